"""Changes of a plan that save memory, one at a time and in combination.

A kind of change is one way to save memory: recomputed blocks, ZeRO, an offload ratio, a smaller
micro-batch, a parallel degree. Each kind has values from mild to strong, and changes all stages
alike.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import chain, combinations

from experiments.pages.groups import grouped
from mistlab.core.values import InputError
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import DIMENSIONS, OFFLOADS, RECOMPUTED, counts_of_blocks
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.placement import even_shares

EIGHTHS = tuple(i / 8 for i in range(1, 9))
QUARTERS = (0.25, 0.5, 0.75, 1.0)
DEGREES = (2, 4, 8)


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """A possible change of a plan: its description, its kind, and the function that applies it."""

    kind: str
    words: str
    made: Callable[[Plan], Plan | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed:
    """A plan to which some changes have been applied."""

    changes: tuple[Change, ...]
    job: Job

    @property
    def words(self) -> str:
        """The descriptions of the changes, joined by "and"."""
        return " and ".join(change.words for change in self.changes)


def single(job: Job) -> Iterator[Changed]:
    """The plan after each change that saves memory; shares, such as offload ratios, are eighths."""
    return _of_job(job, 1, EIGHTHS)


def together(job: Job, number: int) -> Iterator[Changed]:
    """The plan after every combination of this many changes of different kinds. Shares, such as
    offload ratios, are eighths in pairs of changes, and quarters in larger combinations.
    """
    return _of_job(job, number, EIGHTHS if number == 2 else QUARTERS)


def _of_job(job: Job, number: int, shares: tuple[float, ...]) -> Iterator[Changed]:
    """The job after so many changes of different kinds, where it is valid."""
    for changes, plan in _changed(job.plan, number, shares, divides=_divides(job)):
        with suppress(InputError):
            yield Changed(changes=changes, job=replace(job, plan=plan))


def spread(job: Job, cluster: Cluster, times: int) -> Iterator[Job]:
    """The job on several times as many GPUs, which become more replicas, more stages, or more
    tensor parallelism.
    """
    plan = job.plan
    plans = [
        replace(plan, stages=_with_times(plan, "data_parallel", times), micro_batches=count)
        for count, rest in (divmod(plan.micro_batches, times),)
        if count and not rest
    ]
    if times > 1 and _divides(job):
        plans.append(replace(plan, stages=_with_times(plan, "tensor_parallel", times)))
        if all(stage.layers >= times for stage in plan.stages):
            parts = (_parts(stage, times, stage.data_parallel) for stage in plan.stages)
            plans.append(replace(plan, stages=tuple(chain.from_iterable(parts))))
    for other in plans:
        with suppress(InputError):
            yield replace(job, cluster=cluster, plan=other)


def _with_times(plan: Plan, name: str, times: int) -> tuple[StagePlan, ...]:
    return tuple(stage.with_values({name: times * stage.degree(name)}) for stage in plan.stages)


# A plan is tried on one kind of GPUs after another, with the same changes.
@lru_cache(maxsize=4)
def _changed(
    plan: Plan, number: int, shares: tuple[float, ...], *, divides: bool
) -> tuple[tuple[tuple[Change, ...], Plan], ...]:
    """The plan after every combination of so many changes of different kinds, with the changes.
    Those that make it invalid, or of which one alters nothing, are left out.
    """
    by_kind = grouped(_of_kinds(plan, shares, divides=divides), lambda change: change.kind)
    return tuple(
        changed
        for kinds in combinations(by_kind.values(), number)
        for changed in _in_turn(plan, kinds)
    )


def _in_turn(
    plan: Plan, kinds: Sequence[Sequence[Change]]
) -> Iterator[tuple[tuple[Change, ...], Plan]]:
    """The plan after a change of each kind in turn; what follows a change is tried on one plan."""
    if not kinds:
        yield (), plan
        return
    for change in kinds[0]:
        after = change.made(plan)
        if after is not None and after != plan:
            for changes, changed in _in_turn(after, kinds[1:]):
                yield (change, *changes), changed


def _of_kinds(plan: Plan, shares: Sequence[float], *, divides: bool) -> Iterator[Change]:
    """The possible changes of a plan of certain kinds. Changes of parallel degrees come first,
    since other changes depend on the number of stages.
    """
    engine = ENGINES[plan.engine]
    degrees = DEGREES if divides else ()
    for degree in degrees:
        text = f"tensor parallelism times {degree} (replicas divided by it)"
        yield Change(kind="tensor parallelism", words=text, made=partial(_tensor, degree))
    for degree in degrees:
        text = f"stages times {degree} (replicas divided by it)"
        yield Change(kind="stages", words=text, made=partial(_pipeline, degree))
    for size in _smaller(max(stage.micro_batch for stage in plan.stages)):
        text = f"micro-batches of {size}"
        yield Change(kind="micro-batch", words=text, made=partial(_micro_batch, size))
    for level in range(1, engine.highest_zero_of(in_pipeline=plan.num_stages > 1) + 1):
        yield Change(kind="ZeRO", words=f"ZeRO-{level}", made=_at_least({"zero": level}))
    for name in counts_of_blocks() if engine.recomputes_some else (RECOMPUTED,):
        for share in shares if engine.recomputes_some else (1.0,):
            text = f"{_share_text(share)} {DIMENSIONS[name].noun}"
            yield Change(kind=DIMENSIONS[name].noun, words=text, made=_count(name, share))
    for name in OFFLOADS if engine.offloads else ():
        for share in shares:
            text = f"{100 * share:g}% {DIMENSIONS[name].noun}"
            yield Change(kind=DIMENSIONS[name].noun, words=text, made=_at_least({name: share}))


def _divides(job: Job) -> bool:
    """Whether further ranks and stages may divide the weights of a job's plan."""
    return job.workload.base == "16bit" or ENGINES[job.plan.engine].divides_quantised


def _share_text(share: float) -> str:
    return "all" if share == 1 else f"{100 * share:g}% of the"


def _smaller(size: int) -> list[int]:
    return [size // by for by in DEGREES if size % by == 0]


def _stagewise(change: Callable[[StagePlan], StagePlan]) -> Callable[[Plan], Plan | None]:
    def made(plan: Plan) -> Plan | None:
        try:
            return replace(plan, stages=tuple(map(change, plan.stages)))
        except InputError:
            return None

    return made


def _at_least(values: Mapping[str, float]) -> Callable[[Plan], Plan | None]:
    """A function that raises choices of every stage, such as its ZeRO level, to at least the given
    values; it returns None if the plan is then invalid. A stage without data-parallel replicas
    keeps its ZeRO level, since it has nothing to shard.
    """

    def change(stage: StagePlan) -> StagePlan:
        raised = {name: max(value, stage.value(name)) for name, value in values.items()}
        if stage.data_parallel == 1:
            raised.pop("zero", None)
        return stage.with_values(raised)

    return _stagewise(change)


def _count(name: str, share: float) -> Callable[[Plan], Plan | None]:
    """A function that raises a number of blocks, such as the number of recomputed blocks, to at
    least a given share of each stage's blocks; it returns None if the plan is then invalid.
    """

    def change(stage: StagePlan) -> StagePlan:
        count = max(stage.degree(name), -int(-share * stage.layers // 1))
        return stage.with_values({name: count})

    return _stagewise(change)


def _micro_batch(size: int, plan: Plan) -> Plan | None:
    """The plan with smaller micro-batches, whose number grows in proportion; None if the sizes do
    not divide evenly.
    """
    times, rest = divmod(max(stage.micro_batch for stage in plan.stages), size)
    if rest or any(stage.micro_batch % times for stage in plan.stages):
        return None
    stages = tuple(
        stage.with_values({"micro_batch": stage.micro_batch // times}) for stage in plan.stages
    )
    return replace(plan, micro_batches=times * plan.micro_batches, stages=stages)


def _tensor(degree: int, plan: Plan) -> Plan | None:
    """The plan with ``degree`` times the tensor-parallel GPUs, fewer replicas and more
    micro-batches; None if the replicas do not divide evenly.
    """
    if any(stage.data_parallel % degree for stage in plan.stages):
        return None
    stages = tuple(
        stage.with_values(
            {
                "tensor_parallel": stage.tensor_parallel * degree,
                "data_parallel": stage.data_parallel // degree,
            }
        )
        for stage in plan.stages
    )
    return replace(plan, micro_batches=degree * plan.micro_batches, stages=stages)


def _pipeline(degree: int, plan: Plan) -> Plan | None:
    """The plan after each stage is split into ``degree`` stages, which have fewer replicas and run
    more micro-batches; None if the replicas or the blocks are too few.
    """
    if any(stage.data_parallel % degree or stage.layers < degree for stage in plan.stages):
        return None
    stages = tuple(
        part
        for stage in plan.stages
        for part in _parts(stage, degree, stage.data_parallel // degree)
    )
    return replace(plan, micro_batches=degree * plan.micro_batches, stages=stages)


def _parts(stage: StagePlan, degree: int, replicas: int) -> Iterator[StagePlan]:
    """The stages into which one stage is split: they share its blocks, and otherwise equal it."""
    for layers in even_shares(stage.layers, degree):
        counts = {
            name: min(layers, -(-stage.degree(name) * layers // stage.layers))
            for name in counts_of_blocks()
        }
        yield stage.with_values({"layers": layers, "data_parallel": replicas, **counts})
