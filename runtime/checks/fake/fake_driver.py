"""The driver of a device that does not exist: its streams and events do nothing.

Work of the host lane runs at once, in the thread that issues it, so that the modes that watch this
thread see it.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from mistlab.core.units import GIB_BYTES
from runtime.checks.fake.watch import Watch
from runtime.devices.driver import DevicePeaks
from runtime.engine.storage.saved import storage_of

# Invented figures: number of devices, memory of each, and a run's peak.
DEVICES, MEMORY_BYTES, PEAK_BYTES = 8, 80 * GIB_BYTES, GIB_BYTES


class FakeStream:
    """A stream on which everything has ended."""

    def wait_event(self, event: Any) -> None:
        """Does nothing: the event has already occurred."""


class FakeEvent:
    """An event that has already occurred; each recording is one millisecond after the previous
    one.
    """

    def __init__(self, driver: "FakeDriver") -> None:
        self._driver = driver
        self.recorded_ms = 0

    def record(self, stream: Any) -> None:
        """Take the next tick of the driver's clock."""
        self.recorded_ms = self._driver.tick()

    def synchronize(self) -> None:
        """Record that the host waits."""
        self._driver.watch.note("wait", "Event.synchronize")

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds between two recordings; no time can be read within a capture."""
        if self._driver.watch.captures:
            self._driver.watch.note("wait", "Event.elapsed_time")
        return float(end_event.recorded_ms - self.recorded_ms)


class AtOnce(Executor):
    """An executor that runs a call in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call now."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@final
class FakeDriver:
    """Devices whose tensors have no memory."""

    backend = "fake"
    version = ""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._ticks = 0
        # Tensors are held while they are pinned, so that no other storage gets their identifier.
        self._pinned: dict[int, Tensor] = {}

    def tick(self) -> int:
        """The next millisecond."""
        self._ticks += 1
        return self._ticks

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether a tensor is in pinned host memory."""
        return storage_of(tensor) in self._pinned

    def count(self) -> int:
        """An invented number of devices."""
        return DEVICES

    def choose(self, device: torch.device) -> None:
        """Does nothing: all devices are equal."""

    def name(self, device: torch.device) -> str:
        """A name that no device has."""
        return "a device that is not there"

    def has_bf16(self) -> bool:
        """Always true."""
        return True

    def current_stream(self, device: torch.device) -> FakeStream:
        """A stream."""
        return FakeStream()

    def stream(self, device: torch.device, *, urgent: bool = False) -> FakeStream:
        """A stream."""
        return FakeStream()

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """A context without effect."""
        return nullcontext()

    def event(self) -> FakeEvent:
        """A new event."""
        return FakeEvent(self)

    def synchronize(self, device: torch.device) -> None:
        """Record that the host waits."""
        self.watch.note("wait", "synchronize")

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The usual number, repeated for each element."""
        return [usual] * tensor.numel()

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator that is never used."""
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Does nothing."""

    def threads(self, name: str) -> Executor:
        """An executor that works in the calling thread."""
        return AtOnce()

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Fake zeros in host memory."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> int:
        """Record that memory is pinned."""
        self.watch.note("memory pinned", "pin")
        self._pinned[storage_of(memory)] = memory
        return 0

    def unpin(self, memory: Tensor) -> None:
        """Record that memory is no longer pinned."""
        del self._pinned[storage_of(memory)]

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """The invented memory size, all of it free."""
        return MEMORY_BYTES, MEMORY_BYTES

    def reserved_bytes(self, device: torch.device) -> int:
        """Always zero."""
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Does nothing."""

    def count_anew(self, device: torch.device) -> None:
        """Does nothing."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Invented peaks, the same for every run."""
        return DevicePeaks(allocated_bytes=PEAK_BYTES, reserved_bytes=PEAK_BYTES, retries=0)
