"""How much longer sends between stages take on a cluster with a profile.

Axes: S strategies.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.cluster import Cluster
from mistlab.values.mesh import ranks_of


def late_s(value: Callable[[str], NDArray[Any]], cluster: Cluster) -> NDArray[np.float64]:
    """Seconds (S) that sends take longer by a cluster's profile."""
    ranks = np.asarray(ranks_of("tensor", value)).astype(np.int64)
    if cluster.profile is None:
        return np.zeros(len(ranks))
    return cluster.profile.send_s(ranks, cluster.num_gpus)
