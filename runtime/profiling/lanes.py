"""Runs work on several streams side by side; on a CPU, threads take the place of streams."""

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
        """Start all works at once; the caller's stream goes on when all have ended."""


@final
class ThreadLanes:
    """Lanes on a CPU: a thread for each stream."""

    def __init__(self) -> None:
        self._threads = ThreadPoolExecutor(len(STREAMS))

    def side_by_side(self, works: Sequence[TimedWork]) -> None:
        """Start all works at once, and wait for all."""
        for done in [self._threads.submit(work) for work in works]:
            done.result()


@final
class StreamLanes:
    """Lanes on a GPU: a stream of the device for each stream."""

    def __init__(self, device: torch.device, driver: Driver) -> None:
        self._device, self._driver = device, driver
        self._streams = [driver.stream(device) for _ in STREAMS]

    def side_by_side(self, works: Sequence[TimedWork]) -> None:
        """Start all works when the current stream comes here, and let it wait for their ends."""
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
