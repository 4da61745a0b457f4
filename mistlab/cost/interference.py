"""How long work on the four streams takes while it runs side by side.

While a set of streams is busy, each of them runs slower by a factor that depends on the set and on
the group of GPUs that communicates; when one is done, the others go on under the factors of the
smaller set. What comes out lies between the longest part and the sum of all.

Axes: C cases; the four streams last, in the order of ``mistlab.interference.STREAMS``.
"""

import numpy as np
from numpy.typing import NDArray

from mistlab.interference import STREAMS, GroupSlowdowns

BITS = np.array([1, 2, 4, 8])

Factors = NDArray[np.float64]


def factors_of(group: GroupSlowdowns) -> Factors:
    """Factors (16, 4) by the set of busy streams, a bit for each stream."""
    table = np.ones((16, len(STREAMS)))
    for slowdown in group.slowdowns:
        chosen = [STREAMS.index(stream) for stream in slowdown.streams]
        table[BITS[chosen].sum(), chosen] = slowdown.factors
    return table


def overlapped(alone: NDArray[np.float64], factors: Factors) -> NDArray[np.float64]:
    """Seconds (C) until all is done of work that would take ``alone`` (C, 4) by itself."""
    left = alone.copy()
    elapsed = np.zeros(len(alone))
    for _ in STREAMS:
        slowed = factors[(left > 0) @ BITS]
        ends = np.where(left > 0, left * slowed, np.inf)
        first = np.min(ends, axis=1)
        step = np.where(np.isfinite(first), first, 0.0)
        left = np.where(ends <= step[:, None], 0.0, np.maximum(left - step[:, None] / slowed, 0.0))
        elapsed += step
    bounded_ = np.clip(elapsed, alone.max(axis=1), alone.sum(axis=1))
    return np.asarray(bounded_)
