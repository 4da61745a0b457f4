"""Streams of a CUDA device: a stream for each lane, compute being the current one."""

from collections.abc import Sequence

import torch
from torch import Tensor

from runtime.comm.group import Pending
from runtime.engine.streams import LANES, Event, Lane, Work


class CudaStreams:
    """Lanes of a GPU. With ``serialises`` every work waits for the one before, whatever its lane.

    The host only issues: it never waits here but in ``synchronize`` and ``spans``.
    """

    def __init__(self, device: torch.device, *, serialises: bool = False) -> None:
        self._device = device
        self._serialises = serialises
        compute = torch.cuda.current_stream(device)
        self._streams = {
            lane: compute if lane == "compute" else torch.cuda.Stream(device) for lane in LANES
        }
        self._last: Event | None = None
        self._began = self._mark(compute)
        self._log: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def submit(self, lane: Lane, work: Work, waits: Sequence[Event]) -> Event:
        """Issue work on a stream."""
        stream = self._streams[lane]
        for event in waits:
            stream.wait_event(event)
        if self._serialises and self._last is not None:
            stream.wait_event(self._last)
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
        torch.cuda.synchronize(self._device)

    def spoil(self, tensor: Tensor) -> None:
        """Nothing is checked here."""

    def spans(self) -> list[tuple[float, float]]:
        """When each work ran, in the order of submission, by the device's clock."""
        self.synchronize()
        spans = [
            (self._began.elapsed_time(start) / 1e3, self._began.elapsed_time(end) / 1e3)
            for start, end in self._log
        ]
        self._log.clear()
        return spans

    def _mark(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(stream)
        return event
