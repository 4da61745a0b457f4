"""Mixing matrices of communication graphs, in which each rank averages weights with its neighbours,
and how fast they make all ranks' weights equal.
"""

from collections.abc import Sequence

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.reduction.neighbours import offsets_of


def mixing_matrix(topology: str, ranks: int, step: int = 0) -> Floats:
    """The mixing matrix of a communication graph: each rank averages its weights with those of its
    neighbours, all with equal factors.
    """
    return matrix_of(offsets_of(topology, ranks, step), ranks)


def matrix_of(offsets: Sequence[int], ranks: int) -> Floats:
    """The mixing matrix of ranks that average with the ranks at these offsets from each."""
    every = [0, *offsets]
    matrix = np.zeros((ranks, ranks))
    rows = np.arange(ranks)
    for offset in every:
        matrix[rows, (rows + offset) % ranks] = 1 / len(every)
    return matrix


def contraction(topology: str, ranks: int) -> float:
    """The factor by which the differences between ranks' weights shrink in a step: the second
    largest singular value of the mixing matrix. ``one_peer`` cycles through the neighbours of
    ``exponential``, and has its factor, as in convergence bounds for it.
    """
    if ranks == 1:
        return 0.0
    name = "exponential" if topology == "one_peer" else topology
    return contraction_of(offsets_of(name, ranks), ranks)


def contraction_of(offsets: Sequence[int], ranks: int) -> float:
    """The factor by which the differences between ranks' weights shrink in a step, for neighbours
    at these offsets; 1 if the graph is not connected.
    """
    if ranks == 1:
        return 0.0
    # Every row of the mixing matrix is the first row, rotated. Its singular values are therefore
    # the absolute values of the row's Fourier transform, of which the first belongs to the mean.
    weights = np.bincount([0, *(offset % ranks for offset in offsets)], minlength=ranks)
    second = float(np.abs(np.fft.rfft(weights / weights.sum()))[1:].max())
    return second if second > np.finfo(float).eps * ranks else 0.0
