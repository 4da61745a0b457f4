"""The interface (driver) by which the runtime and the profiler use a device other than the CPU.

Every call to a GPU goes through a ``Driver``, so that a stand-in can replace the GPU on a machine
without one. There are two stand-ins: one records how streams order memory accesses, the other has
tensors without memory.
"""

from collections.abc import Iterator
from concurrent.futures import Executor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from threading import Lock
from typing import Any, Protocol

import torch
from torch import Tensor


class Graph(Protocol):
    """A captured graph of a device's work (CUDA graph), which can be replayed."""

    def replay(self) -> None:
        """Run the captured work again on the current stream."""


class Stream(Protocol):
    """A stream: a queue of work on a device."""

    def wait_event(self, event: Any) -> None:
        """Let work that is queued from now on wait for the event."""


class Event(Protocol):
    """A point in the work of a stream."""

    def record(self, stream: Any) -> None:
        """Let the event mark the end of the work queued on the stream so far."""

    def synchronize(self) -> None:
        """Block the calling thread until the device has reached the event."""

    def elapsed_time(self, end_event: Any) -> float:
        """The milliseconds from this event to ``end_event``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """Peaks of a device's memory: bytes of tensors, and bytes that torch's allocator reserved.

    ``retries`` counts how often the allocator had to free its cache and ask the device again.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int


class Driver(Protocol):
    """The interface to one kind of device, such as CUDA devices."""

    @property
    def backend(self) -> str:
        """The name of torch.distributed's backend for collectives between these devices."""

    @property
    def version(self) -> str:
        """The version of the software below torch, such as that of CUDA."""

    def count(self) -> int:
        """The number of devices on this node."""

    def choose(self, device: torch.device) -> None:
        """Make a device the calling thread's current device."""

    def name(self, device: torch.device) -> str:
        """The name that the maker gives to a device."""

    def has_bf16(self, device: torch.device) -> bool:
        """Whether a device can compute in bfloat16."""

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that torch uses by default."""

    def stream(self, device: torch.device, *, urgent: bool = False) -> Stream:
        """A new stream; work on an urgent stream has priority over work on other streams."""

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the calling thread's current stream, within a ``with`` block."""

    def event(self) -> Event:
        """A new event that records times; a thread that waits for it gives up its core."""

    def capture(self, stream: Any) -> AbstractContextManager[Graph]:
        """Capture the work in the ``with`` block instead of running it: work on this stream (not
        the default one), and on streams that fork from it and join it again.
        """

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all streams have ended their work."""

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The values of a tensor, for which the calling thread waits; on devices without values
        each is ``usual``.
        """

    def generator(self, device: torch.device) -> torch.Generator:
        """A new random generator for tensors on a device."""

    def idle(self, cycles: int) -> None:
        """Queue a pause of this many clock cycles on the current stream."""

    def threads(self, name: str) -> Executor:
        """An executor with one host thread, which runs beside the thread that issues work."""

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Zeros in host memory, to be passed to ``pin``."""

    def pin(self, memory: Tensor) -> int:
        """Pin host memory, so that its copies run asynchronously.

        Returns the library's error number, 0 for none.
        """

    def unpin(self, memory: Tensor) -> None:
        """Unpin host memory that ``pin`` has pinned."""

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """The free and the total bytes of a device's memory."""

    def reserved_bytes(self, device: torch.device) -> int:
        """The bytes that torch's allocator currently reserves."""

    def cap(self, device: torch.device, share: float) -> None:
        """Limit torch's allocator to ``share`` of the device's memory."""

    def count_anew(self, device: torch.device) -> None:
        """Free the allocator's cache, and reset its peak counters."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """The peaks of the device's memory since the last ``count_anew``."""


# Lends pinned host memory, and can keep it pinned from one run in a process to the next.
#
# Pinning is slow, because every page is touched and registered. So a process that runs plan after
# plan keeps its pinned memory within ``kept()``, and reuses it.


# Parts of a block of pinned memory begin at page boundaries, like the blocks.
PAGE_BYTES = 4096


@dataclass(slots=True, kw_only=True, eq=False)
class _Block:
    """A block of pinned memory that is lent in parts, one after the other; ``used_bytes`` are lent
    so far.

    ``lent`` counts the parts that have not been returned. The first ``written_bytes`` may hold
    values of earlier runs.
    """

    memory: Tensor
    driver: Driver
    used_bytes: int = 0
    written_bytes: int = 0
    lent: int = 0

    @property
    def left_bytes(self) -> int:
        """The bytes of the block that can still be lent."""
        return self.memory.numel() - self.used_bytes

    def take(self, size_bytes: int) -> Tensor:
        """Lend the next part of the block, filled with zeros."""
        begin, end = self.used_bytes, self.used_bytes + size_bytes
        self.memory[begin : min(end, max(begin, self.written_bytes))].zero_()
        self.used_bytes = min(self.memory.numel(), -(-end // PAGE_BYTES) * PAGE_BYTES)
        self.written_bytes = max(self.written_bytes, end)
        self.lent += 1
        return self.memory[begin:end]

    def give_back(self) -> None:
        """Return a part of the block; once all parts are returned, the block can be lent anew from
        its beginning.
        """
        self.lent -= 1
        if not self.lent:
            self.used_bytes = 0

    def unpin(self) -> None:
        """Unpin the block, before its memory is freed."""
        self.driver.unpin(self.memory)


@dataclass(slots=True, kw_only=True, eq=False)
class Lent:
    """A part of pinned host memory that is lent to a run; it is filled with zeros at first."""

    memory: Tensor
    _block: _Block
    _keeper: "_Keeper | None"

    def give_back(self) -> None:
        """Return the memory to the process that keeps it pinned."""
        if self._keeper is None:
            self._block.unpin()
        else:
            self._keeper.give_back(self._block)


@dataclass(slots=True, kw_only=True, eq=False)
class _Keeper:
    """Keeps the pinned blocks of a process, and lends them to one run after another."""

    _blocks: list[_Block] = field(default_factory=list)
    _lock: Lock = field(default_factory=Lock)

    def lend(self, size_bytes: int, driver: Driver) -> Lent:
        """Lend a part of the smallest block with enough free bytes, or of a new block if there is
        none.

        Before a new block is pinned, all unused blocks are unpinned, so that little more is pinned
        than the run needs.
        """
        with self._lock:
            with_room = [
                block
                for block in self._blocks
                if block.driver is driver and block.left_bytes >= size_bytes
            ]
            block = min(with_room, key=lambda block: block.left_bytes, default=None)
            if block is None:
                self._drop([block for block in self._blocks if not block.lent])
                block = _pinned(size_bytes, driver)
                self._blocks.append(block)
            return Lent(memory=block.take(size_bytes), _block=block, _keeper=self)

    def give_back(self, block: _Block) -> None:
        """Return a part of a block; the block stays pinned."""
        with self._lock:
            block.give_back()

    def end(self) -> None:
        """Unpin and free all blocks of host memory."""
        with self._lock:
            self._drop([*self._blocks])

    def _drop(self, blocks: list[_Block]) -> None:
        for block in blocks:
            block.unpin()
            self._blocks.remove(block)


_keeper: _Keeper | None = None


@contextmanager
def kept() -> Iterator[None]:
    """Within the ``with`` block, keep memory pinned for later runs; unpin all of it at the end."""
    global _keeper  # noqa: PLW0603 (pinned memory is of the process)
    assert _keeper is None, "the process keeps its pinned memory already"
    keeper = _keeper = _Keeper()
    try:
        yield
    finally:
        _keeper = None
        keeper.end()


def lend(size_bytes: int, driver: Driver) -> Lent:
    """Lend pinned host memory, filled with zeros; raises ``MemoryError`` if memory cannot be
    pinned.
    """
    if _keeper is not None:
        return _keeper.lend(size_bytes, driver)
    block = _pinned(size_bytes, driver)
    return Lent(memory=block.memory, _block=block, _keeper=None)


def _pinned(size_bytes: int, driver: Driver) -> _Block:
    memory = driver.host_zeros(size_bytes)
    status = driver.pin(memory)
    if status != 0:
        message = (
            f"{size_bytes / 2**30:.2f} GiB of host memory cannot be pinned (driver error "
            f"{status}): raise the limit of locked memory (ulimit -l), or offload less"
        )
        raise MemoryError(message)
    return _Block(memory=memory, driver=driver)
