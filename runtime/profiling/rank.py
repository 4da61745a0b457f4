"""One of the processes that measure together, with its device and its groups."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Self

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from mistlab.values.workload import Precision
from runtime.devices.table import driver_of
from runtime.profiling.device import Devices
from runtime.profiling.timing import Clock, TimedWork, Timing, clock_of

# A process that waits this long for another gives up, and all processes end.
PATIENCE = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """A process; ``groups`` has its group of each size, over ``talk`` processes compare times."""

    rank: int
    clock: Clock
    precision: Precision
    repetitions: int
    groups: Mapping[int, ProcessGroup]
    talk: ProcessGroup | None

    @classmethod
    @contextmanager
    def joined(cls, rank: int, devices: Devices, meeting: Path, repetitions: int) -> Iterator[Self]:
        """Meet the other processes, and part from them when all have left the ``with`` block."""
        with devices.driven(rank) as device:
            place = cls._join(rank, devices, device, meeting, repetitions)
            yield place
            place.together()
            if place.talk is not None:
                distributed.destroy_process_group()

    @classmethod
    def _join(
        cls, rank: int, devices: Devices, device: torch.device, meeting: Path, repetitions: int
    ) -> Self:
        """Meet the other processes, and make groups of neighbouring ranks."""
        groups: dict[int, ProcessGroup] = {}
        talk = None
        driver = driver_of(device)
        if devices.count > 1:
            distributed.init_process_group(
                driver.backend if driver else "gloo",
                init_method=f"file://{meeting}",
                rank=rank,
                world_size=devices.count,
                timeout=PATIENCE,
                device_id=device if driver else None,
            )
            talk = distributed.new_group(backend="gloo")
            for size in group_sizes(devices.count):
                for first in range(0, devices.count, size):
                    group = distributed.new_group(list(range(first, first + size)))
                    if first <= rank < first + size:
                        groups[size] = group
        return cls(
            rank=rank,
            clock=clock_of(device, partial(_together, talk)),
            precision=devices.precision,
            repetitions=repetitions,
            groups=groups,
            talk=talk,
        )

    def slowest(self, samples_s: Sequence[float]) -> list[float]:
        """For each repetition, the time of the slowest process."""
        if self.talk is None:
            return list(samples_s)
        seconds = torch.tensor(samples_s, dtype=torch.float64)
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX, self.talk)
        return seconds.tolist()

    def together(self) -> None:
        """Wait until every process is here."""
        _together(self.talk)

    def timed(self, work: TimedWork) -> Timing:
        """Time work that all processes do at once."""
        self.together()
        return Timing.of(self.slowest(self.clock.samples_s(work, self.repetitions)))


def _together(talk: ProcessGroup | None) -> None:
    if talk is not None:
        distributed.barrier(talk)


def group_sizes(count: int) -> list[int]:
    """The sizes of groups that divide the number of devices."""
    return [size for size in range(2, count + 1) if count % size == 0]
