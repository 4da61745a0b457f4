"""How groups of ranks lie on nodes: how many ranks share a node, and on how many nodes they are.

Axes: C candidates for stages.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.values.mesh import AXES, GROUPS, ranks_of

Whole = NDArray[np.int64]


def shape_on_nodes(
    group: str, value: Callable[[str], NDArray[Any]], first_rank: Whole, gpus_per_node: int
) -> tuple[Whole, Whole]:
    """The most ranks of a group in a node, and the number of its nodes.

    The stage begins at ``first_rank``, and ranks fill nodes in order.
    """
    reach, apart = np.zeros_like(first_rank), np.ones_like(first_rank)
    step = np.ones_like(first_rank)
    for name, axis in AXES.items():
        degree = value(axis.dimension).astype(np.int64)
        if name in GROUPS[group]:
            # Ranks that are at least a node apart are all in different nodes.
            is_inside = step < gpus_per_node
            reach = reach + np.where(is_inside, (degree - 1) * step, 0)
            apart = apart * np.where(is_inside, 1, degree)
        step = step * degree
    inside = (first_rank + reach) // gpus_per_node - first_rank // gpus_per_node + 1
    nodes = inside * apart
    return -(-ranks_of(group, value).astype(np.int64) // nodes), nodes
