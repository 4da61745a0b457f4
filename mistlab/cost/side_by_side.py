"""Computes how long overlapping work takes on the concurrent streams of a GPU (arithmetic,
collectives, host copies), which slow one another down.

Axes: C cases, B blocks; the four streams first.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import combinations, product
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
_FROM_HOST, AWAY = STREAMS.index("host_to_device"), STREAMS.index("device_to_host")
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


# Computes the time slots of layers whose data leaves as soon as each has computed.


# The work in the time slot of a layer, in the order in which each stream does it: arithmetic;
# on the link the reduction of the layer before, the gather of the next layer's weights and the
# layer's own reduction; from the host the weights that are then gathered, and all else; to the host
# what the layer before has left, and what this layer leaves.
COMPUTED, BEFORE, GATHERED, REDUCED, COPIED, FETCHED, LEFT, LEAVES = range(8)
SLOT_WORK = 8
_STREAM_OF_WORK = np.array([COMPUTE, LINK, LINK, LINK, _FROM_HOST, _FROM_HOST, AWAY, AWAY])
# Sets of work that is not done, twice: in the second half, the layer's own reduction has begun.
_HALF = 1 << SLOT_WORK
_SETS = np.arange(2 * _HALF)
_BIT_OF_WORK = (1 << np.arange(SLOT_WORK, dtype=np.uint8))[::-1, None]


def _of_sets() -> tuple[Bools, Bools, Ints]:
    """For each set of a slot's work that is not done yet: which work runs (8, sets), whether the
    slot goes on (for each of four cases), and which streams are busy.

    The cases: the slot closes the pass (no, yes), and for each of both, reductions hold layers up
    (no, yes).
    """
    is_left: Bools = (_SETS & _BIT_OF_WORK) > 0
    computes, reduces, gathers, reduced, copies, fetches, leaves, _ = is_left
    runs = is_left.copy()
    # No gather interrupts a reduction.
    runs[GATHERED] &= ~(reduces | copies | (reduced & (_SETS >= _HALF)))
    runs[REDUCED] &= ~(reduces | computes | runs[GATHERED])
    runs[FETCHED] &= ~copies
    runs[LEFT] &= ~reduces
    runs[LEAVES] &= ~(leaves | computes | reduced)
    waits = computes | gathers | copies | fetches | leaves
    goes_on = np.concatenate([waits, waits | reduces, computes, computes])
    return runs, goes_on, np.bitwise_or.reduce(runs * BITS[_STREAM_OF_WORK][:, None], axis=0)


_RUNNING, _GOING_ON, _BUSY = _of_sets()
_HALVES = np.where(_RUNNING[REDUCED], _HALF, _SETS & _HALF)


@lru_cache(maxsize=256)
def _factors_of_sets(table: bytes) -> Floats:
    """The slowdown factors of a slot's work, infinite for work that does not run (8, sets of all
    groups), from those of the streams by group and set of busy streams, as bytes.
    """
    factors = np.frombuffer(table).reshape(len(STREAMS), -1, len(BESIDE))
    of_work = factors[_STREAM_OF_WORK][..., _BUSY]
    return np.where(_RUNNING[:, None], of_work, np.inf).reshape(SLOT_WORK, -1)


# Nothing times infinity, for work that is done, is no number, which ``fmin`` leaves out.
@np.errstate(invalid="ignore")
def slot_after(
    work: Floats, slowed_by: SlowedBy, *, closes: Bools | bool = False, holds: Bools | bool = True
) -> Floats:
    """The seconds of one layer's time slot (C); afterwards ``work`` (8, C) has what is left of it.

    A slot ends when its layer has computed, the next layer's data is there, and the layer before is
    reduced and offloaded. The reduction and then the offload of its own layer start as soon as the
    layer has computed. If the slot lasts longer, because it waits for copies, part of that work is
    done before the next slot, which may then be shorter. Weights that are copied from the host are
    gathered afterwards.

    A slot that ``closes`` a pass ends when its layer has computed. Where reductions do not
    ``hold`` layers up, none waits for the reduction of a layer that offloads nothing.
    """
    factors, elapsed = _factors_of_sets(slowed_by.table.tobytes()), np.zeros(work.shape[1])
    offset = slowed_by.first * (len(_SETS) // len(BESIDE))
    ways = len(_SETS) * (2 * np.asarray(closes, dtype=np.intp) + holds)
    begun = np.zeros(work.shape[1], dtype=np.intp)
    while True:
        is_left = np.bitwise_or.reduce((work > 0) * _BIT_OF_WORK) + begun
        goes_on = _GOING_ON.take(ways + is_left)
        if not np.logical_or.reduce(goes_on):
            return elapsed
        slowed = factors.take(offset + is_left, axis=1)
        ahead = work * slowed
        step = np.fmin.reduce(ahead)
        step[~goes_on] = 0.0
        work -= step / slowed
        np.maximum(work, 0.0, out=work)
        np.putmask(work, ahead <= step, 0.0)
        begun = _HALVES.take(is_left)
        elapsed += step


# Simulates the first forward pass, in which each block's optimizer states are offloaded after its
# step.


class StepTask(NamedTuple):
    """A task of every block in the first forward pass: its stream, and how many blocks ahead of the
    computing block it runs.

    It waits until tasks of other names have ended: for each name, of the block a given number of
    places behind its own block.
    """

    name: str
    stream: str
    ahead: int
    after: Sequence[tuple[str, int]]


# A task may depend on the start of an optimizer step, which has this name.
_BEGUN = "S begun"
# The tasks of a block, in the order in which each stream runs them. A block's states are fetched
# into the buffer of the block two before.
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
ROWS = {name: row for row, name in enumerate(NAMES)}
# The numbers of equal blocks that are simulated, that fill the streams at first, and whose time is
# then measured.
_BLOCKS, _FILLING, MEASURED = 10, 4, 4


# Numbers of ended tasks are packed into one integer, with this many bits for each name and a
# further bit that a subtraction clears if the number is too small.
_COUNT_BITS = 6
ONE_MORE = {name: 1 << (_COUNT_BITS + 1) * place for place, name in enumerate((*NAMES, _BEGUN))}
NONE_ENDED = sum(one << _COUNT_BITS for one in ONE_MORE.values())
# The numbers of ended tasks when the first block has run its optimizer step.
_STEPPED = NONE_ENDED + sum(ONE_MORE[name] for name in ("S", "U", "G<", "O<", _BEGUN))
# If weights are offloaded, this many blocks may run their optimizer steps before the first
# micro-batch arrives; the buffers have no room for more.
AHEAD = 2
# For each name of a task, the number of blocks whose task has ended when a late micro-batch
# arrives.
_ENDED_AHEAD: Mapping[str, int] = {
    **dict.fromkeys(("S", "U", "O>", "P>", _BEGUN), AHEAD),
    **dict.fromkeys(("G<", "O<"), AHEAD + 1),
    **dict.fromkeys(("F", "A>"), 0),
}
STEPPED_AHEAD = NONE_ENDED + sum(ONE_MORE[name] * count for name, count in _ENDED_AHEAD.items())


# A way in which blocks run: the name of the task that they lack ("" for none), and whether their
# weights are gathered for each pass, when the block before starts to compute: after the activations
# of a third block, two before that, have left.
Way = tuple[str, bool]


@dataclass(frozen=True, slots=True)
class Lanes:
    """The tasks of all streams in order, way after way (W) and stream after stream, and what each
    task waits for.

    Each task has the row of ``work`` with its seconds, the counts of ended tasks that it ``needs``,
    what its start and its end add to them, and its block.

    ``first`` (4, W) is each stream's first task, ``stepped`` (4, W) its first task after the first
    block's step, ``late`` (4, W) that after a micro-batch that comes late; each stream's last task
    is followed by one that never becomes ready. ``passes`` are the places of the blocks' forward
    passes among the tasks of arithmetic, which are the same in all ways.
    """

    work: Ints
    needs: Ints
    ends: Ints
    begins: Ints
    blocks: Ints
    first: Ints
    stepped: Ints
    late: Ints
    passes: Ints


@lru_cache(maxsize=64)
def lanes_of(blocks: int, in_turn: int, ways: Sequence[Way] = (("", False),)) -> Lanes:
    """The tasks of ``blocks`` consecutive blocks whose work repeats after ``in_turn`` blocks, for
    each of the ``ways`` in which blocks run.
    """
    lanes: list[tuple[int, int, int, int, int]] = []
    first, stepped, late, passes = [], [], [], []
    for (without, gathers), stream in product(ways, STREAMS):
        first.append(len(lanes))
        ahead = before = 0
        for turn, task in product(range(-1, blocks), TASKS):
            block = turn + task.ahead
            if task.stream != stream or task.name == without or not 0 <= block < blocks:
                continue
            if task.name == "F":
                passes.append(len(lanes))
            ahead += block < _ENDED_AHEAD[task.name]
            before += turn < 0
            # The tasks of blocks before the first one count as ended.
            after = (*task.after, ("A>", 3)) if gathers and task.name == "U" else task.after
            waits = [(name, block - back + 1) for name, back in after if name != without]
            needs = [(ONE_MORE[name], most) for name, most in waits]
            counts = sum(one * most for one, most in needs if most > 0)
            begins = ONE_MORE[_BEGUN] if task.name == "S" else 0
            row = in_turn * NAMES.index(task.name) + block % in_turn
            lanes.append((row, counts, ONE_MORE[task.name], begins, block))
        stepped.append(first[-1] + before)
        late.append(first[-1] + ahead)
        lanes.append((0, NONE_ENDED, 0, 0, -1))
    at = np.array([first, stepped, late]).reshape(3, len(ways), -1).swapaxes(1, 2)
    starts = [*at, np.array(passes[:blocks])]
    return Lanes(*np.array(lanes).T.copy(), *starts)


# Cases that have ended are dropped once less than this share of the cases goes on.
_STILL_PLAYED = 15 / 16


def played(
    work: Floats,
    slowed_by: SlowedBy,
    lanes: Lanes,
    way: Ints,
    begun: tuple[Ints, Ints],
    last: Ints,
    blocks: Ints,
) -> tuple[Floats, Floats]:
    """The seconds at which the forward pass of each block starts and ends (blocks, cases C), up to
    block ``last`` of the ``blocks`` (C) that a case has, which run in its ``way`` (C) of the lanes.

    ``begun`` has each stream's first task (4, C) and the counts of the tasks that have ended before
    (C). ``work`` is as in ``stepping_s``. The tasks of consecutive blocks are simulated in order of
    time: on each stream one after another, each as soon as those that it waits for have ended.
    """
    cases, (at, ended) = work.shape[-1], begun
    work, case = np.ravel(work), np.tile(np.arange(cases), (len(STREAMS), 1))
    # What each stream's task takes yet, infinite for a stream that runs none.
    left, is_running = np.full(at.shape, np.inf), np.zeros(at.shape, dtype=bool)
    now, opening, factors = np.zeros(cases), lanes.first[COMPUTE, way], slowed_by.first
    until_last = opening + lanes.passes[last]
    starts_s, ends_s = np.full((2, lanes.first[1, 0], cases), np.nan)
    while going := np.count_nonzero(is_going := at[COMPUTE] <= until_last):
        if going < _STILL_PLAYED * len(now):
            columns = case, at, left, is_running, ended, now, blocks, opening, until_last, factors
            case, at, left, is_running, ended, now, blocks, opening, until_last, factors = (
                column.compress(is_going, axis=-1) for column in columns
            )
        # Blocks that a case lacks wait for nothing, some tasks only for a step to start.
        needs = lanes.needs.take(at) * (lanes.blocks.take(at) < blocks)
        is_ready = (ended - needs[COMPUTE]) & NONE_ENDED == NONE_ENDED
        ended += lanes.begins.take(at[COMPUTE]) * (is_ready & ~is_running[COMPUTE])
        is_ready = (ended - needs) & NONE_ENDED == NONE_ENDED
        starts = is_ready & ~is_running
        (rows,) = starts.ravel().nonzero()
        rows_of_work = lanes.work.take(at.take(rows))
        left.put(rows, work.take(rows_of_work * cases + case.take(rows)))
        is_running |= starts
        task, (rows,) = at[COMPUTE] - opening, starts[COMPUTE].nonzero()
        starts_s[task[rows], case[COMPUTE, rows]] = now[rows]
        slowed = slowed_by.table.take(factors + sets_of(is_running), axis=1)
        left_s = left * slowed
        elapsed = np.minimum.reduce(left_s)
        elapsed[elapsed == np.inf] = 0.0
        ends = left_s <= elapsed
        left = np.maximum(left - elapsed / slowed, 0.0)
        np.putmask(left, ends, np.inf)
        now += elapsed
        ends_s[task, case[COMPUTE]] = now
        ended += np.add.reduce(lanes.ends.take(at) * ends)
        at += ends
        is_running ^= ends
    return starts_s[lanes.passes], ends_s[lanes.passes]


def stepping_s(work: Floats, slowed_by: SlowedBy) -> Floats:
    """The mean seconds from the start of one block's forward pass to that of the next, in a first
    forward pass with optimizer steps.

    ``work`` has the seconds of each block's tasks alone, in the order of ``NAMES`` (names, B, C).
    The first block has already taken its optimizer step. Blocks are equal, or alternate between two
    types.
    """
    (_, in_turn, cases), last = work.shape, _FILLING + MEASURED
    lanes, way = lanes_of(_BLOCKS, in_turn), np.zeros(cases, dtype=np.intp)
    begun, blocks = (lanes.stepped[:, way], np.full(cases, _STEPPED)), np.full(cases, _BLOCKS)
    starts_s, _ = played(work, slowed_by, lanes, way, begun, np.full(cases, last), blocks)
    return np.asarray((starts_s[last] - starts_s[_FILLING]) / MEASURED)
