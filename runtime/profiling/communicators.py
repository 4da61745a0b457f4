"""What processes take of their devices outside torch's allocator once they have connected."""

from dataclasses import dataclass
from typing import get_args

from runtime.comm.connecting import greet
from runtime.comm.processes import everybody
from runtime.profiling.environment import outside_bytes
from runtime.profiling.links import Collective, collective
from runtime.profiling.rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCase:
    """Contexts, libraries and the communicators of all processes and of a group of each size.

    They are used first as in training, since NCCL allocates for an algorithm, and for two ranks
    that exchange messages, when it first has to; ``size_bytes`` is that of long collectives.
    """

    size_bytes: int

    def measured(self, rank: Rank) -> int:
        """Bytes on the device that has most; not the first, where the process that asks has some,
        if there are others."""
        if rank.groups:
            world = everybody()
            after, before = ((rank.rank + step) % world.size for step in (1, -1))
            greet(world, [after], [before], rank.clock.device)
        for gpus in rank.groups:
            for kind in get_args(Collective):
                collective(kind, self.size_bytes, rank, gpus)()
        rank.clock.wait()
        counts = rank.rank > 0 or not rank.groups
        (most,) = rank.slowest([outside_bytes(rank.clock.device) if counts else 0])
        return round(most)
