"""Memory beyond tensors: bytes that torch's allocator holds on a GPU, and bytes of a node's host.

Axes: C candidates or stages.
"""

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.figures_at import figure_at
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

    def allocators(number: Callable[[Allocator], float]) -> Values | float:
        return figure_at(cluster, batch.first_rank, lambda one: number(allocator_of(one)))

    if engine.cached_share is not None:
        comes_and_goes = figures.peak_bytes - figures.held_bytes
        return np.asarray(figures.peak_bytes + engine.cached_share * comes_and_goes)
    ranks = np.where(batch.zero >= 1, ranks_of("gather", batch.value), 1)
    shard = figures.largest_parameters / ranks
    head_bytes = allocators(lambda one: one.head_bytes_a_parameter) * figures.head_parameters
    return np.asarray(
        figures.peak_bytes
        + allocators(lambda one: one.step_bytes_a_parameter) * shard
        + np.minimum(head_bytes, allocators(lambda one: one.head_bytes))
    )


def room_bytes(cluster: Cluster) -> float:
    """Bytes that torch's allocator may hold on a GPU."""
    return cluster.memory_bytes - allocator_of(cluster).outside_bytes


def room_at(cluster: Cluster, first_rank: NDArray[np.int64]) -> Values | float:
    """``room_bytes`` of the GPUs of stages (C) that begin at some ranks."""
    return figure_at(cluster, first_rank, room_bytes)


def room_of_plan(cluster: Cluster, plan: Plan) -> Values:
    """``room_bytes`` of the GPUs of each stage of a plan (C)."""
    gpus = [stage.num_gpus for stage in plan.stages]
    room = room_at(cluster, np.cumsum([0, *gpus[:-1]]))
    return np.broadcast_to(room, len(gpus))


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
    return float(_host_bytes_of_nodes(host_bytes, gpus, cluster).max())


def fullest_host(host_bytes: Values, gpus: Column, cluster: Cluster) -> float:
    """The bytes on a node's host, as a share of its memory, where that share is largest; stages are
    those of ``host_bytes_of_fullest_node``."""
    held = _host_bytes_of_nodes(host_bytes, gpus, cluster)
    room = host_room_at(cluster, np.arange(len(held)) * cluster.gpus_per_node)
    return float((held / room).max())


def host_room_at(cluster: Cluster, first_rank: NDArray[np.int64]) -> Values | float:
    """Bytes of the host memory of the nodes of stages (C) that begin at some ranks."""
    return figure_at(cluster, first_rank, lambda one: one.host_memory_bytes)


def _host_bytes_of_nodes(host_bytes: Values, gpus: Column, cluster: Cluster) -> Values:
    of_rank = np.repeat(host_bytes, gpus)
    node = np.arange(len(of_rank)) // cluster.gpus_per_node
    return np.asarray(np.bincount(node, weights=of_rank), dtype=np.float64)


def host_bytes_of(plan: Plan, prediction: Prediction, cluster: Cluster) -> float:
    """Bytes in host memory of the node that holds most, for a plan that was predicted."""
    return float(_host_bytes_of_plan(plan, prediction, cluster).max())


def host_bytes_over(plan: Plan, prediction: Prediction, cluster: Cluster) -> float:
    """The most bytes by which a predicted plan exceeds a node's host memory; negative if none."""
    held = _host_bytes_of_plan(plan, prediction, cluster)
    room = host_room_at(cluster, np.arange(len(held)) * cluster.gpus_per_node)
    return float((held - room).max())


def _host_bytes_of_plan(plan: Plan, prediction: Prediction, cluster: Cluster) -> Values:
    gpus = np.array([stage.num_gpus for stage in plan.stages])
    held = np.array([stage.host_bytes for stage in prediction.stages])
    return _host_bytes_of_nodes(held / np.minimum(gpus, cluster.gpus_per_node), gpus, cluster)
