"""A robust mean of gradients, which a few ranks that send wrong gradients can hardly change, and
the messages of such ranks.
"""

import numpy as np

from mistlab.core.arrays import Floats

# The factor by which a rank that lies multiplies its gradient before sending it.
LIE = -10.0


def trimmed_mean(rows: Floats, trimmed: int) -> Floats:
    """The mean over ranks (rows) of each value, without its ``trimmed`` smallest and largest
    ones.
    """
    kept = np.sort(rows, axis=0)[trimmed : len(rows) - trimmed]
    return np.asarray(kept.mean(axis=0), dtype=np.float64)


def with_liars(rows: Floats, liars: tuple[int, ...]) -> Floats:
    """The gradients of all ranks (rows) as they are sent: those of lying ranks are multiplied by
    ``LIE``.
    """
    sent = np.array(rows, dtype=np.float64)
    sent[list(liars)] *= LIE
    return sent
