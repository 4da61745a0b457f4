"""A driver that lets the CPU stand for a GPU: work is done when it is issued, pins are noted."""

from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from runtime.devices.driver import DevicePeaks


class InlineStream:
    """In order, since nothing is put off."""

    def wait_event(self, event: Any) -> None:
        """What was issued before is done."""


class InlineEvent:
    """The moment at which it was recorded."""

    def __init__(self) -> None:
        self.at_s = 0.0

    def record(self, stream: Any) -> None:
        self.at_s = perf_counter()

    def synchronize(self) -> None:
        """It has come."""

    def elapsed_time(self, end_event: Any) -> float:
        return float(1e3 * (end_event.at_s - self.at_s))


class InlineDriver:
    """``pinned`` are the bytes of each ``pin``, ``unpinned`` those of each ``unpin``; whatever is
    above ``most_bytes`` is refused."""

    backend = "gloo"
    version = "0"

    def __init__(self, most_bytes: int = 2**40) -> None:
        self.most_bytes = most_bytes
        self.pinned: list[int] = []
        self.unpinned: list[int] = []
        self.held: dict[int, int] = {}

    def count(self) -> int:
        return 1

    def choose(self, device: torch.device) -> None:
        """It is chosen."""

    def name(self, device: torch.device) -> str:
        return "a CPU that stands for a GPU"

    def has_bf16(self, device: torch.device) -> bool:
        return True

    def current_stream(self, device: torch.device) -> InlineStream:
        return InlineStream()

    def stream(self, device: torch.device, *, urgent: bool = False) -> InlineStream:
        return InlineStream()

    def using(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext()

    def event(self) -> InlineEvent:
        return InlineEvent()

    def synchronize(self, device: torch.device) -> None:
        """Everything is done."""

    def generator(self, device: torch.device) -> torch.Generator:
        return torch.Generator()

    def idle(self, cycles: int) -> None:
        """Nothing runs ahead."""

    def threads(self, name: str) -> Executor:
        return ThreadPoolExecutor(1)

    def host_zeros(self, size_bytes: int) -> Tensor:
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> int:
        if sum(self.held.values()) + memory.numel() > self.most_bytes:
            return 2
        assert memory.data_ptr() not in self.held
        self.held[memory.data_ptr()] = memory.numel()
        self.pinned.append(memory.numel())
        return 0

    def unpin(self, memory: Tensor) -> None:
        self.unpinned.append(self.held.pop(memory.data_ptr()))

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        return 2**40, 2**40

    def reserved_bytes(self, device: torch.device) -> int:
        return 0

    def cap(self, device: torch.device, share: float) -> None:
        """Nothing is capped."""

    def count_anew(self, device: torch.device) -> None:
        """Nothing is counted."""

    def peaks(self, device: torch.device) -> DevicePeaks:
        return DevicePeaks(allocated_bytes=1, reserved_bytes=1, retries=0)
