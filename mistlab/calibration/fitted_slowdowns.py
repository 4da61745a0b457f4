"""Fits interference factors (how much streams slow one another) to measurements of overlapping
streams.

Each set of transfers (copies and communication) has parameters: the sum of the transfers' speeds,
how they share this sum, and how much compute and the transfers slow one another down. They minimise
the mean relative error of the measurements of that set. Smaller sets are fitted first: once a
stream of a larger set has ended, the others run on as a smaller set.

Array axes: C is the number of measurements; the last axis has the four streams.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations, product

import numpy as np
from scipy.optimize import minimize

from mistlab.core.arrays import Bools, Floats
from mistlab.core.columns import ColumnSet
from mistlab.cost.kernels import slowdowns_of_group
from mistlab.cost.side_by_side import BITS, factors_of, overlapped
from mistlab.machine.slowdowns import (
    COMPUTE,
    SHARED_SETS,
    STREAMS,
    GroupSlowdowns,
    Interference,
    Slowdown,
)

TRANSFERS = tuple(STREAMS.index(stream) for stream in STREAMS if stream != "compute")

# Starting values of the fitted slowdown factors: the fit starts from each of them, because its
# error has flat regions.
COMPUTE_STARTS = (0.15, 0.8)
TAKEN_STARTS = (0.02, 0.5)
CAPACITY_STARTS = (0.1, 0.6)
SHARE_STARTS = (-0.4, 0.4)

# Where the fitted speeds of overlapping streams add up to less than this (a stream alone has speed
# 1), they are scaled to add up to one, as if streams took turns: no GPU was measured to be slower.
LEAST_SPEED = 0.8
SMOOTH = 1e-3
# The weight of a prior in the fit, which decides slowdown factors that measurements hardly
# determine: it says that transfers share the link equally, and that compute does not slow them.
PRIOR = 1e-3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class OverlapRows(ColumnSet):
    """Measurements of four streams (compute and three kinds of transfer): the seconds of each
    stream alone, and of all of them overlapping. Arrays have a row for each measurement.
    """

    alone: Floats
    together: Floats

    def __len__(self) -> int:
        return len(self.together)

    @property
    def shared(self) -> Bools:
        """A mask of the measurements in which at least two streams have work to overlap."""
        return np.asarray((self.alone > 0).sum(axis=1) > 1)


def fit(rows: OverlapRows, *, gpus_in_node: int, nodes: int) -> GroupSlowdowns:
    """The factors by which overlapping streams slow one another, for communication groups of one
    shape (GPUs in a node, nodes).
    """
    factors = np.ones((16, len(STREAMS)))
    sets = (rows.alone > 0) @ BITS
    for size in range(1, len(STREAMS)):
        for transfers in combinations(TRANSFERS, size):
            without = int(BITS[list(transfers)].sum())
            here = rows.chosen(np.isin(sets, [without, without + BITS[COMPUTE]]) & rows.shared)
            if len(here):
                factors = _with_fitted_factors(here, factors, transfers)
    slowdowns = []
    for streams in SHARED_SETS:
        chosen = [STREAMS.index(stream) for stream in streams]
        index = int(BITS[chosen].sum())
        if index in sets:
            rounded_factors = tuple(round(float(factor), 4) for factor in factors[index, chosen])
            slowdowns.append(Slowdown(streams=streams, factors=rounded_factors))
    return GroupSlowdowns(gpus_in_node=gpus_in_node, nodes=nodes, slowdowns=tuple(slowdowns))


def errors(rows: OverlapRows, group: GroupSlowdowns) -> Floats:
    """The relative errors of predicted overlapped times, one for each measurement: predicted over
    measured seconds, minus one.
    """
    return np.asarray(overlapped(rows.alone, factors_of(group)) / rows.together - 1)


def combined(groups: Sequence[GroupSlowdowns], rows: Sequence[OverlapRows]) -> Interference:
    """The slowdown factors of a machine's overlapping streams, from factors fitted for each shape
    of communication group.

    ``shared_links`` (whether communication takes the links of copies to and from the host) is
    chosen so that the factors of one shape are best predicted from those of the other shapes.
    """
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
    """The slowdown factors predicted for communication groups of one shape from those of the
    machine's other shapes.
    """
    others = tuple(other for other in machine.groups if other is not group)
    without = Interference(shared_links=machine.shared_links, groups=others)
    return slowdowns_of_group(without, gpus_in_node=group.gpus_in_node, nodes=group.nodes)


def _with_fitted_factors(rows: OverlapRows, factors: Floats, transfers: tuple[int, ...]) -> Floats:
    """The slowdown factors of all sets of streams, after those of one set of transfers, with and
    without compute beside it, were fitted to measurements.
    """

    def loss(parameters: Floats) -> float:
        error = (
            overlapped(rows.alone, _with_factors(factors, transfers, parameters)) / rows.together
            - 1
        )
        unlikely = parameters[1] ** 2 + np.sum(parameters[3:] ** 2)
        return float(np.mean(np.sqrt(error**2 + SMOOTH**2)) + PRIOR * unlikely)

    fits = [
        minimize(
            loss,
            start,
            method="Nelder-Mead",
            options={"maxiter": 120 * len(start), "xatol": 2e-3, "fatol": 1e-6, "adaptive": True},
        )
        for start in _starting_points(len(transfers))
    ]
    best = min(fits, key=lambda result: float(result.fun))
    return _in_turn_at_worst(_with_factors(factors, transfers, best.x), transfers)


def _in_turn_at_worst(factors: Floats, transfers: tuple[int, ...]) -> Floats:
    """The slowdown factors of streams, scaled so that overlapping streams take no longer than one
    after another, if the fit made them much longer.
    """
    table = factors.copy()
    index = int(BITS[list(transfers)].sum())
    for busy, streams in ((index, transfers), (index + BITS[COMPUTE], (COMPUTE, *transfers))):
        chosen = list(streams)
        speed = float((1 / table[busy, chosen]).sum())
        if speed < LEAST_SPEED:
            table[busy, chosen] *= speed
    return table


def _starting_points(transfers: int) -> list[tuple[float, ...]]:
    if transfers == 1:
        return list(product(COMPUTE_STARTS, TAKEN_STARTS))
    return [
        (COMPUTE_STARTS[0], TAKEN_STARTS[0], capacity, *[share] * (transfers - 1))
        for capacity, share in product(CAPACITY_STARTS, SHARE_STARTS)
    ]


def _with_factors(factors: Floats, transfers: tuple[int, ...], parameters: Floats) -> Floats:
    """A copy of the slowdown factors of all sets of streams, in which one set of transfers has the
    factors that a fit's parameters stand for.

    The first parameter is compute's slowdown factor, less one. The second is the logarithm of the
    factor by which compute slows the transfers. A set of several transfers also has the logarithm
    of the sum of their speeds without compute, and for each transfer but the first the logarithm of
    its time relative to the first's.
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
