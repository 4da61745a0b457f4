"""Fitting slowdowns to measurements of streams that ran together.

Nested: pairs first, then three streams given the pairs that they end in, then all four. Each set's
factors minimise the mean relative error of the rows with that set.

Axes: C rows; the four streams last.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from mistlab.cost.interference import BITS, Factors, factors_of, overlapped
from mistlab.interference import SHARED_SETS, STREAMS, GroupSlowdowns, Slowdown

# Two starts: streams that hardly touch, and streams that share one resource.
STARTS = (0.15, 0.8)
SMOOTH = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverlapRows:
    """Seconds that each stream's work took alone (C, 4), and all together (C)."""

    alone: NDArray[np.float64]
    together: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.together)

    def chosen(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> "OverlapRows":
        """Some of the rows."""
        return OverlapRows(alone=self.alone[rows], together=self.together[rows])

    @property
    def shared(self) -> NDArray[np.bool_]:
        """Which rows have more than one stream busy."""
        return np.asarray((self.alone > 0).sum(axis=1) > 1)


def fit(rows: OverlapRows, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The slowdowns of one shape of group."""
    factors = np.ones((16, len(STREAMS)))
    sets = (rows.alone > 0) @ BITS
    slowdowns = []
    for streams in SHARED_SETS:
        chosen = [STREAMS.index(stream) for stream in streams]
        index = int(BITS[chosen].sum())
        here = rows.chosen(sets == index)
        if not len(here):
            continue
        factors[index, chosen] = _fit_set(here, factors, index, chosen)
        slowdowns.append(
            Slowdown(
                streams=streams,
                factors=tuple(round(float(f), 4) for f in factors[index, chosen]),
            )
        )
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def errors(rows: OverlapRows, group: GroupSlowdowns) -> NDArray[np.float64]:
    """Relative errors (C), signed: predicted over measured, less one."""
    return np.asarray(overlapped(rows.alone, factors_of(group)) / rows.together - 1)


def _fit_set(
    rows: OverlapRows, factors: Factors, index: int, chosen: list[int]
) -> NDArray[np.float64]:
    trial = factors.copy()

    def loss(excess: NDArray[np.float64]) -> float:
        trial[index, chosen] = 1 + np.abs(excess)
        error = overlapped(rows.alone, trial) / rows.together - 1
        return float(np.mean(np.sqrt(error**2 + SMOOTH**2)))

    options = {"maxiter": 400, "xatol": 1e-3, "fatol": 1e-6}
    found = [
        minimize(loss, np.full(len(chosen), start), method="Nelder-Mead", options=options)
        for start in STARTS
    ]
    best = min(found, key=lambda result: float(result.fun))
    return np.asarray(1 + np.abs(best.x))
