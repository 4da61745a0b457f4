"""A plan whose choices are set by sliders. Each choice applies to all stages; the remaining choices
adapt, so that all GPUs and the whole batch are used.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from math import prod
from typing import Any

from experiments.live_page.texts import AskedProblem
from mistlab.core.values import InputError, near_matches, refuse
from mistlab.engines.engine import ENGINES, names_for_plans
from mistlab.job.job import Job
from mistlab.plan.dimensions import (
    AXES,
    DIMENSIONS,
    counts_of_blocks,
    counts_within,
    dimensions_of_axes,
    engine_problem,
    label_of,
)
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.placement import even_shares
from searchers.meshes import divisors

# The names of the choices that are not dimensions of a stage.
STAGES, ENGINE = "stages", "engine"
# The name of the parallel degree that takes all GPUs that the other degrees leave over.
REPLICAS = AXES["data"].dimension
# The name of the dimension that holds the micro-batch size of a replica.
SEQUENCES = next(name for name, row in DIMENSIONS.items() if "batch" in row.checks)
# The values of a slider that sets a share.
EIGHTHS = tuple(eighth / 8 for eighth in range(9))
# The largest number of values that a slider offers for a parallel degree.
MOST_VALUES = 24


def knobs_of(plan: Plan) -> dict[str, Any]:
    """The values of a plan at which the sliders start: those of its first stage. For numbers of
    blocks, such as that of recomputed blocks, the value is their share of all blocks.
    """
    first = plan.stages[0]
    values: dict[str, Any] = {ENGINE: plan.engine, STAGES: plan.num_stages}
    for name in _turned():
        if name in counts_of_blocks():
            values[name] = sum(stage.degree(name) for stage in plan.stages) / plan.layers
        else:
            values[name] = first.value(name)
    return values


def adapted(asked: AskedProblem, given: Job, knobs: Mapping[str, Any]) -> Job:
    """The job of a given plan, changed to the problem asked for and to the sliders' choices.

    A plan that fits the problem's number of GPUs stays as it is as long as no slider is moved.
    Otherwise data parallelism takes the GPUs that the other degrees leave over, and blocks are
    divided evenly if the number of stages changes.
    """
    _check(knobs)
    plan = given.plan
    if not knobs and given.cluster.num_gpus == asked.cluster.num_gpus:
        job = _as_it_is(asked, plan)
        if job is not None:
            return job
    count = knobs.get(STAGES, plan.num_stages)
    gpus, rest = divmod(asked.cluster.num_gpus, count)
    if rest or not gpus:
        _refuse_degree(STAGES, count, asked.cluster.num_gpus)
    stages = [
        _stage_with_choices(stage, knobs, gpus)
        for stage in _stages_of(asked, plan, count, knobs.keys())
    ]
    micro_batches = _micro_batches(asked, stages[0])
    changed = replace(
        plan,
        engine=knobs.get(ENGINE, plan.engine),
        micro_batches=micro_batches,
        stages=tuple(stages),
    )
    return Job(workload=asked.workload, cluster=asked.cluster, plan=changed)


def choices_of(asked: AskedProblem, job: Job) -> dict[str, list[Any]]:
    """For each slider, the values with which the job is valid while all other sliders stay."""
    choices: dict[str, list[Any]] = {}
    for name, values in _candidates(job):
        choices[name] = [value for value in values if _is_valid(asked, job, name, value)]
    return choices


def labels() -> dict[str, str]:
    """The label that the live page shows for each slider."""
    by_choice = {name: _dimension_label(name) for name in _turned()}
    return {ENGINE: "engine", STAGES: "pipeline stages", **by_choice}


def _dimension_label(name: str) -> str:
    """The label that the live page shows for a dimension of a plan."""
    row = DIMENSIONS[name]
    return row.noun or row.amount.partition("{")[0].rstrip("-") or label_of(name).replace("_", " ")


def _turned() -> list[str]:
    """The dimensions that have sliders: all except the number of blocks, and the degree that takes
    the GPUs left over.
    """
    return [name for name in DIMENSIONS if name not in ("layers", REPLICAS)]


def _check(knobs: Mapping[str, Any]) -> None:
    known = [ENGINE, STAGES, *_turned()]
    for name, value in knobs.items():
        if name not in known:
            refuse(f"knobs.{name}", f"is unknown{near_matches(str(name), known)}")
        if name == ENGINE:
            if value not in names_for_plans():
                refuse(ENGINE, f"{value!r} is unknown{near_matches(str(value), names_for_plans())}")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            refuse(f"knobs.{name}", f"{value!r} is not a number: give one such as 1")
        elif name == STAGES and not (isinstance(value, int) and value > 0):
            refuse(STAGES, f"{value!r} is not a number of stages: give a whole number from 1 on")


def _as_it_is(asked: AskedProblem, plan: Plan) -> Job | None:
    try:
        return Job(workload=asked.workload, cluster=asked.cluster, plan=plan)
    except InputError:
        return None


def _stages_of(asked: AskedProblem, plan: Plan, count: int, turned: Any) -> Iterator[StagePlan]:
    """The stages before the sliders' choices apply: those of the plan, or as many copies of its
    first stage as the slider for stages says.
    """
    layers = asked.workload.model.layers
    if plan.num_stages == count and plan.layers == layers and STAGES not in turned:
        yield from plan.stages
        return
    first = plan.stages[0]
    if layers < count:
        refuse(STAGES, f"{count} is more than the model's {layers} blocks: give at most {layers}")
    for share in even_shares(layers, count):
        wanted = {name: round(first.value(name) * share / first.layers) for name in first.counts}
        yield first.with_values({"layers": share, **counts_within(wanted, share)})


def _stage_with_choices(stage: StagePlan, knobs: Mapping[str, Any], gpus: int) -> StagePlan:
    """A stage on this many GPUs with the sliders' choices."""
    counts = counts_of_blocks()
    values = {name: knobs[name] for name in _turned() if name in knobs and name not in counts}
    wanted = {name: stage.value(name) for name in counts}
    wanted |= {name: round(knobs[name] * stage.layers) for name in counts if name in knobs}
    taken = prod(
        int(values.get(name, stage.value(name)))
        for name in dimensions_of_axes()
        if name != REPLICAS
    )
    replicas, rest = divmod(gpus, taken)
    if rest or not replicas:
        _refuse_degree("degrees", taken, gpus)
    return stage.with_values({**values, **counts_within(wanted, stage.layers), REPLICAS: replicas})


def _micro_batches(asked: AskedProblem, stage: StagePlan) -> int:
    batch, size = asked.workload.global_batch, stage.degree(SEQUENCES) * stage.degree(REPLICAS)
    count, rest = divmod(batch, size)
    if rest or not count:
        refuse(
            "global_batch",
            f"{batch} sequences cannot be divided among {stage.degree(REPLICAS)} data-parallel "
            f"replicas with micro-batches of {stage.degree(SEQUENCES)}: give a multiple of {size}, "
            "or fewer replicas",
        )
    return count


def _refuse_degree(name: str, value: int, gpus: int) -> None:
    refuse(name, f"{value} does not divide {gpus} GPUs: give a divisor of {gpus}")


def _candidates(job: Job) -> Iterator[tuple[str, list[Any]]]:
    """The values of each choice that are tried, to find those that its slider may offer."""
    plan = job.plan
    in_pipeline = plan.num_stages > 1
    few = [d for d in divisors(plan.num_gpus) if d <= job.workload.model.layers]
    yield STAGES, few[:MOST_VALUES]
    yield ENGINE, [*names_for_plans()]
    replicas = plan.stages[0].degree(REPLICAS)
    sequences = divisors(max(1, job.workload.global_batch // replicas))
    gpus = divisors(plan.stages[0].num_gpus)[:MOST_VALUES]
    for name in _turned():
        row = DIMENSIONS[name]
        values: list[Any]
        if row.is_ratio or name in counts_of_blocks():
            values = [*EIGHTHS]
        elif name == SEQUENCES:
            values = [size for size in sequences if size <= MOST_SEQUENCES]
        elif row.maximum is not None:
            values = [*range(int(row.minimum), int(row.maximum) + 1)]
        else:
            values = [*gpus]
        engine = ENGINES[plan.engine]
        yield (
            name,
            [v for v in values if not engine_problem(name, v, engine, in_pipeline=in_pipeline)],
        )


MOST_SEQUENCES = 256


def _is_valid(asked: AskedProblem, job: Job, name: str, value: Any) -> bool:
    """Whether a choice can have a value. It cannot if, for instance, more blocks would be
    recomputed or offloaded than a stage has.
    """
    try:
        turned = adapted(asked, job, {name: value})
    except InputError:
        return False
    if name not in counts_of_blocks():
        return True
    plan = turned.plan
    return all(stage.degree(name) == round(value * stage.layers) for stage in plan.stages)
