"""The driver of a stand-in device, whose streams and events do nothing.

Work for the host's thread runs at once in the thread that issues it, so that the modes that observe
this thread see the work.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Executor, Future
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, final

import torch
from torch import Tensor

from mistlab.core.units import GIB_BYTES
from runtime.checks.fake.watch import Watch
from runtime.devices.driver import DevicePeaks
from runtime.engine.storage.saved import storage_of

# Invented properties of stand-in devices: their number, the memory of each, and a run's peak
# memory.
DEVICES, MEMORY_BYTES, PEAK_BYTES = 8, 80 * GIB_BYTES, GIB_BYTES


class FakeStream:
    """A stream whose work always counts as finished. During a capture it tracks which work of other
    streams comes before its own.
    """

    def __init__(self, driver: "FakeDriver") -> None:
        self._driver = driver
        # The capture that the stream takes part in, how many operations it has issued, and for each
        # other stream how many of that stream's operations come before this stream's next one.
        self.capture, self.work = 0, 0
        self.after: dict[FakeStream, int] = {}

    def wait_event(self, event: "FakeEvent") -> None:
        """Wait for an event; during a capture, an event from before the capture is recorded as a
        violation.
        """
        driver = self._driver
        if not driver.captures:
            return
        if event.capture != driver.captures:
            if self.capture == driver.captures:
                driver.watch.note("outside wait", "Stream.wait_event")
            return
        self.capture = event.capture
        for stream, work in event.after.items():
            self.after[stream] = max(work, self.after.get(stream, 0))

    def goes_on(self) -> None:
        """Count an operation on the stream; during a capture, an operation on a stream outside the
        capture is recorded as a violation.
        """
        if self._driver.captures and self.capture != self._driver.captures:
            self._driver.watch.note("outside work", "work on a lane")
        self.work += 1


class FakeEvent:
    """An event that has always occurred; each is one millisecond later than the previous one."""

    def __init__(self, driver: "FakeDriver") -> None:
        self._driver = driver
        self.recorded_ms, self.capture = 0, 0
        self.after: dict[FakeStream, int] = {}

    def record(self, stream: FakeStream) -> None:
        """Set the event to the next millisecond of the driver's clock."""
        self.recorded_ms = self._driver.tick()
        if self._driver.captures:
            self.capture = stream.capture
            self.after = {**stream.after, stream: stream.work}

    def synchronize(self) -> None:
        """Record that the host waits for the event."""
        self._driver.watch.note("wait", "Event.synchronize")

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds between two events; during checks of captures, reading a time is
        recorded as a wait.
        """
        if self._driver.watch.captures:
            self._driver.watch.note("wait", "Event.elapsed_time")
        return float(end_event.recorded_ms - self.recorded_ms)


class FakeGraph:
    """A captured CUDA graph without work."""

    def replay(self) -> None:
        """Does nothing: a stand-in for a captured CUDA graph has no work to replay."""


class AtOnce(Executor):
    """An executor that runs a call in the thread that submits it."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a call now, in the calling thread."""
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future


@final
class FakeDriver:
    """The driver of stand-in devices, whose tensors have no memory."""

    backend = "fake"
    version = ""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._ticks = 0
        # The number of the current capture (0 if there is none), and the number of captures so far.
        self.captures, self._captured = 0, 0
        self._current = FakeStream(self)
        self._streams = [self._current]
        # Pinned tensors are kept alive, so that no other storage gets the same identifier.
        self._pinned: dict[int, Tensor] = {}

    def tick(self) -> int:
        """The time in milliseconds on the stand-in driver's clock, which advances by one at each
        call.
        """
        self._ticks += 1
        return self._ticks

    def is_pinned(self, tensor: Tensor) -> bool:
        """Whether the host memory of a tensor is pinned."""
        return storage_of(tensor) in self._pinned

    def count(self) -> int:
        """The number of stand-in devices, which is invented."""
        return DEVICES

    def choose(self, device: torch.device) -> None:
        """Does nothing: all stand-in devices are equal."""

    def name(self, device: torch.device) -> str:
        """A device name that no real device has."""
        return "a device that is not there"

    def has_bf16(self, device: torch.device) -> bool:
        """True: stand-in devices always support bfloat16."""
        return True

    def current_stream(self, device: torch.device) -> FakeStream:
        """The default stream of the stand-in device."""
        return self._current

    def stream(self, device: torch.device, *, urgent: bool = False) -> FakeStream:
        """A new stream of the stand-in device; ``urgent`` has no effect."""
        self._streams.append(FakeStream(self))
        return self._streams[-1]

    def using(self, stream: FakeStream) -> AbstractContextManager[object]:
        """Make a stream current in the ``with`` block, and record that it is given work."""
        stream.goes_on()
        return nullcontext()

    @contextmanager
    def capture(self, stream: FakeStream) -> Iterator["FakeGraph"]:
        """Check a CUDA graph capture: record waits for earlier work, work on streams outside the
        capture, and streams that are not joined at the end, all of which would invalidate it.
        """
        self._captured += 1
        self.captures = stream.capture = self._captured
        try:
            yield FakeGraph()
            for other in self._streams:
                is_part = other is not stream and other.capture == self.captures
                if is_part and stream.after.get(other, 0) < other.work:
                    self.watch.note("never joined", "end of the capture")
        finally:
            self.captures = 0

    def event(self) -> FakeEvent:
        """A new event of the stand-in device."""
        return FakeEvent(self)

    def synchronize(self, device: torch.device) -> None:
        """Record that the host waits for the stand-in device."""
        self.watch.note("wait", "synchronize")

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The number ``usual`` for each element, since fake tensors have no values."""
        return [usual] * tensor.numel()

    def generator(self, device: torch.device) -> torch.Generator:
        """A random generator; nothing is drawn from it."""
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Does nothing: a stand-in device has no time."""

    def threads(self, name: str) -> Executor:
        """An executor that runs calls in the calling thread."""
        return AtOnce()

    def host_zeros(self, size_bytes: int) -> Tensor:
        """A fake tensor of zeros in host memory, which takes no memory."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> int:
        """Record that the host memory of a tensor is pinned."""
        self.watch.note("memory pinned", "pin")
        self._pinned[storage_of(memory)] = memory
        return 0

    def unpin(self, memory: Tensor) -> None:
        """Record that the host memory of a tensor is no longer pinned."""
        del self._pinned[storage_of(memory)]

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """The invented size of the device's memory, all of which counts as free."""
        return MEMORY_BYTES, MEMORY_BYTES

    def reserved_bytes(self, device: torch.device) -> int:
        """The bytes that torch's allocator reserves: 0, since no memory is allocated."""
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Does nothing: a stand-in device has no allocator to limit."""

    def count_anew(self, device: torch.device) -> None:
        """Does nothing: a stand-in device measures no peaks."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Invented memory peaks, the same for every run."""
        return DevicePeaks(allocated_bytes=PEAK_BYTES, reserved_bytes=PEAK_BYTES, retries=0)
