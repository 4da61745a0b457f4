"""The interface through which the runtime and the profiler use a device that is not the CPU.

Every call for a GPU goes through a ``Driver``, so that a stand-in can take the GPU's place on a
machine without one. There are two stand-ins: one follows streams by vector clocks, one has tensors
without memory.
"""

from concurrent.futures import Executor
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor


class Stream(Protocol):
    """A queue of a device's work."""

    def wait_event(self, event: Any) -> None:
        """Let work that is queued from now on begin after the event."""


class Event(Protocol):
    """A moment in the work of a stream."""

    def record(self, stream: Any) -> None:
        """Mark the moment at which all work that is on the stream by now has ended."""

    def synchronize(self) -> None:
        """Wait, in the calling thread, until the moment has come."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this moment to the moment of ``end_event``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """The most memory of a device that tensors and torch's allocator have held.

    ``retries`` counts how often the allocator had to free its cache and ask the device again.
    """

    allocated_bytes: int
    reserved_bytes: int
    retries: int


class Driver(Protocol):
    """One kind of device, such as CUDA's."""

    @property
    def backend(self) -> str:
        """torch.distributed's name for the library of collectives between these devices."""

    @property
    def version(self) -> str:
        """The version of the software below torch, such as CUDA's."""

    def count(self) -> int:
        """Number of devices on this node."""

    def choose(self, device: torch.device) -> None:
        """Make a device the calling thread's current device."""

    def name(self, device: torch.device) -> str:
        """The maker's name of a device."""

    def has_bf16(self) -> bool:
        """Whether the current device computes in bfloat16."""

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that torch puts work on by default."""

    def stream(self, device: torch.device, *, urgent: bool = False) -> Stream:
        """A new stream; the work of an urgent stream goes before the ready work of others."""

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the calling thread's current stream, within a ``with`` block."""

    def event(self) -> Event:
        """A new event, with timing."""

    def synchronize(self, device: torch.device) -> None:
        """Wait, in the calling thread, until all streams have ended their work."""

    def generator(self, device: torch.device) -> torch.Generator:
        """A new source of random values for tensors on a device."""

    def idle(self, cycles: int) -> None:
        """Queue a pause on the current stream."""

    def threads(self, name: str) -> Executor:
        """An executor with one thread of the host, which works beside the thread that issues."""

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Zeros in host memory, to be given to ``pin``."""

    def pin(self, memory: Tensor) -> int:
        """Pin host memory, so that its copies run without the host.

        Returns the library's error number, 0 for none.
        """

    def unpin(self, memory: Tensor) -> None:
        """Unpin memory that ``pin`` has pinned."""

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Free memory and all memory of a device."""

    def reserved_bytes(self, device: torch.device) -> int:
        """Memory that torch's allocator holds now."""

    def cap(self, device: torch.device, share: float) -> None:
        """Let torch's allocator hold at most ``share`` of the device's memory."""

    def count_anew(self, device: torch.device) -> None:
        """Free the allocator's cache, and begin to count peaks anew."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Peaks since the last ``count_anew``."""
