"""Fitting slowdowns to measurements of streams that ran together.

For each set of copies and communication, with and without compute beside them: what they get
through together and how they share it are parameters, and compute slows all of them alike. Nested,
smaller sets first, since larger ones end in them; each set's parameters minimise the mean relative
error of its rows.

Axes: C rows; the four streams last.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import minimize

from mistlab.cost.side_by_side import BITS, Factors, factors_of, overlapped
from mistlab.machine.slowdowns import SHARED_SETS, STREAMS, GroupSlowdowns, Interference, Slowdown

COMPUTE = STREAMS.index("compute")
TRANSFERS = tuple(STREAMS.index(stream) for stream in STREAMS if stream != "compute")

# Where searches start; the error has flat places, so that one start is not enough.
COMPUTE_STARTS = (0.15, 0.8)
TAKEN_STARTS = (0.02, 0.5)
CAPACITY_STARTS = (0.1, 0.6)
SHARE_STARTS = (-0.4, 0.4)

SMOOTH = 1e-3
# Rows say little of how streams share what they all finish anyway: then alike, and not by compute.
PRIOR = 1e-3

Values = NDArray[np.float64]


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
    """The slowdowns of one shape of group, for the sets of streams that rows have."""
    factors = np.ones((16, len(STREAMS)))
    sets = (rows.alone > 0) @ BITS
    for size in range(1, len(STREAMS)):
        for transfers in combinations(TRANSFERS, size):
            without = int(BITS[list(transfers)].sum())
            here = rows.chosen(np.isin(sets, [without, without + BITS[COMPUTE]]) & rows.shared)
            if len(here):
                factors = _fitted(here, factors, transfers)
    slowdowns = []
    for streams in SHARED_SETS:
        chosen = [STREAMS.index(stream) for stream in streams]
        index = int(BITS[chosen].sum())
        if index in sets:
            found = tuple(round(float(factor), 4) for factor in factors[index, chosen])
            slowdowns.append(Slowdown(streams=streams, factors=found))
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def errors(rows: OverlapRows, group: GroupSlowdowns) -> NDArray[np.float64]:
    """Relative errors (C), signed: predicted over measured, less one."""
    return np.asarray(overlapped(rows.alone, factors_of(group)) / rows.together - 1)


def combined(groups: Sequence[GroupSlowdowns], rows: Sequence[OverlapRows]) -> Interference:
    """The shapes of a machine, with ``shared_links`` as they derive one another's rows better."""
    options = [
        Interference(shared_links=shared_links, groups=tuple(groups))
        for shared_links in (False, True)
    ]
    if len(groups) == 1:
        return options[0]

    def mean_error(machine: Interference) -> float:
        return float(
            np.mean(
                [
                    np.abs(errors(of_shape, left_out(machine, group))).mean()
                    for group, of_shape in zip(groups, rows, strict=True)
                ]
            )
        )

    return min(options, key=mean_error)


def left_out(machine: Interference, group: GroupSlowdowns) -> GroupSlowdowns:
    """What the other shapes of a machine say of this one."""
    others = tuple(other for other in machine.groups if other is not group)
    return Interference(shared_links=machine.shared_links, groups=others).of_group(
        gpus_in_node=group.gpus_in_node, nodes=group.nodes
    )


def _fitted(rows: OverlapRows, factors: Factors, transfers: tuple[int, ...]) -> Factors:
    """The table with the sets of these transfers, alone and beside compute."""

    def loss(parameters: Values) -> float:
        error = overlapped(rows.alone, _with(factors, transfers, parameters)) / rows.together - 1
        unlikely = parameters[1] ** 2 + np.sum(parameters[3:] ** 2)
        return float(np.mean(np.sqrt(error**2 + SMOOTH**2)) + PRIOR * unlikely)

    found = [
        minimize(
            loss,
            start,
            method="Nelder-Mead",
            options={"maxiter": 120 * len(start), "xatol": 2e-3, "fatol": 1e-6, "adaptive": True},
        )
        for start in _starts(len(transfers))
    ]
    best = min(found, key=lambda result: float(result.fun))
    return _with(factors, transfers, best.x)


def _starts(transfers: int) -> list[tuple[float, ...]]:
    if transfers == 1:
        return list(product(COMPUTE_STARTS, TAKEN_STARTS))
    return [
        (COMPUTE_STARTS[0], TAKEN_STARTS[0], capacity, *[share] * (transfers - 1))
        for capacity, share in product(CAPACITY_STARTS, SHARE_STARTS)
    ]


def _with(factors: Factors, transfers: tuple[int, ...], parameters: Values) -> Factors:
    """The table with the sets of some transfers as the parameters have them.

    Parameters: compute's excess; what compute takes from each transfer's speed, as a logarithm; of
    several transfers also logarithms of the sum of their speeds, and of how much slower each but
    the first is than the first.
    """
    compute, taken, *rest = parameters
    alone = np.ones(1)
    if len(transfers) > 1:
        slower = np.exp([0.0, *rest[1:]])
        alone = np.maximum(slower * np.sum(1 / slower) / np.exp(rest[0]), 1)
    table = factors.copy()
    index = BITS[list(transfers)].sum()
    table[index, transfers] = alone
    table[index + BITS[COMPUTE], transfers] = np.maximum(alone * np.exp(abs(taken)), 1)
    table[index + BITS[COMPUTE], COMPUTE] = 1 + abs(compute)
    return table
