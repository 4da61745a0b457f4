"""The work of the streams in the slots of a pass: which tasks each kind of slot has.

Axes: S distinct strategies, T types of layers, K kinds of slots, P phases; the four streams first.
"""

from collections.abc import Collection, Sequence
from functools import cache

import numpy as np

from mistlab.cost.side_by_side import Streams, link_after
from mistlab.cost.slot_lengths import (
    HERE,
    LOWER,
    UPPER,
    Kinds,
    Values,
    in_slots,
    of_layers,
    with_nothing,
)
from mistlab.cost.tasks import TaskSeconds
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.places import layers_above
from mistlab.schedule.slot_table import PHASES, SHARDED_WEIGHTS, Phase, Place, Task

COMPUTE = STREAMS.index("compute")
_FETCHING = (("P", "<"), ("U", None))


class SlotWork:
    """The tasks in the slots of some kinds (K), for the strategies (S) of ``seconds``."""

    def __init__(self, seconds: TaskSeconds, kinds: Kinds) -> None:
        self.seconds = seconds
        self.kinds = kinds
        self._in_slots: dict[tuple[str, str, int, int], Values | None] = {}
        # The layer that computes waits for its tensor-parallel collectives; copies go on.
        self._waited = {
            phase: of_layers(waited_s, kinds[:, HERE])
            for phase, waited_s in seconds.tensor_s.items()
        }
        side_by_side = seconds.model.template.depth > 0
        # Strategies (S) whose gradients leave between passes of layers.
        self.evicts = np.flatnonzero((seconds.columns["offload_gradients"] > 0) & side_by_side)

    def alone(self, phases: Sequence[Phase] = PHASES, without: Collection[str] = ()) -> Streams:
        """Seconds (4, P, K, S) of each stream's tasks alone, in the slots of some phases,
        ``without`` tasks of some kinds."""
        seconds, template = self.seconds, self.seconds.model.template
        alone = np.zeros((len(STREAMS), len(phases), len(self.kinds), len(seconds.zero)))
        for number, phase in enumerate(phases):
            for task in template.phases[phase]:
                lasting = self._in_slots_s(task, _neighbour(task.place, phase, template.depth))
                if lasting is not None and task.kind not in without:
                    # The tasks of a step run one after another.
                    stream = COMPUTE if phase == "step" else STREAMS.index(task.stream)
                    alone[stream, number] += lasting
            if phase != "step":
                alone[COMPUTE, number] += self._waited[
                    "forward" if "forward" in phase else "backward"
                ]
        return alone

    def fetched_s(self, phases: Sequence[Phase] = PHASES) -> Values:
        """Seconds (2, P, K, S) in which the next layer's weights are swapped in, and in which they
        are then gathered; zero where weights are not both swapped in and gathered.

        If layers are fetched further ahead, the two tasks are in slots of their own.
        """
        seconds, template = self.seconds, self.seconds.model.template
        fetched = np.zeros((2, len(phases), len(self.kinds), len(seconds.zero)))
        swapped = seconds.alone("P", "<")
        if template.depth != 1 or not swapped.any():
            return fetched
        both = np.stack([swapped, seconds.alone("U", "")])
        both = np.where((seconds.zero >= SHARDED_WEIGHTS) & (swapped > 0), both, 0.0)
        of_layer = np.stack([with_nothing(one) for one in both])
        for number, phase in enumerate(phases):
            tasks = [t for t in template.phases[phase] if (t.kind, t.direction) in _FETCHING]
            if len(tasks) >= len(_FETCHING):
                neighbour = _neighbour(tasks[0].place, phase, template.depth)
                fetched[:, number] = of_layer[:, self.kinds[:, neighbour]]
        return fetched

    def evicting_s(self, alone: Streams) -> Values:
        """Seconds (K', S') until reductions are done in slots of strategies whose gradients leave,
        from their tasks (4, K', S').

        A layer computes when the gradients whose buffer it takes have left.
        """
        slowed = in_slots(self.seconds.slowed_by(), alone, self.evicts)
        flat = link_after(alone.reshape(len(STREAMS), -1), slowed, "device_to_host")
        return flat.reshape(alone.shape[1:])

    def _in_slots_s(self, task: Task, neighbour: int) -> Values | None:
        """Seconds (K, S) of a task for one of the three layers of each slot; None for a task that
        takes no time."""
        key = task.kind, task.direction or "", task.from_zero, neighbour
        if key not in self._in_slots:
            of_type = self.seconds.alone(task.kind, task.direction or "")
            if task.from_zero:
                of_type = np.where(self.seconds.zero >= task.from_zero, of_type, 0.0)
            layers = self.kinds[:, neighbour]
            self._in_slots[key] = with_nothing(of_type)[layers] if of_type.any() else None
        return self._in_slots[key]


@cache
def _neighbour(place: Place, phase: Phase, depth: int) -> int:
    """Which of a slot's three layers a task with this place works on."""
    above = layers_above(place, phase, depth)
    return UPPER if above > 0 else LOWER if above < 0 else HERE
