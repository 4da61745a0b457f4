"""The spread of prediction errors, from runs that were left out of a fit."""

import numpy as np

from mistlab.core.arrays import Floats

# With fewer runs, the 90th percentile is that of a normal distribution: this multiple of the mean
# absolute error.
FEW_RUNS = 20
WIDTH_OF_MEAN = 2.06
# Repeated measurements of equal runs differ by this share.
LEAST_WIDTH = 0.001


def half_width_of(errors: Floats) -> float:
    """The half-width, as a share of predictions, that contains 90 % of measurements, from relative
    errors.
    """
    missed = misses(errors)
    width = np.quantile(missed, 0.9) if len(missed) >= FEW_RUNS else WIDTH_OF_MEAN * missed.mean()
    return max(LEAST_WIDTH, round(float(width), 4))


def misses(errors: Floats) -> Floats:
    """The relative distances of measurements from predictions."""
    return np.asarray(np.abs(1 / (1 + errors) - 1))


def trimmed_mean(errors: Floats) -> float:
    """The mean without the largest eighth, in which single runs had problems of their own."""
    kept = np.sort(errors)[: len(errors) - len(errors) // 8]
    return float(kept.mean())
