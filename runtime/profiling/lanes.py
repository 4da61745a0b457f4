"""Running work on several streams side by side: those of a GPU, or threads on a CPU."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, final

import torch

from mistlab.machine.slowdowns import STREAMS
from runtime.devices.driver import Driver
from runtime.devices.table import driver_of
from runtime.profiling.timing import TimedWork


class Lanes(Protocol):
    """Streams that do not wait for one another."""

    def side_by_side(self, works: Sequence[TimedWork]) -> None:
        """Start all at once; the caller's own stream goes on when all are done."""


@final
class ThreadLanes:
    """A thread for each stream."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(STREAMS))

    def side_by_side(self, works: Sequence[TimedWork]) -> None:
        """Start all at once, and wait for all."""
        for done in [self._threads.submit(work) for work in works]:
            done.result()


@final
class StreamLanes:
    """A stream of the device for each stream."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._streams = [driver.stream(device) for _ in STREAMS]

    def side_by_side(self, works: Sequence[TimedWork]) -> None:
        """Launch each behind what the current stream has done, and let it wait for all."""
        current, start = self._driver.current_stream(self._device), self._driver.event()
        start.record(current)
        for stream, work in zip(self._streams, works, strict=False):
            stream.wait_event(start)
            with self._driver.using(stream):
                work()
            end = self._driver.event()
            end.record(stream)
            current.wait_event(end)


def lanes_of(device: torch.device) -> Lanes:
    """The lanes of a device."""
    driver = driver_of(device)
    return ThreadLanes() if driver is None else StreamLanes(device, driver)
