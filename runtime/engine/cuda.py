"""Streams of a GPU: a stream for each lane, compute being the current one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from runtime.comm.group import Pending
from runtime.devices.driver import Driver, Stream
from runtime.devices.driver import Event as DeviceEvent
from runtime.engine.host_lane import HostEvent, HostLane, Span
from runtime.engine.streams import LANES, Event, Lane, Work


class CudaStreams:
    """Lanes of a GPU. With ``serialises`` every work waits for the one before, whatever its lane.

    Who issues never waits here but in ``synchronize`` and ``spans``, and where work needs what the
    host's lane has not come to yet.
    """

    def __init__(self, device: torch.device, driver: Driver, *, serialises: bool = False) -> None:
        self._device, self._driver = device, driver
        self._serialises = serialises
        compute = driver.current_stream(device)
        # Where both are ready transfers go first: what computes later waits for what they bring.
        self._streams: dict[Lane, Stream] = {
            lane: compute if lane == "compute" else driver.stream(device, urgent=True)
            for lane in LANES
        }
        self._host = HostLane(driver.threads("host lane"), self._aside)
        self._last: Event | None = None
        self._log: list[tuple[DeviceEvent, DeviceEvent] | HostEvent] = []
        self._born_s = perf_counter()
        self._anchor()

    def submit(self, lane: Lane, work: Work, waits: Sequence[Event]) -> Event:
        """Issue work on a stream."""
        if self._serialises and self._last is not None:
            waits = (*waits, self._last)
        if lane == "host":
            waits = [event for event in waits if not isinstance(event, Future)]
            self._last = self._host.submit(work, waits)
            self._log.append(self._last)
            return self._last
        stream = self._streams[lane]
        for event in waits:
            if isinstance(event, Future):
                event.result()
            else:
                stream.wait_event(event)
        started = self._mark(stream)
        with self._driver.using(stream):
            if lane == "compute":
                self.settle(work())
            else:
                with torch.no_grad():
                    self.settle(work())
        self._last = self._mark(stream)
        self._log.append((started, self._last))
        return self._last

    def settle(self, pending: Pending | None) -> None:
        """Nothing to wait for: collectives run in the order of the stream."""
        assert pending is None

    def synchronize(self) -> None:
        """Let the host wait for everything."""
        for event in self._log:
            if isinstance(event, Future):
                event.result()
        self._driver.synchronize(self._device)

    def spoil(self, tensor: Tensor) -> None:
        """Nothing is checked here."""

    def spans(self) -> list[Span]:
        """When each work ran, in the order of submission, in seconds since these streams began."""
        self.synchronize()
        spans = [self._span(event) for event in self._log]
        self._log.clear()
        self._anchor()
        return spans

    def close(self) -> None:
        """Let the host lane's thread end; the device does what was issued."""
        self._host.close()

    def _anchor(self) -> None:
        """Note one moment by the device's clock and by the host's.

        Times of events are 32-bit milliseconds since another event: measured from a moment that is
        hours back they would lose their resolution.
        """
        self._began = self._mark(self._streams["compute"])
        self._began.synchronize()
        self._began_s = perf_counter() - self._born_s

    def _span(self, event: tuple[DeviceEvent, DeviceEvent] | HostEvent) -> Span:
        if isinstance(event, Future):
            start_s, end_s = event.result()
            return start_s - self._born_s, end_s - self._born_s
        start, end = event
        start_s, end_s = (self._began.elapsed_time(one) / 1e3 for one in (start, end))
        return self._began_s + start_s, self._began_s + end_s

    def _mark(self, stream: Stream) -> DeviceEvent:
        event = self._driver.event()
        event.record(stream)
        return event

    @contextmanager
    def _aside(self) -> Iterator[None]:
        self._driver.choose(self._device)
        with self._driver.using(self._streams["host"]):
            yield
