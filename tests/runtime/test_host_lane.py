"""The lane of a device's host: in order, behind the device's events, its errors kept."""

from concurrent.futures import ThreadPoolExecutor
from threading import Event
from time import perf_counter

import pytest

pytest.importorskip("torch")

from runtime.engine.streams.device_streams import HostLane


class DeviceEvent:
    """An event that comes when the test says so."""

    def __init__(self) -> None:
        self.has_come = Event()

    def synchronize(self) -> None:
        assert self.has_come.wait(timeout=60)


def test_work_waits_for_the_device_and_for_the_work_before_it() -> None:
    lane, event, done = HostLane(ThreadPoolExecutor(1)), DeviceEvent(), list[str]()
    first = lane.submit(lambda: done.append("first"), [event])
    second = lane.submit(lambda: done.append("second"), [])
    assert not second.done()
    assert done == []
    event.has_come.set()
    (_, end), (start, _) = first.result(), second.result()
    assert done == ["first", "second"]
    assert end <= start <= perf_counter()


def test_an_error_comes_to_whoever_waits() -> None:
    def fails() -> None:
        message = "no"
        raise ValueError(message)

    with pytest.raises(ValueError, match="no"):
        HostLane(ThreadPoolExecutor(1)).submit(fails, []).result()
