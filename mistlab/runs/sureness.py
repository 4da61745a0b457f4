"""Kinds of runs and their shares, from measured runs: how far each lies from its prediction.

A kind of one software needs several runs of several models. A kind of an engine, or of any
software, is that of tables: each table with several runs of the kind counts as much as any other,
because a new table is like a new draw of tables, not of rows. The kind of all runs has the share of
the least sure table, because it stands for runs that are like none that were measured.
"""

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Self

from mistlab.cost.sureness import ANY, ENGINE, KnownKind, RunKind, Sureness
from mistlab.values.prediction import Prediction

# The share of measurements that bounds hold.
SHARE = 0.9
# A kind counts from so many runs of so many models on, and a table from so many runs of a kind on.
FEWEST_RUNS, FEWEST_MODELS = 8, 2
# A kind of any software counts from so many tables on.
FEWEST_TABLES = 2
# Below this number of runs the 90th percentile of a table is its largest error.
FEWEST_OF_ONE_TABLE = 10
# Sums of weights are rounded by less.
ROUNDING = 1e-9


@dataclass(frozen=True, slots=True, kw_only=True)
class Miss:
    """How far a measured run lies outside of what is predicted, as a share of its way."""

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
        """The share of the way, at least 0, by which a measurement lies outside."""
        factor = max(1.0, self.least_s / measured_s, measured_s / self.longest_s)
        return math.log(factor) / self.way

    def bounded(self, prediction: Prediction, share: float) -> Prediction:
        """A prediction with bounds that lie a share of the way outside of the range."""
        factor = math.exp(share * self.way)
        return replace(
            prediction,
            iteration_s_low=self.least_s / factor,
            iteration_s_high=self.longest_s * factor,
        )

    def width(self, share: float) -> float:
        """The upper bound over the lower one, with bounds a share of the way outside."""
        return math.exp(2 * share * self.way) * self.longest_s / self.least_s


def sureness_of(misses: Iterable[Miss], source: str = "") -> Sureness:
    """The kinds of runs that are known from measured ones."""
    together: dict[str, list[Miss]] = defaultdict(list)
    for one in misses:
        for name in one.kind.names:
            together[name].append(one)
    kinds = (_known(name, some) for name, some in sorted(together.items()))
    return Sureness(source=source, kinds=tuple(one for one in kinds if one is not None))


def _known(name: str, misses: Sequence[Miss]) -> KnownKind | None:
    """The kind of some runs; None if too few of them were measured."""
    if name == ANY:
        return _kind(name, _of_least_sure_table(misses), misses)
    of_tables = name.startswith((ANY, ENGINE))
    if of_tables:
        runs = Counter(one.table for one in misses)
        misses = [one for one in misses if runs[one.table] >= FEWEST_RUNS]
    if len(misses) < FEWEST_RUNS or len(_models(misses)) < FEWEST_MODELS:
        return None
    if name.startswith(ANY) and len({one.table for one in misses}) < FEWEST_TABLES:
        return None
    return _kind(name, _quantile(misses, of_tables=of_tables), misses)


def _kind(name: str, share: float, misses: Sequence[Miss]) -> KnownKind:
    return KnownKind(
        name=name,
        share=round(share, 4),
        runs=len(misses),
        models=len(_models(misses)),
        most_gpus=max(one.gpus for one in misses),
    )


def _models(misses: Sequence[Miss]) -> set[tuple[str, str]]:
    return {(one.kind.software, one.model) for one in misses}


def _quantile(misses: Sequence[Miss], *, of_tables: bool) -> float:
    """The share within which 90 % of runs lie, counting one run more than those that are known; in
    a kind ``of_tables`` each table counts as much."""
    runs = Counter(one.table for one in misses)
    ordered = sorted(misses, key=lambda one: one.share)
    weights = [1 / runs[one.table] if of_tables else 1.0 for one in ordered]
    needed = min(1.0, SHARE * (len(ordered) + 1) / len(ordered)) * sum(weights)
    place = sum(below < needed - ROUNDING for below in accumulate(weights))
    return ordered[place].share


def _of_least_sure_table(misses: Sequence[Miss]) -> float:
    """The share of that table whose 90 % of runs lie within the largest share."""
    of_table: dict[str, list[float]] = defaultdict(list)
    for one in misses:
        of_table[one.table].append(one.share)
    large = [some for some in of_table.values() if len(some) >= FEWEST_OF_ONE_TABLE]
    tables = large or [*of_table.values()]
    return max(sorted(some)[math.ceil(SHARE * len(some)) - 1] for some in tables)


@dataclass(frozen=True, slots=True, kw_only=True)
class LeftOut:
    """A run's share when its group was left out, and whether its measurement lies within."""

    share: float
    is_inside: bool


def left_out(misses: Sequence[Miss], groups: Sequence[str]) -> Iterator[LeftOut | None]:
    """For each run the share that is known from the runs of other groups, if there are any."""
    without = {
        group: sureness_of(m for m, own in zip(misses, groups, strict=True) if own != group)
        for group in set(groups)
    }
    for one, group in zip(misses, groups, strict=True):
        if not without[group].kinds:
            yield None
            continue
        share = without[group].share(one.kind, one.gpus)
        yield LeftOut(share=share, is_inside=one.share <= share)
