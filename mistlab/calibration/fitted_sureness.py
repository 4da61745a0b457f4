"""Estimates how far measurements lie from predictions: the errors of runs that a fit did not use,
the common error of all runs of one source, and how single runs scatter around this common error.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints

# With fewer errors than this, their 90th percentile is estimated as their mean times the factor
# below, as for errors that are normally distributed.
FEW_RUNS = 20
WIDTH_OF_MEAN = 2.06
# Measurements are assumed to differ from a prediction by at least this share of it, since repeated
# runs differ by as much.
LEAST_WIDTH = 0.001


def half_width_of(errors: Floats) -> float:
    """The share of a prediction within which 90 % of measurements lie, from the relative errors of
    predictions.
    """
    missed = misses(errors)
    width = np.quantile(missed, 0.9) if len(missed) >= FEW_RUNS else WIDTH_OF_MEAN * missed.mean()
    return max(LEAST_WIDTH, round(float(width), 4))


def misses(errors: Floats) -> Floats:
    """The absolute differences of measurements from predictions, as a share of the prediction,
    given the relative errors of predictions.
    """
    return np.asarray(np.abs(1 / (1 + errors) - 1))


def trimmed_mean(errors: Floats) -> float:
    """The mean of the errors after the largest eighth of them is removed, since those come from
    runs with unusual problems.
    """
    kept = np.sort(errors)[: len(errors) - len(errors) // 8]
    return float(kept.mean())


# Estimates the mean error of predictions for each source of measured runs (a paper, a repository),
# and how far single runs scatter around it.
#
# The error of a source is distributed around the mean of its kind of run, and the error of a run
# around that of its source. Both distributions are Student's t with few degrees of freedom, so a
# few unusual sources do not widen bounds: expectation maximisation gives distant sources less
# weight. The more general kind, to which a kind of run belongs, counts as a few more sources.
#
# Array axes: F is the number of cross-validation folds, each of which leaves some runs out, and S
# the number of sources.

FREEDOM = 3.0
# The number of steps of expectation maximisation; further steps change results by less than a
# thousandth.
STEPS = 40
# The mean error of predictions, and its standard deviations between sources and within a source,
# that are assumed for a kind of run without measurements.
UNKNOWN_OFFSET, UNKNOWN_BETWEEN, UNKNOWN_WITHIN = 0.0, 0.25, 0.15
# The smallest variance of runs: equal runs that are measured again differ by about a percent.
LEAST_VARIANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceSpreads:
    """How errors of predictions are distributed for one kind of run: the mean, the variance between
    sources (papers, repositories) and the variance within a source. Arrays have an entry for each
    cross-validation fold.
    """

    offset: Floats
    between: Floats
    within: Floats

    @classmethod
    def unknown(cls, folds: int) -> Self:
        """The mean and variances of prediction errors that are assumed for a kind of run without
        measurements.
        """
        return cls(
            offset=np.full(folds, UNKNOWN_OFFSET),
            between=np.full(folds, UNKNOWN_BETWEEN**2),
            within=np.full(folds, UNKNOWN_WITHIN**2),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceSums:
    """The number of runs, the sum of their errors and the sum of the errors' squares, as arrays by
    cross-validation fold and source.
    """

    runs: Floats
    total: Floats
    squares: Floats

    @classmethod
    def without_folds(
        cls, missed: Floats, sources: Ints, folds: Ints, shape: tuple[int, int]
    ) -> Self:
        """For each cross-validation fold, the sums of errors over the runs of all other folds; runs
        with fold -1 count in all folds.
        """
        powers = (np.ones_like(missed), missed, missed**2)
        of_fold, sums = folds >= 0, list[Floats]()
        for power in powers:
            in_fold = np.zeros(shape)
            np.add.at(in_fold, (folds[of_fold], sources[of_fold]), power[of_fold])
            sums.append(np.bincount(sources, power, shape[1]) - in_fold)
        runs, total, squares = sums
        return cls(runs=runs, total=total, squares=squares)

    def spreads(self, wider: SourceSpreads, count: float) -> SourceSpreads:
        """The mean and variances of prediction errors for a kind of run, estimated from its
        sources; a more general kind ``wider`` counts as ``count`` more sources.
        """
        is_there: Bools = self.runs > 0.5
        scatters: Bools = self.runs > 1.5
        runs = np.maximum(self.runs, 1.0)
        means = self.total / runs
        variances = (self.squares - runs * means**2) / np.maximum(runs - 1, 1.0)
        variances = np.maximum(variances, 0.0)
        sources, scattering = is_there.sum(axis=1), scatters.sum(axis=1)
        offset, between, within = wider.offset, wider.between, wider.within
        for _ in range(STEPS):
            off = (means - offset[:, None]) ** 2
            expected = between[:, None] + within[:, None] / runs
            weights = is_there * (FREEDOM + 1) / (FREEDOM + off / expected)
            offset = count * wider.offset + (weights * means).sum(axis=1)
            offset = offset / (count + weights.sum(axis=1))
            off = (means - offset[:, None]) ** 2
            between = count * wider.between + (weights * off).sum(axis=1)
            between = np.maximum(LEAST_VARIANCE, between / (count + sources))
            row_weights = scatters * (FREEDOM + 1) / (FREEDOM + variances / within[:, None])
            within = count * wider.within + (row_weights * variances).sum(axis=1)
            within = np.maximum(LEAST_VARIANCE, within / (count + scattering))
        return SourceSpreads(offset=offset, between=between, within=within)


def spreads_of_kinds(
    missed: Floats,
    kinds: Sequence[tuple[str, ...]],
    sources: Ints,
    folds: Ints,
    count: float,
) -> dict[str, SourceSpreads]:
    """The mean and variances of prediction errors for every kind of run, in each cross-validation
    fold estimated from the runs outside the fold.
    """
    shape = max(1, folds.max(initial=-1) + 1), sources.max(initial=-1) + 1
    wider = {own: of for names in kinds for own, of in zip(names, (*names[1:], ""), strict=True)}
    spreads = {"": SourceSpreads.unknown(shape[0])}

    def find(name: str) -> SourceSpreads:
        if name not in spreads:
            rows = np.array([name in names for names in kinds])
            sums = SourceSums.without_folds(missed[rows], sources[rows], folds[rows], shape)
            spreads[name] = sums.spreads(find(wider[name]), count)
        return spreads[name]

    return {name: find(name) for name in wider}
