"""A driver that runs on the CPU and notes the order of its streams and events in a trace.

Work on a stream runs at once, on CPU tensors. The trace knows which earlier work it would have
waited for on a GPU.
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
    """A stream; in the trace it is an actor with the name of its lane."""

    def __init__(self, driver: "ClockedDriver", name: str) -> None:
        self.driver, self.name = driver, name

    def wait_event(self, event: "ClockedEvent") -> None:
        """Let work from now on come after the event."""
        self.driver.wait(self.name, event)


class ClockedEvent:
    """A point in the work of an actor, once it is recorded."""

    def __init__(self, driver: "ClockedDriver") -> None:
        self.driver = driver
        self.stretch: int | None = None
        self.task = self.lane = ""

    def record(self, stream: ClockedStream) -> None:
        """Be the end of all work that the stream has been given."""
        self.note(stream.name)

    def note(self, actor: str) -> None:
        """Be the end of all work that an actor has done."""
        trace = self.driver.trace
        if actor != self.driver.host:
            trace.work(actor, self.driver.host)
        self.stretch, self.task, self.lane = trace.reached(actor), trace.task, actor

    def synchronize(self) -> None:
        """Let the calling thread's work come after the event."""
        self.driver.wait(self.driver.host, self)

    def elapsed_time(self, _end_event: "ClockedEvent") -> float:
        """Nothing takes time."""
        return 0.0


class _HostFuture(Future[Result]):
    """The result of a call on the host's lane; whoever asks for it comes after the call."""

    end: ClockedEvent

    def result(self, timeout: float | None = None) -> Result:
        """The outcome."""
        self.end.synchronize()
        return super().result(timeout)


class _HostThread(Executor):
    """The host's lane: an actor of its own, whose calls run in the thread that submits them."""

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
    """A driver that notes streams and events in a trace."""

    backend = "none"
    version = ""

    def __init__(self, trace: Trace, memory: Memory) -> None:
        self.trace, self.memory = trace, memory
        # The host's actor that runs now, and the current stream.
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
        """Do nothing: there is one device."""

    def name(self, device: torch.device) -> str:
        """An invented name."""
        return "stand-in"

    def has_bf16(self) -> bool:
        """Yes: the values of numbers do not matter."""
        return True

    def current_stream(self, device: torch.device) -> ClockedStream:
        """The stream that operators run on now."""
        return self.current

    def stream(self, device: torch.device, *, urgent: bool = False) -> ClockedStream:
        """A new stream; the caller gives it a name."""
        return ClockedStream(self, "stream")

    @contextmanager
    def using(self, stream: ClockedStream) -> Iterator[None]:
        """Make a stream the current stream within the ``with`` block."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def event(self) -> ClockedEvent:
        """A new event."""
        return ClockedEvent(self)

    def synchronize(self, device: torch.device) -> None:
        """Let the host come after all streams."""
        for actor in {stretch.actor for stretch in self.trace.stretches} - {HOST, HOST_LANE}:
            self.trace.follow(self.host, self.trace.reached(actor))

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator of the CPU."""
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Do nothing: nothing takes time."""

    def threads(self, name: str) -> Executor:
        """The host's lane."""
        return _HostThread(self)

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Zeros in host memory, which the trace notes."""
        with _disable_current_modes():
            zeros = torch.zeros(size_bytes, dtype=torch.uint8)
        self.memory.made_on_host(zeros)
        return zeros

    def pin(self, memory: Tensor) -> int:
        """Do nothing."""
        return 0

    def unpin(self, memory: Tensor) -> None:
        """Do nothing."""

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Nothing is measured."""
        return 0, 0

    def reserved_bytes(self, device: torch.device) -> int:
        """Nothing is measured."""
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Do nothing: nothing is measured."""

    def count_anew(self, device: torch.device) -> None:
        """Do nothing: nothing is measured."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Nothing is measured."""
        return DevicePeaks(allocated_bytes=0, reserved_bytes=0, retries=0)
