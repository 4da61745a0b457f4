"""How far predictions miss measurements: the errors of runs that were left out of a fit."""

import numpy as np

from mistlab.core.arrays import Floats

# Of fewer runs than this the 90th percentile is that of normally distributed errors: this many
# times their mean absolute value.
FEW_RUNS = 20
WIDTH_OF_MEAN = 2.06
# Measurements of equal runs differ by that much themselves.
LEAST_WIDTH = 0.001


def half_width_of(errors: Floats) -> float:
    """The share of predictions within which 90 % of measurements lie, from relative errors."""
    missed = misses(errors)
    width = np.quantile(missed, 0.9) if len(missed) >= FEW_RUNS else WIDTH_OF_MEAN * missed.mean()
    return max(LEAST_WIDTH, round(float(width), 4))


def misses(errors: Floats) -> Floats:
    """How far measurements lie from predictions, as shares of these."""
    return np.asarray(np.abs(1 / (1 + errors) - 1))


def trimmed_mean(errors: Floats) -> float:
    """The mean without the largest eighth, which is where a few runs went wrong by themselves."""
    kept = np.sort(errors)[: len(errors) - len(errors) // 8]
    return float(kept.mean())
