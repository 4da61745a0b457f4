"""Communication graphs in which data-parallel ranks average with some neighbours only (gossip).

Every graph here is the same seen from each rank: rank ``i`` hears from the ranks at fixed offsets
from ``i``, counted round. So in round ``k`` of a step all ranks send to their ``k``-th neighbour at
once, and no two messages meet.
"""

import math
from collections.abc import Sequence
from typing import Literal, get_args

from mistlab.core.values import near_matches, refuse

Topology = Literal["ring", "grid", "exponential", "one_peer", "complete"]
TOPOLOGIES: tuple[Topology, ...] = get_args(Topology)


def offsets_of(topology: str, ranks: int, step: int = 0) -> Sequence[int]:
    """The offsets of the ranks from which each rank receives in a step: for ``one_peer`` a power of
    two that changes from step to step, for ``grid`` the neighbours in a torus that is as square as
    possible.
    """
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
    """The largest divisor of ``ranks`` that is not above the square root of ``ranks``."""
    return max(side for side in range(1, math.isqrt(ranks) + 1) if ranks % side == 0)


def degree_of(topology: str, ranks: int) -> int:
    """The number of messages that each rank sends to its neighbours in a step."""
    return len(offsets_of(topology, ranks))


def parts_of_graph(offsets: Sequence[int], ranks: int) -> int:
    """The number of connected components of a communication graph: one if it is connected."""
    return math.gcd(ranks, *offsets)
