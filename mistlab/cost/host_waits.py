"""How long passes take where the GPU may wait for the host that issues its kernels.

The host issues passes one after another, and the GPU runs them in the same order. So a forward and
a backward pass together take as long as the slower of the two: the host's time for both, or the
GPU's. Passes share the wait by their lengths. The host of an idle stage has issued what comes next,
so a micro-batch passes through it as fast as the GPU; but where ranks of a block wait for the
latest of their hosts, as on a cluster with a profile, or hosts wait for each message of a pipeline,
no host is a pass ahead.

Axes: C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pass_seconds import PassSeconds
from mistlab.engines.host_time import HostTime
from mistlab.machine.cluster import Cluster
from mistlab.schedule.slot_table import Phase
from mistlab.symbolic.treatments import TREATMENTS
from mistlab.values.context_ways import LAUNCHES
from mistlab.values.mesh import num_gpus, ranks_of
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]
Column = NDArray[Any]
Flags = NDArray[np.bool_]


def with_host(
    passes: PassSeconds, host: HostTime, ends: Sequence[StageBatch], cluster: Cluster
) -> PassSeconds:
    """The times of passes under a host, on a cluster that may have a profile; ``ends`` are the
    candidates alone."""
    (batch,) = ends
    inside = dict(passes.inside)
    forward, backward = inside["forward"], inside["backward"]
    both = forward + backward
    longer = np.maximum(both, issued_s(host, batch, cluster)) / np.where(both > 0, both, 1.0)
    waits = is_never_ahead(batch, cluster)
    if host.waits_for_sends:
        waits |= num_gpus(batch.value) < cluster.num_gpus
    ahead = np.where(waits, longer, 1.0)
    through = {**inside, "forward": forward * ahead, "backward": backward * ahead}
    inside["forward"], inside["backward"] = forward * longer, backward * longer
    inside["first_forward"] = np.maximum(inside["first_forward"], inside["forward"])
    inside["last_backward"] = np.maximum(inside["last_backward"], inside["backward"])
    last_computed = np.maximum(passes.last_computed, inside["backward"])
    return replace(passes, inside=inside, through=through, last_computed=last_computed)


def least_with_host(
    passes: PassSeconds, host: HostTime, ends: Sequence[StageBatch], cluster: Cluster
) -> PassSeconds:
    """Times that no passes of a box undercut under a host, from those that none undercuts without
    one; ``ends`` are both ends of the box's recomputed blocks.

    A host makes no pass shorter. But a steady pass that waits for its host is longer, so what a
    first or a last pass takes beyond a steady one may be nothing.
    """
    inside = dict(passes.inside)
    forward, backward = inside["forward"], inside["backward"]
    longest = np.maximum.reduce([issued_s(host, batch, cluster) for batch in ends])
    may_wait = longest > forward + backward

    def beyond(once: Values, steady: Values) -> Values:
        return np.where(may_wait, np.minimum(once, steady), once)

    inside["first_forward"] = beyond(inside["first_forward"], forward)
    inside["last_backward"] = beyond(inside["last_backward"], backward)
    return replace(passes, inside=inside, last_computed=beyond(passes.last_computed, backward))


def held_by_host(
    passes: PassSeconds,
    host: HostTime,
    ends: Sequence[StageBatch],
    cluster: Cluster,
    *,
    may_be_ahead: bool,
) -> tuple[PassSeconds, Values]:
    """The times of passes under a host, and the seconds (C) in which it issues both passes; of a
    box, from both ``ends`` of its recomputed blocks, the least.

    A host that ``may_be_ahead`` holds no pass up by itself. Its seconds count apart.
    """
    under = with_host if len(ends) == 1 else least_with_host
    held = under(passes, host, ends, cluster)
    if not may_be_ahead:
        return held, np.zeros(len(ends[0]))
    waits = is_never_ahead(ends[0], cluster)
    issued = np.minimum.reduce([np.add(*issued_by_pass(host, batch)) for batch in ends])
    return _where(waits, held, passes), np.where(waits, 0.0, issued)


def is_never_ahead(batch: StageBatch, cluster: Cluster) -> Flags:
    """Candidates (C) whose ranks wait for the latest of their hosts, so that none is ahead."""
    return np.asarray(peculiar_s(batch.value, cluster) > 0)


def _where(waits: Flags, held: PassSeconds, passes: PassSeconds) -> PassSeconds:
    """The times of passes under a host where stages wait for it (C), and without one elsewhere."""

    def either(some: Mapping[Phase, Values], others: Mapping[Phase, Values]) -> dict[Phase, Values]:
        return {phase: np.where(waits, some[phase], own) for phase, own in others.items()}

    return replace(
        passes,
        inside=either(held.inside, passes.inside),
        through=either(held.through, passes.through),
        last_computed=np.where(waits, held.last_computed, passes.last_computed),
    )


def issued_s(host: HostTime, batch: StageBatch, cluster: Cluster) -> Values:
    """The host's seconds (C) for a forward and a backward pass."""
    forward, backward = issued_by_pass(host, batch)
    return np.asarray(forward + backward + peculiar_s(batch.value, cluster) * batch.layers)


def of_ranks(host: HostTime, ranks: Column, way: Column) -> tuple[Values, Values]:
    """The host's seconds (C) for a block's forward pass, and for its backward pass, on one of so
    many context-parallel ranks (C), which exchange keys in some ``way`` (C)."""
    forward, backward = np.full(len(ranks), host.forward_s), np.full(len(ranks), host.backward_s)
    for number, launches in LAUNCHES.items():
        rows = (ranks > 1) & (way == number)
        further = ranks[rows] - 1
        forward[rows] += host.launch_s * launches.forward.beside(further)
        backward[rows] += host.launch_s * launches.backward.beside(further)
    return forward, backward


def issued_by_pass(host: HostTime, batch: StageBatch) -> tuple[Values, Values]:
    """The host's seconds (C) for a forward pass, and those for a backward pass; recomputed blocks
    run twice. A cluster's profile is left out."""
    again = np.sum([batch.value(row.dimension) for row in TREATMENTS.values()], axis=0)
    ends = host.end_s * (batch.has_embedding + batch.has_head)
    ranks, way = batch.value("context_parallel"), batch.value("context_exchange")
    forward_s, backward_s = of_ranks(host, ranks, way)
    forward = forward_s * batch.layers + ends
    return np.asarray(forward), np.asarray(backward_s * batch.layers + forward_s * again + ends)


def peculiar_s(value: Callable[[str], NDArray[Any]], cluster: Cluster) -> Values:
    """Seconds (C) that a block's two passes are issued later by a cluster's profile."""
    ranks = np.asarray(ranks_of("tensor", value))
    if cluster.profile is None or cluster.nodes == 1:
        return np.zeros(len(ranks))
    return cluster.profile.block_s(ranks, in_pipeline=num_gpus(value) < cluster.num_gpus)
