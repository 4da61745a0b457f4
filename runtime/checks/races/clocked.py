"""A device's streams and events as notes in a trace, behind the interface of a driver.

What is put on a stream runs at once, on CPU tensors; the trace knows after what it would have come.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from runtime.checks.races.memory import Memory
from runtime.checks.races.trace import HOST, HOST_LANE, Trace, Wait
from runtime.devices.driver import DevicePeaks

Result = TypeVar("Result")


class ClockedStream:
    """An actor of the trace by the name of the lane that it serves."""

    def __init__(self, driver: "ClockedDriver", name: str) -> None:
        self.driver, self.name = driver, name

    def wait_event(self, event: "ClockedEvent") -> None:
        """Work from now on comes after the event."""
        self.driver.wait(self.name, event)


class ClockedEvent:
    """A point of an actor; before it is recorded, none."""

    def __init__(self, driver: "ClockedDriver") -> None:
        self.driver = driver
        self.stretch: int | None = None
        self.task = self.lane = ""

    def record(self, stream: ClockedStream) -> None:
        """The end of what the stream has been given."""
        self.note(stream.name)

    def note(self, actor: str) -> None:
        """The end of what an actor has done."""
        trace = self.driver.trace
        if actor != self.driver.host:
            trace.work(actor, self.driver.host)
        self.stretch, self.task, self.lane = trace.reached(actor), trace.task, actor

    def synchronize(self) -> None:
        """The calling thread of the host waits."""
        self.driver.wait(self.driver.host, self)

    def elapsed_time(self, _end_event: "ClockedEvent") -> float:
        """Nothing takes time."""
        return 0.0


class _HostFuture(Future[Result]):
    """What the host's lane has done: whoever asks for it comes after it."""

    end: ClockedEvent

    def result(self, timeout: float | None = None) -> Result:
        """The outcome."""
        self.end.synchronize()
        return super().result(timeout)


class _HostThread(Executor):
    """The host's lane: an actor of its own, whose work runs where it is submitted."""

    def __init__(self, driver: "ClockedDriver") -> None:
        self.driver = driver

    def submit(self, call: Callable[..., Result], /, *args: Any, **named: Any) -> Future[Result]:
        """Run a call as the host's lane."""
        driver, future = self.driver, _HostFuture[Result]()
        issuer = driver.host
        driver.trace.follow(HOST_LANE, driver.trace.reached(issuer))
        driver.host = HOST_LANE
        try:
            future.set_result(call(*args, **named))
        finally:
            future.end = ClockedEvent(driver)
            future.end.note(HOST_LANE)
            driver.host = issuer
        return future


class ClockedDriver:
    """A driver whose streams and events are those of a trace."""

    backend = "none"
    version = ""

    def __init__(self, trace: Trace, memory: Memory) -> None:
        self.trace, self.memory = trace, memory
        # The actor of the host that runs now, and the stream that is current.
        self.host = HOST
        self.compute = self.current = ClockedStream(self, "compute")

    def wait(self, actor: str, event: ClockedEvent) -> None:
        """Let an actor come after an event."""
        trace = self.trace
        wait = Wait(task=trace.task, lane=actor, for_task=event.task, for_lane=event.lane)
        if actor != self.host:
            trace.follow(actor, trace.reached(self.host))
        trace.follow(actor, event.stretch, wait)

    def count(self) -> int:
        """One device."""
        return 1

    def choose(self, device: torch.device) -> None:
        """There is no other."""

    def name(self, device: torch.device) -> str:
        """A word."""
        return "stand-in"

    def has_bf16(self) -> bool:
        """Numbers are of no interest."""
        return True

    def current_stream(self, device: torch.device) -> ClockedStream:
        """The stream that operators are put on."""
        return self.current

    def stream(self, device: torch.device, *, urgent: bool = False) -> ClockedStream:
        """A new stream; who makes it names it."""
        return ClockedStream(self, "stream")

    @contextmanager
    def using(self, stream: ClockedStream) -> Iterator[None]:
        """Let a stream be the current one."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def event(self) -> ClockedEvent:
        """A new event."""
        return ClockedEvent(self)

    def synchronize(self, device: torch.device) -> None:
        """The host comes after all streams."""
        for actor in {stretch.actor for stretch in self.trace.stretches} - {HOST, HOST_LANE}:
            self.trace.follow(self.host, self.trace.reached(actor))

    def generator(self, device: torch.device) -> torch.Generator:
        """Numbers are of no interest."""
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Nothing takes time."""

    def threads(self, name: str) -> Executor:
        """The host's lane."""
        return _HostThread(self)

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Memory of the host."""
        with _disable_current_modes():
            zeros = torch.zeros(size_bytes, dtype=torch.uint8)
        self.memory.made_on_host(zeros)
        return zeros

    def pin(self, memory: Tensor) -> int:
        """Nothing to do."""
        return 0

    def unpin(self, memory: Tensor) -> None:
        """Nothing to undo."""

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Nothing is measured."""
        return 0, 0

    def reserved_bytes(self, device: torch.device) -> int:
        """Nothing is measured."""
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Nothing is held."""

    def count_anew(self, device: torch.device) -> None:
        """Nothing is counted."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Nothing is measured."""
        return DevicePeaks(allocated_bytes=0, reserved_bytes=0, retries=0)
