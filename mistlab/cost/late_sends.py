"""How much longer sends between stages take on a cluster with a profile.

Axes: S strategies.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.cluster import Cluster
from mistlab.values.mesh import ranks_of


def late_s(
    value: Callable[[str], NDArray[Any]], cluster: Cluster, global_batch: int
) -> NDArray[np.float64]:
    """Seconds (S) that sends take longer by a cluster's profile."""
    ranks = np.asarray(ranks_of("tensor", value)).astype(np.int64)
    profile, gpus = cluster.profile, cluster.num_gpus
    if profile is None:
        return np.zeros(len(ranks))
    data_ranks = np.asarray(value("data_parallel"))
    micro_batches = global_batch // (data_ranks * value("micro_batch"))
    are_whole = (value("zero") == 0) & (cluster.nodes > 1)
    beside = are_whole & profile.is_beside_whole(data_ranks, micro_batches, gpus)
    return profile.send_s(ranks, gpus, beside_whole=beside)
