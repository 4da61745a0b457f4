"""The times of a stage's passes: sums over the slots of each phase.

Inside a pass a layer computes in every slot. In the slots before and after it nothing computes, but
layers are still fetched or evicted. Two passes that follow one another share these slots: the
evictions of the first and the fetches of the second run side by side. A stage turns round at its
first layers, from a backward pass to a forward pass, and at its last layers.

Axes: C candidates, S distinct strategies, K kinds of slots; the four streams last.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.beside_sends import STEADY, BesideSend, longest_slots, slots_beside_sends
from mistlab.cost.first_pass import OF_STEPS, PARTS, FirstPass, first_slots
from mistlab.cost.side_by_side import link_after
from mistlab.cost.slot_lengths import (
    HERE,
    LOWER,
    UPPER,
    Kinds,
    Lengths,
    Sums,
    Values,
    of_layers,
    slot_seconds,
    with_nothing,
)
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.machine.slowdowns import STREAMS
from mistlab.schedule.places import layers_above
from mistlab.schedule.slot_kinds import NOTHING
from mistlab.schedule.slot_table import (
    KINDS,
    PHASES,
    SHARDED_GRADIENTS,
    SHARDED_WEIGHTS,
    Phase,
    Task,
)

# A mask of kinds of slots (K), and the phases whose tasks run side by side in them.
Slots = tuple[NDArray[np.bool_], tuple[Phase, ...]]

COMPUTE = STREAMS.index("compute")
_BACKWARD: Sequence[tuple[Phase, ...]] = (("backward",), ("last_backward",))
_FETCHING = (("P", "<"), ("U", None))
# Kinds of tasks that belong to gradients of weights.
_OF_GRADIENTS = frozenset({"R", "G"})
_NOT_REDUCING = tuple(stream for stream in STREAMS if stream != "gpu_to_gpu")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PassSeconds:
    """Seconds (C) inside the passes of each phase, and outside passes.

    The time inside the ``first`` forward pass leaves out what no layer of it waits for.

    ``through`` is the time inside steady passes of a micro-batch for which its stage was idle.
    ``last_computed`` is the time inside the last backward pass without reductions, which go on
    after it. ``opening`` comes before a steady forward pass by itself, ``first_opening`` before the
    first forward, ``last_closing`` after the last backward. ``beside_sends`` says what sends cost
    steady passes; it is empty if no stage sends beside its passes.
    """

    inside: Mapping[Phase, Values]
    first: FirstPass
    through: Mapping[Phase, Values]
    last_computed: Values
    opening: Values
    first_opening: Values
    last_closing: Values
    turn_at_first_layer: Values
    turn_at_last_layer: Values
    beside_sends: Mapping[Phase, BesideSend]

    def chosen(self, rows: NDArray[np.intp]) -> "PassSeconds":
        """Those of the candidates in these rows."""
        inside = {phase: seconds[rows] for phase, seconds in self.inside.items()}
        return PassSeconds(
            inside=inside,
            first=self.first.chosen(rows),
            through=inside,
            **{name: getattr(self, name)[rows] for name in _ONCE},
            beside_sends={phase: one.chosen(rows) for phase, one in self.beside_sends.items()},
        )


_ONCE = (
    *("last_computed", "opening", "first_opening", "last_closing"),
    *("turn_at_first_layer", "turn_at_last_layer"),
)


def pass_seconds(
    seconds: TaskSeconds,
    kinds: Kinds,
    summed: Sums,
    *,
    sends: bool = True,
    kept: Kept = "own",
) -> PassSeconds:
    """The times of stages' passes, which may be beside ``sends``; ``summed`` sums lengths of slots
    over each stage. If the ``least`` factors are kept, times that no greater work on the same
    streams undercuts."""
    work = _SlotWork(seconds, kinds, kept)
    inside = kinds[:, HERE] != NOTHING
    below = ~inside & (kinds[:, UPPER] != NOTHING)
    above = ~inside & ~below
    slots: Sequence[Slots] = [
        *((inside, (phase,)) for phase in PHASES),
        *((below, (phase,)) for phase in ("forward", "first_forward", "last_backward")),
        *((where, ("forward", "backward")) for where in (below, above)),
    ]
    computed = work.lengths([(inside, ("last_backward",))], _NOT_REDUCING)
    lengths = work.lengths(slots)
    steps = work.first_slots(inside, lengths[PHASES.index("forward")][0])
    beside = work.beside_sends(inside, lengths) if sends else []
    last_computed, *lasting = summed([*computed, *steps, *lengths, *beside])
    # Without offloading there is nothing to sum.
    parts = lasting[: len(steps)] if steps else [np.zeros(1)] * PARTS
    first, lasting = FirstPass(*parts), lasting[len(steps) :]
    lasting, found = lasting[: len(lengths)], lasting[len(lengths) :]
    opening, first_opening, last_closing, at_first_layer, at_last_layer = lasting[len(PHASES) :]
    inside_s = dict(zip(PHASES, lasting, strict=False))
    inside_s["first_forward"] = inside_s["first_forward"] - first.unawaited
    return PassSeconds(
        inside=inside_s,
        first=first,
        through=inside_s,
        last_computed=last_computed,
        opening=opening,
        first_opening=first_opening,
        last_closing=last_closing,
        turn_at_first_layer=at_first_layer,
        turn_at_last_layer=at_last_layer,
        beside_sends=dict(zip(STEADY, map(BesideSend, *[iter(found)] * 5), strict=False)),
    )


def split_pass_seconds(
    seconds: TaskSeconds, kinds: Kinds, summed: Sums, *, weights_s: Values, unhidden_s: Values
) -> tuple[Values, Values]:
    """Seconds (C) of passes that make gradients of weights, in which the gradients are reduced, and
    by which steady backward passes are shorter without them.

    The products take ``weights_s`` (T, S). For ``unhidden_s`` tensor-parallel ranks wait for one
    another, which these products hid before. Both passes together are never shorter than one.
    """
    work = _SlotWork(seconds, kinds, "own")
    inside = kinds[:, HERE] != NOTHING
    whole = work.lengths([(inside, ("backward",))])
    split = work.split_lengths(inside, weights_s, unhidden_s)
    whole_s, inputs_s, weights_s, waits_s = summed([*whole, *split])
    less_s = whole_s - inputs_s
    return np.maximum(weights_s, less_s + waits_s), less_s


def longest_beside_sends(
    seconds: TaskSeconds, kinds: Kinds, summed: Sums
) -> Mapping[Phase, Values]:
    """Seconds (C) of steady passes beside a send that goes on all through them, which no lesser
    work exceeds."""
    work = _SlotWork(seconds, kinds, "most", STEADY)
    inside = kinds[:, HERE] != NOTHING
    longest = [(longest_slots(seconds, work.alone[phase][inside]), inside) for phase in STEADY]
    return dict(zip(STEADY, summed(longest), strict=True))


def least_passes(ends: Sequence[PassSeconds], longest_s: Mapping[Phase, Values]) -> PassSeconds:
    """The times that no passes of a box undercut, from those at both ends of its recomputed blocks
    with the least ratios; ``longest_s`` are those of its ``longest_beside_sends``.

    The number of each kind of slot is linear in the number of recomputed blocks. So each sum of
    slots rises or falls all the way between the two ends, and is least at one of them.
    """

    def least(sums: Sequence[Mapping[Phase, Values]]) -> Mapping[Phase, Values]:
        return {phase: np.minimum(*(own[phase] for own in sums)) for phase in sums[0]}

    inside = least([end.inside for end in ends])
    return PassSeconds(
        inside=inside,
        first=FirstPass.least([end.first for end in ends]),
        through=inside,
        **{name: np.minimum(*(getattr(end, name) for end in ends)) for name in _ONCE},
        beside_sends={
            phase: BesideSend.of_box(
                [end.beside_sends[phase] for end in ends],
                [end.inside[phase] for end in ends],
                longest_s.get(phase, 0.0),
            )
            for phase in ends[0].beside_sends
        },
    )


def reduces_in_place(seconds: TaskSeconds) -> NDArray[np.bool_]:
    """Strategies (S) that reduce gradients in place, and so go on computing meanwhile."""
    in_place = (seconds.zero < SHARDED_GRADIENTS) & (seconds.columns["offload_gradients"] == 0)
    return np.asarray(in_place)


class _SlotWork:
    """The work of the streams in the slots of each kind, in each phase."""

    def __init__(
        self, seconds: TaskSeconds, kinds: Kinds, kept: Kept, phases: Sequence[Phase] = PHASES
    ) -> None:
        self.seconds = seconds
        self.kept = kept
        self.kinds = kinds
        self._padded: dict[tuple[str, str, int], Values] = {}
        self.alone = {phase: self._alone(phase) for phase in phases}
        self.fetched = {phase: self._fetched_s(phase) for phase in phases}
        side_by_side = seconds.model.template.depth > 0
        # Strategies (S) whose gradients leave between passes of layers.
        self.evicts = (seconds.columns["offload_gradients"] > 0) & side_by_side

    def lengths(self, slots: Sequence[Slots], awaited: Sequence[str] = STREAMS) -> list[Lengths]:
        """Seconds (K', S) of each of some slots, until the ``awaited`` streams are done."""
        # Small tables take as long as large ones, so all slots are computed together.
        alone = [
            np.asarray(sum(self.alone[phase][where] for phase in phases)) for where, phases in slots
        ]
        fetched = [
            np.maximum.reduce([self.fetched[phase][where] for phase in phases])
            for where, phases in slots
        ]
        ends = np.cumsum([len(least) for least in fetched])[:-1]
        lasting = slot_seconds(self.seconds, np.concatenate(alone), awaited, self.kept == "least")
        parts = np.split(np.maximum(lasting, np.concatenate(fetched)), ends)
        if awaited is STREAMS and self.evicts.any() and self.kept == "own":
            for number, (_, phases) in enumerate(slots):
                if phases in _BACKWARD:
                    evicting_s = self._evicting_s(alone[number][:, self.evicts])
                    own_s = parts[number][:, self.evicts]
                    parts[number][:, self.evicts] = np.maximum(own_s, evicting_s)
        return [(part, where) for part, (where, _) in zip(parts, slots, strict=True)]

    def first_slots(self, inside: NDArray[np.bool_], usual: Values) -> list[Lengths]:
        """What ``FirstPass`` sums up, if anything; steady slots take ``usual`` seconds (K', S)."""
        columns = self.seconds.columns
        offloads = (columns["offload_weights"] > 0) | (columns["offload_optimizer"] > 0)
        if not (self.seconds.model.template.depth and offloads.any()):
            return []
        stepped = self._alone("first_forward", without=OF_STEPS)[inside]
        alone, kinds = self.alone["first_forward"][inside], self.kinds[inside]
        is_least = self.kept == "least"
        found = first_slots(self.seconds, kinds, alone, stepped, usual, is_least=is_least)
        return [(one, inside) for one in found]

    def split_lengths(
        self, inside: NDArray[np.bool_], weights_s: Values, unhidden_s: Values
    ) -> list[Lengths]:
        """Seconds (K', S) of slots of passes for inputs and of passes for weights, and of what was
        hidden in them."""
        products, waits = (of_layers(one, self.kinds[:, HERE]) for one in (weights_s, unhidden_s))
        inputs = self._alone("backward", without=_OF_GRADIENTS)
        inputs[..., COMPUTE] += waits - products
        weights = self._alone("backward", without=set(KINDS) - _OF_GRADIENTS)
        weights[..., COMPUTE] = products
        lasting = [
            slot_seconds(self.seconds, np.maximum(one[inside], 0.0), STREAMS, self.kept == "least")
            for one in (inputs, weights)
        ]
        lasting[0] = np.maximum(lasting[0], self.fetched["backward"][inside])
        if self.evicts.any():
            evicting_s = self._evicting_s(weights[inside][:, self.evicts])
            lasting[1][:, self.evicts] = np.maximum(lasting[1][:, self.evicts], evicting_s)
        return [(one, inside) for one in (*lasting, waits[inside])]

    def _evicting_s(self, alone: Values) -> Values:
        """Seconds (K, S') until reductions are done in slots of strategies whose gradients leave.

        A layer computes when the gradients whose buffer it takes have left.
        """
        found = np.empty(alone.shape[:2])
        evicts = np.flatnonzero(self.evicts)
        for rows, factors in self.seconds.factors():
            own = rows[evicts]
            slots = alone[:, own]
            flat = link_after(slots.reshape(-1, len(STREAMS)), factors, "device_to_host")
            found[:, own] = flat.reshape(slots.shape[:2])
        return found

    def beside_sends(self, inside: NDArray[np.bool_], usual: Sequence[Lengths]) -> list[Lengths]:
        """What sends cost the slots of steady passes, as in ``slots_beside_sends``; ``usual`` has
        the slots of all phases."""
        found: list[Lengths] = []
        for phase in STEADY:
            alone, usual_s = self.alone[phase][inside], usual[PHASES.index(phase)][0]
            every = slots_beside_sends(self.seconds, alone, usual_s, self.kept)
            found += [(one, inside) for one in every]
        return found

    def _alone(self, phase: Phase, without: Collection[str] = ()) -> Values:
        """Seconds (K, S, 4) of each stream's tasks alone, in a phase's slots, ``without`` tasks of
        some kinds."""
        seconds, template = self.seconds, self.seconds.model.template
        alone = np.zeros((len(self.kinds), len(seconds.zero), len(STREAMS)))
        for task in template.phases[phase]:
            if task.kind in without:
                continue
            layers = self.kinds[:, _neighbour(task, phase, template.depth)]
            # The tasks of a step run one after another.
            stream = COMPUTE if phase == "step" else STREAMS.index(task.stream)
            alone[:, :, stream] += self._of_task(task)[layers]
        if phase != "step":
            # The layer that computes waits for its tensor-parallel collectives; copies go on.
            waiting = seconds.tensor_s["forward" if "forward" in phase else "backward"]
            alone[:, :, COMPUTE] += of_layers(waiting, self.kinds[:, HERE])
        return alone

    def _of_task(self, task: Task) -> Values:
        """Seconds (T + 1, S) of a task for each type of layer, and for no layer (0)."""
        key = task.kind, task.direction or "", task.from_zero
        if key not in self._padded:
            of_type = self.seconds.alone(task.kind, task.direction or "")
            if task.from_zero:
                of_type = np.where(self.seconds.zero >= task.from_zero, of_type, 0.0)
            self._padded[key] = with_nothing(of_type)
        return self._padded[key]

    def _fetched_s(self, phase: Phase) -> Values:
        """Seconds (K, S) until the next layer's weights are swapped in and then gathered.

        If layers are fetched further ahead, the two tasks are in slots of their own.
        """
        seconds, template = self.seconds, self.seconds.model.template
        rows = [row for row in template.phases[phase] if (row.kind, row.direction) in _FETCHING]
        if len(rows) < len(_FETCHING) or template.depth != 1:
            return np.zeros((len(self.kinds), len(seconds.zero)))
        swapped = seconds.alone("P", "<")
        both = swapped + seconds.alone("U", "")
        both = np.where((seconds.zero >= SHARDED_WEIGHTS) & (swapped > 0), both, 0.0)
        return of_layers(both, self.kinds[:, _neighbour(rows[0], phase, template.depth)])


def _neighbour(task: Task, phase: Phase, depth: int) -> int:
    """The one of a slot's three layers that a task is for."""
    above = layers_above(task.place, phase, depth)
    return UPPER if above > 0 else LOWER if above < 0 else HERE
