"""Computes what overlaps while each layer of a stage computes (its "time slot"): the tasks of the
GPU's streams and their seconds; and first forward passes with optimizer steps.

Axes: S strategies, K kinds of slots, P phases, J stages, R runs of layers, T types; streams first.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import NOTHING, Cases, Distinct, distinct_rows, joined_rows
from mistlab.cost.side_by_side import (
    AWAY,
    LINK,
    LINK_BIT,
    MOST_BLOCKS,
    ROWS,
    TASKS,
    SlowedBy,
    Way,
    ends_of_streams,
    lanes_of,
    least_together,
    link_after,
    played,
    sets_of,
    until,
)
from mistlab.cost.tasks import Kept, TaskSeconds
from mistlab.graph.layer_types import EMBEDDING, LayerTypes, type_of
from mistlab.graph.treatments import PLAIN
from mistlab.machine.slowdowns import COMPUTE, STREAMS
from mistlab.plan.dimensions import OFFLOADS
from mistlab.schedule.slots import PHASES, SHARDED_GRADIENTS, SHARDED_WEIGHTS, Phase, Place, Task
from mistlab.stages.stage_shape import layers_above

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


def endless(alone: Floats, slowed_by: SlowedBy) -> tuple[Floats, Floats]:
    """The seconds until the other streams have ended if the link between GPUs is always busy, and
    the seconds of work that the link does meanwhile.

    The other streams' work would take ``alone`` (4, C) by itself.
    """
    left = alone.copy()
    left[LINK] = 0.0
    elapsed, done = np.zeros(left.shape[1]), np.zeros(left.shape[1])
    offset = slowed_by.place(sets_of(left > 0) | LINK_BIT) + LINK_BIT
    for _ in STREAMS[1:]:
        busy = left > 0
        slowed = slowed_by.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * slowed, np.inf)
        first = ahead.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        left = np.where(ahead <= step, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += step
        done += step / slowed[LINK]
    return elapsed, done


# The numbers of equal blocks that are simulated, that fill the streams at first, and whose time is
# then measured.
_BLOCKS, _FILLING, _MEASURED = 10, 4, 4


def stepping_s(work: Floats, slowed_by: SlowedBy) -> Floats:
    """The mean seconds from the end of one block's forward pass to that of the next, in a first
    forward pass with optimizer steps.

    ``work`` is as in ``played``, of equal blocks or of two that alternate. The first block has
    already taken its optimizer step.
    """
    _, in_turn, cases = work.shape
    lanes, way = lanes_of(_BLOCKS, in_turn), np.zeros(cases, dtype=np.intp)
    begun, blocks = lanes.stepped[:, way], np.full(cases, _BLOCKS)
    swaps = np.ones((in_turn, cases), dtype=bool)
    ends_s, _ = played(work, slowed_by, lanes, way, begun, blocks, swaps)
    return np.asarray((ends_s[_FILLING + _MEASURED] - ends_s[_FILLING]) / _MEASURED)


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


def stay_reduced(seconds: TaskSeconds) -> Bools:
    """A mask of the strategies whose gradients stay on GPUs, and are reduced without holding up any
    layer.
    """
    return np.asarray((seconds.columns["offload_gradients"] == 0) & ~reduces_each_pass(seconds))


def steps_in_turn(seconds: TaskSeconds) -> bool:
    """Whether a first forward pass has optimizer steps, and only tasks that
    ``mistlab.cost.side_by_side`` simulates.
    """
    template = seconds.model.template
    names = {f"{task.kind}{task.direction or ''}" for task in template.phases["first_forward"]}
    return template.depth == 1 and {"S"} <= names <= ROWS.keys()


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


# The work in the time slot of a layer, in the order in which each stream does it: arithmetic;
# on the link the reduction of the layer before, the gather of the next layer's weights and the
# layer's own reduction; from the host the weights that are then gathered, and all else; to the host
# what the layer before has left, and what this layer leaves.
COMPUTED, BEFORE, GATHERED, REDUCED, COPIED, FETCHED, LEFT, LEAVES = range(8)
SLOT_WORK = 8
# The passes that are simulated layer by layer if data leaves them
# (``mistlab.cost.layer_recurrences``), and the work of a slot that each kind of task is part of.
SIMULATED: tuple[Phase, ...] = ("forward", "backward", "last_backward")
WORK_OF_TASKS = {
    **dict.fromkeys(("F", "B"), COMPUTED),
    "U": GATHERED,
    "R": REDUCED,
    "P<": COPIED,
    **dict.fromkeys(("G<", "A<"), FETCHED),
    **dict.fromkeys(("A>", "G>"), LEAVES),
}


def keep_all(seconds: TaskSeconds) -> Bools:
    """A mask of the strategies (S) that offload nothing."""
    return np.asarray(~np.logical_or.reduce([seconds.columns[name] > 0 for name in OFFLOADS]))


def leave_passes(seconds: TaskSeconds) -> Bools:
    """Masks of the strategies whose activations leave in forward passes, and of those whose
    gradients leave in backward passes (2, S), if such passes are simulated layer by layer.
    """
    template, columns = seconds.model.template, seconds.columns
    leave = np.stack([columns[f"offload_{kind}"] > 0 for kind in ("activations", "gradients")])
    if not leave.any():
        return leave
    names = {task.name for phase in SIMULATED for task in template.phases[phase]}
    return leave & (template.depth == 1 and names <= WORK_OF_TASKS.keys())


def reduced_inside(seconds: TaskSeconds, layers: Ints) -> Floats:
    """The seconds in which the gradients of layers are reduced while later layers compute."""
    return of_layers(seconds.alone("R", "") * reduces_each_pass(seconds), layers)


# Computes the first forward pass of first stages, and its slots with and without optimizer steps.


_NOT_AWAY = (*STREAMS[:AWAY], *STREAMS[AWAY + 1 :])


def first_slots(
    seconds: TaskSeconds,
    kinds: Ints,
    whole: tuple[Floats, Floats],
    stepped: Floats,
    usual: Floats,
    *,
    is_least: bool,
) -> Floats:
    """The seconds of layers in the first forward pass, for each combination of a layer's type and
    its neighbours' types: all fields of ``FirstPass`` but ``late``.

    ``whole`` has the tasks' seconds and their ends in each layer's time slot, ``stepped`` the
    seconds without optimizer steps (4, K, S). A steady slot takes ``usual`` seconds (K, S). The
    result is (6, K, S). In lower bounds (``is_least``) the next pass waits for nothing.
    """
    columns, (below, here, above) = seconds.columns, kinds.T
    parts = np.zeros((6, *usual.shape))
    unawaited, after, stepped_s, block_steps, end_steps, passing = parts
    weights, state = (with_nothing(seconds.alone(kind, ">")) for kind in ("P", "O"))
    chosen = np.flatnonzero((weights + state).any(axis=0))
    if not len(chosen):
        return parts
    weights, state = weights[:, chosen], state[:, chosen]
    swaps, keeps = (columns[f"offload_{kind}"][chosen] > 0 for kind in ("weights", "activations"))

    # Offloaded activations queue behind the last block's optimizer states, and the head waits for
    # both.
    is_last = (above == NOTHING)[:, None] | (~keeps & ((weights + state)[above] == 0))
    last = np.flatnonzero(is_last.any(axis=1))
    at_last = np.ix_(last, chosen)
    work, ends = (one[:, last[:, None], chosen] for one in whole)
    without_weights = work.copy()
    without_weights[AWAY] = np.maximum(work[AWAY] - weights[here[last]], 0.0)
    # Weights that every rank holds whole are gathered with their optimizer step, not with the
    # forward pass.
    kept = stepped[:, :, chosen]
    kept[LINK] *= gathers_each_pass(seconds)[chosen]
    both = np.concatenate([kept, without_weights], axis=1)
    both_ends = slot_ends(seconds, both, is_least, chosen)
    kept_ends, left_ends = both_ends[:, : len(kinds)], both_ends[:, len(kinds) :]

    computed = until(_NOT_AWAY, ends, work)
    # While the last block's states are offloaded, the block before it and the head compute.
    forward = with_nothing(seconds.alone("F", ""))[:, chosen]
    hidden = (forward[below] + forward[above])[last]
    left = until(STREAMS, left_ends, without_weights)
    is_last = is_last[last]
    unawaited[at_last] = np.where(is_last, until(STREAMS, ends, work) - computed, 0.0)
    if not is_least:
        after[at_last] = np.where(is_last, np.maximum(left - computed - hidden, 0.0), 0.0)
    stepped_s[:, chosen] = np.where(swaps, until(STREAMS, kept_ends, kept), usual[:, chosen])
    kept_computed = until(_NOT_AWAY, kept_ends[:, last], kept[:, last])
    stepped_s[at_last] = np.where(is_last, kept_computed, stepped_s[at_last])

    stepping, swapped = with_nothing(seconds.alone("S", ""))[above][:, chosen], weights[above] > 0
    block_steps[:, chosen] = np.where(swapped, stepping, 0.0)
    end_steps[:, chosen] = np.where(swapped, 0.0, stepping)
    if is_least:
        passed_s = with_nothing(seconds.alone("F", "") + seconds.tensor_s["forward"])
        passing[:, chosen] = passed_s[here][:, chosen]
        if len(seconds.model.types.kinds) > 1:
            # The blocks that run their optimizer steps before the micro-batch arrives may be the
            # largest ones, so in a lower bound no block's step lengthens the pass.
            block_steps[:] = 0.0
    return parts


# Computes first forward passes with optimizer steps. If weights are offloaded, two blocks have run
# their steps, and a third one's states have been fetched, when a micro-batch comes late.


# Cases are simulated so many at a time, which keeps intermediate results in the CPU's cache.
_AT_ONCE = 8192
# The tasks of a block that a stage lacks if it keeps all weights, gradients, and so on.
_IF_KEPT = dict(zip(OFFLOADS, ({"P>"}, {"G<"}, {"O<", "O>"}, {"A>"}), strict=True))


def first_pass_s(
    seconds: TaskSeconds, strategies: Distinct, stages: Distinct, kept: Kept
) -> Floats | None:
    """The seconds from the beginning of the iteration until a stage has computed a first forward
    pass that waits for no micro-batch; if it offloads weights, of one whose micro-batch comes late,
    from its arrival; and for how long activations leave after the first one (3, C). None if no
    optimizer steps run in the pass. Zero for stages with more than ``MOST_BLOCKS`` layers; the
    first also for later stages that offload, and negative for lower bounds.
    """
    if not steps_in_turn(seconds):
        return None
    types, strategy, stage = seconds.model.types, strategies.index, stages.index
    columns = dict(zip(types.columns, stages.columns, strict=True))
    swaps = np.logical_or.reduce(seconds.alone("P", ">") > 0)[strategy]
    sizes, of_runs = types.runs(columns)
    layers = sizes.sum(axis=0)[stage]
    is_played = (layers > 0) & (layers <= MOST_BLOCKS)
    begins = ((columns["has_embedding"][stage] > 0) | keep_all(seconds)[strategy]) & is_played
    if kept == "least":
        return np.where(begins, -1.0, 0.0) * [[1.0], [0.0], [0.0]]
    of_tasks, slowed = of_pass(seconds, "first_forward", ROWS), seconds.slowed_by()
    keeps = [seconds.columns[name] == 0 for name in OFFLOADS]
    way = np.array([*keeps, gathers_each_pass(seconds)]).T @ (1 << np.arange(len(keeps) + 1))
    # Many layers have the same work in their first passes, and so have many strategies.
    of_types = np.arange(of_tasks.shape[1])
    layers_of = distinct_rows(
        [
            *of_tasks.reshape(len(of_tasks), -1),
            *(np.tile(of_strategy, len(of_types)) for of_strategy in (way, slowed.first)),
            np.repeat(of_types == types.names.index(EMBEDDING), len(way)),
        ]
    )
    alike = distinct_rows([*layers_of.index.reshape(len(of_types), -1)])
    passed_s, rows = np.zeros((2, len(strategy))), np.flatnonzero(begins | (swaps & is_played))
    if len(rows):
        cases = Cases.of((sizes, of_runs), alike.index[strategy[rows]], stage[rows])
        of_cases = _first_s(cases, np.array(alike.columns), layers_of, slowed)
        passed_s[:, rows] = of_cases[:, cases.index]
    return np.asarray(np.where([begins, swaps, begins], passed_s[[0, 0, 1]], 0.0))


def _first_s(cases: Cases, layers_of: Ints, layers: Distinct, slowed: SlowedBy) -> Floats:
    """The seconds of the first pass of each case, and for how long activations leave after it
    (2, C).

    Each type of layers and strategy has its row of ``layers`` in ``layers_of``: its tasks' seconds,
    its way, the place of its slowdown factors and whether it is an embedding.
    """
    *tasks, way, first, opens = layers.columns
    of_tasks, types = np.array(tasks), np.broadcast_to(cases.types, cases.sizes.shape)
    of_rows = layers_of[types[:, cases.stage], cases.strategy]
    passes = distinct_rows([*np.concatenate(joined_rows(cases.rows, of_rows))])
    case = np.empty(len(passes.columns[0]), dtype=np.intp)
    case[passes.index] = np.arange(len(passes.index))
    of_passes = np.empty((2, len(case)))
    # Passes of about equally many layers are simulated together.
    in_order = np.argsort(cases.layers[case], kind="stable")
    for begin in range(0, len(in_order), _AT_ONCE):
        chosen = in_order[begin : begin + _AT_ONCE]
        part = cases.chosen(case[chosen])
        rows = layers_of[part.kinds(NOTHING), part.strategy]
        codes, of_part = np.unique(way[rows[0]], return_inverse=True)
        lanes = lanes_of(len(rows), len(rows), (*map(_way, codes.tolist()),))
        work, swaps = of_tasks[:, rows], of_tasks[ROWS["P>"], rows] > 0
        comes_late = swaps.any(axis=0) & ~opens[rows[0]]
        begun = np.where(comes_late, lanes.late[:, of_part], lanes.first[:, of_part])
        slow = replace(slowed, first=first[rows[0]])
        ends_s, over_s = played(work, slow, lanes, of_part, begun, part.layers, swaps)
        passed_s = ends_s[part.layers - 1, np.arange(len(chosen))]
        of_passes[:, chosen] = passed_s, over_s - passed_s
    return of_passes[:, passes.index]


def _way(code: int) -> Way:
    """How blocks run: bits of ``code`` say which data is kept, and if weights are gathered."""
    tasks = (names for bit, names in enumerate(_IF_KEPT.values()) if code >> bit & 1)
    return Way(frozenset[str]().union(*tasks), gathers=bool(code >> len(_IF_KEPT)))
