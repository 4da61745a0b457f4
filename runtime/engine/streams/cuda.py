"""The lanes of a GPU: a stream for each lane; compute uses the current stream."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter

import torch
from torch import Tensor

from mistlab.schedule.lanes import LANES, Lane
from runtime.comm.group import Pending
from runtime.devices.driver import Driver, Stream
from runtime.devices.driver import Event as DeviceEvent
from runtime.engine.streams.host_lane import HostEvent, HostLane, Span
from runtime.engine.streams.lanes import Event, LaneWork


@dataclass(slots=True, kw_only=True, eq=False)
class _StreamWork:
    """Work on a stream: the events of its start and its end.

    They are None once the host has waited for them.
    """

    start: DeviceEvent | None
    end: DeviceEvent | None


class CudaStreams:
    """Lanes of a GPU; with ``serialises`` all work runs in the order of its submission.

    The thread that issues waits only in ``synchronize`` and ``spans``, and for unfinished work of
    the host's lane that new work needs. Events that ``spans`` has read are used again: their work
    has ended, so nobody waits for them any more.
    """

    def __init__(self, device: torch.device, driver: Driver, *, serialises: bool = False) -> None:
        self._device, self._driver = device, driver
        self._serialises = serialises
        compute = driver.current_stream(device)
        # Ready transfers go before ready computing, because later computing waits for them.
        self._streams: dict[Lane, Stream] = {
            lane: compute if lane == "compute" else driver.stream(device, urgent=True)
            for lane in LANES
        }
        self._host = HostLane(driver.threads("host lane"), self._on_host_stream)
        self._last: Event | None = None
        self._log: list[_StreamWork | HostEvent] = []
        self._free: list[DeviceEvent] = []
        # Events of ``beside``: the collective waits for the first, compute for the second.
        self._made, self._reduced = driver.event(), driver.event()
        self._born_s = perf_counter()
        self._began = driver.event()
        self._anchor()

    def stream(self, lane: Lane) -> Stream:
        """The stream of a lane."""
        return self._streams[lane]

    def submit(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> Event:
        """Issue work on a lane."""
        if self._serialises and self._last is not None:
            waits = (*waits, self._last)
        if lane == "host":
            ends = [event.end for event in waits if isinstance(event, _StreamWork)]
            self._last = self._host.submit(work, [end for end in ends if end is not None])
        else:
            self._last = self._launch(lane, work, waits)
        self._log.append(self._last)
        return self._last

    def _launch(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> _StreamWork:
        stream = self._streams[lane]
        for event in waits:
            if isinstance(event, Future):
                event.result()
            elif event.end is not None:
                stream.wait_event(event.end)
        start = self._recorded(stream)
        if lane == "compute":
            self.settle(work())
        else:
            with self._driver.using(stream), torch.no_grad():
                self.settle(work())
        return _StreamWork(start=start, end=self._recorded(stream))

    def settle(self, pending: Pending | None) -> None:
        """Do nothing: a collective runs in the order of its stream."""
        assert pending is None

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Run a collective on its lane after compute's work so far, and ``work`` on compute.

        Two events serve all of these collectives: a stream that is told to wait for an event waits
        for the event's last recording before that.
        """
        if self._serialises:
            self.settle(collective())
            work()
            return
        compute, lane = self._streams["compute"], self._streams["tensor_parallel"]
        self._made.record(compute)
        lane.wait_event(self._made)
        with self._driver.using(lane):
            self.settle(collective())
        self._reduced.record(lane)
        work()
        compute.wait_event(self._reduced)

    def synchronize(self) -> None:
        """Wait, in the calling thread, for all work."""
        for event in self._log:
            if isinstance(event, Future):
                event.result()
        self._driver.synchronize(self._device)

    def spoil(self, tensor: Tensor) -> None:
        """Do nothing: a GPU's streams check nothing."""

    def spans(self) -> list[Span]:
        """Start and end of each work in order of submission, in seconds since the lanes began."""
        self.synchronize()
        spans = [self._span(ran) for ran in self._log]
        self._log.clear()
        self._anchor()
        return spans

    def close(self) -> None:
        """Let the host lane's thread end; the device still runs the work that was issued."""
        self._host.close()

    def _anchor(self) -> None:
        """Note one moment by the device's clock and by the host's clock.

        The time between two events is a 32-bit number of milliseconds, which over hours would lose
        its resolution.
        """
        self._began.record(self._streams["compute"])
        self._began.synchronize()
        self._began_s = perf_counter() - self._born_s

    def _span(self, ran: _StreamWork | HostEvent) -> Span:
        if isinstance(ran, Future):
            start_s, end_s = ran.result()
            return start_s - self._born_s, end_s - self._born_s
        assert ran.start is not None
        assert ran.end is not None
        events = (ran.start, ran.end)
        ran.start = ran.end = None
        self._free += events
        start_s, end_s = (self._began.elapsed_time(event) / 1e3 for event in events)
        return self._began_s + start_s, self._began_s + end_s

    def _recorded(self, stream: Stream) -> DeviceEvent:
        event = self._free.pop() if self._free else self._driver.event()
        event.record(stream)
        return event

    @contextmanager
    def _on_host_stream(self) -> Iterator[None]:
        self._driver.choose(self._device)
        with self._driver.using(self._streams["host"]):
            yield
