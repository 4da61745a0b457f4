"""How far predictions miss measurements: errors of runs that were left out of a fit, and how far
sources of runs are off as a whole, beside how far their rows scatter."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints

# With fewer runs the 90th percentile of errors is taken from a normal distribution: the mean
# absolute error times this.
FEW_RUNS = 20
WIDTH_OF_MEAN = 2.06
# Repeated measurements of equal runs differ by this share of their time.
LEAST_WIDTH = 0.001


def half_width_of(errors: Floats) -> float:
    """The half-width of a band around predictions, as a share of them, that contains 90 % of
    measurements, given their relative errors.
    """
    missed = misses(errors)
    width = np.quantile(missed, 0.9) if len(missed) >= FEW_RUNS else WIDTH_OF_MEAN * missed.mean()
    return max(LEAST_WIDTH, round(float(width), 4))


def misses(errors: Floats) -> Floats:
    """The relative distances of measurements from predictions."""
    return np.asarray(np.abs(1 / (1 + errors) - 1))


def trimmed_mean(errors: Floats) -> float:
    """The mean without the largest eighth of the values, which come from runs with problems of
    their own.
    """
    kept = np.sort(errors)[: len(errors) - len(errors) // 8]
    return float(kept.mean())


# How far the runs of a source (a paper, a repository) are off as a whole, and how far they scatter,
# by kind of run.
#
# A source's offset is normal around its kind's, a row's miss around its source's. Both are told by
# Student's t with few degrees of freedom, so that a few sources unlike all others widen no bound:
# expectation and maximisation weigh a source by how far it lies out. The wider kind counts as some
# sources more.
#
# Axes: F folds, each of which leaves some runs out, S sources.

FREEDOM = 3.0
# Steps of expectation and maximisation, after which numbers move by less than a thousandth.
STEPS = 40
# The offset and the standard deviations between and within sources that are assumed for a kind of
# run that was never measured.
UNKNOWN_OFFSET, UNKNOWN_BETWEEN, UNKNOWN_WITHIN = 0.0, 0.25, 0.15
# The smallest variance: equal runs that are measured again differ by about a percent.
LEAST_VARIANCE = 1e-4


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceSpreads:
    """For one kind of run in each fold (F): the mean offset of its sources, and the variances
    between and within sources.
    """

    offset: Floats
    between: Floats
    within: Floats

    @classmethod
    def unknown(cls, folds: int) -> Self:
        """The spreads that are assumed where nothing was measured."""
        return cls(
            offset=np.full(folds, UNKNOWN_OFFSET),
            between=np.full(folds, UNKNOWN_BETWEEN**2),
            within=np.full(folds, UNKNOWN_WITHIN**2),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SourceSums:
    """For each fold and source (F, S): the number of runs, and the sums of their misses and of
    squared misses.
    """

    runs: Floats
    total: Floats
    squares: Floats

    @classmethod
    def without_folds(
        cls, missed: Floats, sources: Ints, folds: Ints, shape: tuple[int, int]
    ) -> Self:
        """For each fold, the sums over the runs of all other folds, from each run's source and
        fold. A run with fold -1 always counts.
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
        """The offset and variances of a kind of run from its sources; those of the ``wider`` kind
        count as ``count`` more sources.
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
    """The offsets and variances of all kinds of runs in each fold, from the runs outside the fold;
    ``kinds`` are those of each run, the narrowest first. Without folds there is one fold, which
    leaves no run out.
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
