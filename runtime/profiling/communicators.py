"""Measures the device memory that connected processes take outside torch's allocator."""

from dataclasses import dataclass
from typing import get_args

from runtime.comm.connecting import greet
from runtime.comm.processes import everybody
from runtime.profiling.environment import outside_bytes
from runtime.profiling.links import Collective, collective
from runtime.profiling.rank import Rank


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCase:
    """Memory of contexts, libraries, and communicators of all processes and of a group per size.

    Before the measurement the communicators are used as in training: NCCL allocates memory at the
    first use of an algorithm, and at the first message between two ranks. ``size_bytes`` is the
    size of a long collective.
    """

    size_bytes: int

    def measured(self, rank: Rank) -> int:
        """Bytes on the device where most are taken.

        The first device does not count if there are others: the parent process takes memory there.
        """
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
