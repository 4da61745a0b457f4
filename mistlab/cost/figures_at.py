"""Figures of the GPUs and the hosts that a stage has, where groups of nodes are unlike.

Axes: C candidates for stages.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.cluster import Cluster
from mistlab.values.mesh import num_gpus
from mistlab.values.precision import Precision
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]


def groups_of(cluster: Cluster, ranks: NDArray[np.int64]) -> NDArray[np.intp]:
    """The number of the group of each rank (C); ranks beyond the cluster are in the last."""
    ends = [one.stop for one in cluster.ranks_of_groups[:-1]]
    return np.searchsorted(ends, ranks, side="right")


def figure_at(
    cluster: Cluster, first_rank: NDArray[np.int64], figure: Callable[[Cluster], float]
) -> Values | float:
    """A figure of the group of nodes at each stage's first rank (C); one number where all nodes are
    equal."""
    if not cluster.others:
        return figure(cluster)
    of_groups = np.array([figure(group) for group in cluster.of_groups])
    return np.asarray(of_groups[groups_of(cluster, first_rank)])


def in_one_group(cluster: Cluster, batch: StageBatch) -> NDArray[np.bool_] | bool:
    """Whether the GPUs of each stage (C) are in one group of nodes."""
    if not cluster.others:
        return True
    last = batch.first_rank + num_gpus(batch.value).astype(np.int64) - 1
    return np.asarray(groups_of(cluster, batch.first_rank) == groups_of(cluster, last))


def mean_peak_flop_per_s(
    cluster: Cluster, precision: Precision, first_rank: int, gpus: int
) -> float:
    """The peak rate of one of so many GPUs from a rank on, on average."""
    if not cluster.others:
        return cluster.peak_flop_per_s(precision)
    # Every prediction asks, so no cluster is made of a group here.
    groups, node = cluster.groups, cluster.gpus_per_node
    end, total, begun = first_rank + gpus, 0.0, 0
    for number, group in enumerate(groups, 1):
        # Ranks beyond the cluster are in the last group.
        until = begun + group.nodes * node if number < len(groups) else end
        of_group = max(0, min(end, until) - max(first_rank, begun))
        total += of_group * group.hardware.gpu.peak_flop_per_s(precision)
        begun = until
    return total / gpus
