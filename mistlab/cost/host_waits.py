"""When hosts have issued the passes of stages, and which passes wait for their hosts.

The host issues passes one after another, and the GPU runs them in the same order. A host does not
wait for its GPU: while a stage is idle, or has longer passes than usual, its host gets ahead. So
the host's time is apart from that of passes (``Issued``), and an iteration takes as long as the
longer of two chains (``mistlab.cost.chains``).

No host is a pass ahead where ranks of a block wait for the latest of their hosts, as on a cluster
with a profile, or where hosts wait for each message of a pipeline. Then a forward and a backward
pass together take as long as the slower of the two: the host's time for both, or the GPU's. Passes
share the wait by their lengths.

Axes: C candidates.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.chains import ISSUED
from mistlab.cost.pass_seconds import PassSeconds
from mistlab.engines.engine_parts import HostTime
from mistlab.machine.cluster import Cluster
from mistlab.schedule.slot_table import Phase
from mistlab.symbolic.treatments import TREATMENTS
from mistlab.values.context_ways import LAUNCHES
from mistlab.values.mesh import num_gpus, ranks_of
from mistlab.values.stages import StageBatch

Values = NDArray[np.float64]
Column = NDArray[Any]
Flags = NDArray[np.bool_]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Issued:
    """The host's seconds (C) to issue a forward and a backward pass; 0 where no host is ahead of
    its passes, or none issues them."""

    forward_s: Values
    backward_s: Values

    @classmethod
    def of_none(cls, candidates: int) -> Self:
        """Without hosts."""
        return cls(forward_s=np.zeros(candidates), backward_s=np.zeros(candidates))

    def __bool__(self) -> bool:
        """Whether any host may keep its passes waiting."""
        return bool(self.backward_s.any())

    def times(
        self,
        passes: PassSeconds,
        blocks: NDArray[np.int64],
        last_s: tuple[Values, Values],
        sends: tuple[Values, Values],
    ) -> Mapping[str, Values]:
        """The times (C) of ``ISSUED``, for stages of so many blocks (C).

        The last pass and what comes after it take the first of ``last_s``; the second is what
        surely comes after its last block. During ``sends``, from or to the stage in front and from
        or to the next one, hosts issue nothing: before the passes' first blocks and after their
        last ones.
        """
        if not self:
            return dict.fromkeys(ISSUED, np.zeros(len(blocks)))
        received_s, sent_s = sends
        forward_s, backward_s = passes.inside["forward"], passes.inside["backward"]
        after_last_s = last_s[1] + backward_s / blocks
        found = {
            "issued_forward_s": self.forward_s + received_s + sent_s,
            "issued_backward_s": self.backward_s + received_s + sent_s,
            "issued_forward_late_s": _late_s(
                self.forward_s, blocks, forward_s, forward_s / blocks, sent_s
            ),
            "issued_backward_late_s": _late_s(
                self.backward_s, blocks, backward_s, backward_s / blocks, received_s
            ),
            "issued_end_s": _late_s(self.backward_s, blocks, last_s[0], after_last_s, received_s),
        }
        return {name: np.where(self.backward_s > 0, own, 0.0) for name, own in found.items()}


def _late_s(
    issued_s: Values, blocks: NDArray[np.int64], first_s: Values, last_s: Values, held_s: Values
) -> Values:
    """Seconds (C) from when a host goes on after a pass that it issued in ``issued_s``, until the
    stage has computed: ``first_s`` after the first of the pass's blocks was issued, ``last_s``
    after the last one was. The host is held up for ``held_s`` when it has issued the pass."""
    return np.maximum(issued_s / blocks + first_s - issued_s, last_s) - held_s


def held_by_host(
    passes: PassSeconds, host: HostTime | None, ends: Sequence[StageBatch], cluster: Cluster
) -> tuple[PassSeconds, Issued]:
    """The times of passes, which are longer where no host is ahead, and the times of other hosts;
    of a box, from both ``ends`` of its recomputed blocks, the least."""
    batch = ends[0]
    if host is None:
        return passes, Issued.of_none(len(batch))
    forward_s, backward_s = np.minimum.reduce([issued_by_pass(host, end) for end in ends])
    waits = is_never_ahead(host, batch, cluster)
    if waits.any():
        under = with_host if len(ends) == 1 else least_with_host
        passes = _where(waits, under(passes, host, ends, cluster), passes)
        forward_s, backward_s = (np.where(waits, 0.0, own) for own in (forward_s, backward_s))
    return passes, Issued(forward_s=forward_s, backward_s=backward_s)


def with_host(
    passes: PassSeconds, host: HostTime, ends: Sequence[StageBatch], cluster: Cluster
) -> PassSeconds:
    """The times of passes that take at least as long as their host, on a cluster that may have a
    profile; ``ends`` are the candidates alone."""
    (batch,) = ends
    inside = dict(passes.inside)
    forward, backward = inside["forward"], inside["backward"]
    both = forward + backward
    longer = np.maximum(both, issued_s(host, batch, cluster)) / np.where(both > 0, both, 1.0)
    inside["forward"], inside["backward"] = forward * longer, backward * longer
    inside["first_forward"] = np.maximum(inside["first_forward"], inside["forward"])
    inside["last_backward"] = np.maximum(inside["last_backward"], inside["backward"])
    last_computed = np.maximum(passes.last_computed, inside["backward"])
    through = {phase: longer * seconds for phase, seconds in passes.through.items()}
    return replace(passes, inside=inside, through=through, last_computed=last_computed)


def least_with_host(
    passes: PassSeconds, host: HostTime, ends: Sequence[StageBatch], cluster: Cluster
) -> PassSeconds:
    """Times that no passes of a box undercut that take at least as long as their host, from those
    that none undercuts without one; ``ends`` are both ends of the box's recomputed blocks.

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


def is_never_ahead(host: HostTime, batch: StageBatch, cluster: Cluster) -> Flags:
    """Candidates (C) whose ranks wait for the latest of their hosts, or whose hosts wait for the
    messages of a pipeline, so that none is ahead."""
    of_ranks_late = peculiar_s(batch.value, cluster) > 0
    in_pipeline = num_gpus(batch.value) < cluster.num_gpus
    return np.asarray(of_ranks_late | (host.waits_for_sends & in_pipeline))


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
