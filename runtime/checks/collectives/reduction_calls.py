"""Records the collective calls by which a rank averages gradients or weights, as the runtime's own
code makes them.

All layers of a section (the parameters that one group of ranks shards) are averaged alike. So a
vector of a few values stands for each layer, and one layer of each fragment for all layers of the
fragment. The data that each group should average are named here from the rank's position alone, so
that the groups can be checked against these names.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import cast

import torch

from mistlab.plan.plan import StagePlan
from mistlab.reduction.reduction_costs import Reduction
from mistlab.stages.stage_program import Op, flush, iterations
from mistlab.stages.stage_shape import StageShape, replicas_of
from runtime.checks.collectives.noted_calls import NotedCalls
from runtime.checks.collectives.world_calls import Call, Step
from runtime.comm.group import in_turn
from runtime.comm.topology import CPU, Connections
from runtime.engine.storage.state import Section
from runtime.engine.training import Training
from runtime.engine.work.averages import averages_of
from runtime.engine.work.scaling import Scaling
from runtime.engine.work.turn_server import TurnServer

PEERS, REDUCERS = "peers", "reduce"
# The number of values per server in the recorded vectors; the last server gets fewer.
VALUES_OF_PART = 64
# The number of vectors of a layer: master weights and two moments.
VECTORS = 3


@dataclass(frozen=True, slots=True)
class ReductionCalls:
    """The recorded calls for each section of a layer (the parameters that one group of ranks
    shards), and for all weights after each averaging step. ``late`` says that the calls for layers
    come after all passes.
    """

    of_layer: tuple[tuple[Call, ...], ...] = ()
    of_weights: tuple[tuple[int, tuple[Call, ...]], ...] = ()
    late: bool = False


def reduction_calls(
    notes: NotedCalls,
    how: Reduction,
    connections: Connections,
    stage_plan: StagePlan,
    *,
    clips: bool,
) -> ReductionCalls:
    """Record how a connected rank averages one layer's gradients per section, and its weights in
    each step of the averaging cycle.
    """
    training = Training(learning_rate=0.0, clip_norm=1.0 if clips else None)
    size = how.shards * (how.shards + VALUES_OF_PART - 2) + 1
    sections = [_section(size, how.fragments) for _ in connections.sharers]
    averages, of_weights = averages_of(
        *(how, connections, sections, training),
        scaling=Scaling(training, CPU),
        device=CPU,
        replicas=replicas_of(stage_plan),
    )
    of_layer, late = [], False
    for layer_averages in averages:
        notes.route = "gradients"
        average = layer_averages.average
        if isinstance(layer_averages, TurnServer) and layer_averages.scaling is not None:
            late, average = True, layer_averages.serve
        in_turn(average(0, torch.ones(size)))
        of_layer.append(notes.taken())
    of_steps = []
    if of_weights is not None:
        of_weights.begin()
        for step in filter(of_weights.is_due, range(1, of_weights.cycle + 1)):
            notes.route = f"weights in step {step}"
            of_weights.average(step)
            of_steps.append((step, notes.taken()))
    return ReductionCalls(tuple(of_layer), tuple(of_steps), late)


def parts_of(
    calls: ReductionCalls, connections: Connections, replica: int, replicas: int
) -> Mapping[str, str]:
    """What a rank averages in each group, by the group's name: its shard of gradients within a
    replica, and its shard of weights over all replicas.
    """
    position, averaged = connections.place, {}
    whose = f"replica {replica}, " if replicas > 1 else ""
    gradients = f"gradients of {whose}stage {position.stage}, tensor {position.tensor}"
    weights = f"weights of rank {connections.rank} in each replica"
    averaged = {REDUCERS: gradients}
    averaged |= dict.fromkeys((call.group for call in (*calls.of_layer, ())[0]), gradients)
    if replicas > 1:
        averaged[PEERS] = weights
    for _, of_step in calls.of_weights:
        averaged |= dict.fromkeys((call.group for call in of_step), weights)
    return averaged


def _section(size: int, layers: int) -> Section:
    """A stand-in for a section of the state (the parameters that one group of ranks shards), with a
    few values per layer.
    """

    def layer() -> SimpleNamespace:
        vectors = [SimpleNamespace(resident=torch.ones(size)) for _ in range(VECTORS)]
        layout, step = SimpleNamespace(numel=size), torch.zeros(())
        return SimpleNamespace(layout=layout, optimizer=vectors, step=step)

    return cast("Section", SimpleNamespace(layers={one: layer() for one in range(layers)}))


@dataclass(slots=True)
class _Laid:
    """A list of tasks with their calls, in which a task waits only for tasks of its own program."""

    calls_of: Callable[[Op], tuple[Call, ...]]
    steps: list[Step] = field(default_factory=list)
    _places: list[int] = field(default_factory=list)

    def program(self, ops: Sequence[Op]) -> None:
        """Append the tasks of one iteration of a stage."""
        for op in ops:
            here, places = len(self.steps), self._places
            waits = tuple(here - places[-back] for back in op.waits if back <= len(places))
            calls = self.calls_of(op)
            self.steps.append(Step(task=str(op.task), lane=op.lane, waits=waits, calls=calls))
            places.append(here)

    def begin_anew(self) -> None:
        """Let later tasks not wait for earlier ones, because the host has waited for the earlier
        tasks.
        """
        self._places.clear()

    def after_all(self, task: str, calls: tuple[Call, ...]) -> None:
        """Append a task that begins after all earlier work on all lanes."""
        here = len(self.steps)
        last = {step.lane: place for place, step in enumerate(self.steps)}
        waits = tuple(here - place for place in last.values())
        self.steps.append(Step(task=task, waits=waits, calls=calls))


def steps_of_program(
    shape: StageShape,
    calls_of: Callable[[Op], tuple[Call, ...]],
    calls: ReductionCalls,
    count: int,
) -> tuple[Step, ...]:
    """The tasks of ``count`` iterations. If weights are averaged, also of each later iteration
    after which they are averaged, and of one more; the iterations left out equal the second one.
    """
    first, later = iterations(shape, 2)
    laid, due = _Laid(calls_of), dict(calls.of_weights)
    if not due:
        for number in range(count):
            laid.program(later if number else first)
            if calls.late:
                served = tuple(call for section in calls.of_layer for call in section)
                laid.after_all(f"server behind iteration {number + 1}", served)
        return tuple(laid.steps)
    losses = Call(group=PEERS, kind="all_reduce", what="losses of replicas")
    follows = False
    for step in sorted({*range(1, count + 1), *due}):
        laid.program(later if follows else first)
        laid.after_all(f"losses of step {step}", (losses,))
        follows = step not in due
        if not follows:
            laid.begin_anew()
            laid.program(flush(shape))
            laid.after_all(f"average after step {step}", due[step])
            laid.begin_anew()
    laid.program(later if follows else first)
    return tuple(laid.steps)
