"""Searches and changes of plans keep to what the tools of an engine can run: recomputation of all
blocks or none, and undivided weights of few bits.
"""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments.bench.problem import attention_words
from experiments.bench.search_options import searched, space_called
from experiments.budget.changes import Changed, single, spread
from experiments.cli.command import parser_for
from experiments.commands import COMMANDS
from experiments.interchange.single_changes import single_changes
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.engines.adapters import Base
from mistlab.engines.engine import ENGINES
from mistlab.export.nearest import nearest
from mistlab.formats.recipes.exports import EXPORTS
from mistlab.job.job import Job, job_from_mapping
from mistlab.job.search import Problem
from mistlab.plan.named_spaces import SPACES, space_of
from mistlab.plan.space_files import space_from
from searchers.methods.exhaustive import all_plans

STAGE = {"layers": 32, "data_parallel": 4, "tensor_parallel": 1, "micro_batch": 1, "zero": 3}


def job_of(engine: str, base: str) -> Job:
    sizes = {"sequence_length": 1024, "global_batch": 16, "attention": "flash", "precision": "bf16"}
    trained = {"train": "adapters", "base": base}
    return job_from_mapping(
        {
            "workload": {"model": "llama3-8b", **sizes, **trained},
            "cluster": {"hardware": "h100-80gb", "nodes": 1, "gpus_per_node": 4},
            "plan": {"engine": engine, "micro_batches": 4, "stages": [STAGE]},
        }
    )


@pytest.mark.parametrize("name", ["mist", "wide"])
@pytest.mark.parametrize("engine", ["fsdp", "trainer", "trainer-fused", "deepspeed-trainer"])
def test_weights_of_few_bits_stay_whole_in_spaces_of_tools(name: str, engine: str) -> None:
    space = space_of(name).on(engine)
    assert space.holding("16bit") == space
    for base in ("8bit", "4bit"):
        held = space.holding(base)
        assert (held.tensor_parallel, held.pipeline) == ((1,), (1,))
    # This package's own engine divides them, alone or beside others.
    whole = space_of(name).on("mistlab")
    held = whole.holding("4bit")
    assert (held.lists, held.pipeline) == (whole.lists, whole.pipeline)
    for engines in (("mistlab", engine), (engine, "mistlab")):
        both = space_of(name).on(*engines).holding("4bit")
        alone = {one.engine: one for one in both.of_engines}
        assert alone.keys() == {*engines}
        assert (alone[engine].tensor_parallel, alone[engine].pipeline) == ((1,), (1,))
        assert 2 in (alone["mistlab"].tensor_parallel or (2,))
        assert alone["mistlab"].pipeline is None


def test_an_engine_that_no_plan_of_a_file_is_left_for_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "space.yaml"
    path.write_text("{like: mist, name: mine, tensor_parallel: [2]}", encoding="utf-8")
    parser = parser_for(COMMANDS["tune"], "tune")
    asked = ("--model", "llama3-8b", "--gpus-per-node", "4", "--train", "lora", "--base", "4bit")
    several = (*asked, "--engine", "trainer,mistlab")
    options = parser.parse_args([*several, "--space", str(path)])
    assert searched(options)[1].engines == ("mistlab",)
    said = "no plan of space mine is left for engine trainer, which does not divide weights of 4bit"
    assert said in capsys.readouterr().err
    assert searched(parser.parse_args([*several]))[1].engines == ("trainer", "mistlab")
    assert "is left out" not in capsys.readouterr().err


@pytest.mark.parametrize("engine", ["deepspeed-trainer", "deepspeed"])
def test_a_space_without_pipelines_has_engines_that_shard_gradients_outside_of_them(
    engine: str,
) -> None:
    """DeepSpeed shards gradients (ZeRO-2) where a model has no pipeline, as in space fsdp."""
    alone = space_of("fsdp").on(engine)
    assert (alone.zero, alone.pipeline) == ((2, 3), (1,))
    with pytest.raises(InputError, match="optimizer state only in a pipeline: give 0 or 1"):
        replace(alone, pipeline=(1, 2))


@pytest.mark.parametrize("listed", [{"tensor_parallel": (2, 4)}, {"pipeline": (2,)}])
def test_a_space_whose_every_plan_divides_weights_of_few_bits_is_refused(
    listed: dict[str, tuple[int, ...]],
) -> None:
    ((name, degrees),) = listed.items()
    space = replace(space_of("mist"), engine="trainer", name="mine", recomputation="all", **listed)  # type: ignore[arg-type]
    assert space.holding("16bit") == space
    known = ", ".join(map(str, degrees))
    message = f"base: 4bit, but engine trainer divides .* space mine lists {name} {known}: list 1"
    with pytest.raises(InputError, match=message):
        space.holding("4bit")
    # Another engine can run its plans, and stays alone.
    both = replace(space, other_engines=("mistlab",)).holding("4bit")
    assert both.engines == ("mistlab",)
    assert both.listed(name) if name != "pipeline" else both.pipeline == degrees
    # A list with other degrees keeps 1 alone.
    wider = replace(space, **{name: (1, *degrees)}).holding("4bit")  # type: ignore[arg-type]
    assert (wider.tensor_parallel, wider.pipeline) == ((1,), (1,))


def test_a_space_file_has_what_its_engine_runs(tmp_path: Path) -> None:
    content: dict[str, Any] = {"like": "mist", "name": "mist", "engine": "trainer"}
    assert space_from(content, tmp_path) == space_of("mist").on("trainer")
    assert space_from({**content, "other_engines": ["mistlab"]}, tmp_path).recomputation == "any"
    for key, value, remedy in (
        ("core_recomputed_layers", [4, 8], r"\[4, 8\], but engine trainer .*: give \[0\], or"),
        ("core_recomputed_layers", None, r"null, but engine trainer .*: give \[0\], or leave"),
        ("recomputation", "any", "'any', but engine trainer .*: give 'none_or_all', or leave"),
    ):
        with pytest.raises(InputError, match=f"{key}: {remedy}"):
            space_from({**content, key: value}, tmp_path)
    for key, value in (("core_recomputed_layers", [0]), ("recomputation", "all")):
        space_from({**content, key: value}, tmp_path)
    both = tmp_path / "both.yaml"
    both.write_text("{like: mist, name: both, other_engines: [trainer]}", encoding="utf-8")
    for engine in ("mistlab", "trainer"):
        assert space_called(str(both), engine).engines == (engine,)


@pytest.mark.parametrize("name", [*SPACES])
def test_a_named_space_has_only_what_its_engine_runs(name: str) -> None:
    assert space_of(name).on(*space_of(name).engines) == space_of(name)


@pytest.mark.parametrize("name", [*SPACES])
def test_trainers_recompute_all_blocks_or_none(name: str) -> None:
    space = space_of(name).on("trainer")
    layers = 8
    for dimension, counts in (
        ("checkpointed_layers", {0, layers}),
        ("core_recomputed_layers", {0}),
        ("products_recomputed_layers", {0}),
    ):
        ask = {"layers": layers, "degree": lambda _: 1, "in_pipeline": False}
        assert {*space.choices(dimension, **ask)} <= counts  # type: ignore[arg-type]
    whole = space_of("mist").on("mistlab")
    assert len(whole.choices("checkpointed_layers", **ask)) == layers + 1  # type: ignore[arg-type]


def kinds_of(changed: list[Changed]) -> set[str]:
    return {change.kind for one in changed for change in one.changes}


@pytest.mark.parametrize("engine", ["fsdp", "trainer"])
def test_proposed_changes_keep_weights_of_few_bits_whole(engine: str) -> None:
    dividing = {"tensor parallelism", "stages"}
    assert dividing <= kinds_of([*single(job_of(engine, "16bit"))])
    assert not dividing & kinds_of([*single(job_of(engine, "4bit"))])
    assert dividing <= kinds_of([*single(job_of("mistlab", "4bit"))])
    hardware = catalog.hardware("h100-80gb")
    for base, numbers in (("16bit", {1, 2}), ("4bit", {1})):
        job = job_of(engine, base)
        larger = replace(job.cluster, hardware=hardware, gpus_per_node=8)
        degrees = {one.plan.stages[0].tensor_parallel for one in spread(job, larger, 2)}
        assert degrees == numbers


def degrees_of(job: Job) -> set[tuple[int, int]]:
    plans = [change.job.plan for change in single_changes(job)]
    return {(plan.num_stages, plan.stages[0].tensor_parallel) for plan in plans}


@pytest.mark.parametrize("engine", ["fsdp", "trainer"])
def test_single_changes_keep_weights_of_few_bits_whole(engine: str) -> None:
    dividing = {(1, 2), (1, 4), (2, 1), (4, 1)}
    assert dividing <= degrees_of(job_of(engine, "16bit"))
    assert dividing <= degrees_of(job_of("mistlab", "4bit"))
    job = job_of(engine, "4bit")
    assert degrees_of(job) == {(1, 1)}
    # A plan that divides them already may do so less.
    stage = replace(job.plan.stages[0], data_parallel=1, tensor_parallel=4)
    divided = replace(job, plan=replace(job.plan, stages=(stage,), micro_batches=16))
    assert degrees_of(divided) == {(1, 1), (1, 2), (1, 4)}


def recomputed(job: Job) -> set[int]:
    plans = [change.job.plan for change in single_changes(job)]
    return {plan.stages[0].checkpointed_layers for plan in plans}


def test_single_changes_of_trainers_recompute_all_blocks_or_none() -> None:
    assert recomputed(job_of("trainer", "16bit")) == {0, 32}
    assert len(recomputed(job_of("fsdp", "16bit"))) == 9
    # Other changes of a plan that recomputes some leave its blocks as they are.
    job = job_of("trainer", "16bit")
    stage = replace(job.plan.stages[0], checkpointed_layers=4)
    job = replace(job, plan=replace(job.plan, stages=(stage,)))
    assert recomputed(job) == {0, 4, 32}


def test_proposed_recomputation_of_trainers_is_of_all_blocks() -> None:
    counts = {
        one.job.plan.stages[0].checkpointed_layers for one in single(job_of("trainer", "16bit"))
    }
    assert counts == {0, 32}
    assert ENGINES["fsdp"].recomputes_some
    assert len({one.words for one in single(job_of("fsdp", "16bit"))}) > 10


@pytest.mark.parametrize(
    ("engine", "hardware", "tokens", "is_told"),
    [
        ("fsdp", "h100-80gb", 32768, True),
        ("fsdp", "a100-80gb", 8192, True),
        ("fsdp-compiled", "h100-80gb", 8192, True),
        ("fsdp-compiled", "a100-80gb", 8192, False),
        ("fsdp", "h100-80gb", 4096, False),
        ("trainer", "h100-80gb", 32768, False),
        ("deepspeed-trainer", "h100-80gb", 32768, False),
        ("mistlab", "h100-80gb", 32768, False),
    ],
)
def test_attention_of_another_kernel_is_told_of_long_sequences(
    engine: str, hardware: str, tokens: int, is_told: bool
) -> None:
    job = job_of("fsdp", "16bit")
    job = replace(
        job,
        workload=replace(job.workload, sequence_length=tokens, precision="bf16"),
        cluster=replace(job.cluster, hardware=catalog.hardware(hardware)),
        plan=replace(job.plan, engine=engine),
    )
    told = attention_words(job)
    assert bool(told) == is_told
    if is_told:
        share = ENGINES[engine].shares(hardware)[1]
        assert f"a Triton kernel with linear biases, at {share:.0%} of the GPU's" in told
        # The engine's usual precision is another than the plan's.
        assert "LLaMA-Factory), --engine trainer --precision bf16 predicts long" in told
        # The engine that is named has FlashAttention, and so attends in less time.
        assert ENGINES["trainer"].shares(hardware)[1] == 1 > share
    math = replace(job, workload=replace(job.workload, attention="math"))
    assert attention_words(math) == ""


@pytest.mark.parametrize("name", ["trl", "axolotl", "llama-factory"])
@pytest.mark.parametrize("base", ["16bit", "8bit", "4bit"])
def test_recipes_express_the_plans_of_their_space(name: str, base: Base) -> None:
    job = job_of("trainer", base)
    plans = all_plans(
        Problem(workload=job.workload, cluster=job.cluster), space_of("trainer").holding(base)
    )
    exact = {}
    for plan in plans:
        (stage,) = plan.stages
        ways = (stage.zero, stage.checkpointed_layers, stage.offload.activations)
        exact[ways] = nearest(replace(job, plan=plan), EXPORTS[name]).is_exact
    # Recipes offload the inputs of recomputed blocks, and the nearest to all else is one that does.
    assert {ways for ways, is_exact in exact.items() if not is_exact} == {
        (level, 0, 1.0) for level, *_ in exact
    }
    assert {level for level, *_ in exact} == ({0} if base == "8bit" else {0, 2, 3})


@pytest.mark.parametrize(
    ("model", "engines", "name", "precision"),
    [
        ("llama3-8b", "trainer", "trainer", "bf16"),
        ("qwen3-30b-a3b", "trainer-fused,deepspeed-trainer", "trainer", "bf16"),
        ("llama3-8b", "trainer,deepspeed", "mist", "bf16"),
        ("qwen3-30b-a3b", "megatron-core", "moe", "fp16"),
    ],
)
def test_programs_for_fine_tuning_have_the_space_of_their_recipes(
    model: str, engines: str, name: str, precision: str
) -> None:
    line = ("--model", model, "--hardware", "h100-80gb", "--engine", engines)
    problem, space = searched(parser_for(COMMANDS["tune"], "tune").parse_args([*line]))
    assert (space.name, problem.workload.precision) == (name, precision)
