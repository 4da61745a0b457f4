"""What the runtime and the profiler ask of a device that is not the CPU.

Whatever runs on a GPU goes through a ``Driver``, so that stand-ins can take a GPU's place where
there is none: one that orders streams by vector clocks, one whose tensors have no memory.
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
        """Let work that is queued from now on begin after an event."""


class Event(Protocol):
    """A moment of a stream."""

    def record(self, stream: Any) -> None:
        """Be the moment at which all that is queued on a stream by now has ended."""

    def synchronize(self) -> None:
        """Let the calling thread of the host wait for the moment."""

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this moment to another; both were recorded with timing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DevicePeaks:
    """The most that torch's allocator has held of a device, and how often it had to give back what
    it had cached."""

    allocated_bytes: int
    reserved_bytes: int
    retries: int


class Driver(Protocol):
    """One kind of device, as torch calls it."""

    @property
    def backend(self) -> str:
        """The library of collectives between such devices, as torch.distributed calls it."""

    @property
    def version(self) -> str:
        """Of the software below torch."""

    def count(self) -> int:
        """Devices that are there."""

    def choose(self, device: torch.device) -> None:
        """Let a device be the calling thread's current one."""

    def name(self, device: torch.device) -> str:
        """What the maker calls it."""

    def has_bf16(self) -> bool:
        """Whether the current device computes in bfloat16."""

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that torch puts work on when nobody says otherwise."""

    def stream(self, device: torch.device, *, urgent: bool = False) -> Stream:
        """A new stream; the work of an urgent one goes first where both are ready."""

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Let a stream be the calling thread's current one."""

    def event(self) -> Event:
        """A new event, with timing."""

    def synchronize(self, device: torch.device) -> None:
        """Let the calling thread of the host wait for all streams."""

    def generator(self, device: torch.device) -> torch.Generator:
        """A new source of random values for tensors there."""

    def idle(self, cycles: int) -> None:
        """Queue a pause on the current stream."""

    def threads(self, name: str) -> Executor:
        """One thread of the host, for work that goes on beside whoever issues."""

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Bytes of the host, for ``pin``."""

    def pin(self, memory: Tensor) -> int:
        """Let copies of host memory run by themselves; the library's error number, 0 for none."""

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``."""

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Memory that nobody has, and all of it."""

    def reserved_bytes(self, device: torch.device) -> int:
        """Memory that torch's allocator holds now."""

    def cap(self, device: torch.device, share: float) -> None:
        """Let torch's allocator hold no more than a share of all memory."""

    def count_anew(self, device: torch.device) -> None:
        """Give back what is cached, and begin to count peaks again."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Peaks since ``count_anew``."""
