"""How long work on the four streams of a GPU takes while it runs side by side.

While a set of streams is busy, each of them runs slower by a factor that depends on the set and on
the group of GPUs that communicates; when one is done, the others go on under the factors of the
smaller set. What comes out lies between the longest part and the sum of all.

More work on a stream may make the whole shorter: while two kinds of copies run, communication can
slow a third less. So ``lowered`` factors give a time that no greater work on the same streams
undercuts (docs/decisions/0035-searches-that-prove.md).

Axes: C cases; the four streams last, in the order of ``mistlab.machine.slowdowns.STREAMS``.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.slowdowns import STREAMS, GroupSlowdowns

BITS = np.array([1, 2, 4, 8])
# All sets of streams.
BESIDE = range(1 << len(STREAMS))

# Cases worked on together: few enough that what is computed between stays in the cache.
BLOCK = 8192

LINK = STREAMS.index("gpu_to_gpu")

Factors = NDArray[np.float64]


def factors_of(group: GroupSlowdowns) -> Factors:
    """Factors (16, 4) by the set of busy streams, a bit for each stream."""
    table = np.ones((16, len(STREAMS)))
    for slowdown in group.slowdowns:
        chosen = [STREAMS.index(stream) for stream in slowdown.streams]
        table[BITS[chosen].sum(), chosen] = slowdown.factors
    return table


def lowered(factors: Factors) -> Factors:
    """Factors (256, 4) by the streams that had work at first (times 16) and those still busy: the
    least that a stream has beside these and any others that had work at first."""
    sets = np.arange(len(factors))
    tables = []
    for first in sets:
        table = np.where(((sets & ~first) == 0)[:, None], factors, np.inf)
        for bit in BITS:
            without = sets[(sets & bit) == 0]
            table[without] = np.minimum(table[without], table[without + bit])
        # Streams that are not busy have no factor.
        tables.append(np.where(np.isfinite(table) & _is_in(sets), table, 1.0))
    return np.concatenate(tables)


def _is_in(sets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each stream (4) is in each set."""
    return np.asarray((sets[:, None] & BITS) > 0)


def overlapped(
    alone: NDArray[np.float64], factors: Factors, awaited: Sequence[str] = STREAMS
) -> NDArray[np.float64]:
    """Seconds (C) of work that would take ``alone`` (C, 4) by itself, until the ``awaited`` streams
    are done with theirs; the factors may be ``lowered``."""
    chosen = np.array([STREAMS.index(stream) for stream in awaited])
    by_stream = np.ascontiguousarray(factors.T)
    # What nothing runs beside takes as long as it does by itself.
    elapsed = alone[:, chosen].sum(axis=1)
    several = np.flatnonzero((alone > 0).sum(axis=1) > 1)
    for start in range(0, len(several), BLOCK):
        block = several[start : start + BLOCK]
        elapsed[block] = _elapsed(np.ascontiguousarray(alone[block].T), by_stream, chosen)
    return np.asarray(elapsed)


def _elapsed(
    alone: NDArray[np.float64], factors: Factors, awaited: NDArray[np.intp]
) -> NDArray[np.float64]:
    """Seconds (C) of ``alone`` (4, C) under factors (4, 16): streams first, for speed."""
    left = alone
    elapsed = np.zeros(alone.shape[1])
    begun = np.uint8(16) * _sets(alone > 0) if factors.shape[1] > len(BESIDE) else np.uint8(0)
    for _ in STREAMS:
        busy = left > 0
        slowed = factors.take(begun + _sets(busy), axis=1)
        ends = np.where(busy, left * slowed, np.inf)
        first = ends.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        left = np.where(ends <= step, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += np.where(busy[awaited].any(axis=0), step, 0.0)
    return np.asarray(np.clip(elapsed, alone[awaited].max(axis=0), alone.sum(axis=0)))


def beside_endless(
    alone: NDArray[np.float64], factors: Factors
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Seconds (C) until the other streams are done with work of ``alone`` (C, 4) while the link
    between GPUs never rests, and the work (C) that the link does meanwhile."""
    by_stream = np.ascontiguousarray(factors.T)
    left = np.ascontiguousarray(alone.T)
    left[LINK] = 0.0
    elapsed, done = np.zeros(len(alone)), np.zeros(len(alone))
    for _ in STREAMS[1:]:
        busy = left > 0
        slowed = by_stream.take(_sets(busy) | np.uint8(1 << LINK), axis=1)
        ends = np.where(busy, left * slowed, np.inf)
        first = ends.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        left = np.where(ends <= step, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += step
        done += step / slowed[LINK]
    return elapsed, done


def link_after(alone: NDArray[np.float64], factors: Factors, first: str) -> NDArray[np.float64]:
    """Seconds (C) until the link between GPUs is done, while at first one other stream works, and
    the others begin when it is done; zero where the link is done by then."""
    found = np.zeros(len(alone))
    one = STREAMS.index(first)
    rows = np.flatnonzero((alone[:, LINK] > 0) & (alone[:, one] > 0))
    left = alone[rows]
    link, other = factors[BITS[[LINK, one]].sum(), [LINK, one]]
    before = left[:, one] * other
    left[:, LINK] -= before / link
    left[:, one] = 0.0
    last = np.flatnonzero(left[:, LINK] > 0)
    found[rows[last]] = before[last] + overlapped(left[last], factors, (STREAMS[LINK],))
    return found


def _sets(busy: NDArray[np.bool_]) -> NDArray[np.uint8]:
    bits = busy.view(np.uint8)
    return np.asarray(bits[0] | bits[1] << 1 | bits[2] << 2 | bits[3] << 3)
