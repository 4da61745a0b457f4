"""What a stage's fullest GPU and each node's host must hold beyond what tensors take.

Axes: C candidates or stages.
"""

import numpy as np
from numpy.typing import NDArray

from mistlab.cluster import Cluster
from mistlab.engines import Allocator
from mistlab.errors import UncalibratedError
from mistlab.stages import Column, StageFigures, StagePeaks

Values = NDArray[np.float64]


def reserved_bytes(
    figures: StageFigures | StagePeaks, *, data_parallel: Column, zero: Column, allocator: Allocator
) -> Values:
    """The most that torch's allocator holds on a GPU (C), from the peak of what tensors take."""
    shard = figures.largest_parameters / np.where(zero >= 1, data_parallel, 1)
    return np.asarray(
        figures.peak_bytes
        + allocator.step_bytes_a_parameter * shard
        + allocator.head_bytes_a_parameter * figures.head_parameters
    )


def allocator_of(cluster: Cluster) -> Allocator:
    """What a GPU's memory holds beyond tensors; refuses hardware of which that is not known."""
    allocator = cluster.hardware.allocator
    if allocator is None:
        message = (
            f"cluster.hardware: {cluster.hardware.name} has no allocator: run "
            "python -m experiments.calibrate --runs TABLE.csv with peaks of whole runs"
        )
        raise UncalibratedError(message)
    return allocator


def host_bytes_of_fullest_node(host_bytes: Values, gpus: Column, cluster: Cluster) -> float:
    """Bytes on the host of one node, for stages (C) of ``gpus`` GPUs that fill nodes in order."""
    of_rank = np.repeat(host_bytes, gpus)
    node = np.arange(len(of_rank)) // cluster.gpus_per_node
    return float(np.bincount(node, weights=of_rank).max())
