"""Computes how long overlapping work takes on the concurrent streams of a GPU (arithmetic,
collectives, host copies), which slow one another down.

Axes: C cases, B blocks; the four streams first.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations
from typing import NamedTuple, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.machine.slowdowns import COMPUTE, STREAMS, GroupSlowdowns

# Computes how long work takes on the four streams of a GPU that run at the same time.


BITS = np.array([1, 2, 4, 8])
# All sets of busy streams, as bit masks of four bits.
BESIDE = range(1 << len(STREAMS))

# At most this many cases are computed at once, so that intermediate results stay in the CPU's
# cache.
BLOCK = 8192

LINK = STREAMS.index("gpu_to_gpu")
LINK_BIT = np.uint8(1 << LINK)
FROM_HOST, AWAY = STREAMS.index("host_to_device"), STREAMS.index("device_to_host")
_BIT_OF_STREAM = BITS.astype(np.uint8)[:, None]


@dataclass(frozen=True, slots=True, eq=False)
class SlowedBy:
    """The slowdown factors of concurrent streams, for each of many cases.

    All groups' factors (4, F) are in one ``table``, streams first for speed; the factors of a
    case's group begin at the column ``first`` (C), and each group has ``size`` columns.
    """

    table: Floats
    first: Rows
    size: int

    @classmethod
    def of_all(cls, factors: Floats, cases: int) -> Self:
        """Use the same slowdown factors in all cases.

        They may be ``lowered`` or ``raised``.
        """
        first = np.zeros(cases, dtype=np.intp)
        return cls(np.ascontiguousarray(factors.T), first, len(factors))

    @classmethod
    def of_groups(cls, groups: Iterable[tuple[Bools, Floats]], cases: int) -> Self:
        """Use each group's slowdown factors in the cases that its mask selects."""
        tables: list[Floats] = []
        first = np.zeros(cases, dtype=np.intp)
        for rows, factors in groups:
            first[rows] = len(tables) * len(factors)
            tables.append(factors)
        return cls(np.ascontiguousarray(np.concatenate(tables).T), first, len(tables[0]))

    def chosen(self, cases: Rows) -> Self:
        """Select the cases with these indices."""
        return type(self)(self.table, self.first[cases], self.size)

    @property
    def beside_any(self) -> Self:
        """The ``lowered`` factors that hold whichever streams have work at first."""
        first = self.place(np.full(self.first.shape, len(BESIDE) - 1, dtype=np.uint8))
        return type(self)(self.table, first, len(BESIDE))

    def place(self, begun: NDArray[np.uint8]) -> Rows:
        """The column of the table that has the factors for no busy streams, for each case.

        In a table of ``lowered`` factors it depends on ``begun``, the set of streams that had work
        at first.
        """
        if self.size == len(BESIDE):
            return self.first
        return self.first + len(BESIDE) * begun.astype(np.intp)


def factors_of(group: GroupSlowdowns) -> Floats:
    """The slowdown factor of each stream (column) for each set of busy streams (row)."""
    table = np.ones((16, len(STREAMS)))
    for slowdown in group.slowdowns:
        chosen = [STREAMS.index(stream) for stream in slowdown.streams]
        table[BITS[chosen].sum(), chosen] = slowdown.factors
    return table


def lowered(factors: Floats) -> Floats:
    """Lower bounds of slowdown factors, which never decrease if more streams are busy.

    A row is for two sets of streams: the set A that had work at first (times 16), and the set S
    that is still busy. It has the smallest factor of each stream over all sets T that contain S and
    are contained in A.
    """
    sets = np.arange(len(factors))
    tables = []
    for first in sets:
        table = np.where(((sets & ~first) == 0)[:, None], factors, np.inf)
        for bit in BITS:
            without = sets[(sets & bit) == 0]
            table[without] = np.minimum(table[without], table[without + bit])
        # A stream that has no work is given the factor 1.
        tables.append(np.where(np.isfinite(table) & _is_in(sets), table, 1.0))
    return np.concatenate(tables)


def raised(factors: Floats) -> Floats:
    """Upper bounds of slowdown factors while the link between GPUs is busy: the largest factor for
    any subset of the busy streams.

    The result is (16, 4).
    """
    sets = np.arange(len(factors))
    table = np.where(_is_in(sets) & ((sets & (1 << LINK)) > 0)[:, None], factors, 1.0)
    for bit in BITS:
        with_it = sets[(sets & bit) > 0]
        table[with_it] = np.maximum(table[with_it], table[with_it - bit])
    return table


def _is_in(sets: Ints) -> Bools:
    """Whether each of the four streams is in each set of streams."""
    return np.asarray((sets[:, None] & BITS) > 0)


def overlapped(alone: Floats, factors: Floats, awaited: Sequence[str] = STREAMS) -> Floats:
    """The seconds until the ``awaited`` streams have ended if all streams run at the same time,
    with work that takes ``alone`` by itself.

    ``alone`` is (C, 4). The slowdown factors may be ``lowered``.
    """
    work = np.ascontiguousarray(alone.T)
    return until(awaited, ends_of_streams(work, SlowedBy.of_all(factors, len(alone))), work)


def until(awaited: Sequence[str], ends: Floats, alone: Floats) -> Floats:
    """The seconds until the ``awaited`` streams have ended, from the ``ends`` of all streams.

    They take at least the longest work of an awaited stream ``alone``, and at most the work of all
    streams in sequence. All arrays have the streams first.
    """
    chosen = [STREAMS.index(stream) for stream in awaited]
    least, last = (one if awaited is STREAMS else one[chosen] for one in (alone, ends))
    last = np.maximum(last.max(axis=0), least.max(axis=0))
    return np.asarray(np.minimum(last, alone.sum(axis=0)))


def ends_of_streams(alone: Floats, slowed: SlowedBy) -> Floats:
    """The time at which each stream ends if all run concurrently; zero for one without work.

    The work would take ``alone`` (4, C) by itself.
    """
    # A stream that has work while no other has takes as long as alone.
    ends = alone.copy()
    several = np.flatnonzero((alone > 0).sum(axis=0, dtype=np.uint8) > 1)
    for start in range(0, len(several), BLOCK):
        block = several[start : start + BLOCK]
        ends[:, block] = ends_of_several(alone.take(block, axis=1), slowed.chosen(block))
    return ends


def ends_of_several(left: Floats, slowed_by: SlowedBy) -> Floats:
    """The time at which each stream ends, for cases in which several streams have work.

    While a set of streams is busy, each stream of the set is slowed down by a factor that depends
    on the set and on the shape of the communicating group. When a stream has ended, the others
    continue under the factors of the smaller set. The total time is never shorter than the longest
    stream alone, and never longer than the sum of all streams.

    More work on one stream may shorten the total: while two kinds of copies run, communication can
    be slowed by a third less. ``lowered`` factors give a lower bound instead, for this work and any
    greater work on the same streams. ``raised`` factors give an upper bound, for this work and any
    lesser work (docs/decisions/0035-searches-that-prove.md).
    """
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


def link_after(alone: Floats, slowed_by: SlowedBy, first: str) -> Floats:
    """The seconds until the link between GPUs has ended, if it runs beside one other stream at
    first, and beside all of them afterwards.

    The other streams start when the stream ``first`` has ended. The result is zero if the link ends
    before ``first``.
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


def sets_of(busy: Bools) -> NDArray[np.uint8]:
    """The set of busy streams in each case as a bit mask, from a mask for each stream."""
    sets: NDArray[np.uint8] = np.bitwise_or.reduce(busy * _BIT_OF_STREAM)
    return sets


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
# Of prices that differ by no more than this, one is tried.
_NEAR = 1 / 64


@lru_cache(maxsize=256)
def largest_weights(factors: bytes) -> Floats:
    """The weights of ``_vertices`` that are not dominated by other weights."""
    weights = _vertices(factors)
    exceeds = (weights[:, None] >= weights).all(axis=2) & (weights[:, None] > weights).any(axis=2)
    return weights[~exceeds.any(axis=0)]


@lru_cache(maxsize=256)
def prices_of(factors: bytes, streams: tuple[int, ...]) -> Sequence[tuple[Floats, Bools]]:
    """What the ``largest_weights`` ask for work on some of the streams, without prices that are
    near another one; each with a mask of the weights that ask as much.
    """
    weights = largest_weights(factors)[:, streams]
    kept: list[Floats] = []
    for price in np.unique(weights, axis=0)[::-1]:
        if all(np.abs(price - other).max() > _NEAR for other in kept):
            kept.append(price)
    return [(price, np.logical_and.reduce(weights >= price, axis=1)) for price in kept]


# Computes the time of layers whose weights are copied from the host and then gathered from ranks.


def ends_if_gathered(alone: Floats, slowed: SlowedBy, copied: Floats, gathered: Floats) -> Floats:
    """The time at which each stream ends if weights are gathered only after they were copied from
    the host.

    All work would take ``alone`` (4, C). The gather is the last ``gathered`` seconds (C) of the
    link's work, the copy the first ``copied`` seconds (C) of the host's; both are positive. Until
    both the copy and the link's other work have ended, the host copy slows the other streams, and
    afterwards the link does.
    """
    left, offset = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK], left[FROM_HOST] = np.maximum(alone[LINK] - gathered, 0.0), copied
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    for _ in STREAMS:
        busy = left > 0
        factors = slowed.table.take(offset + sets_of(busy), axis=1)
        ahead = np.where(busy, left * factors, np.inf)
        step = np.where(busy[FROM_HOST], ahead.min(axis=0), 0.0)
        is_done = busy & (ahead <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        elapsed += step
        ends += is_done * elapsed
    left[LINK] += gathered
    left[FROM_HOST] = np.maximum(alone[FROM_HOST] - copied, 0.0)
    return np.maximum(ends, np.where(left > 0, ends_of_several(left, slowed) + elapsed, 0.0))


def least_ends_if_gathered(
    alone: Floats, slowed: SlowedBy, copied: Floats, gathered: Floats
) -> Floats:
    """Lower bounds of the time at which each stream ends if weights are gathered only after they
    were copied from the host, for this work and for any with longer copies.

    The slowdown factors are ``lowered`` (docs/decisions/0035-searches-that-prove.md).

    If the copies are longer, the gather may come at any later time. So in the bound no gather slows
    the copies, and arithmetic is slowed only as much as by a gather, whatever else runs.
    """
    left, offset = alone.copy(), slowed.place(sets_of(alone > 0))
    left[LINK] = np.maximum(alone[LINK] - gathered, 0.0)
    copying, gathering = copied.copy(), gathered.copy()
    ends, elapsed = np.zeros_like(alone), np.zeros(alone.shape[1])
    # At most six events follow: the ends of the four streams, of the copy and of the gather.
    for _ in range(len(STREAMS) + 2):
        busy = left > 0
        factors = slowed.table.take(offset + sets_of(busy), axis=1)
        on_link = slowed.table[LINK].take(offset + (sets_of(busy) | LINK_BIT))
        gathers = ~busy[LINK] & (copying <= 0) & (gathering > 0)
        ahead = np.where(busy, left * factors, np.inf)
        copied_s = np.where(copying > 0, copying * factors[FROM_HOST], np.inf)
        gathered_s = np.where(gathers, gathering * on_link, np.inf)
        step = np.minimum(ahead.min(axis=0), np.minimum(copied_s, gathered_s))
        step = np.where(np.isfinite(step), step, 0.0)
        is_done, is_gathered = busy & (ahead <= step), gathers & (gathered_s <= step)
        left = np.where(is_done, 0.0, np.maximum(left - step / factors, 0.0))
        copying = np.where(copied_s <= step, 0.0, copying - step / factors[FROM_HOST])
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


# Simulates the first forward pass, in which blocks run their optimizer steps.


class StepTask(NamedTuple):
    """A task of every block in the first forward pass: its stream, how many blocks ahead of the
    computing block it runs, and of how many blocks it has ended when a late micro-batch arrives.

    It waits until tasks of other names have ended: for each name, of the block a given number of
    places behind its own block.
    """

    name: str
    stream: str
    ahead: int
    late: int
    after: Sequence[tuple[str, int]]


# If weights are offloaded, this many blocks may run their optimizer steps before the first
# micro-batch arrives; the buffers have no room for more.
AHEAD = 2
# A block's tasks, in the order in which each stream runs them; but optimizer steps also run while
# no pass can. A block's states are fetched into the buffer of the block two before.
TASKS = (
    StepTask("S", "compute", 1, AHEAD, (("G<", 0), ("O<", 0), ("P>", 2))),
    StepTask("F", "compute", 0, 0, (("U", 0), ("A>", 2), ("S", -1))),
    StepTask("U", "gpu_to_gpu", 1, AHEAD, (("S", 0),)),
    StepTask("G<", "host_to_device", 1, AHEAD + 1, (("S begun", 1),)),
    StepTask("O<", "host_to_device", 1, AHEAD + 1, (("S begun", 1), ("O>", 2))),
    StepTask("O>", "device_to_host", 0, AHEAD, (("S", 0),)),
    StepTask("P>", "device_to_host", 0, AHEAD, (("S", 0),)),
    StepTask("A>", "device_to_host", -1, 0, (("F", 0),)),
)
NAMES = tuple(task.name for task in TASKS)
ROWS = {name: row for row, name in enumerate(NAMES)}
# Each stream runs the tasks of a lane in order. Optimizer steps and activations are lanes of their
# own: the streams of arithmetic and of offloads have two, and run whichever is ready, if both are
# the task that was issued first.
_LANES = (*STREAMS, "S", "A>")
_STEPS, _LEAVING = _LANES.index("S"), _LANES.index("A>")
_STREAMS, _PACED = slice(len(STREAMS)), slice(COMPUTE + 1, AWAY)
_SHARED, _OTHERS = slice(COMPUTE, AWAY + 1, AWAY - COMPUTE), slice(_STEPS, _LEAVING + 1)
# Steps and passes count when they begin and end.
_COUNTED = [1 + (lane in ("compute", "S")) for lane in _LANES]
# How far each lane is, is packed into one integer, with so many bits for each lane and a further
# bit that a subtraction clears if the lane is not so far.
_BITS_OF_LANE = 9
_ONE_MORE = [1 << (_BITS_OF_LANE + 1) * lane for lane in range(len(_LANES))]
_NONE_ENDED, _ONES = sum(one << _BITS_OF_LANE for one in _ONE_MORE), np.array(_ONE_MORE)[:, None]
# The most blocks whose two tasks in each lane can be counted.
MOST_BLOCKS = (1 << _BITS_OF_LANE) // 2 - 1


class Way(NamedTuple):
    """How blocks run: which tasks they lack, and whether weights are gathered for each pass."""

    without: frozenset[str] = frozenset()
    gathers: bool = False

    def waits(self, task: StepTask) -> Iterator[tuple[str, int]]:
        """The tasks that a task waits for: names, and how many blocks behind its own."""
        yield from task.after
        # Sharded weights are gathered when the block before begins to compute.
        if task.name == "U" and self.gathers:
            yield "F begun", 1


@dataclass(frozen=True, slots=True)
class Lanes:
    """The tasks of all lanes in order, way after way (W) and lane after lane, and what each task
    waits for.

    Each task has the row of ``work`` with its seconds, how far the lanes must be that it ``needs``
    (and that the step of a block ``swaps``, whose weights take turns in the buffers of two blocks),
    its block, and the place in which it was ``issued``.

    ``first`` (6, W) is each lane's first task, ``stepped`` (6, W) its first task after the first
    block's step, ``late`` (6, W) that after a micro-batch that comes late; each lane's last task
    is followed by one that never becomes ready.
    """

    work: Ints
    needs: Ints
    swaps: Ints
    blocks: Ints
    issued: Ints
    first: Ints
    stepped: Ints
    late: Ints


def lanes_of(blocks: int, in_turn: int, ways: Sequence[Way] = (Way(),)) -> Lanes:
    """The tasks of ``blocks`` consecutive blocks whose work repeats after ``in_turn`` blocks, for
    each of the ``ways`` in which blocks run.
    """
    tables, starts = zip(*(_lanes_of_way(blocks, in_turn, way) for way in ways), strict=True)
    before = np.cumsum([0, *(table.shape[1] for table in tables[:-1])])
    at = np.stack(starts, axis=2) + before
    return Lanes(*np.concatenate(tables, axis=1), *at)


@lru_cache(maxsize=512)
def _lanes_of_way(blocks: int, in_turn: int, way: Way) -> tuple[Ints, Ints]:
    """The columns of ``Lanes`` for one way, and where its lanes begin (3, 6)."""
    block, one_more = np.arange(blocks), np.array(_ONE_MORE)
    of_lanes: dict[int, list[StepTask]] = {lane: [] for lane in range(len(_LANES))}
    for task in TASKS:
        if task.name not in way.without:
            of_lanes[_LANES.index(task.name if task.name in _LANES else task.stream)].append(task)
    # In which place each task is issued, and how far its lane is when it has ended (tasks, B).
    issued = {
        task.name: (block + 1 - task.ahead) * len(TASKS) + row for row, task in enumerate(TASKS)
    }
    orders, parts, starts, begin = [], [], [], 0
    far: dict[str, tuple[int, Ints]] = {}
    for lane, tasks in of_lanes.items():
        order = np.argsort([issued[task.name] for task in tasks], axis=None)
        ended = (1 + np.argsort(order).reshape(-1, blocks)) * _COUNTED[lane]
        far |= {task.name: (lane, row) for task, row in zip(tasks, ended, strict=True)}
        orders.append(order)

    def needed(waits: Iterable[tuple[str, int]]) -> Ints:
        most = np.zeros((len(_LANES), blocks), dtype=np.int64)
        for name, back in waits:
            kind = name.removesuffix(" begun")
            if kind in far:
                other, ended = far[kind]
                here, there = block[max(back, 0) : blocks + min(back, 0)], block[max(-back, 0) :]
                count = ended[there[: len(here)]] - (kind != name)
                most[other, here] = np.maximum(most[other, here], count)
        return np.asarray(one_more @ most)

    for (lane, tasks), order in zip(of_lanes.items(), orders, strict=True):
        rows = [
            [
                in_turn * NAMES.index(task.name) + block % in_turn,
                needed(way.waits(task)),
                needed([("F", 2)] * (task.name == "S")),
                block,
                issued[task.name],
            ]
            for task in tasks
        ]
        last = np.array([[0], [_NONE_ENDED], [0], [-1], [len(TASKS) * (blocks + 2)]])
        columns = np.array(rows).swapaxes(0, 1).reshape(len(last), -1)[:, order] if rows else last
        parts += [columns, last] if rows else [last]
        late = sum(min(task.late - (lane == LINK and way.gathers), blocks) for task in tasks)
        stepped = sum(min(max(task.ahead, 0), blocks) for task in tasks)
        starts.append((begin, begin + stepped, begin + late))
        begin += len(order) + 1
    return np.concatenate(parts, axis=1), np.array(starts).T


# Cases that have ended are dropped once less than this share of the cases goes on.
_STILL_PLAYED = 15 / 16


def played(
    work: Floats, slow: SlowedBy, lanes: Lanes, way: Ints, at: Ints, blocks: Ints, swaps: Bools
) -> tuple[Floats, Floats]:
    """The seconds at which the forward pass of each of a case's ``blocks`` (C) ends (B, C), if they
    run in the ``way`` (C) of the lanes, and at which all activations have left (C).

    ``at`` has each lane's first task (6, C); those before it have ended. ``work`` has the seconds
    of each block's tasks alone, in the order of ``NAMES`` (names, B, C), and a block in ``swaps``
    (B, C) offloads weights; fewer blocks repeat. The tasks are simulated in order of time: on each
    stream one after another, each as soon as those that it waits for have ended.
    """
    cases, opening, factors = work.shape[-1], lanes.first[COMPUTE, way], slow.first
    far = _NONE_ENDED + np.multiply(_ONE_MORE, _COUNTED) @ (at - lanes.first[:, way])
    work, case = np.ravel(work), np.arange(cases)
    # What each stream's task takes yet, infinite for a stream that runs none.
    left, is_running, is_other = np.full((4, cases), np.inf), at[_STREAMS] < 0, at[_OTHERS] < 0
    moved, now, over_s = np.arange(at.size), np.zeros(cases), np.zeros(cases)
    needs, ends_s = np.zeros_like(at), np.full((lanes.first[COMPUTE + 1, 0], cases), np.nan)
    while going := np.add.reduce(is_going := _are_going(lanes, at, opening, blocks)):
        needs.put(moved, _needs(lanes, at, moved, swaps, blocks))
        if going < _STILL_PLAYED * at.shape[1]:
            tables = at, left, is_running, is_other, needs, swaps, case, far, now, blocks
            at, left, is_running, is_other, needs, swaps, case, far, now, blocks, *of_cases = (
                table.compress(is_going, axis=-1) for table in (*tables, factors, opening, is_going)
            )
            factors, opening, is_going = of_cases
        is_ready = (far - needs) & _NONE_ENDED == _NONE_ENDED
        is_other = np.where(is_running[_SHARED], is_other, _others(lanes, at, is_ready))
        is_ready[_SHARED] |= is_ready[_OTHERS]
        # Tasks of other streams may wait for a step or a pass to begin.
        begun = _ONE_MORE[COMPUTE] + is_other[0] * (_ONE_MORE[_STEPS] - _ONE_MORE[COMPUTE])
        far += begun * (is_ready[COMPUTE] & ~is_running[COMPUTE])
        is_ready[_PACED] = (far - needs[_PACED]) & _NONE_ENDED == _NONE_ENDED
        starts = is_ready[_STREAMS] & ~is_running
        (rows,) = starts.ravel().nonzero()
        tasks = at[_STREAMS].copy()
        tasks[_SHARED] += is_other * (at[_OTHERS] - at[_SHARED])
        of_work = lanes.work.take(tasks.take(rows)) * cases
        left.put(rows, work.take(of_work + case.take(rows, mode="wrap")))
        is_running |= starts
        slowed = slow.table.take(factors + sets_of(is_running), axis=1)
        elapsed = np.minimum.reduce(left * slowed)
        elapsed[elapsed == np.inf] = 0.0
        ends = left * slowed <= elapsed
        left = np.where(ends, np.inf, np.maximum(left - elapsed / slowed, 0.0))
        now += elapsed
        ends_s[at[COMPUTE] - opening, case] = now
        over_s[case] += elapsed * is_going
        moves = np.concatenate([ends, ends[_SHARED] & is_other])
        moves[_SHARED] &= ~is_other
        far += np.add.reduce(moves * _ONES)
        (moved,) = moves.ravel().nonzero()
        at += moves
        is_running ^= ends
    return ends_s[:-1], over_s


def _are_going(lanes: Lanes, at: Ints, opening: Ints, blocks: Ints) -> Bools:
    """Whether any of each case's blocks has yet to pass, or its activations to leave."""
    leaves = lanes.blocks.take(at[_LEAVING])
    return np.asarray((at[COMPUTE] - opening < blocks) | ((leaves >= 0) & (leaves < blocks)))


def _others(lanes: Lanes, at: Ints, is_ready: Bools) -> Bools:
    """Whether streams with two lanes may run a task of the other one next (2, C)."""
    away, leaving = lanes.issued.take(at[AWAY :: _LEAVING - AWAY])
    are = ~is_ready[_SHARED]
    are[1] |= leaving < away
    are &= is_ready[_OTHERS]
    return are


def _needs(lanes: Lanes, at: Ints, moved: Rows, swaps: Bools, blocks: Ints) -> Ints:
    """How far the lanes must be for the tasks in some places of ``at`` (6, C). Of the ``blocks``
    (C) some are in ``swaps`` (B, C); those that a case lacks need nothing.
    """
    column, task = moved % at.shape[1], at.take(moved)
    block = lanes.blocks.take(task)
    needs = lanes.needs.take(task) + lanes.swaps.take(task) * swaps[block % swaps.shape[0], column]
    return np.asarray(needs * (block < blocks.take(column)))
