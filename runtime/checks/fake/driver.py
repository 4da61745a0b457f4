"""A driver of a device that is not there: streams and events in name, pinned memory in a list.

The host lane's work runs at once, in the thread that issues: so it is seen by the modes that watch
that thread.
"""

from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from mistlab.values.units import GIB_BYTES
from runtime.checks.fake.watch import Watch
from runtime.devices.driver import DevicePeaks
from runtime.engine.storage.saved import storage_of

# Devices, memory of each, and what a run has had of it at most: all made up.
DEVICES, MEMORY_BYTES, PEAK_BYTES = 8, 80 * GIB_BYTES, GIB_BYTES


class FakeStream:
    """A stream on which everything has ended."""

    def wait_event(self, event: Any) -> None:
        """It has come."""


class FakeEvent:
    """An event that has come; those of a driver are a millisecond apart, in order of recording."""

    def __init__(self, driver: "FakeDriver") -> None:
        self._driver = driver
        self.recorded_ms = 0

    def record(self, stream: Any) -> None:
        """The clock's next tick."""
        self.recorded_ms = self._driver.tick()

    def synchronize(self) -> None:
        """The host waits."""
        self._driver.watch.note("wait", "Event.synchronize")

    def elapsed_time(self, end_event: Any) -> float:
        """Ticks in between."""
        return float(end_event.recorded_ms - self.recorded_ms)


class AtOnce(Executor):
    """Runs what is submitted where it is submitted."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """The result is there."""
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
        # Each is held as long as it is pinned: no other storage gets its number meanwhile.
        self._pinned: dict[int, Tensor] = {}

    def tick(self) -> int:
        """The time."""
        self._ticks += 1
        return self._ticks

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether copies of a tensor on the host run by themselves."""
        return storage_of(tensor) in self._pinned

    def count(self) -> int:
        """Devices."""
        return DEVICES

    def choose(self, device: torch.device) -> None:
        """Nothing to choose."""

    def name(self, device: torch.device) -> str:
        """A name that no device has."""
        return "a device that is not there"

    def has_bf16(self) -> bool:
        """Yes."""
        return True

    def current_stream(self, device: torch.device) -> FakeStream:
        """Some stream."""
        return FakeStream()

    def stream(self, device: torch.device, *, urgent: bool = False) -> FakeStream:
        """Some other."""
        return FakeStream()

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Nothing changes."""
        return nullcontext()

    def event(self) -> FakeEvent:
        """A new event."""
        return FakeEvent(self)

    def synchronize(self, device: torch.device) -> None:
        """The host waits."""
        self.watch.note("wait", "synchronize")

    def generator(self, device: torch.device) -> torch.Generator:
        """A generator that nothing draws from."""
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Nothing is queued."""

    def threads(self, name: str) -> Executor:
        """The calling thread."""
        return AtOnce()

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Fake bytes of the host."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> int:
        """Remember that memory is pinned."""
        self.watch.note("memory pinned", "pin")
        self._pinned[storage_of(memory)] = memory
        return 0

    def unpin(self, memory: Tensor) -> None:
        """Forget it."""
        del self._pinned[storage_of(memory)]

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """All is free."""
        return MEMORY_BYTES, MEMORY_BYTES

    def reserved_bytes(self, device: torch.device) -> int:
        """Nothing is taken."""
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Nothing is capped."""

    def count_anew(self, device: torch.device) -> None:
        """Nothing is counted."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """The same of every run."""
        return DevicePeaks(allocated_bytes=PEAK_BYTES, reserved_bytes=PEAK_BYTES, retries=0)
