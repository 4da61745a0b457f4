"""Streams of a GPU, on a stand-in that notes what is recorded and waited for."""

import itertools
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from runtime.engine.streams.device_streams import CudaStreams  # noqa: E402

DEVICE = torch.device("cpu")


class Stream:
    def __init__(self) -> None:
        self.waited_for: list[int] = []

    def wait_event(self, event: "Event") -> None:
        assert event.moment is not None
        self.waited_for.append(event.moment)


class Event:
    """Its moment is how many others were recorded before."""

    def __init__(self, moments: Iterator[int]) -> None:
        self.moments = moments
        self.moment: int | None = None

    def record(self, stream: Stream) -> None:
        self.moment = next(self.moments)

    def synchronize(self) -> None:
        assert self.moment is not None

    def elapsed_time(self, end_event: "Event") -> float:
        assert self.moment is not None
        assert end_event.moment is not None
        return 1e3 * (end_event.moment - self.moment)


class Driver:
    """What streams ask of a driver."""

    def __init__(self) -> None:
        self.compute = Stream()
        self.current = [self.compute]
        self.moments = itertools.count()
        self.made = 0
        # The thread that has chosen a device, and the device.
        self.chosen: list[tuple[int, Any]] = []

    def current_stream(self, device: Any) -> Stream:
        return self.compute

    def stream(self, device: Any, *, urgent: bool = False) -> Stream:
        return Stream()

    @contextmanager
    def using(self, stream: Stream) -> Iterator[None]:
        self.current.append(stream)
        yield
        self.current.pop()

    def event(self) -> Event:
        self.made += 1
        return Event(self.moments)

    def choose(self, device: Any) -> None:
        self.chosen.append((get_ident(), device))

    def synchronize(self, device: Any) -> None:
        pass

    def threads(self, name: str) -> ThreadPoolExecutor:
        return ThreadPoolExecutor(1)


@pytest.fixture
def driver() -> Driver:
    return Driver()


@pytest.fixture
def streams(driver: Driver) -> CudaStreams:
    return CudaStreams(DEVICE, driver)


def nothing() -> None:
    pass


def test_work_runs_on_the_stream_of_its_lane(driver: Driver, streams: CudaStreams) -> None:
    used: dict[str, Stream] = {}

    def note(lane: str) -> None:
        used[lane] = driver.current[-1]

    for lane in ("compute", "host_to_device", "host"):
        streams.submit(lane, lambda lane=lane: note(lane), [])
    streams.synchronize()
    assert used == {lane: streams.stream(lane) for lane in used}
    assert len(used) == len(set(used.values())) == 3


def test_the_hosts_thread_works_with_the_gpu_of_its_rank(
    driver: Driver, streams: CudaStreams
) -> None:
    """CUDA's current GPU is a thread's own: a new thread has the first one of the node."""
    threads: list[int] = []
    streams.submit("host", lambda: threads.append(get_ident()), []).result()
    assert driver.chosen == [(threads[0], DEVICE)]
    assert threads != [get_ident()]


def test_a_wait_is_for_the_end_of_the_work_itself(driver: Driver, streams: CudaStreams) -> None:
    first = streams.submit("compute", nothing, [])
    streams.submit("compute", nothing, [])
    streams.submit("host_to_device", nothing, [first])
    # Moment 0 is where times count from, 1 and 2 are the first work's start and end.
    assert streams.stream("host_to_device").waited_for == [2]


def test_events_that_were_read_are_used_again(driver: Driver, streams: CudaStreams) -> None:
    def iterate() -> list[tuple[float, float]]:
        for lane in ("compute", "host_to_device", "compute"):
            streams.submit(lane, nothing, [])
        return streams.spans()

    first, made = iterate(), driver.made
    second = iterate()
    assert driver.made == made
    for spans in (first, second):
        lengths = [end - start for start, end in spans]
        assert lengths == pytest.approx([1.0, 1.0, 1.0])


def test_nobody_waits_for_what_was_read(driver: Driver, streams: CudaStreams) -> None:
    before = streams.submit("compute", nothing, [])
    streams.spans()
    # This one's events are those of the work before.
    streams.submit("compute", nothing, [])
    streams.submit("host_to_device", nothing, [before])
    streams.submit("host", nothing, [before]).result()
    assert streams.stream("host_to_device").waited_for == []


def test_times_are_read_when_the_device_has_ended_its_work(
    driver: Driver, streams: CudaStreams, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[Any] = []
    monkeypatch.setattr(driver, "synchronize", waits.append)
    streams.submit("compute", nothing, [])
    streams.spans()
    assert waits == [DEVICE]


def test_serialised_work_waits_for_the_work_before(driver: Driver) -> None:
    streams = CudaStreams(DEVICE, driver, serialises=True)
    streams.submit("compute", nothing, [])
    streams.submit("host_to_device", nothing, [])
    assert streams.stream("host_to_device").waited_for == [2]
