"""Fits of collectives' latencies and shares to measured rows, and errors of clusters left out."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.optimize import least_squares

from experiments.networks.collective_tables import CollectiveRow, columns_of
from mistlab.core.arrays import Bools, Floats
from mistlab.network.collective_times import CollectiveNumbers, Fitted

# Logarithms: how far a row scatters, and how far numbers and factors of generations may go from
# where the fit begins.
SCATTER, NUMBER_SPREAD, GENERATION_SPREAD, NETWORK_SPREAD = 0.2, 0.5, 0.3, 1.0
# What chunks can cost at most, however many there are: twice the root of latency times transfer.
MOST_CHUNKS = 2.0
# A cluster counts as this power of the number of its rows: neither all alike, nor each row.
CLUSTER_POWER = 0.3
# 90 % of measurements of clusters that were left out lie within these.
QUANTILES = (0.05, 0.95)


@dataclass(frozen=True, slots=True, kw_only=True)
class ClustersLeftOut:
    """Measured over predicted seconds of each row, by a fit without its cluster."""

    rows: Sequence[CollectiveRow]
    over: Floats
    kinds: Sequence[str]

    @property
    def errors(self) -> Floats:
        """Absolute errors of predictions, as shares of what was measured."""
        return np.abs(1 / self.over - 1)

    def of(self, cluster: str) -> Bools:
        """Which rows are a cluster's."""
        return np.array([row.cluster == cluster for row in self.rows])


def fit(rows: Sequence[CollectiveRow], start: Fitted) -> Fitted:
    """Numbers that predict measured rows best, near where the fit starts; bounds as they were.

    Exchanges over sockets have rates of their own, and count for nothing here.
    """
    rows = [row for row in rows if row.network != "sockets"]
    columns = columns_of(rows)
    logs = np.log([_measured_s(row) for row in rows])
    sizes = Counter(row.cluster for row in rows)
    weights = np.array([sizes[row.cluster] ** ((CLUSTER_POWER - 1) / 2) for row in rows])
    generations = sorted({row.links.generation for row in rows})
    networks = sorted({row.network for row in rows if row.nodes > 1})
    names = CollectiveNumbers.names()
    begin = np.log([getattr(start.numbers, name) for name in names])
    begin = np.concatenate([begin, np.zeros(2 * len(generations) + len(networks))])
    spread = np.full(len(begin), GENERATION_SPREAD)
    spread[: len(names)] = NUMBER_SPREAD
    spread[len(begin) - len(networks) :] = NETWORK_SPREAD

    def of_point(point: Floats) -> Fitted:
        values = [float(value) for value in np.exp(point)]
        factors = iter(values[len(names) :])
        return Fitted(
            numbers=CollectiveNumbers(**dict(zip(names, values, strict=False))),
            latency={name: next(factors) for name in generations},
            host={name: next(factors) for name in generations},
            network={name: next(factors) for name in networks},
            bounds=start.bounds,
        )

    def residuals(point: Floats) -> Floats:
        off = weights * (np.log(columns.seconds(of_point(point))) - logs) / SCATTER
        return np.concatenate([off, (point - begin) / spread])

    most = np.full(len(begin), np.inf)
    most[: len(names)] = [np.log(MOST_CHUNKS) if "chunks" in name else np.inf for name in names]
    found = least_squares(
        residuals, begin, bounds=(-np.inf, most), loss="cauchy", x_scale=0.3, max_nfev=80
    )
    return of_point(found.x)


def left_out(rows: Sequence[CollectiveRow], start: Fitted) -> ClustersLeftOut:
    """Each cluster predicted by a fit to all others."""
    over = np.empty(len(rows))
    for cluster in dict.fromkeys(row.cluster for row in rows):
        is_out = np.array([row.cluster == cluster for row in rows])
        others = [row for row in rows if row.cluster != cluster]
        fitted = fit(others, start) if others else start
        own = [row for row in rows if row.cluster == cluster]
        measured = np.array([_measured_s(row) for row in own])
        over[is_out] = measured / columns_of(own).seconds(fitted)
    return ClustersLeftOut(
        rows=rows, over=over, kinds=[str(kind) for kind in columns_of(rows).kinds]
    )


def bounds_of(apart: ClustersLeftOut) -> Mapping[str, tuple[float, float]]:
    """Bounds of each kind of row by what was left out, each cluster counted by its fit's weight."""
    sizes = Counter(row.cluster for row in apart.rows)
    weights = np.array([sizes[row.cluster] ** (CLUSTER_POWER - 1) for row in apart.rows])
    kinds = np.array(apart.kinds)
    return {
        kind: _quantiles(apart.over[kinds == kind], weights[kinds == kind])
        for kind in sorted(set(apart.kinds))
    }


def _quantiles(values: Floats, weights: Floats) -> tuple[float, float]:
    order = np.argsort(values)
    share = np.cumsum(weights[order]) / weights.sum()
    low, high = np.interp(QUANTILES, share, values[order])
    return float(min(low, 1.0)), float(max(high, 1.0))


def _measured_s(row: CollectiveRow) -> float:
    assert row.measured_us is not None
    return 1e-6 * row.measured_us
