"""Plans as a registry of torchtitan 0.3, a Python module, and back."""

import ast
from dataclasses import replace
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.given import Given
from mistlab.export.nearest import Nearest, nearest
from mistlab.export.target import read_back
from mistlab.export.targets import TARGETS
from mistlab.export.torchtitan_rules import BROUGHT, BROUGHT_TODAY
from mistlab.job.job import Job
from mistlab.schedule.context_ways import GATHER, RING
from tests.mistlab.plans_of_today import job_of, jobs_of_today
from tests.mistlab.test_export import what_is_trained

TORCHTITAN, TOML = TARGETS["torchtitan"], TARGETS["torchtitan-toml"]
# Fields of torchtitan 0.3.0's configuration classes that modules set, with their types.
FIELDS: dict[str, dict[str, type]] = {
    "TrainingConfig": {
        "local_batch_size": int,
        "global_batch_size": int,
        "seq_len": int,
        "mixed_precision_param": str,
        "enable_cpu_offload": bool,
        "disable_cuda_graphs": bool,
    },
    "ParallelismConfig": {
        "data_parallel_replicate_degree": int,
        "data_parallel_shard_degree": int,
        "fsdp_reshard_after_forward": str,
        "tensor_parallel_degree": int,
        "enable_sequence_parallel": bool,
        "context_parallel_degree": int,
        "expert_parallel_degree": int,
        "pipeline_parallel_degree": int,
        "pipeline_parallel_schedule": str,
        "pipeline_parallel_microbatch_size": int,
        "module_fqns_per_model_part": list,
    },
}


def settings_of(text: str) -> dict[str, Any]:
    """The settings of a module's two sections."""
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Call) and ast.unparse(node.func) in FIELDS:
            for word in node.keywords:
                value = ast.literal_eval(word.value)
                assert word.arg is not None
                assert isinstance(value, FIELDS[ast.unparse(node.func)][word.arg])
                found[word.arg] = value
    return found


def exports(seed: int, count: int) -> list[tuple[Job, Nearest]]:
    """Jobs that torchtitan has a form for, and these forms."""
    found = []
    for job in jobs_of_today(count, seed):
        try:
            found.append((job, nearest(job, TORCHTITAN)))
        except InputError:
            continue
    return found


def text_of(job: Job) -> str:
    return TORCHTITAN.write(nearest(job, TORCHTITAN).job)


def test_modules_have_known_settings_and_their_processes_come_out() -> None:
    for _, found in exports(seed=11, count=60):
        said = settings_of(TORCHTITAN.write(found.job))
        degrees = ("replicate", "shard")
        data = [said[f"data_parallel_{name}_degree"] for name in degrees]
        others = [said[f"{name}_parallel_degree"] for name in ("tensor", "context", "pipeline")]
        ranks = data[0] * data[1] * others[0] * others[1] * others[2]
        assert ranks == found.job.cluster.num_gpus
        assert said["global_batch_size"] == found.job.workload.global_batch
        assert said["global_batch_size"] % (said["local_batch_size"] * data[0] * data[1]) == 0
        assert data[1] * others[0] * others[1] % said["expert_parallel_degree"] == 0


def test_every_plan_comes_back_or_what_was_lost_is_said() -> None:
    found = exports(seed=5, count=120)
    assert len(found) > 80
    for job, form in found:
        assert read_back(TORCHTITAN, TORCHTITAN.write(form.job), form.job) == form.job
        assert form.is_exact == (what_is_trained(job) == what_is_trained(form.job))
        assert nearest(form.job, TORCHTITAN).is_exact


@pytest.mark.parametrize("name", BROUGHT_TODAY)
def test_a_model_that_torchtitan_brings_comes_back_by_its_flavour(name: str) -> None:
    model = catalog.model(name)
    job = nearest(job_of(name, {"layers": model.layers}, engine="fsdp"), TORCHTITAN).job
    cluster = job.cluster
    given = Given(
        hardware=cluster.hardware, nodes=cluster.nodes, gpus_per_node=cluster.gpus_per_node
    )
    assert TORCHTITAN.read(TORCHTITAN.write(job), given).job == job


def test_models_of_earlier_versions_are_those_of_later_ones_too() -> None:
    assert BROUGHT.items() <= BROUGHT_TODAY.items()


def test_the_version_stands_in_both_forms() -> None:
    job = job_of("llama3-8b")
    assert "torchtitan 0.3.0" in text_of(job).splitlines()[0]
    toml = TOML.write(nearest(job, TOML).job)
    assert toml.startswith("# For torchtitan up to 0.2.2 (later: --to torchtitan), on 1 nodes of 8")


def test_context_parallel_ranks_gather_keys() -> None:
    stage = {"context_parallel": 2, "zero": 3}
    for way, is_exact in ((RING, False), (GATHER, True)):
        job = job_of("llama3-8b", {**stage, "context_exchange": way}, engine="fsdp")
        found = nearest(job, TORCHTITAN)
        assert found.is_exact == is_exact
        assert found.job.plan.stages[0].context_exchange == GATHER
    assert nearest(job, TOML).job.plan.stages[0].context_exchange == RING


@pytest.mark.parametrize("splits", [0, 1])
def test_sequences_are_split_or_not(splits: int) -> None:
    stage = {"tensor_parallel": 2, "sequence_parallel": splits, "zero": 3}
    found = nearest(job_of("llama3-8b", stage, engine="fsdp"), TORCHTITAN)
    assert found.is_exact
    assert f"enable_sequence_parallel={bool(splits)}" in TORCHTITAN.write(found.job)


def test_experts_are_whole_among_ranks() -> None:
    stage = {"expert_parallel": 2, "expert_tensor_parallel": 2, "tensor_parallel": 2, "zero": 3}
    (got,) = nearest(job_of("qwen3-30b-a3b", stage, engine="fsdp"), TORCHTITAN).job.plan.stages
    assert (got.expert_parallel, got.expert_tensor_parallel) == (4, 1)


def test_models_are_cut_unless_their_head_is_their_embedding() -> None:
    zero: tuple[dict[str, Any], ...] = ({"zero": 2},) * 2
    for name, stages in (("qwen3-30b-a3b", 2), ("gpt-oss-20b", 2), ("llama3.2-1b", 1)):
        job = nearest(job_of(name, *zero, engine="fsdp"), TORCHTITAN).job
        assert job.plan.num_stages == stages
        assert ("'lm_head']]" in TORCHTITAN.write(job)) == (stages > 1)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({}, "activation_checkpoint=None"),
        ({"checkpointed_layers": 3}, "activation_checkpoint=FullAC.Config()"),
        ({"products_recomputed_layers": 3}, "activation_checkpoint=SelectiveAC.Config()"),
    ],
)
def test_all_blocks_are_recomputed_or_none_or_their_second_products(
    values: dict[str, Any], words: str
) -> None:
    assert words in text_of(job_of("llama3-8b", {"zero": 3, **values}, engine="fsdp"))


MODULE = text_of(job_of("llama3-8b", {"zero": 3}, engine="fsdp"))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("seq_len=4096", "seq_len=LENGTH", "seq_len: LENGTH is not a plain value: write the value"),
        ("def plan(", "def other():\n    pass\n\n\ndef plan(", "holds 2 functions"),
        ("return Trainer", "return = Trainer", "is not Python .*: correct this line"),
        (
            "import model_registry",
            "import other_registry",
            "the file names no flavour",
        ),
    ],
)
def test_a_broken_module_is_refused(old: str, new: str, words: str) -> None:
    assert old in MODULE
    given = Given(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)
    with pytest.raises(InputError, match=words):
        TORCHTITAN.read(MODULE.replace(old, new), given)


def test_what_a_module_leaves_out_takes_torchtitan_s_defaults() -> None:
    text = MODULE
    for line in (
        "        activation_checkpoint=None,\n",
        "            enable_sequence_parallel=False,\n",
    ):
        assert line in text
        text = text.replace(line, "")
    text = text.replace("tensor_parallel_degree=1", "tensor_parallel_degree=2")
    text = text.replace("data_parallel_shard_degree=8", "data_parallel_shard_degree=-1")
    given = Given(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=8)
    (stage,) = TORCHTITAN.read(text, given).job.plan.stages
    assert (stage.data_parallel, stage.sequence_parallel) == (4, 1)
    assert stage.products_recomputed_layers == stage.layers


def test_a_pattern_of_blocks_is_refused() -> None:
    for target in (TORCHTITAN, TOML):
        with pytest.raises(InputError, match="pattern, but torchtitan includes no such"):
            nearest(job_of("nemotron-h-8b"), target)


def test_the_toml_of_earlier_versions_is_read_all_the_same() -> None:
    job = nearest(job_of("llama3-8b", {"zero": 3}, engine="fsdp"), TOML).job
    text = TOML.write(job)
    assert read_back(TORCHTITAN, text, job) == read_back(TOML, text, job) == job
    changed = replace(job, workload=replace(job.workload, sequence_length=2048))
    assert read_back(TORCHTITAN, TOML.write(changed), changed) == changed
