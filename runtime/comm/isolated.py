"""One stage by itself: what would come from its neighbours is drawn at random where it is needed.

That takes no memory beyond the stage's own, so its peaks are those that it has among the others.
"""

import torch
from torch import Tensor

from mistlab.values.plan import Plan
from runtime.comm.group import Alone
from runtime.comm.topology import Connections, Topology
from runtime.devices.table import generator_of

# As large as what an untrained embedding gives out.
STD = 0.02


class Neighbour:
    """Stands in for the stage at the other end of a link: whatever is sent is dropped."""

    def __init__(self, device: torch.device, seed: int) -> None:
        self._generator = generator_of(device).manual_seed(seed)

    def exchange(self, sends: list[tuple[Tensor, int]], receives: list[tuple[Tensor, int]]) -> None:
        """Fill what is received."""
        for tensor, _ in receives:
            tensor.normal_(std=STD, generator=self._generator)


def isolated(plan: Plan, stage: int, device: torch.device, seed: int) -> Connections:
    """The connections of a stage of one rank without the others; the seed is of what comes in."""
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
