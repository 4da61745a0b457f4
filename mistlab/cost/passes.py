"""How long a stage's passes take: sums over the slots of each phase.

Inside a pass a layer computes in every slot. The slots outside, where nothing computes and
neighbours are still fetched or evicted, are shared: what the pass before leaves over and what the
next one fetches run side by side. A stage turns round at its first layers, from a backward pass to
a forward, and at its last ones.

Axes: C candidates, S distinct strategies, K kinds of slots; the four streams last.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.interference import overlapped
from mistlab.cost.tasks import TaskSeconds
from mistlab.interference import STREAMS
from mistlab.schedule import PHASES, SHARDED_GRADIENTS, SHARDED_WEIGHTS, Phase, Task
from mistlab.slots import NOTHING, SlotKind

Values = NDArray[np.float64]
# Seconds (C) from lengths (K, S) of some of the kinds of slots.
Sum = Callable[[Values, NDArray[np.bool_]], Values]

COMPUTE = STREAMS.index("compute")
_FETCHING = (("P", "<"), ("U", None))
_NOT_REDUCING = tuple(stream for stream in STREAMS if stream != "gpu_to_gpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSeconds:
    """Seconds (C) inside the passes of each phase, and outside of them.

    ``last_computed`` is inside the last backward pass, without reductions that go on after it.
    ``opening`` comes before a steady forward pass by itself, ``first_opening`` before the first
    one, ``last_closing`` after the last backward.
    """

    inside: Mapping[Phase, Values]
    last_computed: Values
    opening: Values
    first_opening: Values
    last_closing: Values
    turn_at_first_layer: Values
    turn_at_last_layer: Values


def pass_seconds(seconds: TaskSeconds, kinds: Sequence[SlotKind], summed: Sum) -> PassSeconds:
    """The passes of stages whose slots are ``summed``."""
    work = {phase: slot_work(seconds, phase, kinds) for phase in PHASES}
    inside = np.array([here != NOTHING for _, here, _ in kinds])
    below = ~inside & np.array([upper != NOTHING for _, _, upper in kinds])
    above = ~inside & ~below

    def lasting(
        where: NDArray[np.bool_], *phases: Phase, awaited: Sequence[str] = STREAMS
    ) -> Values:
        slots = np.sum([work[phase][where] for phase in phases], axis=0)
        fetched = np.max([_fetched_s(seconds, phase, kinds)[where] for phase in phases], axis=0)
        return summed(np.maximum(_slot_seconds(seconds, slots, awaited), fetched), where)

    return PassSeconds(
        inside={phase: lasting(inside, phase) for phase in PHASES},
        last_computed=lasting(inside, "last_backward", awaited=_NOT_REDUCING),
        opening=lasting(below, "forward"),
        first_opening=lasting(below, "first_forward"),
        last_closing=lasting(below, "last_backward"),
        turn_at_first_layer=lasting(below, "forward", "backward"),
        turn_at_last_layer=lasting(above, "forward", "backward"),
    )


def reduces_in_place(seconds: TaskSeconds) -> NDArray[np.bool_]:
    """Which strategies (S) go on computing while gradients of layers passed are being reduced."""
    in_place = (seconds.zero < SHARDED_GRADIENTS) & (seconds.columns["offload_gradients"] == 0)
    return np.asarray(in_place)


def slot_work(seconds: TaskSeconds, phase: Phase, kinds: Sequence[SlotKind]) -> Values:
    """Seconds (K, S, 4) that each stream's tasks in a phase's slots take by themselves."""
    template = seconds.model.template
    alone = np.zeros((len(kinds), len(seconds.zero), len(STREAMS)))
    for task in template.phases[phase]:
        stream = STREAMS.index(task.stream)
        of_type = seconds.alone(task.kind, task.direction or "")
        of_type = np.where(seconds.zero >= task.from_zero, of_type, 0.0)
        for row, kind in enumerate(kinds):
            layer = kind[_place(task, phase, template.depth)]
            if layer != NOTHING:
                alone[row, :, stream] += of_type[layer]
    if phase != "step":
        # The layer that computes waits for its tensor-parallel collectives, copies go on.
        waiting = seconds.tensor_s["forward" if "forward" in phase else "backward"]
        for row, (_, here, _) in enumerate(kinds):
            if here != NOTHING:
                alone[row, :, COMPUTE] += waiting[here]
    return alone


def _fetched_s(seconds: TaskSeconds, phase: Phase, kinds: Sequence[SlotKind]) -> Values:
    """Seconds (K, S) until the next layer's weights are swapped in and then gathered.

    Fetched further ahead, the two are in slots of their own.
    """
    template = seconds.model.template
    least = np.zeros((len(kinds), len(seconds.zero)))
    rows = [row for row in template.phases[phase] if (row.kind, row.direction) in _FETCHING]
    if len(rows) < len(_FETCHING) or template.depth != 1:
        return least
    both = seconds.alone("P", "<") + seconds.alone("U", "")
    both = np.where((seconds.zero >= SHARDED_WEIGHTS) & (seconds.alone("P", "<") > 0), both, 0.0)
    for row, kind in enumerate(kinds):
        layer = kind[_place(rows[0], phase, template.depth)]
        if layer != NOTHING:
            least[row] = both[layer]
    return least


def _slot_seconds(seconds: TaskSeconds, alone: Values, awaited: Sequence[str]) -> Values:
    """Seconds (K, S) of slots until the ``awaited`` streams are done."""
    if seconds.model.template.depth == 0:
        return np.asarray(alone.sum(axis=-1))
    lengths = np.empty(alone.shape[:2])
    for rows, factors in seconds.factors():
        part = alone[:, rows]
        flat = overlapped(part.reshape(-1, len(STREAMS)), factors, awaited)
        lengths[:, rows] = flat.reshape(part.shape[:2])
    return lengths


def _place(task: Task, phase: Phase, depth: int) -> int:
    """Which of a slot's three layers a task is for: 0 the lower, 1 the one here, 2 the upper."""
    if task.place == "here" or depth == 0:
        return 1
    upwards = "backward" not in phase
    return 2 if (task.place == "ahead") == upwards else 0
