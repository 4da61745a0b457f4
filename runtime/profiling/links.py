"""Measures single transfers: collectives, sends, and copies between device and host.

On a CPU both ends of a copy are host memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor, distributed

from runtime.comm.group import Pending, finished, greet
from runtime.comm.processes import ProcessGroup, everybody
from runtime.profiling.environment import outside_bytes
from runtime.profiling.timing import Rank, TimedWork, Timing

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
Copy = Literal["host_to_device", "device_to_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCase:
    """A collective to be measured in groups of ``gpus`` ranks; ``size_bytes`` is the whole
    message.
    """

    kind: Collective
    gpus: int
    size_bytes: int

    def measured(self, rank: Rank) -> Timing:
        """Time the collective, in all groups of the node at once."""
        return rank.timed(collective(self.kind, self.size_bytes, rank, self.gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCase:
    """A copy to be measured between a device and pinned host memory."""

    kind: Copy
    size_bytes: int

    def measured(self, rank: Rank) -> Timing:
        """Time the copy, on all devices of the node at once."""
        return rank.timed(copy(self.kind, self.size_bytes, rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCase:
    """A message to be measured, from the first rank's device to the device of its ``peer``."""

    size_bytes: int
    peer: int = 1

    def measured(self, rank: Rank) -> Timing:
        """The time of a message, measured as half the time of a message and its answer."""
        message = _values(self.size_bytes, rank)

        def there_and_back() -> None:
            if rank.rank not in (0, self.peer):
                return
            ways = (distributed.send, distributed.recv)
            for way in ways if rank.rank == 0 else reversed(ways):
                way(message, self.peer - rank.rank)

        both = rank.timed(there_and_back)
        return Timing(median_s=both.median_s / 2, spread=both.spread)


def collective(kind: Collective, size_bytes: int, rank: Rank, gpus: int) -> TimedWork:
    """A function that runs a collective in this process's group, as the runtime's executor does."""
    group = ProcessGroup(rank.groups[gpus])
    whole = _values(size_bytes, rank, gpus)
    part = whole[: len(whole) // gpus].clone()
    start: dict[Collective, Callable[[], Pending | None]] = {
        "all_gather": lambda: group.all_gather(whole, part),
        "reduce_scatter": lambda: group.reduce_scatter(whole),
        "all_reduce": lambda: group.all_reduce(whole),
    }
    return lambda: finished(start[kind]())


def copy(kind: Copy, size_bytes: int, rank: Rank) -> TimedWork:
    """A function that copies between this process's device and the host."""
    on_device = _values(size_bytes, rank)
    on_host = torch.empty(len(on_device), pin_memory=on_device.device.type != "cpu").fill_(1.0)
    source, target = (on_host, on_device) if kind == "host_to_device" else (on_device, on_host)
    return lambda: target.copy_(source, non_blocking=True)


def _values(size_bytes: int, rank: Rank, divisor: int = 1) -> Tensor:
    """Random 32-bit values; their number is a multiple of ``divisor``."""
    count = size_bytes // 4 // divisor * divisor
    return torch.randn(count, device=rank.clock.device)


# Measures the device memory that connected processes use outside torch's allocator.


@dataclass(frozen=True, slots=True, kw_only=True)
class OutsideCase:
    """The memory outside torch's allocator, to be measured: the memory of contexts, libraries, and
    communicators of all processes and of one group of each size.

    The communicators are used first as in training, because NCCL allocates memory at the first use
    of an algorithm, and at the first message between two ranks. ``size_bytes`` is the size of a
    long collective.
    """

    size_bytes: int

    def measured(self, rank: Rank) -> int:
        """The bytes outside torch's allocator, on the device with the most.

        If there are several devices, the first does not count, because the parent process uses
        memory there.
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
