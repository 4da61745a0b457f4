"""Measures links between nodes, in processes that torchrun started, equally many on each node.

A group has the same number of neighbouring ranks on each node, at the same local indices. All
groups of a shape work at once, so that they share the nodes' links as in a run.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

from torch import distributed

from mistlab.core.values import reject
from runtime.comm.processes import device_of, join, leave, world_of_launcher
from runtime.profiling.timing import PATIENCE, Rank, clock_of, together

USAGE = (
    "torchrun --nnodes 2 --nproc-per-node GPUS --rdzv-backend c10d --rdzv-endpoint FIRST:29500 "
    "-m experiments.profile_hardware --between-nodes, the same line on each node"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesOfRun:
    """The nodes on which a launcher started processes, and the number on each."""

    nodes: int
    gpus: int

    @classmethod
    def of_launcher(cls) -> "NodesOfRun":
        """The nodes by torchrun's environment variables; raises an error for fewer than two."""
        size, gpus = (int(os.environ.get(name, "1")) for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"))
        if size == gpus or size % gpus:
            launched = "one node" if size == gpus else f"{size} processes on nodes of {gpus}"
            reject(
                f"--between-nodes: measures the network between at least two equal nodes, but "
                f"{launched} started: start {USAGE}"
            )
        return cls(nodes=size // gpus, gpus=gpus)

    @property
    def shapes(self) -> list[int]:
        """The numbers of ranks per node with which groups are measured."""
        return [count for count in range(1, self.gpus + 1) if self.gpus % count == 0]

    def groups(self, in_node: int) -> list[list[int]]:
        """The groups with this many ranks on each node."""
        return [
            [node * self.gpus + rank for node in range(self.nodes) for rank in range(first, end)]
            for first, end in ((one, one + in_node) for one in range(0, self.gpus, in_node))
        ]


@contextmanager
def rank_of_nodes(of: NodesOfRun, kind: str, repetitions: int) -> Iterator[Rank]:
    """Connect this process to the processes on other nodes, in groups of all shapes; disconnects at
    the end of the ``with`` block.
    """
    world = world_of_launcher()
    device = device_of(kind, world)
    join(world, device, PATIENCE.total_seconds())
    groups: dict[int, distributed.ProcessGroup] = {}
    talk = distributed.new_group(backend="gloo", timeout=PATIENCE)
    for in_node in of.shapes:
        for ranks in of.groups(in_node):
            group = distributed.new_group(ranks, timeout=PATIENCE)
            if world.rank in ranks:
                groups[len(ranks)] = group
    rank = Rank(
        rank=world.rank,
        clock=clock_of(device, partial(together, talk)),
        precision="fp32",
        repetitions=repetitions,
        groups=groups,
        talk=talk,
    )
    yield rank
    rank.together()
    leave(world)
