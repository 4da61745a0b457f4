"""Graphs of ranks that average with their neighbours: who they are, how they are weighted, and how
fast their values come together.

Every graph here is the same seen from each rank: rank ``i`` hears from the ranks at fixed offsets
from ``i``, counted round. So in round ``k`` of a step all ranks send to their ``k``-th neighbour at
once, and no two messages meet.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.values import near_matches, refuse

Topology = Literal["ring", "grid", "exponential", "one_peer", "complete"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)


def offsets_of(topology: str, ranks: int, step: int = 0) -> Sequence[int]:
    """The offsets from which a rank hears in a step; of ``one_peer`` a power of two that changes
    from step to step, of ``grid`` those of a torus that is as square as may be."""
    if topology not in TOPOLOGIES:
        refuse("topology", f"{topology!r} is unknown{near_matches(topology, TOPOLOGIES)}")
    if ranks < 1:
        refuse("ranks", f"{ranks} is too small: give at least 1")
    doublings = max(1, math.ceil(math.log2(ranks)))
    by_name: dict[str, list[int]] = {
        "ring": [1, -1],
        "grid": [1, -1, _side(ranks), -_side(ranks)],
        "exponential": [2**power for power in range(doublings)],
        "one_peer": [2 ** (step % doublings)],
        "complete": [*range(1, ranks)],
    }
    offsets = dict.fromkeys(offset % ranks for offset in by_name[topology])
    return [offset for offset in offsets if offset]


def _side(ranks: int) -> int:
    """The largest divisor of a number that is at most its root."""
    return max(side for side in range(1, math.isqrt(ranks) + 1) if ranks % side == 0)


def degree_of(topology: str, ranks: int) -> int:
    """How many messages a rank sends in a step."""
    return len(offsets_of(topology, ranks))


def mixing_matrix(topology: str, ranks: int, step: int = 0) -> Floats:
    """The weights by which each rank averages: equal ones of itself and its neighbours."""
    offsets = [0, *offsets_of(topology, ranks, step)]
    matrix = np.zeros((ranks, ranks))
    rows = np.arange(ranks)
    for offset in offsets:
        matrix[rows, (rows + offset) % ranks] = 1 / len(offsets)
    return matrix


def contraction(topology: str, ranks: int) -> float:
    """The factor by which differences between ranks shrink in a step, at least: the second largest
    singular value of the mixing matrix. ``one_peer`` goes through the same neighbours one by one,
    and has the factor of ``exponential``, as its bounds on convergence do."""
    if ranks == 1:
        return 0.0
    matrix = mixing_matrix("exponential" if topology == "one_peer" else topology, ranks)
    second = float(np.linalg.svd(matrix - 1 / ranks, compute_uv=False)[0])
    return second if second > np.finfo(float).eps * ranks else 0.0
