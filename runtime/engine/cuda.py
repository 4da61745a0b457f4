"""Streams of a CUDA device: a stream for each lane, compute being the current one."""

from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from time import perf_counter

import torch
from torch import Tensor

from runtime.comm.group import Pending
from runtime.engine.host_lane import HostEvent, HostLane, Span
from runtime.engine.streams import LANES, Event, Lane, Work


class CudaStreams:
    """Lanes of a GPU. With ``serialises`` every work waits for the one before, whatever its lane.

    Who issues never waits here but in ``synchronize`` and ``spans``, and where work needs what the
    host's lane has not come to yet.
    """

    def __init__(self, device: torch.device, *, serialises: bool = False) -> None:
        self._device = device
        self._serialises = serialises
        compute = torch.cuda.current_stream(device)
        self._streams = {
            lane: compute if lane == "compute" else torch.cuda.Stream(device) for lane in LANES
        }
        self._host = HostLane(self._aside)
        self._last: Event | None = None
        self._began = self._mark(compute)
        # The same moment by the host's clock.
        self._began.synchronize()
        self._began_s = perf_counter()
        self._log: list[tuple[torch.cuda.Event, torch.cuda.Event] | HostEvent] = []

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
        with torch.cuda.stream(stream):
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
        torch.cuda.synchronize(self._device)

    def spoil(self, tensor: Tensor) -> None:
        """Nothing is checked here."""

    def spans(self) -> list[Span]:
        """When each work ran, in the order of submission, by the device's clock."""
        self.synchronize()
        spans = [self._span(event) for event in self._log]
        self._log.clear()
        return spans

    def _span(self, event: tuple[torch.cuda.Event, torch.cuda.Event] | HostEvent) -> Span:
        if isinstance(event, Future):
            start_s, end_s = event.result()
            return start_s - self._began_s, end_s - self._began_s
        start, end = event
        return self._began.elapsed_time(start) / 1e3, self._began.elapsed_time(end) / 1e3

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event

    @contextmanager
    def _aside(self) -> Iterator[None]:
        with torch.cuda.device(self._device), torch.cuda.stream(self._streams["host"]):
            yield
