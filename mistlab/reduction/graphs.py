"""Mixing matrices of graphs of ranks, and how fast ranks' values come together by them."""

from collections.abc import Sequence

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.reduction.neighbours import offsets_of


def mixing_matrix(topology: str, ranks: int, step: int = 0) -> Floats:
    """The weights by which each rank averages: equal ones of itself and its neighbours."""
    return matrix_of(offsets_of(topology, ranks, step), ranks)


def matrix_of(offsets: Sequence[int], ranks: int) -> Floats:
    """The mixing matrix of neighbours at these offsets."""
    every = [0, *offsets]
    matrix = np.zeros((ranks, ranks))
    rows = np.arange(ranks)
    for offset in every:
        matrix[rows, (rows + offset) % ranks] = 1 / len(every)
    return matrix


def contraction(topology: str, ranks: int) -> float:
    """The factor by which differences between ranks shrink in a step, at least: the second largest
    singular value of the mixing matrix. ``one_peer`` goes through the same neighbours one by one,
    and has the factor of ``exponential``, as its bounds on convergence do."""
    if ranks == 1:
        return 0.0
    name = "exponential" if topology == "one_peer" else topology
    return contraction_of(offsets_of(name, ranks), ranks)


def contraction_of(offsets: Sequence[int], ranks: int) -> float:
    """The factor by which differences shrink in a step among neighbours at these offsets; 1 if
    ranks do not all hear of one another."""
    second = float(np.linalg.svd(matrix_of(offsets, ranks) - 1 / ranks, compute_uv=False)[0])
    return second if second > np.finfo(float).eps * ranks else 0.0
