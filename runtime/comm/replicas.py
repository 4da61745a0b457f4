"""Replicas of a run: sets of ranks that each train by the plan, and average their weights
periodically.

The data-parallel ranks of every stage are cut into as many consecutive parts as there are replicas.
The ranks of a replica form the groups of a plan with fewer data-parallel ranks. The ranks that hold
the same part of the weights, one of each replica, form another group.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Self

import torch

from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from runtime.comm.group import Alone, Group, GroupMaker, enter
from runtime.comm.topology import CPU, Connections, connected


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaRanks:
    """The ranks of a run's replicas; each replica trains by ``plan``."""

    whole: Plan
    plan: Plan
    count: int

    @classmethod
    def of(cls, plan: Plan, workload: Workload) -> Self:
        """The replicas into which a workload's gradient reduction divides a plan's ranks; one if
        the reduction has no replicas.
        """
        count = workload.reduction.replicas_of(plan.data_ranks[0])
        return cls(whole=plan, plan=plan.of_replica(count), count=count)

    def place(self, rank: int) -> tuple[int, int]:
        """The replica of a global rank, and its rank inside the replica."""
        before = 0
        for stage in self.plan.stages:
            if rank < self.count * stage.num_gpus:
                replica, local = divmod(rank, stage.num_gpus)
                return replica, before + local
            rank -= self.count * stage.num_gpus
            before += stage.num_gpus
        raise AssertionError

    def rank(self, replica: int, rank: int) -> int:
        """The global rank of a rank inside a replica."""
        before = 0
        for stage in self.plan.stages:
            if rank < stage.num_gpus:
                return before + replica * stage.num_gpus + rank
            rank -= stage.num_gpus
            before += self.count * stage.num_gpus
        raise AssertionError

    def sequences_of(self, replica: int, stage: int, data: int) -> int:
        """The index of a data-parallel rank of a replica among the data-parallel ranks of all
        replicas, which decides the rank's sequences.
        """
        return replica * self.plan.data_ranks[stage] + data


def connected_replicas(
    plan: Plan,
    workload: Workload,
    rank: int,
    make: GroupMaker,
    *,
    device: torch.device = CPU,
) -> Connections:
    """A rank's groups inside its replica, and the group of ranks with the same weights in other
    replicas; with one replica, the plan's own groups.
    """
    tied, experts = workload.model.head_has_table, workload.model.experts is not None
    replicas = ReplicaRanks.of(plan, workload)
    if replicas.count == 1:
        return connected(plan, rank, make, tied=tied, experts=experts, device=device)
    replica, inner = replicas.place(rank)

    def make_each(name: str, ranks: Sequence[int]) -> Group | None:
        """Create a group of ranks in each replica, and return the group of this rank's replica; all
        ranks create all groups in the same order.
        """
        called = "replica" if name == "world" else name
        groups = [
            make(called, [replicas.rank(number, one) for one in ranks])
            for number in range(replicas.count)
        ]
        return groups[replica] if inner in ranks else None

    inside = connected(replicas.plan, inner, make_each, tied=tied, experts=experts, device=device)
    peers: Group = Alone()
    for inner_rank in range(replicas.plan.num_gpus):
        group = make(
            "peers", [replicas.rank(number, inner_rank) for number in range(replicas.count)]
        )
        if inner_rank == inner:
            assert group is not None
            peers = group
    enter([peers], device)
    return replace(inside, peers=peers)
