"""Measures transfers, one at a time: collectives, sends, and copies between device and host.

On a CPU both ends of a copy are host memory.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, distributed

from runtime.comm.group import Pending, finished
from runtime.comm.processes import ProcessGroup
from runtime.profiling.rank import Rank
from runtime.profiling.timing import TimedWork, Timing

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]
Copy = Literal["host_to_device", "device_to_host"]


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectiveCase:
    """A collective over groups of ``gpus`` ranks; ``size_bytes`` is the whole message."""

    kind: Collective
    gpus: int
    size_bytes: int

    def measured(self, rank: Rank) -> Timing:
        """The time of the collective, with all groups of the node at once."""
        return rank.timed(collective(self.kind, self.size_bytes, rank, self.gpus))


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyCase:
    """A copy between a device and pinned memory of the host."""

    kind: Copy
    size_bytes: int

    def measured(self, rank: Rank) -> Timing:
        """The time of the copy, on all devices of the node at once."""
        return rank.timed(copy(self.kind, self.size_bytes, rank))


@dataclass(frozen=True, slots=True, kw_only=True)
class SendCase:
    """A message from one device to another."""

    size_bytes: int

    def measured(self, rank: Rank) -> Timing:
        """Half the time of a message there and back, between the first two ranks."""
        message = _values(self.size_bytes, rank)

        def there_and_back() -> None:
            if rank.rank > 1:
                return
            ways = (distributed.send, distributed.recv)
            for way in ways if rank.rank == 0 else reversed(ways):
                way(message, 1 - rank.rank)

        both = rank.timed(there_and_back)
        return Timing(median_s=both.median_s / 2, spread=both.spread)


def collective(kind: Collective, size_bytes: int, rank: Rank, gpus: int) -> TimedWork:
    """A function that runs a collective over this process's group, with the executor's calls."""
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
