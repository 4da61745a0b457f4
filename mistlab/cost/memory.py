"""Memory beyond tensors: bytes that torch's allocator holds on a GPU, and bytes of a node's host.

Axes: C candidates or stages.
"""

import numpy as np
from numpy.typing import NDArray

from mistlab.engines.engine import Engine
from mistlab.machine.cluster import Cluster
from mistlab.machine.whole_runs import Allocator
from mistlab.values.errors import UncalibratedError
from mistlab.values.mesh import ranks_of
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction
from mistlab.values.stages import Column, StageBatch, StageFigures, StagePeaks

Values = NDArray[np.float64]


def reserved_bytes(
    figures: StageFigures | StagePeaks, batch: StageBatch, cluster: Cluster, engine: Engine
) -> Values:
    """The most bytes that torch's allocator holds on a GPU (C), from the peak of tensors."""
    allocator = allocator_of(cluster)
    if engine.cached_share is not None:
        comes_and_goes = figures.peak_bytes - figures.held_bytes
        return np.asarray(figures.peak_bytes + engine.cached_share * comes_and_goes)
    ranks = np.where(batch.zero >= 1, ranks_of("gather", batch.value), 1)
    shard = figures.largest_parameters / ranks
    head_bytes = allocator.head_bytes_a_parameter * figures.head_parameters
    return np.asarray(
        figures.peak_bytes
        + allocator.step_bytes_a_parameter * shard
        + np.minimum(head_bytes, allocator.head_bytes)
    )


def room_bytes(cluster: Cluster) -> float:
    """Bytes that torch's allocator may hold on a GPU."""
    return cluster.memory_bytes - allocator_of(cluster).outside_bytes


def allocator_of(cluster: Cluster) -> Allocator:
    """The numbers for memory beyond tensors; refuses hardware that lacks them."""
    allocator = cluster.hardware.allocator
    if allocator is None:
        message = (
            f"cluster.hardware: {cluster.hardware.name} has no allocator: run "
            "python -m experiments.calibrate --runs TABLE.csv with peaks of whole runs"
        )
        raise UncalibratedError(message)
    return allocator


def host_bytes_of_fullest_node(host_bytes: Values, gpus: Column, cluster: Cluster) -> float:
    """Bytes on the host of the fullest node, for stages (C) with ``gpus`` GPUs (C) each.

    ``host_bytes`` (C) is for one rank. Stages fill nodes in order.
    """
    of_rank = np.repeat(host_bytes, gpus)
    node = np.arange(len(of_rank)) // cluster.gpus_per_node
    return float(np.bincount(node, weights=of_rank).max())


def host_bytes_of(plan: Plan, prediction: Prediction, cluster: Cluster) -> float:
    """Bytes in host memory of the node that holds most, for a plan that was predicted."""
    gpus = np.array([stage.num_gpus for stage in plan.stages])
    held = np.array([stage.host_bytes for stage in prediction.stages])
    return host_bytes_of_fullest_node(held / np.minimum(gpus, cluster.gpus_per_node), gpus, cluster)
