"""Per-layer time slots, the sets of tasks that overlap while a layer computes: their kinds, counts,
tasks and seconds.

Axes: R runs, J stages, P points, K kinds of slots.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.cost.side_by_side import (
    AWAY,
    LINK,
    LINK_BIT,
    NAMES,
    SlowedBy,
    ends_of_several,
    ends_of_streams,
    least_together,
    link_after,
    sets_of,
    slot_after,
    slots_in_turn,
    stepping_s,
    until,
)
from mistlab.cost.tasks import TaskSeconds
from mistlab.graph.layer_types import LayerTypes, type_of
from mistlab.graph.treatments import PLAIN
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.schedule.slots import (
    KINDS,
    PHASES,
    SHARDED_GRADIENTS,
    SHARDED_WEIGHTS,
    Phase,
    Place,
    Task,
)
from mistlab.stages.stage_shape import layers_above

# Counts the time slots of each kind in a stage's passes.
#
# A stage's layers are runs of equal layers. A time slot has three layers: the one that computes,
# the lower one ``depth`` before it and the upper one ``depth`` after it, which are fetched or
# offloaded meanwhile. The first and last ``depth`` slots lie outside the pass, where no layer
# computes and its neighbours are still fetched or offloaded. Time slots with the same three types
# of layers take equally long, so only counts are needed. The three types change where a run ends,
# or ``depth`` before or after it; between two such points all time slots are of one kind.
#
# Axes: R runs, J stages, P points, K kinds of time slots.


# The index that stands for no layer, before the first layer of a stage or after the last one: the
# last row of tables by layer type.
NOTHING = -1


def slot_counts(sizes: Floats, types: Ints, depth: int) -> tuple[Ints, Floats]:
    """The kinds of time slots that occur in stages, by the types of their three layers (K, 3), and
    the number of each kind in a pass of each stage (K, J).

    ``sizes`` are how many layers the runs have (R, J), ``types`` theirs (R, J or R, 1).
    """
    ends = np.cumsum(sizes, axis=0)
    edges = np.concatenate([np.zeros_like(ends[:1]), ends])
    points = np.sort(np.concatenate([edges - depth, edges, edges + depth]), axis=0)
    lengths, middles = np.diff(points, axis=0), (points[1:] + points[:-1]) / 2
    # In the order of kinds, the absent layers before a stage come first, and those after it last.
    after = int(types.max()) + 2
    nothing = np.zeros_like(types[:1])
    places = np.concatenate([nothing, types + 1, nothing + after])
    code = np.zeros(lengths.shape, dtype=np.int64)
    for shift in (-depth, 0, depth):
        code = code * (after + 1) + _at(middles + shift, edges, places)
    occurs = np.zeros((after + 1) ** 3, dtype=bool)
    occurs[code[lengths > 0]] = True
    codes = np.flatnonzero(occurs)
    kinds = np.stack(np.unravel_index(codes, (after + 1,) * 3), axis=1)
    is_layer = (kinds > 0) & (kinds < after)
    is_slot = is_layer.any(axis=1)
    counts = _counted(code, lengths, codes[is_slot], len(occurs))
    return np.where(is_layer, kinds - 1, NOTHING)[is_slot], counts


def _at(positions: Floats, edges: Floats, places: Ints) -> Ints:
    """The layer type at each position in a stage (P, J), from the positions ``edges`` at which runs
    of equal layers begin, and the type ``places`` of each run.
    """
    run = (positions[:, None] >= edges).sum(axis=1)
    if places.shape[1] == 1:
        return np.asarray(places[run, 0])
    return np.take_along_axis(places, run, axis=0)


def _counted(
    code: Ints,
    lengths: Floats,
    codes: Ints,
    every: int,
) -> Floats:
    """The number of time slots with each code of three layer types (K, J), from the lengths of the
    intervals with that code.
    """
    stages = code.shape[1]
    row = np.full(every, len(codes))
    row[codes] = np.arange(len(codes))
    flat = row[code] * stages + np.arange(stages)
    counted = np.bincount(
        flat.ravel(), weights=lengths.ravel(), minlength=(len(codes) + 1) * stages
    )
    return np.asarray(counted.reshape(-1, stages)[: len(codes)])


# The seconds of time slots of some kinds, which all sums over a pass's time slots need.
#
# Axes: C candidates, S distinct strategies, T types of layers, K kinds of time slots, L lengths of
# a time slot; the four streams first.


# The columns of a table of kinds of time slots (K, 3): the types of the lower, the computing and
# the upper layer.
LOWER, HERE, UPPER = range(3)


def of_layers(of_type: Floats, layers: Ints) -> Floats:
    """The seconds (K, S) of one layer in each kind of time slot, from the seconds of all layer
    types (T, S).
    """
    return np.asarray(with_nothing(of_type)[layers])


def with_nothing(of_type: Floats) -> Floats:
    """The seconds of all layer types, and at the end a row of zeros that stands for no layer (T +
    1, S).
    """
    return np.concatenate([of_type, np.zeros((1, of_type.shape[1]))])


def slot_ends(
    seconds: TaskSeconds,
    alone: Floats,
    is_least: bool,
    chosen: Rows | slice = slice(None),
) -> Floats:
    """The end of each stream in seconds, in the time slots of the ``chosen`` strategies (4, K, S),
    whose tasks take ``alone`` (4, K, S) by themselves.
    """
    if seconds.model.template.depth == 0:
        # Where an engine overlaps nothing, the tasks of a time slot run in sequence.
        return np.broadcast_to(alone.sum(axis=0), alone.shape)
    slowed = seconds.slowed_by("least" if is_least else "own")
    flat = ends_of_streams(alone.reshape(len(alone), -1), in_slots(slowed, alone, chosen))
    return flat.reshape(alone.shape)


def in_slots(slowed: SlowedBy, alone: Floats, chosen: Rows | slice = slice(None)) -> SlowedBy:
    """How much streams slow one another down in the time slots of the ``chosen`` strategies."""
    first = np.broadcast_to(slowed.first[chosen], alone.shape[1:])
    return SlowedBy(slowed.table, first.reshape(-1), slowed.size)


# The tasks of each stream in each kind of time slot of a pass.
#
# Axes: S distinct strategies, T types of layers, K kinds of time slots, P phases; the four streams
# first.


_FETCHING = (("P", "<"), ("U", None))


class SlotWork:
    """Computes the tasks of each stream in time slots of some kinds (K), for each strategy (S)."""

    def __init__(self, seconds: TaskSeconds, kinds: Ints) -> None:
        self.seconds = seconds
        self.kinds = kinds
        self._in_slots: dict[tuple[str, str, int, int], Floats | None] = {}
        # While a computing layer waits for its tensor-parallel collectives, host copies continue.
        self._waited = {
            phase: of_layers(waited_s, kinds[:, HERE])
            for phase, waited_s in seconds.tensor_s.items()
        }
        side_by_side = seconds.model.template.depth > 0
        # The strategies (S) that offload gradients while layers compute.
        self.evicts = np.flatnonzero((seconds.columns["offload_gradients"] > 0) & side_by_side)

    def alone(self, phases: Sequence[Phase] = PHASES, without: Collection[str] = ()) -> Floats:
        """The seconds of each stream's tasks by themselves (4, P, K, S), in the time slots of some
        phases, ``without`` tasks of some kinds.
        """
        seconds, template = self.seconds, self.seconds.model.template
        alone = np.zeros((len(STREAMS), len(phases), len(self.kinds), len(seconds.zero)))
        for number, phase in enumerate(phases):
            for task in template.phases[phase]:
                lasting = self._in_slots_s(task, _neighbour(task.place, phase, template.depth))
                if lasting is not None and task.kind not in without:
                    # The tasks of an optimizer step run in sequence, so they all count on one
                    # stream.
                    stream = COMPUTE if phase == "step" else STREAMS.index(task.stream)
                    alone[stream, number] += lasting
            if phase != "step":
                alone[COMPUTE, number] += self._waited[
                    "forward" if "forward" in phase else "backward"
                ]
        return alone

    def fetched_s(self, phases: Sequence[Phase] = PHASES) -> Floats:
        """The seconds of copying the next layer's weights from the host, and of then gathering them
        (2, P, K, S); zero where weights are not both copied and gathered.

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

    def evicting_s(self, alone: Floats) -> Floats:
        """The seconds until gradient reductions have ended (K', S'), in time slots of strategies
        that offload gradients, which have tasks ``alone`` (4, K', S').

        A layer computes when the gradients whose buffer it takes have left.
        """
        slowed = in_slots(self.seconds.slowed_by(), alone, self.evicts)
        flat = link_after(alone.reshape(len(STREAMS), -1), slowed, "device_to_host")
        return flat.reshape(alone.shape[1:])

    def _in_slots_s(self, task: Task, neighbour: int) -> Floats | None:
        """The seconds (K, S) of a task for one of the three layers of each kind of time slot; None
        for a task that takes no time.
        """
        key = task.kind, task.direction or "", task.from_zero, neighbour
        if key not in self._in_slots:
            of_type = self.seconds.alone(task.kind, task.direction or "")
            if task.from_zero:
                of_type = np.where(self.seconds.zero >= task.from_zero, of_type, 0.0)
            layers = self.kinds[:, neighbour]
            self._in_slots[key] = with_nothing(of_type)[layers] if of_type.any() else None
        return self._in_slots[key]


@cache
def _neighbour(position: Place, phase: Phase, depth: int) -> int:
    """Which of a time slot's three layers a task works on: LOWER, HERE (the computing one) or
    UPPER.
    """
    above = layers_above(position, phase, depth)
    return UPPER if above > 0 else LOWER if above < 0 else HERE


# The time slots of backward passes that leave weight gradients to separate passes.
#
# Axes: S distinct strategies, T types of layers, K kinds of time slots; the four streams first.


# The kinds of tasks that a separate weight-gradient pass has instead of the backward pass.
_OF_GRADIENTS = frozenset({"R", "G"})


def split_slots(work: SlotWork, weights_s: Floats, unhidden_s: Floats) -> Floats:
    """The seconds of time slots (4, K, S) in whole backward passes, in input-gradient passes and in
    weight-gradient passes, and of the waits that weight-gradient GEMMs hid before; arguments as in
    ``split_pass_seconds``.
    """
    here = work.kinds[:, HERE]
    products, waits = (of_layers(one, here) for one in (weights_s, unhidden_s))
    (whole,) = work.alone(("backward",)).swapaxes(0, 1)
    (inputs,) = work.alone(("backward",), without=_OF_GRADIENTS).swapaxes(0, 1)
    inputs[COMPUTE] += waits - products
    (weights,) = work.alone(("backward",), without={*KINDS} - _OF_GRADIENTS).swapaxes(0, 1)
    weights[COMPUTE] = products
    (fetched_s,) = work.fetched_s(("backward",)).sum(axis=0)
    whole_s, inputs_s, own_s = (_lasting(work, one) for one in (whole, inputs, weights))
    whole_s, inputs_s = np.maximum(whole_s, fetched_s), np.maximum(inputs_s, fetched_s)
    if len(work.evicts):
        for alone, lasting in ((whole, whole_s), (weights, own_s)):
            evicting_s = work.evicting_s(alone[:, :, work.evicts])
            lasting[:, work.evicts] = np.maximum(lasting[:, work.evicts], evicting_s)
    return np.stack([whole_s, inputs_s, own_s, waits])


def _lasting(work: SlotWork, alone: Floats) -> Floats:
    """The seconds of time slots (K, S) whose streams have tasks ``alone`` (4, K, S)."""
    alone = np.maximum(alone, 0.0)
    return until(STREAMS, slot_ends(work.seconds, alone, is_least=False), alone)


# Time slots in which weights are copied from the host and then gathered from ranks.
#
# Each rank swaps in its shard of a layer's weights, and only then gathers the layer. The link
# between GPUs therefore first does its other work, and gathers when both have ended. Until then the
# host copy slows the other streams, and afterwards the link does.
#
# Axes: C cases; the four streams first.


_FROM_HOST = STREAMS.index("host_to_device")


def ends_if_gathered(alone: Floats, slowed: SlowedBy, copied: Floats, gathered: Floats) -> Floats:
    """The end of each stream in seconds (4, C), whose work would take ``alone`` (4, C), if the link
    gathers weights only after they are copied from the host: the gather is the last ``gathered``
    seconds (C) of the link's work, the copy the first ``copied`` seconds (C) of the host's; both
    are positive.
    """
    left, offset = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK], left[_FROM_HOST] = np.maximum(alone[LINK] - gathered, 0.0), copied
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    for _ in STREAMS:
        busy = left > 0
        factors = slowed.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * factors, np.inf)
        step = np.where(busy[_FROM_HOST], ahead.min(axis=0), 0.0)
        is_done = busy & (ahead <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        elapsed += step
        ends += is_done * elapsed
    left[LINK] += gathered
    left[_FROM_HOST] = np.maximum(alone[_FROM_HOST] - copied, 0.0)
    return np.maximum(ends, np.where(left > 0, ends_of_several(left, slowed) + elapsed, 0.0))


def least_ends_if_gathered(
    alone: Floats, slowed: SlowedBy, copied: Floats, gathered: Floats
) -> Floats:
    """Lower bounds (4, C) of ``ends_if_gathered`` for this work and for any with greater copies,
    under ``lowered`` slowdown factors (docs/decisions/0035-searches-that-prove.md).

    With greater copies the link may gather at any later time. So the copies here are slowed by no
    gathering. Arithmetic is slowed as little as it is while the link gathers, whatever else runs.
    """
    left, offset = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK] = np.maximum(alone[LINK] - gathered, 0.0)
    copying, gathering = copied.copy(), gathered.copy()
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    # Each stream ends once, and so do the copy of weights from the host and the gather.
    for _ in range(len(STREAMS) + 2):
        busy = left > 0
        factors = slowed.table.take(offset + sets_of(busy), axis=1)
        on_link = slowed.table[LINK].take(offset + (sets_of(busy) | LINK_BIT))
        gathers = ~busy[LINK] & (copying <= 0) & (gathering > 0)
        ahead = np.where(busy, left * factors, np.inf)
        copied_s = np.where(copying > 0, copying * factors[_FROM_HOST], np.inf)
        gathered_s = np.where(gathers, gathering * on_link, np.inf)
        step = np.minimum(ahead.min(axis=0), np.minimum(copied_s, gathered_s))
        step = np.where(np.isfinite(step), step, 0.0)
        is_done, is_gathered = busy & (ahead <= step), gathers & (gathered_s <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        copying = np.where(copied_s <= step, 0.0, copying - step / factors[_FROM_HOST])
        gathering -= np.where(gathers, step / on_link, 0.0)
        gathering[is_gathered] = 0.0
        elapsed += step
        ends += is_done * elapsed
        ends[LINK] = np.where(is_gathered, elapsed, ends[LINK])
    slower = slowed.table[COMPUTE].take(offset + (1 << COMPUTE) + LINK_BIT)
    slowed_s = alone[COMPUTE] + gathered * (1 - 1 / slower)
    computes = alone[COMPUTE] > 0
    ends[COMPUTE] = np.where(computes, np.maximum(ends[COMPUTE], slowed_s), 0.0)
    return ends


# The mean seconds of consecutive time slots of equal layers whose data is offloaded as soon as it
# is computed.
#
# A time slot that waits for copies lasts longer than its arithmetic, and the offload of its own
# layer starts in it. It is then slowed by two layers' work, and the next time slot by none; both
# together take longer than two time slots with one layer's work each.
#
# Axes: S distinct strategies, K kinds of time slots; the four streams first.


# How many consecutive time slots are simulated, and how many of them, the last ones, are measured.
_SLOTS, _MEASURED = 8, 4
# The data that is offloaded in each phase: activations (A) or gradients (G).
_LEAVING: Mapping[Phase, str] = {"forward": "A", "backward": "G", "last_backward": "G"}


def slots_of_leaving(work: SlotWork, alone: Floats, usual_s: Floats) -> Floats:
    """The seconds (N, S) of the time slots in each phase of ``_LEAVING``, whose tasks take
    ``alone`` (4, N, S) by themselves; a slot takes ``usual_s`` if all tasks start with it. Slots
    that offload data between equal layers, or between two alternating types, take the mean of
    consecutive slots if that is longer.
    """
    seconds, kinds = work.seconds, work.kinds
    # A case is a strategy in one phase.
    phase, strategy = np.nonzero([seconds.alone(k, ">").any(axis=0) for k in _LEAVING.values()])
    rows = np.flatnonzero((kinds[:, LOWER] == kinds[:, UPPER]) & (kinds[:, LOWER] != NOTHING))
    if not len(rows) or not len(phase) or seconds.model.template.depth != 1:
        return usual_s
    # Each time slot, and the one after it.
    turns = kinds[rows], kinds[rows][:, [HERE, UPPER, HERE]]
    places = phase * len(kinds) + rows[:, None], strategy
    following = SlotWork(seconds, turns[1]).alone(tuple(_LEAVING)).swapaxes(1, 2)
    slots = np.stack([alone[:, *places], following[..., phase, strategy]], axis=1)
    from_zero = np.array([np.inf, SHARDED_GRADIENTS, 0])[phase]
    reduced_s = seconds.alone("R", "")[:, strategy] * (seconds.zero[strategy] >= from_zero)
    reduced = [of_layers(reduced_s, turn[:, LOWER]) for turn in turns]
    works = [one.reshape(len(one), -1) for one in slots.swapaxes(0, 1)]
    slowed = in_slots(seconds.slowed_by(), slots[:, 0], strategy)
    lasts, _ = slots_in_turn(works, [one.ravel() for one in reduced], slowed, slots=_SLOTS)
    both_s = np.sum(lasts[-_MEASURED:], axis=0).reshape(reduced[0].shape) * 2 / _MEASURED
    # Where all layers are equal, the following time slot is the same as this one.
    barriers = until(STREAMS, slot_ends(seconds, slots, False, strategy), slots)
    are_alike = (kinds[rows, HERE] == kinds[rows, LOWER])[:, None]
    longer, both_at_once_s = usual_s.copy(), barriers.sum(axis=0)
    more_s = both_s - np.where(are_alike, 2 * usual_s[places], both_at_once_s)
    longer[places] += np.maximum(more_s, 0.0) / 2
    return longer


def slots_of_first_layers(work: SlotWork, usual_s: Floats) -> Floats:
    """The seconds (N, S) of the time slots in each phase of ``_LEAVING`` if an offload starts as
    soon as its own layer has computed; they take ``usual_s`` if it starts with the next slot.

    Beside its own offload, the first slot of a pass waits longer for its copies, while the turn
    after the pass has less left to offload. Where a pass through equal layers and its turn take
    longer together, the first slot takes all of the difference. Steady backward passes stay as
    they are: their bounds would be loose (docs/decisions/0058-what-played-plans-have.md).
    """
    seconds, kinds, longer = work.seconds, work.kinds, usual_s.copy()
    for number, (phase, kind) in enumerate(_LEAVING.items()):
        if phase == "backward":
            continue
        chosen = np.flatnonzero(seconds.alone(kind, ">").any(axis=0))
        before, after = (LOWER, UPPER) if phase == "forward" else (UPPER, LOWER)
        rows = np.flatnonzero((kinds[:, before] == NOTHING) & (kinds[:, after] == kinds[:, HERE]))
        if not len(rows) or not len(chosen) or seconds.model.template.depth != 1:
            continue
        layers = kinds[rows, HERE]
        # Four kinds of time slots: the first of a pass, one inside it, its last, and the one after
        # it, before the next pass (the turn).
        slots = np.tile(layers[:, None], (4, 1, 3))
        slots[0, :, before] = slots[2, :, after] = slots[3, :, [HERE, after]] = NOTHING
        alone = SlotWork(seconds, slots.reshape(-1, 3)).alone((phase, "forward", "backward"))
        alone = alone.reshape(*alone.shape[:2], 4, len(rows), -1)[..., chosen]
        tasks = alone[:, 0]
        if phase == "forward":
            tasks[:, 3] = alone[:, 1, 3] + alone[:, 2, 3]
        reduced_s = seconds.alone("R", "") * (phase == "last_backward")
        reduced, offloaded = (
            of_layers(of_type, layers)[:, chosen].ravel()
            for of_type in (reduced_s, seconds.alone(kind, ">"))
        )
        slowed = in_slots(seconds.slowed_by(), tasks[:, 0], chosen)
        first, inner, last, turn = tasks.reshape(len(tasks), 4, -1).swapaxes(0, 1)
        # Consecutive slots begin with one before which nothing is left to offload: the first slot
        # of the pass.
        lasts, left = slots_in_turn([inner] * 2, [reduced] * 2, slowed, slots=_SLOTS)
        on_link = left[0], np.maximum(last[LINK] - reduced, 0.0), reduced
        last_s, left = slot_after(last, slowed, on_link, (left[1], offloaded))
        rest = turn.copy()
        rest[LINK] -= reduced - left[0]
        rest[AWAY] -= offloaded - left[1]
        barriers = np.stack([first, inner, last, turn, np.maximum(rest, 0.0)], axis=1)
        barriers = barriers.reshape(len(tasks), 5, len(rows), -1)
        ends = slot_ends(seconds, barriers, False, chosen)
        first_s, inner_s, whole_last_s, turn_s, rest_s = until(STREAMS, ends, barriers)
        mean_s = np.mean(lasts[-_MEASURED:], axis=0).reshape(first_s.shape)
        slots_s = first_s + (_SLOTS - 1) * np.maximum(inner_s, mean_s) + whole_last_s + turn_s
        played_s = (np.sum(lasts, axis=0) + last_s).reshape(first_s.shape) + rest_s
        longer[number * len(kinds) + rows[:, None], chosen] += np.maximum(played_s - slots_s, 0.0)
    return longer


def slots_of_stepping(work: SlotWork, usual_s: Floats, *, is_least: bool) -> Floats:
    """The seconds of time slots of the first forward pass (K, S), which take ``usual_s`` if all
    tasks start with the slot. Where states or weights are offloaded, the mean over consecutive
    blocks: of equal blocks if it is longer, of two alternating types of blocks always.

    If ``is_least``, lower bounds of this work and any greater one.
    """
    seconds, kinds = work.seconds, work.kinds
    table = seconds.model.template.phases["first_forward"]
    leaves = seconds.alone("P", ">") + seconds.alone("O", ">")
    chosen = np.flatnonzero(leaves.any(axis=0))
    if not len(chosen):
        return usual_s
    rows = np.flatnonzero((kinds[:, LOWER] == kinds[:, UPPER]) & (kinds[:, LOWER] != NOTHING))
    are_alike = kinds[rows, HERE] == kinds[rows, LOWER]
    rows = rows[are_alike & (not is_least) | _take_turns(seconds.model.types, kinds[rows])]
    are_alike = kinds[rows, HERE] == kinds[rows, LOWER]
    names = [f"{task.kind}{task.direction or ''}" for task in table]
    if seconds.model.template.depth != 1 or not len(rows) or not {*names} <= {*NAMES}:
        return usual_s
    shape = len(rows), len(chosen)
    blocks = np.zeros((len(NAMES), 2, *shape))
    both = np.zeros((len(STREAMS), *shape))
    for name, task in zip(names, table, strict=True):
        alone = seconds.alone(task.kind, task.direction or "") * (seconds.zero >= task.from_zero)
        if task.kind == "F":
            alone = alone + seconds.tensor_s["forward"]
        turns = [of_layers(alone, kinds[rows, place])[:, chosen] for place in (HERE, UPPER)]
        blocks[NAMES.index(name)] = turns
        both[STREAMS.index(task.stream)] += np.sum(turns, axis=0)
    slowed = in_slots(seconds.slowed_by(), both, chosen)
    least_s = least_together(both.reshape(len(STREAMS), -1), slowed).reshape(shape) / 2
    if not is_least:
        least_s = np.where(are_alike[:, None], usual_s[rows[:, None], chosen], least_s)
        in_turn_s = stepping_s(blocks.reshape(len(NAMES), 2, -1), slowed).reshape(shape)
        least_s = np.maximum(in_turn_s, least_s)
    slots_s = usual_s.copy()
    slots_s[rows[:, None], chosen] = least_s
    return slots_s


def _take_turns(types: LayerTypes, kinds: Ints) -> Bools:
    """A mask of the time slots (K, 3) between blocks of two alternating types that are run in the
    same way.
    """
    cycle, index = (*types.pattern, *types.pattern[:3]), types.names.index
    fours = (cycle[place : place + 4] for place in range(len(types.pattern)))
    turns = {four[:2] for four in fours if four[:2] == four[2:] and four[0] != four[1]}
    ways = (PLAIN, *types.treatments)
    pairs = {frozenset(index(type_of(kind, way)) for kind in two) for two in turns for way in ways}
    return np.array([frozenset(row) in pairs for row in kinds.tolist()], dtype=bool)


# The turn of a stage: the time slot in which a backward pass and the next forward pass overlap.
#
# The last gradients of a backward pass are reduced or offloaded while none of its layers computes
# any more. At most two layers are in progress (``mistlab.stages.pass_tasks``), so only the second
# layer of the forward pass waits for this: the first one computes meanwhile. A send of the backward
# pass overlaps with both, and half of the link is the reduction's.
#
# Some strategies have a separate time slot for the turn, before the first layer computes: it waits
# for weights to be fetched, and an offloaded gradient waits until it is reduced.
#
# Axes: S distinct strategies, K kinds of time slots; the four streams first.


@dataclass(frozen=True, slots=True, eq=False)
class SharedTurns:
    """The turns of a stage (from a backward to a forward pass) that share the time slot of the
    forward pass's first layer, for those strategies ``rows`` (S') of all ``strategies`` that have
    such turns: all tasks of the slot ``alone`` (4, K, S'), and the layer's own time (K, S').
    """

    rows: Rows
    strategies: int
    alone: Floats
    layer_s: Floats

    def of_all(self, values: Floats) -> Floats:
        """Values for all strategies (..., K, S), from those for strategies with shared turns (...,
        K, S'); zero for the others.
        """
        of_strategies = np.zeros((*values.shape[:-1], self.strategies))
        of_strategies[..., self.rows] = values
        return of_strategies


def shared_turns(seconds: TaskSeconds, kinds: Ints, alone: Floats) -> SharedTurns | None:
    """The turns of a stage that share a time slot with the first layer, None if there are none;
    ``alone`` (4, K, S) are the tasks of all turns.
    """
    rows = np.flatnonzero(are_shared(seconds))
    if len(rows):
        rows = rows[(alone[:, :, rows] > 0).any(axis=(0, 1))]
    if not len(rows):
        return None
    layer_s = of_layers(seconds.alone("F", "") + seconds.tensor_s["forward"], kinds[:, UPPER])
    layer_s, together = layer_s[:, rows], alone[:, :, rows]
    together[COMPUTE] += layer_s
    return SharedTurns(rows, alone.shape[-1], together, layer_s)


def are_shared(seconds: TaskSeconds) -> Bools:
    """A mask of the strategies (S) whose turns share the first layer's time slot: they fetch no
    weights, and in each pass either reduce or offload gradients, but not both.
    """
    columns = seconds.columns
    fetches = (seconds.zero >= SHARDED_WEIGHTS) | (columns["offload_weights"] > 0)
    reduces, leave = seconds.zero >= SHARDED_GRADIENTS, columns["offload_gradients"] > 0
    # If layers are fetched further ahead, or nothing overlaps, the work between two passes is in
    # other time slots.
    return np.asarray((reduces != leave) & ~fetches & (seconds.model.template.depth == 1))
