"""Runs one stage of a pipeline alone, with random tensors in place of its neighbours' messages.

The random values are drawn into the buffers that would receive the messages. They take no further
memory, so the stage's memory peaks are the same as in the whole pipeline.
"""

import torch
from torch import Tensor

from mistlab.values.plan import Plan
from runtime.comm.group import Alone
from runtime.comm.topology import Connections, Topology
from runtime.devices.table import generator_of

# The standard deviation of an untrained embedding's output.
STD = 0.02


class Neighbour:
    """Stands in for the stage at the other end of a link: drops messages and invents answers."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = generator_of(device).manual_seed(seed)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Drop all tensors to send, and fill all tensors to receive with random values."""
        for tensor, _ in receives:
            tensor.normal_(std=STD, generator=self._generator)


def isolated(plan: Plan, stage: int, device: torch.device, seed: int) -> Connections:
    """Connections for one stage of one rank alone; ``seed`` is for the invented messages."""
    assert plan.stages[stage].num_gpus == 1
    topology, alone = Topology(plan=plan), Alone()
    rank = topology.rank(stage, 0, 0)
    return Connections(
        topology=topology,
        rank=rank,
        tensor=alone,
        gather=alone,
        reduce=alone,
        world=alone,
        tied=alone,
        links={
            name: (Neighbour(device, seed + number), ranks)
            for number, (name, ranks) in enumerate(topology.links())
            if rank in ranks
        },
    )
