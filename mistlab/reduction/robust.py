"""A mean that a few ranks that lie cannot move far, and what such ranks send."""

import numpy as np

from mistlab.core.arrays import Floats

# What a rank that lies sends in place of its gradient: so many times of it, the other way.
LIE = -10.0


def trimmed_mean(rows: Floats, trimmed: int) -> Floats:
    """Of each column the mean of its values without the ``trimmed`` smallest and largest ones."""
    kept = np.sort(rows, axis=0)[trimmed : len(rows) - trimmed]
    return np.asarray(kept.mean(axis=0), dtype=np.float64)


def with_liars(rows: Floats, liars: tuple[int, ...]) -> Floats:
    """The rows of all ranks as they are sent, where some ranks lie."""
    sent = np.array(rows, dtype=np.float64)
    sent[list(liars)] *= LIE
    return sent
