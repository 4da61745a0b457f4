"""Times work that is repeated on a device: by events on a GPU, by the host's clock on a CPU.

Caches are cleared before each repetition, because in a run weights, states and messages come from
memory: the tensors of all blocks together are larger than any cache.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from pathlib import Path
from statistics import median, quantiles
from typing import Protocol, Self, final

import torch
from torch import distributed
from torch.distributed import ProcessGroup

from mistlab.core.units import MIB_BYTES
from mistlab.engines.engine import Precision
from runtime.devices.cuda import driver_of
from runtime.devices.driver import Driver
from runtime.profiling.environment import Devices

TimedWork = Callable[[], object]

WARM_UPS = 2
# The GPU pauses for this many cycles before each timed work, so that the host has launched all
# kernels when the work begins.
HEAD_START_CYCLES = 2_000_000
# The bytes written before each timed work, to clear the L2 cache (at most 126 MB).
FLUSHED_BYTES = 256 * MIB_BYTES
# The bytes written before each timed work on a CPU, to clear its caches: twice the size of a
# server's shared cache.
FLUSHED_ON_HOST_BYTES = 64 * MIB_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The median of repeated measurements, and their spread.

    ``spread`` is the distance between the quartiles, divided by the median.
    """

    median_s: float
    spread: float

    @classmethod
    def of(cls, samples_s: Sequence[float]) -> "Timing":
        """The median of repeated measurements, and their spread."""
        middle = median(samples_s)
        spread = 0.0
        if len(samples_s) > 1:
            lower, _, upper = quantiles(samples_s, n=4, method="inclusive")
            spread = (upper - lower) / middle
        return cls(median_s=middle, spread=spread)


class Clock(Protocol):
    """Times work on one device."""

    @property
    def device(self) -> torch.device:
        """The device on which the clock times work."""

    def samples_s(self, work: TimedWork, repetitions: int) -> list[float]:
        """The seconds of each repetition of ``work``, after warm-up."""

    def wait(self) -> None:
        """Wait until the device has ended all work."""


@final
class HostClock:
    """A clock for work that has ended when its function returns; it clears caches first.

    ``meet`` is called once the caches are clear, so that processes that work together begin at the
    same time.
    """

    def __init__(self, meet: Callable[[], object] = lambda: None) -> None:
        self.device = torch.device("cpu")
        self._meet = meet
        self.flushed = torch.zeros(FLUSHED_ON_HOST_BYTES, dtype=torch.int8)
        self._small = torch.ones(8, 8)

    def samples_s(self, work: TimedWork, repetitions: int) -> list[float]:
        """The seconds of each repetition of ``work``, after warm-up."""
        for _ in range(WARM_UPS):
            work()
        samples = []
        for _ in range(repetitions):
            self._clear()
            self._meet()
            start = time.perf_counter()
            work()
            samples.append(time.perf_counter() - start)
        return samples

    def _clear(self) -> None:
        """Clear the data caches of the CPU; torch's code stays in them, as in a run."""
        self.flushed.zero_()
        for _ in range(WARM_UPS):
            torch.mm(self._small, self._small).add_(self._small)

    def wait(self) -> None:
        """Returns at once, since the work has ended already."""


@final
class EventClock:
    """A clock for work on a GPU's current stream: it records an event before and after, with cold
    caches.
    """

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self.device, self._driver = device, driver
        self._flushed = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device=device)

    def samples_s(self, work: TimedWork, repetitions: int) -> list[float]:
        """The seconds of each repetition of ``work``, after warm-up."""
        for _ in range(WARM_UPS):
            work()
        pairs = []
        for _ in range(repetitions):
            start, end = self._driver.event(), self._driver.event()
            stream = self._driver.current_stream(self.device)
            self._driver.idle(HEAD_START_CYCLES)
            self._flushed.zero_()
            start.record(stream)
            work()
            end.record(stream)
            pairs.append((start, end))
        self.wait()
        return [start.elapsed_time(end) / 1e3 for start, end in pairs]

    def wait(self) -> None:
        """Wait until the GPU has no more work."""
        self._driver.synchronize(self.device)


def clock_of(device: torch.device, meet: Callable[[], object] = lambda: None) -> Clock:
    """The clock for a device; on a CPU, processes call ``meet`` before each timed work."""
    driver = driver_of(device)
    return HostClock(meet) if driver is None else EventClock(device, driver)


# One of the processes that measure at the same time, with its device and its groups.


# How long a process waits for another before it gives up, and all processes end.
PATIENCE = timedelta(minutes=2)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rank:
    """A process that measures: ``groups`` has its group of each size; processes exchange times over
    ``talk``.
    """

    rank: int
    clock: Clock
    precision: Precision
    repetitions: int
    groups: Mapping[int, ProcessGroup]
    talk: ProcessGroup | None

    @classmethod
    @contextmanager
    def joined(cls, rank: int, devices: Devices, meeting: Path, repetitions: int) -> Iterator[Self]:
        """Connect this process to the other measuring processes; disconnects once all have left the
        ``with`` block.
        """
        with devices.driven(rank) as device:
            joined_rank = cls._join(rank, devices, device, meeting, repetitions)
            yield joined_rank
            joined_rank.together()
            if joined_rank.talk is not None:
                distributed.destroy_process_group()

    @classmethod
    def _join(
        cls, rank: int, devices: Devices, device: torch.device, meeting: Path, repetitions: int
    ) -> Self:
        """Connect to the other measuring processes, and create groups of neighbouring ranks."""
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
            clock=clock_of(device, partial(together, talk)),
            precision=devices.precision,
            repetitions=repetitions,
            groups=groups,
            talk=talk,
        )

    def slowest(self, samples_s: Sequence[float]) -> list[float]:
        """For each repetition, the time of the process that took longest."""
        if self.talk is None:
            return list(samples_s)
        seconds = torch.tensor(samples_s, dtype=torch.float64)
        distributed.all_reduce(seconds, distributed.ReduceOp.MAX, self.talk)
        return seconds.tolist()

    def together(self) -> None:
        """Wait until every measuring process has reached this call."""
        together(self.talk)

    def timed(self, work: TimedWork) -> Timing:
        """Time ``work``, which all processes run at once."""
        self.together()
        return Timing.of(self.slowest(self.clock.samples_s(work, self.repetitions)))


def together(talk: ProcessGroup | None) -> None:
    """Wait until all communicating processes have reached this call; a single process continues."""
    if talk is not None:
        distributed.barrier(talk)


def group_sizes(count: int) -> list[int]:
    """The sizes of groups that divide the number of devices evenly."""
    return [size for size in range(2, count + 1) if count % size == 0]
