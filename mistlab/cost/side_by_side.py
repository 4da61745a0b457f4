"""How long work on the four streams of a GPU takes while it runs side by side.

While a set of streams is busy, each stream of the set runs slower by a factor. The factor depends
on the set, and on the shape of the group of GPUs that communicates. When a stream has done its
work, the others go on under the factors of the smaller set. The time of all work is never shorter
than the longest stream's work alone, and never longer than the sum.

More work on one stream may make the whole shorter: while two kinds of copies run, communication can
slow a third less. ``lowered`` factors give a lower bound instead, for this work and for any greater
work on the same streams. ``raised`` factors give an upper bound, for this work and for any lesser
work (docs/decisions/0035-searches-that-prove.md).

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
    """Factors (256, 4) that bound ``factors`` from below and grow with the set of busy streams.

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
        # Streams that are not busy have no factor.
        tables.append(np.where(np.isfinite(table) & _is_in(sets), table, 1.0))
    return np.concatenate(tables)


def raised(factors: Factors) -> Factors:
    """Factors (16, 4) by the set of busy streams, for sets with the link between GPUs: the most
    that a stream has beside the link and any of these streams."""
    sets = np.arange(len(factors))
    table = np.where(_is_in(sets) & ((sets & (1 << LINK)) > 0)[:, None], factors, 1.0)
    for bit in BITS:
        with_it = sets[(sets & bit) > 0]
        table[with_it] = np.maximum(table[with_it], table[with_it - bit])
    return table


def _is_in(sets: NDArray[np.int64]) -> NDArray[np.bool_]:
    """Whether each stream (4) is in each set."""
    return np.asarray((sets[:, None] & BITS) > 0)


def overlapped(
    alone: NDArray[np.float64], factors: Factors, awaited: Sequence[str] = STREAMS
) -> NDArray[np.float64]:
    """Seconds (C) until the ``awaited`` streams have done their work, where all streams work at the
    same time. The work of each stream takes ``alone`` (C, 4) by itself. Factors may be
    ``lowered``."""
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
    """Seconds (C) until all other streams have done their work of ``alone`` (C, 4) while the link
    between GPUs never rests; and the work (C) that the link does in this time. The factors may be
    ``lowered`` or ``raised``."""
    by_stream = np.ascontiguousarray(factors.T)
    left = np.ascontiguousarray(alone.T)
    left[LINK] = 0.0
    elapsed, done = np.zeros(len(alone)), np.zeros(len(alone))
    link = np.uint8(1 << LINK)
    begun = np.uint8(16) * (_sets(left > 0) | link) if len(factors) > len(BESIDE) else np.uint8(0)
    for _ in STREAMS[1:]:
        busy = left > 0
        slowed = by_stream.take(begun + (_sets(busy) | link), axis=1)
        ends = np.where(busy, left * slowed, np.inf)
        first = ends.min(axis=0)
        step = np.where(np.isfinite(first), first, 0.0)
        left = np.where(ends <= step, 0.0, np.maximum(left - step / slowed, 0.0))
        elapsed += step
        done += step / slowed[LINK]
    return elapsed, done


def link_after(alone: NDArray[np.float64], factors: Factors, first: str) -> NDArray[np.float64]:
    """Seconds (C) until the link between GPUs is done, if the stream ``first`` works beside it, and
    the other streams begin when ``first`` is done. Zero where the link is done before they begin.
    """
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
