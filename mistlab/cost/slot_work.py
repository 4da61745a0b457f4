"""Computes what overlaps while each layer of a stage computes (its "time slot"): the tasks of the
GPU's streams and their seconds.

Axes: S strategies, K kinds of slots, P phases, J stages, R runs of layers, T types; streams first.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from itertools import combinations

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import Sums
from mistlab.cost.side_by_side import (
    AWAY,
    BITS,
    LEAVES,
    ROWS,
    TASKS,
    SlowedBy,
    ends_of_streams,
    link_after,
    slot_after,
    slots_in_turn,
    stepping_s,
    until,
    work_of_slot,
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

# Counts, in each stage, the layers that have the same type and the same types of neighbours, which
# take equally long.


# The type of an absent layer, before the first layer of a stage or after the last one.
NOTHING = -1


def slot_counts(sizes: Floats, types: Ints, depth: int) -> tuple[Ints, Floats]:
    """Count the layers of each stage by their type and the types of the layers before and after,
    whose weights are fetched or offloaded at the same time.

    The kinds (K, 3) are the combinations of three types that occur; the counts are (K, J). A
    stage's layers are runs of equal layers. A time slot has three layers: the one that computes,
    the lower one ``depth`` before it and the upper one ``depth`` after it, which are fetched or
    offloaded meanwhile. The first and last ``depth`` slots lie outside the pass, where no layer
    computes. The three types change where a run ends, or ``depth`` before or after it; between two
    such points all time slots are of one kind.

    ``sizes`` (R, J) are the numbers of layers in the runs, ``types`` (R, J or R, 1) the types of
    these layers.
    """
    ends = np.cumsum(sizes, axis=0)
    edges = np.concatenate([np.zeros_like(ends[:1]), ends])
    points = np.sort(np.concatenate([edges - depth, edges, edges + depth]), axis=0)
    lengths, middles = np.diff(points, axis=0), (points[1:] + points[:-1]) / 2
    # The absent layers before a stage get the lowest code, those after it the highest.
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
    """The type of the layer at each position in each stage.

    Runs of equal layers begin at ``edges`` and have the types ``places``.
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
    """Add up the numbers of layers that have the same code of three layer types."""
    stages = code.shape[1]
    row = np.full(every, len(codes))
    row[codes] = np.arange(len(codes))
    flat = row[code] * stages + np.arange(stages)
    counted = np.bincount(
        flat.ravel(), weights=lengths.ravel(), minlength=(len(codes) + 1) * stages
    )
    return np.asarray(counted.reshape(-1, stages)[: len(codes)])


# Computes the seconds in which layers compute, with the tasks that overlap with them.


# Column numbers of a table with three types of layers in each row: the layer before the one that
# computes, the one that computes, and the layer after it.
LOWER, HERE, UPPER = range(3)


def of_layers(of_type: Floats, layers: Ints) -> Floats:
    """Select the seconds of the types of layers with these indices; absent layers take none."""
    return np.asarray(with_nothing(of_type)[layers])


def with_nothing(of_type: Floats) -> Floats:
    """Add a row of zeros to the seconds of all types of layers, for an absent layer."""
    return np.concatenate([of_type, np.zeros((1, of_type.shape[1]))])


def slot_ends(
    seconds: TaskSeconds,
    alone: Floats,
    is_least: bool,
    chosen: Rows | slice = slice(None),
) -> Floats:
    """The time at which each stream ends while a layer computes, for the ``chosen`` strategies.

    The tasks take ``alone`` (4, K, S) by themselves.
    """
    if seconds.model.template.depth == 0:
        # An engine that overlaps nothing runs the tasks of a layer one after another.
        return np.broadcast_to(alone.sum(axis=0), alone.shape)
    slowed = seconds.slowed_by("least" if is_least else "own")
    flat = ends_of_streams(alone.reshape(len(alone), -1), in_slots(slowed, alone, chosen))
    return flat.reshape(alone.shape)


def in_slots(slowed: SlowedBy, alone: Floats, chosen: Rows | slice = slice(None)) -> SlowedBy:
    """The slowdown factors of concurrent streams for each layer and each chosen strategy."""
    first = np.broadcast_to(slowed.first[chosen], alone.shape[1:])
    return SlowedBy(slowed.table, first.reshape(-1), slowed.size)


# Computes the tasks that each stream runs while a layer computes.


_FETCHING = (("P", "<"), ("U", None))


class SlotWork:
    """Computes the tasks that each stream runs while a layer computes, for each kind of layer and
    neighbours, and for each strategy.
    """

    def __init__(self, seconds: TaskSeconds, kinds: Ints) -> None:
        self.seconds = seconds
        self.kinds = kinds
        self._in_slots: dict[tuple[str, str, int, int], Floats | None] = {}
        # While a layer waits for its tensor-parallel collectives, host copies continue.
        self._waited = {
            phase: of_layers(waited_s, kinds[:, HERE])
            for phase, waited_s in seconds.tensor_s.items()
        }
        side_by_side = seconds.model.template.depth > 0
        # The indices of the strategies that offload gradients while layers compute.
        self.evicts = np.flatnonzero((seconds.columns["offload_gradients"] > 0) & side_by_side)

    def alone(self, phases: Sequence[Phase] = PHASES, without: Collection[str] = ()) -> Floats:
        """The seconds of each stream's tasks by themselves, ``without`` tasks of some kinds.

        The shape is (4, P, K, S), for the given phases.
        """
        seconds, template = self.seconds, self.seconds.model.template
        alone = np.zeros((len(STREAMS), len(phases), len(self.kinds), len(seconds.zero)))
        for number, phase in enumerate(phases):
            for task in template.phases[phase]:
                lasting = self._in_slots_s(task, _neighbour(task.place, phase, template.depth))
                if lasting is not None and task.kind not in without:
                    # The tasks of an optimizer step run one after another, so all of them count as
                    # compute.
                    stream = COMPUTE if phase == "step" else STREAMS.index(task.stream)
                    alone[stream, number] += lasting
            if phase != "step":
                alone[COMPUTE, number] += self._waited[
                    "forward" if "forward" in phase else "backward"
                ]
        return alone

    def fetched_s(self, phases: Sequence[Phase] = PHASES) -> Floats:
        """The seconds in which the next layer's weights are copied from the host and then gathered;
        zero where they are not both copied and gathered.

        Shape (2, P, K, S).

        If layers are fetched further ahead, the copy and the gather are in different slots, and
        nothing needs to be added.
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
        """The seconds until gradient reductions have ended, for strategies that offload gradients.

        The tasks are ``alone`` (4, K', S').

        A layer computes only when the gradients in the buffer that it reuses have been offloaded.
        """
        slowed = in_slots(self.seconds.slowed_by(), alone, self.evicts)
        flat = link_after(alone.reshape(len(STREAMS), -1), slowed, "device_to_host")
        return flat.reshape(alone.shape[1:])

    def _in_slots_s(self, task: Task, neighbour: int) -> Floats | None:
        """The seconds of a task of a layer, or of the layer before or after it; None for a task
        that takes no time.
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
    """Which layer a task works on while a layer computes: that layer (HERE), the one before it
    (LOWER) or after it (UPPER).
    """
    above = layers_above(position, phase, depth)
    return UPPER if above > 0 else LOWER if above < 0 else HERE


# Computes backward passes without weight gradients, which are computed in separate passes.


# These kinds of tasks move from the backward pass to the separate weight-gradient pass: reducing
# and offloading gradients.
_OF_GRADIENTS = frozenset({"R", "G"})


def split_slots(work: SlotWork, weights_s: Floats, unhidden_s: Floats) -> Floats:
    """The seconds of each layer in a whole backward pass, in its input-gradient part and in its
    weight-gradient part, and of waits that weight-gradient GEMMs hide in a whole pass.

    The result is (4, K, S); the arguments are those of ``split_pass_seconds``.
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


def split_pass_seconds(
    seconds: TaskSeconds, kinds: Ints, summed: Sums, *, weights_s: Floats, unhidden_s: Floats
) -> tuple[Floats, Floats]:
    """The seconds of separate weight-gradient passes with their gradient reductions, and how much
    shorter backward passes are without them.

    The weight-gradient GEMMs take ``weights_s`` (T, S). For ``unhidden_s`` tensor-parallel ranks
    wait for collectives that these GEMMs hide in a whole backward pass. Both passes together are
    never shorter than one.
    """
    is_inside = kinds[:, HERE] != NOTHING
    split = split_slots(SlotWork(seconds, kinds[is_inside]), weights_s, unhidden_s)
    whole_s, inputs_s, weights_s, waits_s = summed([(split, is_inside)])
    less_s = whole_s - inputs_s
    return np.maximum(weights_s, less_s + waits_s), less_s


def _lasting(work: SlotWork, alone: Floats) -> Floats:
    """The seconds of tasks that overlap, given the seconds of each stream alone."""
    alone = np.maximum(alone, 0.0)
    return until(STREAMS, slot_ends(work.seconds, alone, is_least=False), alone)


# Computes the least time in which work on several streams can be done, in any order.


def least_together(work: Floats, slowed_by: SlowedBy) -> Floats:
    """The least seconds in which the four streams can do their work, in whatever order.

    ``work`` is (4, C). While a set of streams is busy, each of them runs at one over its slowdown
    factor. A weighted sum of the work is a lower bound if no set of streams can process more than
    one second of it per second. The largest of these sums is the least time (the dual of a linear
    programme); its weights are a vertex of a polytope that depends on the slowdown factors alone.
    """
    least = np.zeros(work.shape[1])
    for first in np.unique(slowed_by.first).tolist():
        cases = np.flatnonzero(slowed_by.first == first)
        table = slowed_by.table[:, first : first + (1 << len(STREAMS))]
        least[cases] = (_vertices(table.tobytes()) @ work[:, cases]).max(axis=0)
    return least


@lru_cache(maxsize=256)
def _vertices(factors: bytes) -> Floats:
    """Weights for which a weighted sum of the four streams' work is a lower bound of its time.

    ``factors`` are the slowdowns (4, 16) by set of busy streams, as bytes; the result is (V, 4).
    """
    table = np.frombuffer(factors).reshape(len(STREAMS), -1)
    is_busy: Bools = (np.arange(1, table.shape[1])[:, None] & BITS) > 0
    rates = np.where(is_busy, 1 / table.T[1:], 0.0)
    # A vertex of the polytope of weights satisfies as many constraints with equality as there are
    # weights.
    limits = np.concatenate([rates, -np.eye(len(STREAMS))])
    bounds = np.concatenate([np.ones(len(rates)), np.zeros(len(STREAMS))])
    chosen: Rows = np.array([*combinations(range(len(limits)), len(STREAMS))])
    chosen = chosen[np.abs(np.linalg.det(limits[chosen])) > _SINGULAR]
    weights = np.linalg.solve(limits[chosen], bounds[chosen][..., None])[..., 0]
    weights = weights[(weights @ limits.T <= bounds + _ROUNDING).all(axis=1)].clip(0.0)
    # Rounding must not make a bound too large, so the weights are scaled down.
    weights = weights / np.maximum(1.0, (weights @ rates.T).max(axis=1))[:, None]
    return np.asarray(np.unique(weights.round(12), axis=0)) * (1 - _ROUNDING)


_SINGULAR, _ROUNDING = 1e-9, 1e-9


# Computes the mean time of equal layers in a row whose data is offloaded as soon as each has
# computed.


# The number of layers in a row that are simulated, and the number of last ones whose time is
# measured.
_SLOTS, _MEASURED = 8, 4
# What each steady phase offloads: activations (A) or gradients (G).
_LEAVING: Mapping[Phase, str] = {"forward": "A", "backward": "G"}


def slots_of_leaving(work: SlotWork, alone: Floats, usual_s: Floats) -> Floats:
    """The seconds of layers whose activations or gradients are offloaded while the next layers
    compute; of equal layers in a row, or of two alternating types, the mean if that is longer.

    Their tasks take ``alone`` (4, N, S) by themselves, in each phase of ``_LEAVING``; a layer's
    slot takes ``usual_s`` if all tasks start with it. A time slot that waits for copies lasts
    longer than its arithmetic, and the offload of its own layer starts in it. It is then slowed by
    two layers' work, and the next time slot by none; both together take longer than two time slots
    with one layer's work each.
    """
    seconds, kinds = work.seconds, work.kinds
    # Select the phases and strategies in which something is offloaded.
    phase, strategy = np.nonzero([seconds.alone(k, ">").any(axis=0) for k in _LEAVING.values()])
    rows = np.flatnonzero((kinds[:, LOWER] == kinds[:, UPPER]) & (kinds[:, LOWER] != NOTHING))
    if not len(rows) or not len(phase) or seconds.model.template.depth != 1:
        return usual_s
    # The three layer types of each layer with its neighbours, and those of the layer after it.
    turns = kinds[rows], kinds[rows][:, [HERE, UPPER, HERE]]
    places = phase * len(kinds) + rows[:, None], strategy
    following = SlotWork(seconds, turns[1]).alone(tuple(_LEAVING)).swapaxes(1, 2)
    slots = np.stack([alone[:, *places], following[..., phase, strategy]], axis=1)
    from_zero = np.array([np.inf, SHARDED_GRADIENTS])[phase]
    reduced_s = seconds.alone("R", "")[:, strategy] * (seconds.zero[strategy] >= from_zero)
    reduced = [of_layers(reduced_s, turn[:, LOWER]) for turn in turns]
    works = [one.reshape(len(one), -1) for one in slots.swapaxes(0, 1)]
    slowed = in_slots(seconds.slowed_by(), slots[:, 0], strategy)
    lasts, _ = slots_in_turn(works, [one.ravel() for one in reduced], slowed, slots=_SLOTS)
    both_s = np.sum(lasts[-_MEASURED:], axis=0).reshape(reduced[0].shape) * 2 / _MEASURED
    # The seconds of each layer if its offload starts only with the next layer; where all layers are
    # equal, these are the usual seconds.
    barriers = until(STREAMS, slot_ends(seconds, slots, False, strategy), slots)
    are_alike = (kinds[rows, HERE] == kinds[rows, LOWER])[:, None]
    longer, both_at_once_s = usual_s.copy(), barriers.sum(axis=0)
    more_s = both_s - np.where(are_alike, 2 * usual_s[places], both_at_once_s)
    longer[places] += np.maximum(more_s, 0.0) / 2
    return longer


def slots_of_first_layers(work: SlotWork, usual_s: Floats) -> Floats:
    """The seconds of each layer in a steady forward pass if its activations leave as soon as it has
    computed, which lengthens the first layer of the pass.

    Layers take ``usual_s`` (K, S) if they leave with the next slot. While its own activations are
    offloaded, the first slot of a pass waits longer for its copies, and the time between passes has
    less left to offload. If a pass through equal layers and the time after it together take longer,
    the first slot gets all of the difference.
    """
    seconds, kinds, longer = work.seconds, work.kinds, usual_s.copy()
    chosen = np.flatnonzero(seconds.alone("A", ">").any(axis=0))
    rows = np.flatnonzero((kinds[:, LOWER] == NOTHING) & (kinds[:, UPPER] == kinds[:, HERE]))
    if not len(rows) or not len(chosen) or seconds.model.template.depth != 1:
        return longer
    layers = kinds[rows, HERE]
    # Four rows give the types of layers around the first layer of a pass, around one inside it,
    # around its last layer, and between this pass and the next.
    slots = np.tile(layers[:, None], (4, 1, 3))
    slots[0, :, LOWER] = slots[2, :, UPPER] = slots[3, :, [HERE, UPPER]] = NOTHING
    alone = SlotWork(seconds, slots.reshape(-1, 3)).alone(("forward", "backward"))
    alone = alone.reshape(*alone.shape[:2], 4, len(rows), -1)[..., chosen]
    tasks = alone[:, 0]
    tasks[:, 3] += alone[:, 1, 3]
    offloaded = of_layers(seconds.alone("A", ">"), layers)[:, chosen].ravel()
    none = np.zeros_like(offloaded)
    slowed = in_slots(seconds.slowed_by(), tasks[:, 0], chosen)
    first, inner, last, turn = tasks.reshape(len(tasks), 4, -1).swapaxes(0, 1)
    # The first layer of a pass has no layer before it whose data would be left to offload.
    lasts, left = slots_in_turn([inner] * 2, [none] * 2, slowed, slots=_SLOTS)
    work_of_last = work_of_slot(last, none, left, (none, offloaded))
    last_s = slot_after(work_of_last, slowed)
    rest = turn.copy()
    rest[AWAY] -= offloaded - work_of_last[LEAVES]
    barriers = np.stack([first, inner, last, turn, np.maximum(rest, 0.0)], axis=1)
    barriers = barriers.reshape(len(tasks), 5, len(rows), -1)
    ends = slot_ends(seconds, barriers, False, chosen)
    first_s, inner_s, whole_last_s, turn_s, rest_s = until(STREAMS, ends, barriers)
    mean_s = np.mean(lasts[-_MEASURED:], axis=0).reshape(first_s.shape)
    slots_s = first_s + (_SLOTS - 1) * np.maximum(inner_s, mean_s) + whole_last_s + turn_s
    played_s = (np.sum(lasts, axis=0) + last_s).reshape(first_s.shape) + rest_s
    longer[rows[:, None], chosen] += np.maximum(played_s - slots_s, 0.0)
    return longer


def slots_of_stepping(work: SlotWork, usual_s: Floats, *, is_least: bool) -> Floats:
    """The seconds of each layer in the first forward pass with offloaded states or weights: the
    mean over a row of blocks.

    A layer's slot takes ``usual_s`` (K, S) if all tasks start with it. The mean is used for equal
    blocks if it is longer, for two alternating types of blocks always.

    With ``is_least``, the results are lower bounds for this work and any greater work.
    """
    seconds, kinds = work.seconds, work.kinds
    leaves = seconds.alone("P", ">") + seconds.alone("O", ">")
    chosen = np.flatnonzero(leaves.any(axis=0))
    if not len(chosen):
        return usual_s
    rows = np.flatnonzero((kinds[:, LOWER] == kinds[:, UPPER]) & (kinds[:, LOWER] != NOTHING))
    are_alike = kinds[rows, HERE] == kinds[rows, LOWER]
    rows = rows[are_alike & (not is_least) | _take_turns(seconds.model.types, kinds[rows])]
    are_alike = kinds[rows, HERE] == kinds[rows, LOWER]
    if not steps_in_turn(seconds) or not len(rows):
        return usual_s
    shape = len(rows), len(chosen)
    of_tasks = of_pass(seconds, "first_forward", ROWS)[..., chosen]
    blocks = np.stack([of_tasks[:, kinds[rows, place]] for place in (HERE, UPPER)], axis=1)
    both = np.zeros((len(STREAMS), *shape))
    for task, turns in zip(TASKS, blocks, strict=True):
        both[STREAMS.index(task.stream)] += np.sum(turns, axis=0)
    slowed = in_slots(seconds.slowed_by(), both, chosen)
    least_s = least_together(both.reshape(len(STREAMS), -1), slowed).reshape(shape) / 2
    if not is_least:
        least_s = np.where(are_alike[:, None], usual_s[rows[:, None], chosen], least_s)
        in_turn_s = stepping_s(blocks.reshape(len(ROWS), 2, -1), slowed).reshape(shape)
        least_s = np.maximum(in_turn_s, least_s)
    slots_s = usual_s.copy()
    slots_s[rows[:, None], chosen] = least_s
    return slots_s


def of_pass(seconds: TaskSeconds, phase: Phase, rows: Mapping[str, int]) -> Floats:
    """The seconds that the tasks of a pass take alone (rows, T + 1, S), by type of layer and
    strategy; the last type stands for no layer. ``rows`` has the row of each task's name.
    """
    types, way = len(seconds.model.types.names) + 1, "forward" if "forward" in phase else "backward"
    of_tasks = np.zeros((max(rows.values()) + 1, types, len(seconds.zero)))
    for task in seconds.model.template.phases[phase]:
        alone = seconds.alone(task.kind, task.direction or "") * (seconds.zero >= task.from_zero)
        alone = alone + seconds.tensor_s[way] if task.kind in ("F", "B") else alone
        of_tasks[rows[f"{task.kind}{task.direction or ''}"]] += with_nothing(alone)
    return of_tasks


def gathers_each_pass(seconds: TaskSeconds) -> Bools:
    """A mask of the strategies (S) that gather sharded weights for each pass."""
    return np.asarray(seconds.zero >= SHARDED_WEIGHTS)


def reduces_each_pass(seconds: TaskSeconds) -> Bools:
    """A mask of the strategies (S) whose layers wait for reductions in each pass."""
    return np.asarray(seconds.zero >= SHARDED_GRADIENTS)


def reduces_in_place(seconds: TaskSeconds) -> Bools:
    """Whether gradients are reduced without holding up any layer, for each strategy."""
    in_place = (seconds.zero < SHARDED_GRADIENTS) & (seconds.columns["offload_gradients"] == 0)
    return np.asarray(in_place)


def steps_in_turn(seconds: TaskSeconds) -> bool:
    """Whether a first forward pass has only tasks that ``mistlab.cost.side_by_side`` simulates."""
    template = seconds.model.template
    names = {f"{task.kind}{task.direction or ''}" for task in template.phases["first_forward"]}
    return template.depth == 1 and names <= ROWS.keys()


def _take_turns(types: LayerTypes, kinds: Ints) -> Bools:
    """A mask of the layers whose neighbours are of another type, in a model of two alternating
    types of blocks that are run the same way.
    """
    cycle, index = (*types.pattern, *types.pattern[:3]), types.names.index
    fours = (cycle[place : place + 4] for place in range(len(types.pattern)))
    turns = {four[:2] for four in fours if four[:2] == four[2:] and four[0] != four[1]}
    ways = (PLAIN, *types.treatments)
    pairs = {frozenset(index(type_of(kind, way)) for kind in two) for two in turns for way in ways}
    return np.array([frozenset(row) in pairs for row in kinds.tolist()], dtype=bool)


# Computes the time between a backward pass and the next forward pass of a stage (the "turn"), in
# which the two overlap.


@dataclass(frozen=True, slots=True, eq=False)
class SharedTurns:
    """The time between a backward and the next forward pass, for strategies in which it overlaps
    with the forward pass's first layer.

    ``rows`` (S') are the indices of these among all ``strategies``; ``alone`` (4, K, S') are the
    seconds of all tasks by themselves, ``layer_s`` (K, S') those of the layer. The last gradients
    of a backward pass are reduced or offloaded when none of its layers computes any more. At most
    two layers are in progress (``mistlab.stages.pass_tasks``), so only the second layer of the
    forward pass waits for this, while the first one computes. A send of the backward pass overlaps
    with both, and shares the link equally with the reduction.
    """

    rows: Rows
    strategies: int
    alone: Floats
    layer_s: Floats

    def of_all(self, values: Floats) -> Floats:
        """Fill in zeros for strategies whose time between two passes does not overlap with the next
        pass.
        """
        of_strategies = np.zeros((*values.shape[:-1], self.strategies))
        of_strategies[..., self.rows] = values
        return of_strategies


def shared_turns(seconds: TaskSeconds, kinds: Ints, alone: Floats) -> SharedTurns | None:
    """The times between a backward pass and the next forward pass, for strategies in which this
    time overlaps with the forward pass's first layer; None if there are none.

    ``alone`` (4, K, S) are the tasks between all passes.
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
    """A mask of the strategies in which the time between two passes overlaps with the first layer
    of the next.

    These strategies fetch no weights, and in each pass either reduce or offload gradients, but not
    both. In other strategies that time is separate: the first layer waits for weights to be
    fetched, and an offloaded gradient waits until it is reduced.
    """
    columns = seconds.columns
    fetches = (seconds.zero >= SHARDED_WEIGHTS) | (columns["offload_weights"] > 0)
    reduces, leave = seconds.zero >= SHARDED_GRADIENTS, columns["offload_gradients"] > 0
    # If an engine fetches layers more than one ahead, or overlaps nothing, the tasks between two
    # passes belong to other time slots.
    return np.asarray((reduces != leave) & ~fetches & (seconds.model.template.depth == 1))
