"""Single changes of a plan, each of which corresponds to one option of a launch line.

A change alters one choice on all stages, moves GPUs from one parallel degree to another, moves a
block to the next stage, or changes the size of micro-batches. GPUs, model and batch stay as they
are.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import gcd
from typing import Any

from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES
from mistlab.export.given import choice_of, values_words
from mistlab.export.nearest import canonical
from mistlab.job.job import Job
from mistlab.plan.dimensions import DIMENSIONS, RECOMPUTED, counts_of_blocks, dimensions_of_axes
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.orders import ORDERS
from mistlab.schedule.placement import even_shares
from searchers.meshes import divisors

# The values that are tried for shares: the share of recomputed blocks, and that of offloaded
# states.
EIGHTHS = tuple(eighth / 8 for eighth in range(9))
# If a dimension has more integer values than this, only the values next to the current one are
# tried.
FEW = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class SingleChange:
    """A single change of a plan: a description of the choice that changes, and the job after the
    change.
    """

    choice: str
    words: str
    job: Job


def single_changes(job: Job) -> list[SingleChange]:
    """All single changes of a job that give a valid job, and that its engine's tools can run."""
    changes: dict[Plan, SingleChange] = {}
    for choice, text, plan in _plans(job):
        try:
            changed = canonical(replace(job, plan=plan))
        except InputError:
            continue
        is_run = _divides_as_before(job, changed.plan) and _recomputes_whole(job, changed.plan)
        if changed.plan != job.plan and is_run:
            changes.setdefault(changed.plan, SingleChange(choice=choice, words=text, job=changed))
    return list(changes.values())


def _divides_as_before(job: Job, changed: Plan) -> bool:
    """Whether a changed plan divides frozen weights of few bits among no more ranks and stages than
    before, unless the engine divides such weights.
    """
    if job.workload.base == "16bit" or ENGINES[changed.engine].divides_quantised:
        return True
    degrees, degrees_before = (
        (plan.num_stages, max(stage.tensor_parallel for stage in plan.stages))
        for plan in (changed, job.plan)
    )
    return all(now <= before for now, before in zip(degrees, degrees_before, strict=True))


def _recomputes_whole(job: Job, changed: Plan) -> bool:
    """Whether each stage of a changed plan recomputes all of its blocks or none, unless the engine
    recomputes some; true of a plan with the recomputation of the plan before.
    """
    if ENGINES[changed.engine].recomputes_some:
        return True
    counts, counts_before = (
        [[stage.value(name) for name in counts_of_blocks()] for stage in plan.stages]
        for plan in (changed, job.plan)
    )
    return counts == counts_before or all(
        stage.value(name) in ((0, stage.layers) if name == RECOMPUTED else (0,))
        for stage in changed.stages
        for name in counts_of_blocks()
    )


def _plans(job: Job) -> Iterator[tuple[str, str, Plan]]:
    makers = (_choices, _micro_batches, _degrees, _moved_blocks, _whole_plan)
    for maker in makers:
        yield from maker(job)


def _choices(job: Job) -> Iterator[tuple[str, str, Plan]]:
    """Changes of one choice that saves memory, such as the number of recomputed blocks, on all
    stages at once.
    """
    stages = job.plan.stages
    for name in DIMENSIONS:
        now = [stage.value(name) for stage in stages]
        if name in counts_of_blocks():
            for share in EIGHTHS:
                counts = [round(share * stage.layers) for stage in stages]
                yield from _with(job, name, now, counts)
        elif name not in (*_DEGREES, *dimensions_of_axes()):
            for value in _values(name, now):
                yield from _with(job, name, now, [value] * len(now))


_DEGREES = ("layers", "data_parallel", "tensor_parallel", "micro_batch")


def _values(name: str, now: list[float]) -> tuple[float, ...]:
    row = DIMENSIONS[name]
    if row.is_ratio:
        return EIGHTHS
    if row.maximum is not None and row.maximum - row.minimum <= FEW:
        return tuple(range(int(row.minimum), int(row.maximum) + 1))
    return tuple({*(value * 2 for value in now), *(max(row.minimum, value // 2) for value in now)})


def _with(
    job: Job, name: str, now: Sequence[float], then: Sequence[float]
) -> Iterator[tuple[str, str, Plan]]:
    text = f"{choice_of(name)} {values_words(name, then)} instead of {values_words(name, now)}"
    stages = _valid(job.plan.stages, name, then)
    if stages:
        yield name, text, replace(job.plan, stages=stages)


def _valid(
    stages: tuple[StagePlan, ...], name: str, values: Sequence[float]
) -> tuple[StagePlan, ...]:
    """The stages with another value of one dimension; empty if a stage cannot have this value."""
    try:
        return tuple(
            stage.with_values({name: value}) for stage, value in zip(stages, values, strict=True)
        )
    except InputError:
        return ()


def _micro_batches(job: Job) -> Iterator[tuple[str, str, Plan]]:
    """Plans with micro-batches of another size, whose number changes accordingly."""
    plan = job.plan
    sequences = gcd(*(stage.micro_batch for stage in plan.stages)) * plan.micro_batches
    for count in divisors(sequences):
        if not plan.micro_batches / 4 <= count <= plan.micro_batches * 4:
            continue
        sizes = [stage.micro_batch * plan.micro_batches / count for stage in plan.stages]
        if all(size.is_integer() for size in sizes):
            stages = tuple(
                replace(stage, micro_batch=int(size))
                for stage, size in zip(plan.stages, sizes, strict=True)
            )
            text = f"{count} micro-batches of {_spelled(sizes)} instead of {plan.micro_batches}"
            yield "micro_batches", text, replace(plan, micro_batches=count, stages=stages)


def _spelled(sizes: list[float]) -> str:
    numbers = [f"{size:.0f}" for size in sizes]
    return numbers[0] if len(set(numbers)) == 1 else " ".join(numbers)


def _degrees(job: Job) -> Iterator[tuple[str, str, Plan]]:
    """Plans in which one parallel degree (pipeline, data or tensor) is divided by a number, and
    another multiplied by it.
    """
    plan, first = job.plan, job.plan.stages[0]
    if len({(one.data_parallel, one.tensor_parallel) for one in plan.stages}) > 1:
        return
    now = {
        "pipeline": plan.num_stages,
        "data_parallel": first.data_parallel,
        "tensor_parallel": first.tensor_parallel,
    }
    for giver, degree in now.items():
        for taker in now.keys() - {giver}:
            for factor in divisors(degree)[1:]:
                then = {**now, giver: degree // factor, taker: now[taker] * factor}
                moved = _remeshed(job, then)
                if moved is not None:
                    text = ", ".join(
                        f"{name} {then[name]} instead of {now[name]}" for name in (giver, taker)
                    )
                    yield "degrees", f"{text}{_batch_words(plan, moved)}", moved


def _batch_words(before: Plan, after: Plan) -> str:
    was, now = before.micro_batches, after.micro_batches
    return "" if was == now else f" ({now} micro-batches instead of {was})"


def _remeshed(job: Job, degrees: dict[str, int]) -> Plan | None:
    """A plan with other parallel degrees; None if the batch or the blocks are too few for them.
    Blocks are divided evenly. Every stage gets the strongest memory savings of the original stages,
    and the original plan's share of recomputed blocks; micro-batches are at most as large as
    before.
    """
    plan, batch, stages = job.plan, job.workload.global_batch, job.plan.stages
    data = degrees["data_parallel"]
    if batch % data or degrees["pipeline"] > plan.layers:
        return None
    sequences = batch // data
    most = max(stage.micro_batch for stage in stages)
    micro_batch = max(size for size in range(1, most + 1) if sequences % size == 0)
    values: dict[str, Any] = {
        name: max(stage.value(name) for stage in stages)
        for name in DIMENSIONS
        if name not in _DEGREES and name not in counts_of_blocks()
    }
    made = []
    for layers in even_shares(plan.layers, degrees["pipeline"]):
        counts = {
            name: round(sum(one.value(name) for one in stages) / plan.layers * layers)
            for name in counts_of_blocks()
        }
        degrees_of_stage = {
            "layers": layers,
            "data_parallel": data,
            "tensor_parallel": degrees["tensor_parallel"],
            "micro_batch": micro_batch,
        }
        made.append(StagePlan.of_values({**values, **counts, **degrees_of_stage}))
    return replace(plan, micro_batches=sequences // micro_batch, stages=tuple(made))


def _moved_blocks(job: Job) -> Iterator[tuple[str, str, Plan]]:
    """Plans in which one block moves from a stage to another; if all blocks of a stage are
    recomputed or offloaded, so is the moved block.
    """
    stages = job.plan.stages
    for giver, source in enumerate(stages):
        for taker in range(len(stages)):
            if giver == taker or source.layers == 1:
                continue
            moved = list(stages)
            for stage, step in ((giver, -1), (taker, 1)):
                moved[stage] = stages[stage].resized(stages[stage].layers + step)
            text = f"a block of stage {giver} on stage {taker} instead"
            yield "layers", text, replace(job.plan, stages=tuple(moved))


def _whole_plan(job: Job) -> Iterator[tuple[str, str, Plan]]:
    """Plans with another pipeline schedule, or with overlapped communication turned on or off."""
    plan = job.plan
    if plan.num_stages > 1:
        for order in ORDERS:
            if order != plan.order:
                text = f"order {order} instead of {plan.order}"
                yield "order", text, replace(plan, order=order)
    if not plan.overlap_communication:
        overlapped = replace(plan, overlap_communication=True)
        yield "overlap_communication", "communication overlapped", overlapped
