"""Why two predictors differ over a plan: the one thing without which they differ least.

Both predict the plan again with one thing removed at a time: a kind of offloading, a kind of task,
the time of sends, the host, or the slowdown of streams by one another.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES
from mistlab.job.job import Job
from mistlab.machine.slowdowns import NO_INTERFERENCE
from mistlab.plan.dimensions import OFFLOADS
from mistlab.plan.plan import Offload, Plan
from mistlab.schedule.slots import Kind
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor, as_they_are

Altered = Callable[[TaskModel], TaskModel]
# Sends that take no time would not be tasks.
_HARDLY_ANY = 1e-9
# What must be left of a difference at most, if one thing is to be its reason.
HALF = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class Reason:
    """The thing that was removed, and the difference without it; ``removed`` is empty if no single
    thing takes half of the difference away."""

    removed: str
    difference: float

    def __str__(self) -> str:
        if not self.removed:
            return "several things together"
        return f"{self.removed} ({self.difference:+.1%} without)"


def reason_of(job: Job, difference: float) -> Reason:
    """The thing whose removal takes most of a plan's difference away."""
    found = [
        Reason(removed=name, difference=difference_of(replace(job, plan=plan), altered))
        for name, plan, altered in _without_one(job.plan)
    ]
    least = min(found, key=lambda one: abs(one.difference))
    if abs(least.difference) <= HALF * abs(difference):
        return least
    return Reason(removed="", difference=difference)


def difference_of(job: Job, altered: Altered = as_they_are) -> float:
    """The closed form's time over the event simulator's, less one, with other times of tasks."""
    work, cluster = job.workload, job.cluster
    closed = SymbolicPredictor(workload=work, cluster=cluster, altered=altered).predict(job.plan)
    simulator = EventSimulator(workload=work, cluster=cluster, altered=altered)
    played = simulator.simulate(job.plan)
    return closed.iteration_s / played.iteration_s - 1


def _without_one(plan: Plan) -> Iterator[tuple[str, Plan, Altered]]:
    """The plan, or the times of its tasks, without one thing that it has; and the thing."""
    engine = ENGINES[plan.engine]
    for name in OFFLOADS:
        if any(stage.value(name) > 0 for stage in plan.stages):
            kind = name.removeprefix("offload_")
            yield f"offloaded {_WORDS.get(kind, kind)}", _keeping(plan, kind), as_they_are
    rows = engine.template(overlap_communication=plan.overlap_communication).phases.values()
    kinds = {row.kind for of_phase in rows for row in of_phase}
    for kind, words in _REMOVABLE.items():
        if kind in kinds:
            yield words, plan, _without_tasks(kind)
    if plan.num_stages > 1:
        yield "sends", plan, _without_sends
    if engine.host is not None:
        yield "the host's time", plan, _without_host
    yield "streams that slow one another down", plan, _without_contention


_WORDS: Mapping[str, str] = {"optimizer": "optimizer state"}
_REMOVABLE: Mapping[Kind, str] = {"R": "reductions of gradients", "U": "gathers of weights"}


def _keeping(plan: Plan, kind: str) -> Plan:
    """The plan with one kind of what it offloads on the GPU."""
    return replace(
        plan,
        stages=tuple(
            replace(stage, offload=_without(stage.offload, kind)) for stage in plan.stages
        ),
    )


def _without(offload: Offload, kind: str) -> Offload:
    return replace(offload, **{kind: 0.0})


def _without_tasks(kind: Kind) -> Altered:
    """Times of tasks in whose slot table a kind of task is not."""

    def altered(tasks: TaskModel) -> TaskModel:
        phases = {
            phase: tuple(row for row in rows if row.kind != kind)
            for phase, rows in tasks.template.phases.items()
        }
        return replace(tasks, template=replace(tasks.template, phases=phases))

    return altered


def _without_sends(tasks: TaskModel) -> TaskModel:
    return replace(tasks, send_factor=_HARDLY_ANY)


def _without_host(tasks: TaskModel) -> TaskModel:
    return replace(tasks, host=None)


def _without_contention(tasks: TaskModel) -> TaskModel:
    hardware = replace(tasks.cluster.hardware, interference=NO_INTERFERENCE)
    return replace(tasks, cluster=replace(tasks.cluster, hardware=hardware))
