"""Runs work on several streams at the same time; on a CPU, threads take the place of streams."""

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import product
from typing import Protocol, final

import torch

from mistlab.machine.slowdowns import STREAMS
from runtime.devices.cuda import driver_of
from runtime.devices.driver import Driver
from runtime.models.config import TYPE_OF_PRECISION
from runtime.profiling.links import collective, copy
from runtime.profiling.timing import Rank, TimedWork, Timing


class Lanes(Protocol):
    """Streams of a device that run concurrently and do not wait for one another."""

    def side_by_side(self, works: Mapping[str, TimedWork]) -> None:
        """Start the work of several streams together; the caller's stream continues once all of it
        has ended.
        """


@final
class ThreadLanes:
    """Threads of a CPU in place of streams: one thread for each stream."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(STREAMS))

    def side_by_side(self, works: Mapping[str, TimedWork]) -> None:
        """Start the work of all threads together, and wait for all."""
        for done in [self._threads.submit(work) for work in works.values()]:
            done.result()


@final
class StreamLanes:
    """Streams of a GPU, each with the priority that it has in a run."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._streams = {name: driver.stream(device, urgent=name != "compute") for name in STREAMS}

    def side_by_side(self, works: Mapping[str, TimedWork]) -> None:
        """Start the work of all streams when the current stream reaches this point, and let the
        current stream wait for all of it.
        """
        current, start = self._driver.current_stream(self._device), self._driver.event()
        start.record(current)
        for name, work in works.items():
            stream = self._streams[name]
            stream.wait_event(start)
            with self._driver.using(stream):
                work()
            end = self._driver.event()
            end.record(stream)
            current.wait_event(end)


def lanes_of(device: torch.device) -> Lanes:
    """The streams of a device: threads on a CPU, CUDA streams on a GPU."""
    driver = driver_of(device)
    return ThreadLanes() if driver is None else StreamLanes(device, driver)


# Measures how much four concurrent streams slow one another (interference).
#
# Each stream gets work of one of a few lengths, or none, and all combinations are measured. A
# stream's work is a number of equal GEMMs, transfers or copies, whose time is measured first. Some
# combinations copy in both directions at once.


TRIAL_RUNS = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """The lengths of work to combine: ``levels`` are multiples of ``unit_s`` seconds, where 0 is an
    idle stream.

    ``product_size`` is the size of the square GEMMs that compute, ``chunk_bytes`` the size of one
    transfer.
    """

    levels: tuple[int, ...]
    unit_s: float
    product_size: int
    chunk_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapCase:
    """A combination of work to be measured: one length for each stream; ranks communicate in groups
    of ``gpus``.
    """

    gpus: int
    levels: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapTiming:
    """The measured times of a combination: of each stream's work alone (None for an idle stream),
    and of all together.
    """

    alone: tuple[Timing | None, ...]
    together: Timing


def overlap_cases(gpus: int, levels: tuple[int, ...]) -> list[OverlapCase]:
    """All combinations with at least two busy streams; with a single device, the combinations
    without communication.
    """
    transfers = levels if gpus > 1 else (0,)
    mixtures = product(levels, transfers, levels, levels)
    busy = (mixture for mixture in mixtures if sum(level > 0 for level in mixture) > 1)
    return [OverlapCase(gpus=gpus, levels=mixture) for mixture in busy]


class StreamLoads:
    """The work of each stream in a process, and how often it is repeated to take one unit of
    length.
    """

    def __init__(self, lengths: Lengths, rank: Rank, gpus: int) -> None:
        self._rank = rank
        self._lanes = lanes_of(rank.clock.device)
        works = {
            "compute": lambda: _products(lengths.product_size, rank),
            "gpu_to_gpu": lambda: collective("all_gather", lengths.chunk_bytes, rank, gpus),
            "host_to_device": lambda: copy("host_to_device", lengths.chunk_bytes, rank),
            "device_to_host": lambda: copy("device_to_host", lengths.chunk_bytes, rank),
        }
        self._loads = [
            None if stream == "gpu_to_gpu" and gpus == 1 else self._load(works[stream], lengths)
            for stream in STREAMS
        ]

    def measured(self, case: OverlapCase) -> OverlapTiming:
        """Time the work of each stream alone, then the work of all streams together."""
        works = {
            name: self._work(stream, level)
            for stream, (name, level) in enumerate(zip(STREAMS, case.levels, strict=True))
        }
        return OverlapTiming(
            alone=tuple(
                None if work is None else self._timed({name: work}) for name, work in works.items()
            ),
            together=self._timed({name: work for name, work in works.items() if work is not None}),
        )

    def _load(self, make: Callable[[], TimedWork], lengths: Lengths) -> tuple[TimedWork, int]:
        """A piece of work for a stream, and how often it is repeated to take one unit of length."""
        work = make()
        seconds = self._rank.slowest(self._rank.clock.samples_s(work, TRIAL_RUNS))
        return work, max(1, round(lengths.unit_s / Timing.of(seconds).median_s))

    def _work(self, stream: int, level: int) -> TimedWork | None:
        load = self._loads[stream]
        if not level or load is None:
            return None
        work, unit = load

        def repeated() -> None:
            for _ in range(level * unit):
                work()

        return repeated

    def _timed(self, works: Mapping[str, TimedWork]) -> Timing:
        return self._rank.timed(lambda: self._lanes.side_by_side(works))


def _products(size: int, rank: Rank) -> TimedWork:
    dtype = TYPE_OF_PRECISION[rank.precision]
    left, right = (torch.randn(size, size, device=rank.clock.device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    return lambda: torch.mm(left, right, out=result)
