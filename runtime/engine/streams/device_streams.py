"""The lanes of a device, which are queues of work: CUDA streams, or simulated streams on a CPU, and
a thread for work of the host.
"""

import random
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from time import perf_counter
from typing import Literal

import torch
from torch import Tensor

from mistlab.schedule.stage_passes import LANES, Lane
from runtime.comm.group import Pending
from runtime.devices.cuda import driver_of
from runtime.devices.driver import Driver, Graph, Stream
from runtime.devices.driver import Event as DeviceEvent
from runtime.engine.streams.lanes import Event, LaneWork, Streams

# The lane for host work beside a GPU: a thread that computes on the host's processors.


Span = tuple[float, float]
HostEvent = Future[Span]


class HostLane:
    """Runs host work in order, in one thread; its events are futures that give start and end in
    seconds.

    Inside ``aside`` the work issues its copies on a stream that no other lane uses, since the
    streams of other lanes have later work queued already.
    """

    def __init__(
        self,
        thread: Executor,
        aside: Callable[[], AbstractContextManager[object]] = nullcontext,
    ) -> None:
        self._thread = thread
        self._aside = aside

    def submit(self, work: LaneWork, waits: Sequence[Event]) -> HostEvent:
        """Queue work after the lane's other work, and after events of the device."""
        return self._thread.submit(self._run, work, tuple(waits))

    def close(self) -> None:
        """Let the thread end after its current work; queued work is dropped."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _run(self, work: LaneWork, waits: Sequence[Event]) -> Span:
        for event in waits:
            event.synchronize()
        start = perf_counter()
        with torch.no_grad(), self._aside():
            work()
        return start, perf_counter()


# The lanes of a GPU: one CUDA stream for each lane; computation uses the current stream.


class _StreamWork:
    """Work on a CUDA stream, with the events of its start and end; both are None once the host has
    waited for them.
    """

    __slots__ = ("end", "start")

    def __init__(self, start: DeviceEvent, end: DeviceEvent) -> None:
        self.start: DeviceEvent | None = start
        self.end: DeviceEvent | None = end


class CudaStreams:
    """The lanes of a GPU; with ``serialises`` all work runs in the order of its submission.

    The issuing thread waits only in ``synchronize`` and ``spans``, and when new work needs host
    work that is not finished. ``spans`` reads events and then recycles them: their work has ended,
    so nothing waits for them any more.
    """

    def __init__(self, device: torch.device, driver: Driver, *, serialises: bool = False) -> None:
        self._device, self._driver = device, driver
        self._serialises = serialises
        compute = driver.current_stream(device)
        # Transfers have priority over computation that is also ready, because later computation
        # waits for transfers.
        self._streams: dict[Lane, Stream] = {
            lane: compute if lane == "compute" else driver.stream(device, urgent=True)
            for lane in LANES
        }
        # One ``no_grad`` context serves all work, since work never launches other work.
        self._without_gradients = torch.no_grad()
        self._host = HostLane(driver.threads("host lane"), self._on_host_stream)
        self._last: Event | None = None
        self._log: list[_StreamWork | HostEvent] = []
        self._free: list[DeviceEvent] = []
        # Events for ``beside``: its collective waits for the first, and the compute lane for the
        # second.
        self._made, self._reduced = driver.event(), driver.event()
        self._born_s = perf_counter()
        self._began = driver.event()
        self._anchor()

    def stream(self, lane: Lane) -> Stream:
        """The CUDA stream on which work of a lane (such as computation or collectives) runs."""
        return self._streams[lane]

    def submit(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> Event:
        """Issue a function's work on the CUDA stream of a lane."""
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
            with self._driver.using(stream), self._without_gradients:
                self.settle(work())
        return _StreamWork(start=start, end=self._recorded(stream))

    def settle(self, pending: Pending | None) -> None:
        """Does nothing, since a collective runs in the order of its CUDA stream."""
        assert pending is None

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Run a collective on its lane after the compute lane's work so far, while ``work`` runs on
        the compute lane.

        Two events serve all these collectives: a stream that waits for an event waits for the
        latest recording at the time of the call.
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

    @contextmanager
    def captured(self) -> Iterator[Graph]:
        """Capture the work of all lanes within the ``with`` block as a graph, instead of running
        it. Earlier work must have ended, and ``spans`` must have been called to free its events.
        """
        compute = self._streams["compute"]
        lanes = [lane for lane in self._streams.values() if lane is not compute]
        with self._driver.capture(compute) as graph:
            # For the capture, all lanes branch from the compute lane at the start, and join it at
            # the end.
            self._made.record(compute)
            for lane in lanes:
                lane.wait_event(self._made)
            yield graph
            for lane in lanes:
                compute.wait_event(self._recorded(lane))
        # Work that is captured in a graph does not run now, so it has no times.
        self._log.clear()

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The values of a tensor that the compute lane writes, copied to the host."""
        return self._driver.read(tensor, usual)

    def synchronize(self) -> None:
        """Block the calling thread until all work has ended."""
        for event in self._log:
            if isinstance(event, Future):
                event.result()
        self._driver.synchronize(self._device)

    def spoil(self, *tensors: Tensor) -> None:
        """Does nothing: CUDA streams do not check reads of freed memory."""

    def spans(self) -> list[Span]:
        """The start and end of each work in order of submission, in seconds since the lanes were
        made.
        """
        self.synchronize()
        spans = [self._span(ran) for ran in self._log]
        self._log.clear()
        self._anchor()
        return spans

    def close(self) -> None:
        """Let the host lane's thread end; the device still runs the work issued so far."""
        self._host.close()

    def _anchor(self) -> None:
        """Record one moment on the clocks of both device and host.

        The time between two events is a 32-bit number of milliseconds, which loses resolution over
        hours.
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
        start, end = ran.start, ran.end
        ran.start = ran.end = None
        self._free += (start, end)
        since = self._began.elapsed_time
        return self._began_s + since(start) / 1e3, self._began_s + since(end) / 1e3

    def _recorded(self, stream: Stream) -> DeviceEvent:
        event = self._free.pop() if self._free else self._driver.event()
        event.record(stream)
        return event

    @contextmanager
    def _on_host_stream(self) -> Iterator[None]:
        self._driver.choose(self._device)
        with self._driver.using(self._streams["host"]):
            yield


# Simulated streams on a CPU, whose progress can be varied to uncover races.
#
# The compute lane runs its work at once. Other lanes may delay their work: ``eager`` runs all work
# that can run, ``lazy`` runs work only when something waits for it, ``random`` mixes both, by a
# seed. A correct program gives the same results with each. Memory that must not be read any more is
# filled with NaN.


Progress = Literal["eager", "lazy", "random"]


def _done() -> None:
    """Takes the place of a queued function once it has run."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Item:
    lane: Lane
    work: LaneWork
    waits: Sequence["_Item"]
    pending: Pending | None = None
    started_s: float | None = None
    ended_s: float | None = None

    @property
    def is_done(self) -> bool:
        return self.ended_s is not None


@dataclass(slots=True, kw_only=True)
class SimulatedStreams:
    """The lanes of a CPU as queues of calls; an event is the queued item itself."""

    progress: Progress = "eager"
    seed: int = 0
    spoils: bool = True
    _queues: dict[Lane, deque[_Item]] = field(
        default_factory=lambda: {lane: deque() for lane in LANES}, init=False
    )
    _draw: random.Random = field(init=False)
    _log: list[_Item] = field(default_factory=list, init=False)

    def __post_init__(self) -> None:
        self._draw = random.Random(self.seed)

    def submit(self, lane: Lane, work: LaneWork, waits: Sequence[Event]) -> Event:
        """Queue work; work on the compute lane waits for its events and runs at once."""
        item = _Item(lane=lane, work=work, waits=waits)
        self._log.append(item)
        self._queues[lane].append(item)
        if lane == "compute":
            for event in waits:
                self._run_up_to(event)
            self._advance_some()
            self._run_up_to(item)
        else:
            self._advance_some()
        return item

    def settle(self, pending: Pending | None) -> None:
        """Wait for a collective; the other lanes continue meanwhile, as on a device."""
        if pending is None:
            return
        while not pending.is_ready():
            if not self._advance_all():
                pending.wait_a_moment()
        pending.finish()

    def beside(self, collective: LaneWork, work: Callable[[], object]) -> None:
        """Start a collective, run ``work``, then wait for the collective."""
        pending = collective()
        work()
        self.settle(pending)

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The values of a tensor, after the work that writes it."""
        del usual
        return [int(one) for one in tensor.tolist()]

    def synchronize(self) -> None:
        """Run all work that is queued on simulated streams."""
        for queue in self._queues.values():
            while queue:
                self._run_up_to(queue[-1])

    def spoil(self, *tensors: Tensor) -> None:
        """Fill tensors with bytes that are NaN in every floating-point type."""
        for tensor in tensors if self.spoils else ():
            tensor.view(torch.uint8).fill_(255)

    def spans(self) -> list[tuple[float, float]]:
        """The start and the end of each work, in order of submission."""
        self.synchronize()
        spans = []
        for item in self._log:
            assert item.started_s is not None
            assert item.ended_s is not None
            spans.append((item.started_s, item.ended_s))
        self._log.clear()
        return spans

    def close(self) -> None:
        """Drop all queued work, and the tensors that it refers to."""
        for queue in self._queues.values():
            queue.clear()
        self._log.clear()

    def _advance_some(self) -> None:
        if self.progress == "eager":
            while self._advance_all():
                pass
        elif self.progress == "random":
            for lane in self._draw.sample(LANES, len(LANES)):
                while self._draw.random() < 0.5 and self._advance(lane):
                    pass

    def _advance_all(self) -> bool:
        """Advance each lane by one step if possible; returns whether any lane advanced."""
        advanced = [self._advance(lane) for lane, queue in self._queues.items() if queue]
        return any(advanced)

    def _advance(self, lane: Lane) -> bool:
        queue = self._queues[lane]
        if not queue or lane == "compute":
            return False
        item = queue[0]
        started = False
        if item.started_s is None:
            if not all(event.is_done for event in item.waits):
                return False
            self._start(item)
            started = True
        if item.pending is not None:
            if not item.pending.is_ready():
                return started
            item.pending.finish()
        self._end(item)
        return True

    def _run_up_to(self, event: _Item) -> None:
        """Run a lane up to an event, along with all work that the event waits for."""
        queue = self._queues[event.lane]
        while not event.is_done:
            item = queue[0]
            if item.started_s is None:
                for before in item.waits:
                    self._run_up_to(before)
            # This lane may have advanced while it waited for another collective.
            if item.is_done:
                continue
            if item.started_s is None:
                self._start(item)
            if item.pending is not None:
                self._await(item)
            if not item.is_done:
                self._end(item)

    def _await(self, item: _Item) -> None:
        assert item.pending is not None
        while not item.is_done and not item.pending.is_ready():
            if not self._advance_all():
                item.pending.wait_a_moment()
        if not item.is_done:
            item.pending.finish()

    def _start(self, item: _Item) -> None:
        item.started_s = perf_counter()
        # Forget the function, since it holds tensors, and the log holds all items.
        work, item.work = item.work, _done
        with torch.no_grad() if item.lane != "compute" else torch.enable_grad():
            item.pending = work()

    def _end(self, item: _Item) -> None:
        head = self._queues[item.lane].popleft()
        assert head is item
        item.ended_s = perf_counter()
        # An item lives on while later work waits for it, so drop its references to tensors of
        # messages and to earlier items.
        item.pending, item.waits = None, ()


# Chooses the lanes for a device.


def streams_of(device: torch.device, *, serialises: bool = False) -> Streams:
    """CUDA streams for a GPU, or simulated streams for a CPU; with ``serialises`` no two tasks
    overlap.
    """
    driver = driver_of(device)
    if driver is None:
        return SimulatedStreams(spoils=False)
    return CudaStreams(device, driver, serialises=serialises)
