"""Kinds of runs and their shares, from measured runs: how far each lies from its prediction.

The runs of one group, a model of one software or a table, are alike: a new model is like a new draw
of models, not of rows. So in each kind a group counts as the root of its number of runs. In kinds
of one software groups are its models, in kinds of an engine or of any engine they are tables.
"""

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from mistlab.cost.confidence import ANY, ENGINE, TAIL, KnownKind, RunKind, Shares, Sureness
from mistlab.job.prediction import Prediction

# A kind of more runs is told by as many shares, each of which stands for as many runs.
MOST_SHARES = 40
# Sums of weights are rounded by less.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How far a measured run lies outside of what is predicted, as a share of its way: below 0 for
    a run that is faster."""

    kind: RunKind
    table: str
    model: str
    gpus: int
    share: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Range:
    """The shortest and the longest time that is predicted of a run, before any doubt: the longest
    is that on the slowest cluster known. ``way`` is the unit of doubt (``RunKind.way``)."""

    least_s: float
    longest_s: float
    way: float

    @classmethod
    def of(cls, prediction: Prediction, above: float, way: float) -> Self:
        """The range of a prediction whose upper bound is ``above`` times the longest time."""
        least_s = prediction.iteration_s
        longest_s = max(least_s, prediction.iteration_s_high / above)
        return cls(least_s=least_s, longest_s=longest_s, way=way)

    def miss(self, measured_s: float) -> float:
        """The share of the way by which a measurement lies outside, below 0 if it is faster."""
        nearest_s = min(max(measured_s, self.least_s), self.longest_s)
        return math.log(measured_s / nearest_s) / self.way

    def bounds_s(self, shares: Shares) -> tuple[float, float]:
        """Bounds that lie shares of the way outside of the range."""
        below, above = shares.around(self.way)
        return self.least_s * below, self.longest_s * above

    def bounded(self, prediction: Prediction, shares: Shares) -> Prediction:
        """A prediction with bounds that lie shares of the way outside of the range."""
        low_s, high_s = self.bounds_s(shares)
        return replace(prediction, iteration_s_low=low_s, iteration_s_high=high_s)


def sureness_of(misses: Iterable[Miss], source: str = "") -> Sureness:
    """The kinds of runs that are known from measured ones."""
    together: dict[str, list[Miss]] = defaultdict(list)
    for one in misses:
        for name in one.kind.names:
            together[name].append(one)
    kinds = tuple(_known(name, some) for name, some in sorted(together.items()))
    return Sureness(source=source, kinds=kinds)


def _known(name: str, misses: Sequence[Miss]) -> KnownKind:
    """The kind of some runs."""
    models = {(one.kind.software, one.model) for one in misses}
    of_tables = name.startswith((ANY, ENGINE))
    groups = [one.table if of_tables else one.model for one in misses]
    return KnownKind(
        name=name,
        shares=_equally_likely([one.share for one in misses], groups),
        runs=len(misses),
        models=len(models),
        groups=len(set(groups)),
        most_gpus=max(one.gpus for one in misses),
    )


def _equally_likely(shares: Sequence[float], groups: Sequence[str]) -> tuple[float, ...]:
    """At most so many shares that are as likely: the quantiles in the middle of equal parts of all
    runs, where a group counts as the root of its number of runs."""
    _, group, runs = np.unique(groups, return_inverse=True, return_counts=True)
    order = np.argsort(shares, kind="stable")
    passed = np.cumsum((runs**-0.5)[group][order])
    parts = min(MOST_SHARES, len(shares))
    middles = (np.arange(parts) + 0.5) / parts * passed[-1]
    places = np.searchsorted(passed, middles - ROUNDING)
    return tuple(np.take(shares, order[places]).round(4).tolist())


def left_out(misses: Sequence[Miss], groups: Sequence[str]) -> Iterator[Shares | None]:
    """For each run the shares that are known from the runs of other groups, if there are any."""
    without = {
        group: sureness_of(m for m, own in zip(misses, groups, strict=True) if own != group)
        for group in set(groups)
    }
    for one, group in zip(misses, groups, strict=True):
        known = without[group]
        yield known.shares(one.kind, one.gpus) if known.kinds else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """How a run's measurement lies to its bounds: whether within, and what the bounds cost.

    ``score`` is the interval score of the logarithms of times (Gneiting and Raftery, 2007): the
    width, and by how far the measurement lies outside, counted 20 times for bounds of 90 %. Bounds
    that are honest and no wider than needed have the lowest mean.
    """

    width: float
    is_inside: bool
    score: float

    @classmethod
    def of(cls, measured_s: float, bounds_s: tuple[float, float]) -> Self:
        """How a measurement lies to a lower and an upper bound."""
        low_s, high_s = bounds_s
        outside = max(1.0, low_s / measured_s, measured_s / high_s)
        width = high_s / low_s
        score = math.log(width) + math.log(outside) / TAIL
        return cls(width=width, is_inside=outside == 1, score=score)
