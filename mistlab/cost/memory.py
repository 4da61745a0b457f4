"""Computes the memory of pipeline stages: peak bytes of activations, and memory that is not
tensors.

Axes: C candidates, V chunks of a stage, T types of layers, R runs of layers.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Column, Floats, Ints
from mistlab.core.values import UncalibratedError
from mistlab.cost.links import figure_at
from mistlab.engines.engine import Engine
from mistlab.engines.fitted import fitted
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.machine.hardware import Allocator
from mistlab.plan.dimensions import EXPERT_AXES, GROUPS, axes_of, num_gpus, ranks_of
from mistlab.plan.plan import Plan
from mistlab.stages.plan_orders import HeldMoments, PassMoments
from mistlab.stages.stage_batch import StageBatch, StagePeaks

# Computes the peak bytes of a stage's activations layer by layer; weights, gradients and optimizer
# states come in addition.


# Groups of consecutive layers of one type in a stage: the number of layers in each group, and the
# index of their type, for each candidate.
Runs = tuple[Floats, Ints]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkedLayers:
    """The bytes that one layer of each type has on the GPU for one micro-batch, for each candidate.

    From the forward to the backward pass it ``keeps`` bytes on the GPU, while the bytes ``moving``
    are on the host. From the backward pass to a separate weight-gradient pass (W), bytes are
    ``left``. Where ``in_w`` (T, 1) holds, W runs the layer's whole backward pass.
    """

    keeps: Floats
    moving: Floats
    left: Floats
    forward_peak: Floats
    backward_peak: Floats
    in_w: Bools

    def of_types(self, types: Ints) -> Self:
        """Select the bytes of a layer of the type with this index.

        There is one index for each candidate, or one for all.
        """
        if len(types) == 1:
            return type(self)(
                **{one.name: getattr(self, one.name)[types[0]] for one in fields(self)}
            )
        rows = np.arange(len(types))
        is_in_w = self.in_w[types, 0]
        others = {one.name: getattr(self, one.name) for one in fields(self) if one.name != "in_w"}
        return type(self)(**{name: own[types, rows] for name, own in others.items()}, in_w=is_in_w)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Run:
    """Consecutive layers of one type in a stage, ``count`` of them for each candidate.

    ``before`` are the bytes of the layer in front of them that are still being offloaded while the
    first of them runs.
    """

    count: Floats
    own: WalkedLayers
    before: Floats

    @property
    def is_there(self) -> Bools:
        """A mask of the candidates that have any of these layers."""
        return self.count > 0


def _runs(layers: WalkedLayers, runs: Runs) -> Iterator[_Run]:
    moving = np.zeros(layers.keeps.shape[1])
    for count, types in zip(*runs, strict=True):
        if not count.any():
            continue
        run = _Run(count=count, own=layers.of_types(types), before=moving)
        moving = np.where(run.is_there, run.own.moving, moving)
        yield run


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Chunk:
    """The bytes of activations of one chunk of a stage's layers for one micro-batch: those kept
    between passes, and each pass's peak above the bytes present at its beginning.

    ``begins`` is the peak of the first layer's forward pass.
    """

    keeps: Floats
    left: Floats
    leaving: Floats
    begins: Floats
    forward: Floats
    backward: Floats
    of_weights: Floats

    @classmethod
    def of(cls, layers: WalkedLayers, runs: Runs, sent: Floats) -> Self:
        """The activation bytes of a chunk with these layers.

        The chunk keeps the output that it ``sent`` to the next chunk until its backward pass.
        """
        nothing = np.zeros(len(sent))
        every = [*_runs(layers, runs)]
        kept, left, leaving, begins, forward = nothing, nothing, nothing, nothing, nothing
        of_weights, is_begun = nothing, np.zeros(len(sent), dtype=np.bool_)
        for run in every:
            of_layer, is_first = run.own, run.is_there & ~is_begun
            runs_first = kept + run.before + of_layer.forward_peak
            runs_last = (
                kept + (run.count - 1) * of_layer.keeps + of_layer.moving + of_layer.forward_peak
            )
            forward = _fuller(forward, runs_first, run.is_there)
            forward = _fuller(forward, runs_last, run.count > 1)
            begins = np.where(is_first, of_layer.forward_peak, begins)
            of_weights = np.where(is_first & of_layer.in_w, of_layer.backward_peak, of_weights)
            leaving = np.where(run.is_there, of_layer.moving, leaving)
            kept, left = kept + run.count * of_layer.keeps, left + run.count * of_layer.left
            is_begun |= run.is_there
        backward, now = nothing, -sent
        for run in reversed(every):
            of_layer, each = run.own, run.own.left - run.own.keeps
            # In the backward pass through equal layers, the memory peak is reached while the last,
            # the second or the first layer is computed.
            runs_last = now - of_layer.keeps + of_layer.moving + of_layer.backward_peak
            runs_second = runs_last + (run.count - 2) * each
            runs_first = (
                now - of_layer.keeps + (run.count - 1) * each + run.before + of_layer.backward_peak
            )
            backward = _fuller(backward, runs_last, (run.count > 1) & ~of_layer.in_w)
            backward = _fuller(backward, runs_second, (run.count > 1) & ~of_layer.in_w)
            backward = _fuller(backward, runs_first, run.is_there & ~of_layer.in_w)
            now = now + run.count * each
        return cls(
            keeps=kept + sent,
            left=left,
            leaving=leaving,
            begins=begins,
            forward=forward,
            backward=np.maximum(backward, now),
            of_weights=np.where(of_weights > 0, of_weights - left, 0.0),
        )


def _fuller(bytes_: Floats, others: Floats, are_there: Bools) -> Floats:
    return np.where(are_there, np.maximum(bytes_, others), bytes_)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class WalkedPasses:
    """The peak bytes of a stage in its forward passes, and in all its other passes, for each
    candidate.
    """

    forward: Floats
    backward: Floats

    @classmethod
    def of(
        cls,
        moments: HeldMoments,
        layers: WalkedLayers,
        chunks: Sequence[Runs],
        *,
        sent: Sequence[Floats],
        step_buffer: Floats,
    ) -> Self:
        """The peak bytes of stages, computed pass by pass in the order in which a stage runs its
        passes.

        From a layer's forward pass until its backward pass a stage keeps the part of its
        activations that is not offloaded. If weight gradients have separate passes (W), it then
        keeps what W needs. Offloaded activations of a layer leave during the next layer's forward
        pass, and return during that layer's backward pass. Within consecutive layers of one type
        bytes change linearly, so the peak is at the first or the last of them.

        Chunks keep the outputs that they ``sent``; ``moments`` give the number of micro-batches in
        flight when each pass begins. First forward passes also need the ``step_buffer``.
        """
        of_chunks = [_Chunk.of(layers, runs, of) for runs, of in zip(chunks, sent, strict=True)]
        each = np.stack([one.keeps for one in of_chunks] + [one.left for one in of_chunks])
        forward = backward = np.zeros(each.shape[1])
        for pass_moments in moments.begins:
            held = (pass_moments.held @ each).max(axis=0)
            if pass_moments.kind == "F":
                needs = (
                    held
                    + _forward(pass_moments, of_chunks)
                    + pass_moments.first_forward * step_buffer
                )
                forward = np.maximum(forward, needs)
            else:
                of = of_chunks[pass_moments.chunk]
                needs = held + (of.backward if pass_moments.kind == "B" else of.of_weights)
                backward = np.maximum(backward, needs)
        return cls(forward=forward, backward=backward)


def _forward(passes: PassMoments, chunks: Sequence[_Chunk]) -> Floats:
    """The peak bytes of a chunk's forward pass above the bytes present at its beginning, for each
    candidate.

    Activations that the pass before offloads may still be on the GPU while the first layer runs.
    """
    chunk = chunks[passes.chunk]
    if passes.leaving is None:
        return chunk.forward
    return np.maximum(chunks[passes.leaving].leaving + chunk.begins, chunk.forward)


# Computes memory that is not tensors: what torch's allocator reserves on a GPU beyond tensors,
# NCCL's communicators, and a node's host memory.

# If only adapters are trained, torch's allocator keeps this share of the bytes of temporary tensors
# cached.
CACHED_SHARE: float = fitted("fsdp")["cached_share"]


def reserved_bytes(
    figures: StagePeaks, batch: StageBatch, cluster: Cluster, engine: Engine
) -> Floats:
    """The peak bytes that torch's allocator reserves on a GPU, for each candidate, given the peak
    bytes of tensors.
    """

    def allocators(number: Callable[[Allocator], float]) -> Floats | float:
        return figure_at(cluster, batch.first_rank, lambda hardware: number(allocator_of(hardware)))

    comes_and_goes = figures.peak_bytes - figures.held_bytes
    if engine.cached_share is not None:
        return np.asarray(figures.peak_bytes + engine.cached_share * comes_and_goes)
    ranks = np.where(batch.zero >= 1, ranks_of("gather", batch.value), 1)
    shard = figures.largest_parameters / ranks
    head_bytes = (
        allocators(lambda allocator: allocator.head_bytes_a_parameter) * figures.head_parameters
    )
    of_trained = allocators(
        lambda allocator: allocator.step_bytes_a_parameter
    ) * shard + np.minimum(head_bytes, allocators(lambda allocator: allocator.head_bytes))
    # The hardware's constants were fitted to runs that train all weights; if only adapters are
    # trained, the allocator caches activations as it does under FSDP, and an optimizer step takes
    # no memory.
    cached = CACHED_SHARE * comes_and_goes
    return np.asarray(figures.peak_bytes + np.where(shard > 0, of_trained, cached))


def room_bytes(cluster: Cluster) -> float:
    """The bytes on a GPU of the cluster that torch's allocator may reserve."""
    return cluster.memory_bytes - allocator_of(cluster).outside_bytes


def room_at(cluster: Cluster, batch: StageBatch) -> Floats | float:
    """The bytes that torch's allocator may reserve on a GPU of each stage.

    The bytes of NCCL's communicators are subtracted if their size is known.
    """
    room = figure_at(cluster, batch.first_rank, room_bytes)
    return room - communicator_bytes(cluster, batch) if _counts_groups(cluster) else room


def room_of_plan(cluster: Cluster, plan: Plan) -> Floats:
    """The bytes on a GPU of each stage of a plan that torch's allocator may reserve."""
    if _counts_groups(cluster):
        room = room_at(cluster, StageBatch.of_plan(plan))
    else:
        gpus = [stage.num_gpus for stage in plan.stages]
        room = figure_at(cluster, np.cumsum([0, *gpus[:-1]]), room_bytes)
    return np.broadcast_to(room, plan.num_stages)


def communicator_bytes(cluster: Cluster, batch: StageBatch) -> Floats:
    """The bytes that NCCL's communicators take on a GPU of each stage."""
    each = figure_at(cluster, batch.first_rank, lambda one: allocator_of(one).communicator_bytes)
    return np.asarray(each * communicators(batch))


def communicators(batch: StageBatch) -> Floats:
    """The number of NCCL communicators on a GPU of each stage.

    There is one for all ranks, one for each group of ranks of its stage, two for each neighbouring
    stage, and on the first and the last stage one for a shared embedding table.

    Groups of experts count where experts are divided. A stage counts once, however many chunks it
    has.
    """
    ranks = {name: np.asarray(ranks_of(name, batch.value)) for name in GROUPS}
    divides_experts = ranks["experts"] * ranks["expert tensor"] > 1
    neighbours = 2 - batch.has_embedding - batch.has_head
    count = 2 * neighbours + (batch.has_embedding != batch.has_head)
    count = count + ((num_gpus(batch.value) > 1) | (neighbours > 0))
    for name in GROUPS.keys() - {"state replicas"}:
        is_made = ranks[name] > 1
        if axes_of(name) is EXPERT_AXES:
            is_made = is_made & divides_experts
        if name.startswith("gather"):
            is_made = is_made & (batch.zero >= 1)
        count = count + is_made
    return np.asarray(count, dtype=np.float64)


def _counts_groups(cluster: Cluster) -> bool:
    """Whether the hardware of any group of nodes says how many bytes a communicator takes."""
    return any(allocator_of(group).communicator_bytes for group in cluster.of_groups)


def allocator_of(cluster: Cluster) -> Allocator:
    """The hardware's constants for memory that is not tensors; refuses hardware without them."""
    allocator = cluster.hardware.allocator
    if allocator is None:
        message = (
            f"cluster.hardware: {cluster.hardware.name} has no allocator (GPU memory beyond "
            "tensors): measure peak memory of runs and run "
            "python -m experiments.calibrate --runs TABLE.csv"
        )
        raise UncalibratedError(message)
    return allocator


def host_bytes_of_fullest_node(host_bytes: Floats, gpus: Column, cluster: Cluster) -> float:
    """The bytes of host memory in use on the fullest node, if stages fill nodes in order.

    Each stage has ``gpus`` GPUs; ``host_bytes`` (C) is for one rank of it.
    """
    return float(_host_bytes_of_nodes(host_bytes, gpus, cluster).max())


def fullest_host(host_bytes: Floats, gpus: Column, cluster: Cluster) -> float:
    """The bytes of host memory in use on the fullest node, as a share of the node's host memory."""
    held = _host_bytes_of_nodes(host_bytes, gpus, cluster)
    room = host_room_at(cluster, np.arange(len(held)) * cluster.gpus_per_node)
    return float((held / room).max())


def host_room_at(cluster: Cluster, first_rank: Ints) -> Floats | float:
    """The bytes of host memory of the node that each stage is on, given its first rank."""
    return figure_at(cluster, first_rank, lambda one: one.host_memory_bytes)


def _host_bytes_of_nodes(host_bytes: Floats, gpus: Column, cluster: Cluster) -> Floats:
    of_rank = np.repeat(host_bytes, gpus)
    node = np.arange(len(of_rank)) // cluster.gpus_per_node
    return np.asarray(np.bincount(node, weights=of_rank), dtype=np.float64)


def host_bytes_of(plan: Plan, prediction: Prediction, cluster: Cluster) -> float:
    """The bytes of host memory in use on the fullest node, given a plan and the prediction of its
    cost.
    """
    return float(_host_bytes_of_plan(plan, prediction, cluster).max())


def host_bytes_over(plan: Plan, prediction: Prediction, cluster: Cluster) -> float:
    """The most bytes by which host memory in use exceeds that of a node, over all nodes; negative
    if every node has enough.
    """
    held = _host_bytes_of_plan(plan, prediction, cluster)
    room = host_room_at(cluster, np.arange(len(held)) * cluster.gpus_per_node)
    return float((held - room).max())


def _host_bytes_of_plan(plan: Plan, prediction: Prediction, cluster: Cluster) -> Floats:
    gpus = np.array([stage.num_gpus for stage in plan.stages])
    held = np.array([stage.host_bytes for stage in prediction.stages])
    return _host_bytes_of_nodes(held / np.minimum(gpus, cluster.gpus_per_node), gpus, cluster)
