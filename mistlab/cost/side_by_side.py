"""How much the concurrent streams of a GPU slow one another down, for communicating groups of any
shape, and how long overlapping work then takes.

Axes: G measured shapes; J streams of a set.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import combinations, product
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import distinct_rows
from mistlab.machine.slowdowns import (
    COMPUTE,
    SHARED_SETS,
    STREAMS,
    GroupSlowdowns,
    Interference,
    Slowdown,
)

# Derives how much streams slow one another down while a group of some shape (GPUs in a node, nodes)
# communicates, from shapes that were measured.
#
# A shape changes the joint throughput of the streams, and its distribution over them. Both are
# assumed to change smoothly with the size of the group, and determine the factors. Each set of busy
# streams is treated separately. Of stream j, u_j is its work, in the time that a copy of its length
# would take alone, and f_j is its slowdown factor, so that it runs at speed 1 / f_j. C is the joint
# throughput of copies and communication: the sum of u_j / f_j. Logarithms of the f_j and of C are
# averaged over the measured shapes, with a slope in the size; the f_j are then scaled together to a
# throughput of C. Compute is not part of C.
#
# Axes: G measured shapes; J streams of a set.


# The weight of a measured shape falls by the factor e for each so many doublings of size between it
# and the wanted shape: at one doubling it is 1/e^2.
NEAR_DOUBLINGS = 0.5
# Damps the slopes that slowdown factors have in the group's size: they count as if this much
# measured weight had no slope, so that shapes far from all measured ones are not extrapolated
# freely.
DAMPING = 0.02


def slowdowns_of_group(machine: Interference, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The slowdown factors of streams while a group of this shape communicates: as measured, or
    derived from those of other shapes.
    """
    for group in machine.groups:
        if (group.gpus_in_node, group.nodes) == (gpus_in_node, nodes):
            return group
    return _derived(
        machine.groups,
        gpus_in_node=gpus_in_node,
        nodes=nodes,
        shared_links=machine.shared_links,
    )


def _derived(
    groups: Sequence[GroupSlowdowns], *, gpus_in_node: int, nodes: int, shared_links: bool
) -> GroupSlowdowns:
    """The slowdown factors of streams while a group of this shape communicates, derived from those
    of the measured shapes.

    If the shape crosses nodes, they are derived from shapes that cross nodes, if there are any; if
    it does not, from shapes that do not.
    """
    alike = [group for group in groups if (group.nodes > 1) == (nodes > 1)] or groups
    influence = _influence([(g.gpus_in_node, g.nodes) for g in alike], (gpus_in_node, nodes))
    slowdowns = []
    for streams in SHARED_SETS:
        factors = np.array([group.factors(streams) for group in alike])
        work = [_work(streams, g.gpus_in_node * g.nodes, shared_links) for g in alike]
        capacities = np.sum(work / factors, axis=1)
        expected = np.exp(influence @ np.log(factors))
        capacity = np.exp(influence @ np.log(capacities))
        of_shape = _work(streams, gpus_in_node * nodes, shared_links)
        scaled = expected * np.where(of_shape > 0, np.sum(of_shape / expected) / capacity, 1)
        slowdowns.append(
            Slowdown(streams=streams, factors=tuple(float(f) for f in np.maximum(scaled, 1)))
        )
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def _work(streams: tuple[str, ...], gpus: int, shared_links: bool) -> Floats:
    """The work that each stream (J) of a set does per second when it runs alone; for streams that
    share links, the bytes in one direction.

    Communication uses both directions, and sends all but the GPU's own part of a message.
    """
    copies = sum(stream in ("host_to_device", "device_to_host") for stream in streams)
    traffic = (1 - 1 / gpus) if shared_links and copies else 1
    work = {"compute": 0, "gpu_to_gpu": traffic * max(copies, 1)}
    return np.array([work.get(stream, 1) for stream in streams], dtype=np.float64)


def _influence(measured: Sequence[tuple[int, int]], shape: tuple[int, int]) -> Floats:
    """The weights (G) of measured shapes for a wanted shape: the sum of the shapes' values, each
    times its weight, is the value expected there.
    """
    sizes, size = _sizes(measured), _sizes([shape])[0]
    doublings = np.abs(np.log2(np.array(measured) / shape)).sum(axis=1)
    near = np.exp(-doublings / NEAR_DOUBLINGS)
    mean = near / near.sum()
    centred = sizes - mean @ sizes
    weighted = near * centred.T
    slopes = np.linalg.solve(weighted @ centred + DAMPING * np.eye(len(size)), weighted)
    # The weights of sizes sum to zero, so a value that is equal on all shapes has no slope.
    return np.asarray(mean + (size - mean @ sizes) @ slopes)


def _sizes(shapes: Iterable[tuple[int, int]]) -> Floats:
    return np.array([(gpus / 2, np.log2(nodes)) for gpus, nodes in shapes])


# The time of work on the four streams of a GPU while they run concurrently.
#
# While a set of streams is busy, each stream of the set is slowed down by a factor that depends on
# the set and on the shape of the communicating group. When a stream has ended, the others continue
# under the factors of the smaller set. The total time is never shorter than the longest stream
# alone, and never longer than the sum of all streams.
#
# More work on one stream may shorten the total: while two kinds of copies run, communication can be
# slowed by a third less. ``lowered`` factors give a lower bound instead, for this work and any
# greater work on the same streams. ``raised`` factors give an upper bound, for this work and any
# lesser work (docs/decisions/0035-searches-that-prove.md).
#
# Axes: C cases; the four streams in the order of ``mistlab.machine.slowdowns.STREAMS``.


BITS = np.array([1, 2, 4, 8])
# All sets of busy streams, as bit masks.
BESIDE = range(1 << len(STREAMS))

# The number of cases that are computed at once: few enough that intermediate results stay in the
# CPU's cache.
BLOCK = 8192

LINK = STREAMS.index("gpu_to_gpu")
LINK_BIT = np.uint8(1 << LINK)
_FROM_HOST = STREAMS.index("host_to_device")
_BIT_OF_STREAM = BITS.astype(np.uint8)[:, None]

# Tables of times and factors have the four streams on their first axis (4, ...).


@dataclass(frozen=True, slots=True, eq=False)
class SlowedBy:
    """The slowdown factors of the streams in each case. All groups' factors (4, F) are in one
    ``table``, streams first for speed; the factors of a case's group begin at the column ``first``
    (C), and each group has ``size`` columns.
    """

    table: Floats
    first: Rows
    size: int

    @classmethod
    def of_all(cls, factors: Floats, cases: int) -> Self:
        """The same slowdown factors, which may be ``lowered`` or ``raised``, for all cases."""
        first = np.zeros(cases, dtype=np.intp)
        return cls(np.ascontiguousarray(factors.T), first, len(factors))

    @classmethod
    def of_groups(cls, groups: Iterable[tuple[Bools, Floats]], cases: int) -> Self:
        """The slowdown factors of each group, for those cases that the group's mask (C)
        contains.
        """
        tables: list[Floats] = []
        first = np.zeros(cases, dtype=np.intp)
        for rows, factors in groups:
            first[rows] = len(tables) * len(factors)
            tables.append(factors)
        return cls(np.ascontiguousarray(np.concatenate(tables).T), first, len(tables[0]))

    def chosen(self, cases: Rows) -> Self:
        """The slowdown factors of the cases with these indices only."""
        return type(self)(self.table, self.first[cases], self.size)

    def place(self, begun: NDArray[np.uint8]) -> Rows:
        """For each case (C), the table's column for the set of no busy streams. In a table of
        ``lowered`` factors this column depends on ``begun``, the set of streams that had work at
        first.
        """
        if self.size == len(BESIDE):
            return self.first
        return self.first + len(BESIDE) * begun.astype(np.intp)


def factors_of(group: GroupSlowdowns) -> Floats:
    """The slowdown factors of each stream (16, 4), by the set of busy streams as a bit mask."""
    table = np.ones((16, len(STREAMS)))
    for slowdown in group.slowdowns:
        chosen = [STREAMS.index(stream) for stream in slowdown.streams]
        table[BITS[chosen].sum(), chosen] = slowdown.factors
    return table


def lowered(factors: Floats) -> Floats:
    """Lower bounds of slowdown factors (256, 4), which only grow if more streams are busy.

    A row is for the set A of streams that had work at first (times 16) and the set S that is still
    busy. It has the least factor of each stream over all sets T, where S is in T and T is in A.
    """
    sets = np.arange(len(factors))
    tables = []
    for first in sets:
        table = np.where(((sets & ~first) == 0)[:, None], factors, np.inf)
        for bit in BITS:
            without = sets[(sets & bit) == 0]
            table[without] = np.minimum(table[without], table[without + bit])
        # A stream that is not busy has the factor 1.
        tables.append(np.where(np.isfinite(table) & _is_in(sets), table, 1.0))
    return np.concatenate(tables)


def raised(factors: Floats) -> Floats:
    """Upper bounds of slowdown factors (16, 4) for each set of busy streams that contains the link
    between GPUs: the largest factor of a stream with the link and any of these streams busy.
    """
    sets = np.arange(len(factors))
    table = np.where(_is_in(sets) & ((sets & (1 << LINK)) > 0)[:, None], factors, 1.0)
    for bit in BITS:
        with_it = sets[(sets & bit) > 0]
        table[with_it] = np.maximum(table[with_it], table[with_it - bit])
    return table


def _is_in(sets: Ints) -> Bools:
    """Whether each stream (4) is in each set of streams."""
    return np.asarray((sets[:, None] & BITS) > 0)


def overlapped(alone: Floats, factors: Floats, awaited: Sequence[str] = STREAMS) -> Floats:
    """The seconds until the ``awaited`` streams have ended if all streams run concurrently, whose
    work would take ``alone`` (C, 4) by itself. The slowdown factors may be ``lowered``.
    """
    work = np.ascontiguousarray(alone.T)
    return until(awaited, ends_of_streams(work, SlowedBy.of_all(factors, len(alone))), work)


def until(awaited: Sequence[str], ends: Floats, alone: Floats) -> Floats:
    """The seconds until all ``awaited`` streams have ended, given the ``ends`` of all streams: at
    least the longest work of the awaited ones ``alone``, at most the work of all streams in
    sequence (all arrays have the streams first).
    """
    chosen = [STREAMS.index(stream) for stream in awaited]
    least, last = (one if awaited is STREAMS else one[chosen] for one in (alone, ends))
    last = np.maximum(last.max(axis=0), least.max(axis=0))
    return np.asarray(np.minimum(last, alone.sum(axis=0)))


def ends_of_streams(alone: Floats, slowed: SlowedBy) -> Floats:
    """The end of each stream in seconds (4, C) if all run concurrently, whose work would take
    ``alone`` (4, C) by itself; zero for a stream without work.
    """
    # Where only one stream has work, it takes the same time as alone.
    ends = alone.copy()
    several = np.flatnonzero((alone > 0).sum(axis=0, dtype=np.uint8) > 1)
    for start in range(0, len(several), BLOCK):
        block = several[start : start + BLOCK]
        ends[:, block] = ends_of_several(alone.take(block, axis=1), slowed.chosen(block))
    return ends


def ends_of_several(left: Floats, slowed_by: SlowedBy) -> Floats:
    """The same as ``ends_of_streams``, for cases in which several streams have work."""
    ends, elapsed = np.zeros_like(left), np.zeros(left.shape[1])
    offset = slowed_by.place(sets_of(left > 0))
    for _ in STREAMS:
        busy = left > 0
        slowed = slowed_by.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * slowed, np.inf)
        first = ahead.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        is_done = ahead <= step
        left = np.where(is_done, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += step
        ends += is_done * elapsed
    return ends


def endless(alone: Floats, slowed_by: SlowedBy) -> tuple[Floats, Floats]:
    """The seconds (C) until all other streams have ended their work of ``alone`` (4, C) while the
    link between GPUs is always busy, and how many seconds of its own work the link does meanwhile
    (C).
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


def link_after(alone: Floats, slowed_by: SlowedBy, first: str) -> Floats:
    """The seconds (C) until the link between GPUs has ended, if only it and the stream ``first``
    run until ``first`` has ended, and then the other streams start. Zero where the link ends before
    ``first``.
    """
    after_s = np.zeros(alone.shape[1])
    stream = STREAMS.index(first)
    rows = np.flatnonzero((alone[LINK] > 0) & (alone[stream] > 0))
    left, slowed_by = alone.take(rows, axis=1), slowed_by.chosen(rows)
    pair = slowed_by.first + BITS[[LINK, stream]].sum()
    before = left[stream] * slowed_by.table[stream, pair]
    left[LINK] -= before / slowed_by.table[LINK, pair]
    left[stream] = 0.0
    last = np.flatnonzero(left[LINK] > 0)
    left = left.take(last, axis=1)
    ends = ends_of_streams(left, slowed_by.chosen(last))
    after_s[rows[last]] = before[last] + until((STREAMS[LINK],), ends, left)
    return after_s


def link_behind(
    tasks: Iterable[tuple[Floats, Floats]], computing: Floats, linking: Floats
) -> Floats:
    """For each case (C), the seconds until the last of several consecutive tasks has computed, and
    until the link between GPUs has done the work that all tasks except the last leave to it (2, C).

    ``tasks`` are computed one after another, each for so many seconds (C) alone, and then the link
    works for so many. Beside one another both take ``computing`` and ``linking`` (C) times as long.
    """
    elapsed = np.zeros_like(computing)
    left, after = np.zeros_like(computing), np.zeros_like(computing)
    for compute, link in tasks:
        left = left + np.where(compute > 0, after, 0.0)
        beside = np.minimum(compute * computing, left * linking)
        elapsed += beside + np.maximum(compute - beside / computing, 0.0)
        left = np.maximum(left - beside / linking, 0.0)
        after = np.where(compute > 0, link, after)
    return np.stack([elapsed, elapsed + left])


def sets_of(busy: Bools) -> NDArray[np.uint8]:
    """The set of busy streams in each case as a bit mask, from a mask of each stream (4, C)."""
    return np.asarray(np.bitwise_or.reduce(busy * _BIT_OF_STREAM, axis=0))


# Consecutive time slots whose layers' data is offloaded as soon as it is computed. A time slot is
# the set of tasks that overlap while one layer computes.
#
# A time slot ends when the work that it began with has ended. The offload of its own layer, and the
# reduction before it, start as soon as the layer has computed. If the time slot lasts longer,
# because it waits for copies, part of that work is done before the next time slot, which may then
# be shorter.

AWAY = STREAMS.index("device_to_host")


def slots_in_turn(
    alone: Sequence[Floats], reduced: Sequence[Floats], slowed_by: SlowedBy, *, slots: int
) -> tuple[Sequence[Floats], tuple[Floats, Floats]]:
    """The seconds of each of ``slots`` consecutive per-layer time slots (C), which alternate
    between two kinds, and the seconds of the last slot's reduction and offload that are left (C).
    The streams in a slot of each kind work for ``alone`` (4, C); of the link's work, ``reduced``
    (C) reduces the data that is then offloaded.
    """
    # Many cases have the same work, so distinct ones are computed once.
    distinct = distinct_rows([*alone[0], *alone[1], *reduced, slowed_by.first])
    table = np.array(distinct.columns[:-1])
    alone, reduced = (table[: len(STREAMS)], table[len(STREAMS) : -2]), (table[-2], table[-1])
    slowed_by = replace(slowed_by, first=distinct.columns[-1])
    # The rest of the previous time slot's reduction and of its offload; none before the first slot.
    left, lasts = (np.zeros_like(reduced[0]), np.zeros_like(reduced[0])), []
    for number in range(slots):
        here, after = number % 2, (number + 1) % 2
        gathered = np.maximum(alone[here][LINK] - reduced[here], 0.0)
        on_link = left[0], gathered, reduced[after]
        leaving = left[1], alone[after][AWAY]
        lasts_s, left = slot_after(alone[here], slowed_by, on_link, leaving)
        lasts.append(lasts_s[distinct.index])
    return lasts, (left[0][distinct.index], left[1][distinct.index])


def slot_after(
    alone: Floats,
    slowed_by: SlowedBy,
    on_link: tuple[Floats, Floats, Floats],
    leaving: tuple[Floats, Floats],
) -> tuple[Floats, tuple[Floats, Floats]]:
    """The seconds of one time slot, and the rest of its own reduction and offload (C). The link
    finishes the previous slot's reduction, gathers weights, and reduces the gradients of this
    slot's layer, which are then offloaded.
    """
    (before, gathered, reduced), (left, offload) = on_link, leaving
    elapsed, rest = np.zeros(alone.shape[1]), alone.copy()
    while True:
        reduces, gathers, leaves = before > 0, gathered > 0, left > 0
        computes = rest[COMPUTE] > 0
        reduction = np.where(computes, 0.0, reduced)
        rest[LINK] = np.where(reduces, before, np.where(gathers, gathered, reduction))
        offloads = ~leaves & ~computes & (reduced <= 0)
        rest[AWAY] = np.where(leaves & ~reduces, left, np.where(offloads, offload, 0.0))
        goes_on = computes | (rest[_FROM_HOST] > 0) | reduces | gathers | leaves
        if not goes_on.any():
            return elapsed, (reduced, offload)
        busy = rest > 0
        slowed = slowed_by.table.take(slowed_by.first + sets_of(busy), axis=1)
        ahead = np.where(busy, rest * slowed, np.inf)
        step = np.where(goes_on, ahead.min(axis=0), 0.0)
        is_link, is_away = busy[LINK], busy[AWAY]
        rest = np.where(busy & (ahead <= step), 0.0, np.maximum(rest - step / slowed, 0.0))
        before = np.where(reduces, rest[LINK], before)
        gathered = np.where(is_link & ~reduces & gathers, rest[LINK], gathered)
        reduced = np.where(is_link & ~reduces & ~gathers, rest[LINK], reduced)
        left = np.where(is_away & leaves, rest[AWAY], left)
        offload = np.where(is_away & ~leaves, rest[AWAY], offload)
        elapsed += step


# Time slots of the first forward pass, in which each block's optimizer states are offloaded after
# its step.
#
# The tasks of consecutive blocks are simulated in order of time: on each stream one after another,
# each as soon as its dependencies have ended. Blocks are equal, or alternate between two types.
#
# Axes: C cases, B two alternating blocks, V vertices; the four streams first.


class StepTask(NamedTuple):
    """A task of each block in the first forward pass: its stream, and how many blocks ahead of the
    computing block it runs.

    It waits until tasks of other names have ended for the block so many places behind its own one.
    """

    name: str
    stream: str
    ahead: int
    after: Sequence[tuple[str, int]]


# The name of a dependency on the start of a step, rather than on its end.
_BEGUN = "S begun"
# The tasks of a block, in the order of each stream. A block's states are fetched during the step of
# the block before, into the buffer of the block two before; so are weights that are offloaded after
# their step, and offloaded activations.
TASKS = (
    StepTask("S", "compute", 1, (("G<", 0), ("O<", 0), ("P>", 2))),
    StepTask("F", "compute", 0, (("U", 0), ("A>", 2))),
    StepTask("U", "gpu_to_gpu", 1, (("S", 0),)),
    StepTask("G<", "host_to_device", 1, ((_BEGUN, 1),)),
    StepTask("O<", "host_to_device", 1, ((_BEGUN, 1), ("O>", 2))),
    StepTask("O>", "device_to_host", 0, (("S", 0),)),
    StepTask("P>", "device_to_host", 0, (("S", 0),)),
    StepTask("A>", "device_to_host", -1, (("F", 0),)),
)
NAMES = tuple(task.name for task in TASKS)
# How many consecutive blocks are simulated; at first they fill the streams, and the time of the
# blocks after that is measured.
_BLOCKS, _FILLING, _MEASURED = 10, 4, 4


# How often tasks of each name have ended, as fields of one integer: a count, and a set bit above
# it. The bit is still set in the difference from the counts that a task needs if the count
# suffices.
_COUNT_BITS = 4
_ONE = {name: 1 << (_COUNT_BITS + 1) * place for place, name in enumerate((*NAMES, _BEGUN))}
_ENOUGH = sum(one << _COUNT_BITS for one in _ONE.values())
# The counts at the beginning, when the first block has already taken its optimizer step.
_STEPPED = _ENOUGH + sum(_ONE[name] for name in ("S", "U", "G<", "O<", _BEGUN))


@dataclass(frozen=True, slots=True)
class _Lanes:
    """The tasks of all streams (Q), one stream after another, each in order: the row of ``work``
    with the task's seconds, the counts that it ``needs``, and what its end and its start add to the
    counts.

    ``first`` (4) is each stream's first task; a task that is never ready follows its last.
    ``passes`` are the forward passes between whose starts the mean is measured.
    """

    work: Ints
    needs: Ints
    ends: Ints
    begins: Ints
    first: Ints
    passes: Ints


@lru_cache(maxsize=1)
def _lanes() -> _Lanes:
    lanes: list[tuple[int, int, int, int]] = []
    first, passes = [], []
    for stream in STREAMS:
        first.append(len(lanes))
        for turn, task in product(range(_BLOCKS), TASKS):
            block = turn + task.ahead
            if task.stream != stream or not 0 <= block < _BLOCKS:
                continue
            if task.name == "F" and block in (_FILLING, _FILLING + _MEASURED):
                passes.append(len(lanes))
            # Tasks of blocks before the first one count as ended.
            needs = [(_ONE[name], block - back + 1) for name, back in task.after]
            counts = sum(one * most for one, most in needs if most > 0)
            begins = _ONE[_BEGUN] if task.name == "S" else 0
            row = 2 * NAMES.index(task.name) + block % 2
            lanes.append((row, counts, _ONE[task.name], begins))
        lanes.append((0, _ENOUGH, 0, 0))
    work, needs, ends, begins = np.array(lanes).T.copy()
    return _Lanes(work, needs, ends, begins, np.array(first), np.array(passes))


def stepping_s(work: Floats, slowed_by: SlowedBy) -> Floats:
    """The mean seconds (C) from the start of one block's forward pass to that of the next block's,
    in a first forward pass; ``work`` has the seconds of each block's tasks alone, in the order of
    ``NAMES`` (names, B, C). The first block has already taken its optimizer step.
    """
    lanes, cases = _lanes(), work.shape[-1]
    work, column = np.ravel(work), np.arange(cases)
    at, ended = np.repeat(lanes.first[:, None], cases, axis=1), np.full(cases, _STEPPED)
    left, is_running = np.zeros((len(STREAMS), cases)), np.zeros((len(STREAMS), cases), dtype=bool)
    now, begun = np.zeros(cases), np.full((len(lanes.passes), cases), np.nan)
    while np.isnan(begun[-1]).any():
        # An optimizer step that starts lets tasks begin that wait for its start.
        is_ready = (ended - lanes.needs.take(at[COMPUTE])) & _ENOUGH == _ENOUGH
        starts = is_ready & ~is_running[COMPUTE]
        ended += lanes.begins.take(at[COMPUTE]) * starts
        is_ready = (ended - lanes.needs.take(at)) & _ENOUGH == _ENOUGH
        starts = is_ready & ~is_running
        left = np.where(starts, work.take(lanes.work.take(at) * cases + column), left)
        is_running |= starts
        is_pass = starts[COMPUTE] & (at[COMPUTE] == lanes.passes[:, None])
        begun = np.where(is_pass, now, begun)
        busy = left > 0
        # Tasks that take no time end before all others.
        is_over = is_running & ~busy
        slowed = slowed_by.table.take(slowed_by.first + sets_of(busy), axis=1)
        left_s = np.where(busy, left * slowed, np.inf)
        goes_on = busy.any(axis=0) & ~is_over.any(axis=0)
        elapsed = np.where(goes_on, left_s.min(axis=0), 0.0)
        ends = is_over | (left_s <= elapsed)
        left = np.where(ends, 0.0, np.maximum(left - elapsed / slowed, 0.0))
        now = now + elapsed
        ended += (lanes.ends.take(at) * ends).sum(axis=0)
        at += ends
        is_running ^= ends
    return np.asarray((begun[1] - begun[0]) / _MEASURED)


# The least time of work on several streams, in whatever order it is done.
#
# While a set of streams is busy, each runs at one over its slowdown. A weighted sum of the work is
# a lower bound if no set of streams processes more than one second of it per second. The largest of
# these sums is the least time (the dual of a linear programme); its weights are a vertex of a
# polytope that depends on the slowdowns alone.


def least_together(work: Floats, slowed_by: SlowedBy) -> Floats:
    """The least seconds (C) in which the four streams can do ``work`` (4, C), in whatever order."""
    least = np.zeros(work.shape[1])
    for first in np.unique(slowed_by.first).tolist():
        cases = np.flatnonzero(slowed_by.first == first)
        table = slowed_by.table[:, first : first + (1 << len(STREAMS))]
        least[cases] = (_vertices(table.tobytes()) @ work[:, cases]).max(axis=0)
    return least


@lru_cache(maxsize=256)
def _vertices(factors: bytes) -> Floats:
    """Weights of the four streams (V, 4): each weighted sum of the streams' work is a lower bound
    of its time; ``factors`` are the slowdowns (4, 16) by set of busy streams, as bytes.
    """
    table = np.frombuffer(factors).reshape(len(STREAMS), -1)
    is_busy: Bools = (np.arange(1, table.shape[1])[:, None] & BITS) > 0
    rates = np.where(is_busy, 1 / table.T[1:], 0.0)
    # At a vertex of the polytope, as many constraints hold with equality as there are weights.
    limits = np.concatenate([rates, -np.eye(len(STREAMS))])
    bounds = np.concatenate([np.ones(len(rates)), np.zeros(len(STREAMS))])
    chosen: Rows = np.array([*combinations(range(len(limits)), len(STREAMS))])
    chosen = chosen[np.abs(np.linalg.det(limits[chosen])) > _SINGULAR]
    weights = np.linalg.solve(limits[chosen], bounds[chosen][..., None])[..., 0]
    weights = weights[(weights @ limits.T <= bounds + _ROUNDING).all(axis=1)].clip(0.0)
    # The weights are scaled down so that rounding never makes the bound too large.
    weights = weights / np.maximum(1.0, (weights @ rates.T).max(axis=1))[:, None]
    return np.asarray(np.unique(weights.round(12), axis=0)) * (1 - _ROUNDING)


_SINGULAR, _ROUNDING = 1e-9, 1e-9
