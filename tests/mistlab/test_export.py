"""Plans in other frameworks' words: every plan comes back, or what was lost is said."""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES
from mistlab.export.nearest import Nearest, canonical, nearest
from mistlab.export.target import read_back
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job, job_from_mapping, job_to_mapping
from mistlab.plan.dimensions import DIMENSIONS
from tests import added_rows
from tests.mistlab.drawn_plans import drawn_jobs
from tests.with_row import run_with_row

# The last one has nothing that any target could not say.
PLAIN = job_from_mapping(
    {
        "workload": {
            "model": "llama-7b",
            "sequence_length": 2048,
            "global_batch": 16,
            "attention": "flash",
            "precision": "bf16",
        },
        "cluster": {"hardware": "a100-80gb", "nodes": 1, "gpus_per_node": 8},
        "plan": {
            "micro_batches": 2,
            "stages": [
                {
                    "layers": 32,
                    "data_parallel": 8,
                    "tensor_parallel": 1,
                    "micro_batch": 1,
                    "zero": 3,
                }
            ],
        },
    }
)
JOBS = (*drawn_jobs(60, seed=99), PLAIN)
ALL = tuple(TARGETS)


@cache
def nearest_of(name: str) -> list[tuple[Job, Nearest]]:
    """Every job, and the nearest one of a target."""
    return [(job, nearest(job, TARGETS[name])) for job in JOBS]


def back_of(name: str, job: Job) -> Job:
    """The job of the text that a target writes; what its text cannot say is given."""
    return read_back(TARGETS[name], TARGETS[name].write(job), job)


def what_is_trained(job: Job) -> tuple[object, ...]:
    """Everything about a job but its engine and its cluster."""
    plan = canonical(job).plan
    return (
        job.workload,
        plan.stages,
        plan.micro_batches,
        plan.order,
        plan.overlap_communication,
    )


@pytest.mark.parametrize("name", ALL)
def test_every_plan_comes_back_or_what_was_lost_is_said(name: str) -> None:
    exact = 0
    for job, found in nearest_of(name):
        assert back_of(name, found.job) == found.job
        assert found.is_exact == (what_is_trained(job) == what_is_trained(found.job)), found.remarks
        exact += found.is_exact
    assert 0 < exact < len(JOBS)


@pytest.mark.parametrize("name", ALL)
def test_the_nearest_plan_is_its_own_nearest(name: str) -> None:
    for _, found in nearest_of(name):
        again = nearest(found.job, TARGETS[name])
        assert again.is_exact
        assert what_is_trained(again.job) == what_is_trained(found.job)


@pytest.mark.parametrize("name", ALL)
def test_what_is_saved_on_a_stage_is_not_kept_without_a_word(name: str) -> None:
    """A change of a dimension has a remark that names its key."""
    for job, found in nearest_of(name):
        if job.plan.num_stages != found.job.plan.num_stages:
            continue
        told = {remark.choice for remark in found.remarks}
        for row, (before, after) in (
            (key, pair)
            for key in DIMENSIONS
            for pair in zip(canonical(job).plan.stages, found.job.plan.stages, strict=True)
        ):
            if before.value(row) != after.value(row):
                assert (DIMENSIONS[row].path or row) in told


def test_a_dimension_without_a_row_is_lost() -> None:
    run_with_row(added_rows.SHUFFLED, added_rows.shuffled_is_lost)


def text_for(name: str, plan_file: dict[str, Any], **values: Any) -> str:
    for stage in plan_file["plan"]["stages"]:
        stage.update(values)
    return TARGETS[name].write(nearest(job_from_mapping(plan_file), TARGETS[name]).job)


def test_megatron_divides_blocks_by_a_layout(plan_file: dict[str, Any]) -> None:
    first, second = plan_file["plan"]["stages"]
    first["layers"], second["layers"] = 18, 14
    text = text_for("megatron", plan_file)
    assert f'--pipeline-model-parallel-layout "E{"t" * 18}|{"t" * 14}L"' in text
    assert "--recompute-method block --recompute-num-layers 4" in text
    assert "--optimizer-cpu-offload" in text
    assert "--optimizer-offload-fraction 0.5" in text


@pytest.mark.parametrize(("stages", "zero", "kept"), [(1, 3, 3), (2, 2, 1), (2, 1, 1), (4, 3, 1)])
def test_deepspeed_shards_only_optimizer_state_in_pipelines(
    stages: int, zero: int, kept: int
) -> None:
    (stage,) = PLAIN.plan.stages
    one = replace(stage, layers=32 // stages, data_parallel=8 // stages, zero=zero)
    plan = replace(PLAIN.plan, micro_batches=2 * stages, stages=(one,) * stages)
    found = nearest(replace(PLAIN, plan=plan), TARGETS["deepspeed"]).job.plan
    assert [stage.zero for stage in found.stages] == [kept] * stages


def test_deepspeed_says_fractions_under_zero_3_alone(plan_file: dict[str, Any]) -> None:
    (stage,) = plan_file["plan"]["stages"] = plan_file["plan"]["stages"][:1]
    stage.update({"layers": 32, "zero": 3, "offload": {"optimizer": 0.5, "gradients": 0.5}})
    assert '"ratio": 0.5' in text_for("deepspeed", plan_file)
    text = text_for("deepspeed", plan_file, zero=2)
    assert '"ratio"' not in text
    assert '"offload_optimizer"' in text


def test_torchtitan_recomputes_every_nth_block(plan_file: dict[str, Any]) -> None:
    text = text_for("torchtitan-toml", plan_file, checkpointed_layers=3)
    assert 'mode = "selective"' in text
    assert 'selective_ac_option = "5"' in text


def test_accelerate_has_no_pipelines(plan_file: dict[str, Any]) -> None:
    job = job_from_mapping(plan_file)
    found = nearest(job, TARGETS["accelerate"])
    assert found.job.plan.num_stages == 1
    assert found.job.plan.stages[0].data_parallel == 4
    assert any(remark.choice == "stages" for remark in found.remarks)


def test_an_order_of_a_file_is_lost(plan_file: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    line = " ".join(f"Fm{m} Bm{m}" for m in range(4))
    path.write_text(f"{line}\n{line}\n", encoding="utf-8")
    plan_file["plan"]["order"] = str(path)
    job = job_from_mapping(plan_file)
    for target in TARGETS.values():
        found = nearest(job, target)
        assert found.job.plan.order == "1f1b"
        assert any(remark.choice == "order" for remark in found.remarks)


def with_stages(*stages: dict[str, Any], **plan: Any) -> Job:
    """A job of Llama 7B on three nodes of eight GPUs, in four micro-batches."""
    made = [{"tensor_parallel": 1, "micro_batch": 1, **stage} for stage in stages]
    return job_from_mapping(
        {
            "workload": {
                "model": "llama-7b",
                "sequence_length": 2048,
                "global_batch": 4 * made[0]["data_parallel"] * made[0]["micro_batch"],
                "attention": "flash",
                "precision": "bf16",
            },
            "cluster": {"hardware": "a100-80gb", "nodes": 3, "gpus_per_node": 8},
            "plan": {"micro_batches": 4, "stages": made, **plan},
        }
    )


def test_replicas_of_states_that_only_ranks_of_sequences_shard_come_back() -> None:
    job = with_stages(
        {"layers": 32, "data_parallel": 2, "context_parallel": 2, "zero": 3, "state_replicas": 2}
    )
    found = nearest(job, TARGETS["torchtitan-toml"])
    assert found.is_exact
    assert back_of("torchtitan-toml", found.job) == found.job
    assert found.job.plan.stages[0].state_replicas == 2


def test_replicas_of_states_divide_the_replicas_that_all_stages_get() -> None:
    """Stages of 8 and 16 GPUs become stages of 12, on which 3 replicas come closest."""
    stage = {"layers": 16, "data_parallel": 4, "micro_batch": 3, "zero": 2, "state_replicas": 2}
    job = with_stages(stage | {"context_parallel": 2}, stage | {"tensor_parallel": 4})
    stages = nearest(job, TARGETS["torchtitan"]).job.plan.stages
    assert [(stage.data_parallel, stage.state_replicas) for stage in stages] == [(3, 1)] * 2


def test_blocks_recomputed_on_all_stages_leave_room_for_no_other_treatment() -> None:
    job = with_stages(
        {"layers": 16, "data_parallel": 1, "checkpointed_layers": 12},
        {"layers": 16, "data_parallel": 1, "core_recomputed_layers": 16},
    )
    stages = nearest(job, TARGETS["megatron"]).job.plan.stages
    assert [stage.checkpointed_layers for stage in stages] == [12, 12]
    assert [stage.value("core_recomputed_layers") for stage in stages] == [0, 0]


def test_a_traced_model_is_refused_by_those_that_build_models(plan_file: dict[str, Any]) -> None:
    job = job_from_mapping(plan_file)
    model = replace(job.workload.model, family="custom", graph_file="x.json")
    job = replace(job, workload=replace(job.workload, model=model))
    for name in ("megatron", "torchtitan", "torchtitan-toml"):
        with pytest.raises(InputError, match=r"workload\.model: is a traced model"):
            nearest(job, TARGETS[name])
    assert nearest(job, TARGETS["deepspeed"]).job.workload.model == model


def test_attention_core_is_recomputed_selectively(plan_file: dict[str, Any]) -> None:
    for stage in plan_file["plan"]["stages"]:
        stage.update({"checkpointed_layers": 0, "core_recomputed_layers": 16})
    text = text_for("megatron", plan_file)
    assert "--recompute-granularity selective --recompute-modules core_attn" in text
    found = nearest(job_from_mapping(plan_file), TARGETS["megatron"])
    assert back_of("megatron", found.job) == found.job


def test_a_model_with_experts_is_refused_by_torchtitan(plan_file: dict[str, Any]) -> None:
    plan_file["workload"] |= {"model": "mixtral-8x7b", "precision": "bf16"}
    plan_file["cluster"] = {"hardware": "h100-80gb", "nodes": 1, "gpus_per_node": 4}
    job = job_from_mapping(plan_file)
    with pytest.raises(InputError, match=r"workload\.model: mixtral-8x7b has experts"):
        nearest(job, TARGETS["torchtitan"])


def of_engine(engine: str, precision: str) -> Job:
    """The plain plan with ZeRO-1 on B200, under an engine."""
    mapping = job_to_mapping(PLAIN)
    mapping["workload"]["precision"] = precision
    mapping["cluster"]["hardware"] = "b200-180gb"
    mapping["plan"]["engine"] = engine
    mapping["plan"]["stages"][0]["zero"] = 1
    return job_from_mapping(mapping)


@pytest.mark.parametrize(
    ("engine", "standing"),
    [
        ("megatron-core", "megatron-core"),
        ("megatron-core-fused-loss", "megatron-core-fused-loss"),
        ("megatron-bridge", "megatron-core"),
        ("mistlab", "megatron"),
        ("fsdp", "megatron"),
    ],
)
def test_megatron_runs_plans_of_its_own_engines_as_they_are(engine: str, standing: str) -> None:
    found = nearest(of_engine(engine, "bf16"), TARGETS["megatron"])
    assert found.job.plan.engine == standing
    told = [remark.text for remark in found.remarks if remark.choice == "engine"]
    assert len(told) == (engine != standing)


@pytest.mark.parametrize("name", [name for name in ALL if name != "megatron"])
@pytest.mark.parametrize("precision", ["fp8", "fp4"])
def test_products_of_few_bits_become_16_bit_ones(name: str, precision: str) -> None:
    found = nearest(of_engine("megatron-core", precision), TARGETS[name])
    assert found.job.workload.precision == "bf16"
    assert not found.is_exact


def test_torchtitan_says_that_a_model_with_parts_of_its_own_is_no_llama() -> None:
    model = replace(PLAIN.workload.model, qk_norm=True)
    job = replace(PLAIN, workload=replace(PLAIN.workload, model=model))
    notes = [remark.text for remark in nearest(job, TARGETS["torchtitan"]).remarks]
    assert "a torchtitan flavour builds Llama's blocks; this one needs a model of its own" in notes


@pytest.mark.parametrize("precision", ["fp16", "bf16"])
@pytest.mark.parametrize("sums", ["32bit", "16bit"])
@pytest.mark.parametrize("name", ALL)
def test_the_bits_of_sums_come_back_or_are_told(name: str, sums: str, precision: str) -> None:
    workload = replace(PLAIN.workload, gradients=sums, precision=precision)  # type: ignore[arg-type]
    found = nearest(replace(PLAIN, workload=workload), TARGETS[name])
    engine = ENGINES[found.job.plan.engine]

    def bits(job: Job) -> str:
        return job.workload.trained_by(engine).memory_in(job.workload.precision).sums

    assert bits(back_of(name, found.job)) == bits(found.job)
    told = any(remark.choice == "gradients" for remark in found.remarks)
    assert told == (found.job.workload.gradients != sums)
    is_kept = found.job.workload.precision == precision
    if TARGETS[name].says_sums and is_kept and precision in engine.other_sums:
        assert bits(found.job) == sums
