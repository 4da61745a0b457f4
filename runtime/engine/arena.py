"""Memory that lives as long as a run: one allocation of exactly what is needed, and its parts.

Sizes come from a rehearsal: what takes parts does so twice, first from a ``Rehearsal``.
"""

from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from runtime.devices.driver import Driver

# Parts begin where any type may, and where vector instructions like it.
PLACE_BYTES = 256


class Room(Protocol):
    """Where flat tensors can be had."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next part."""


class Rehearsal:
    """Counts what is taken."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """A tensor without memory."""
        self.size_bytes += _placed(numel * dtype.itemsize)
        return torch.empty(numel, dtype=dtype, device="meta")


class Arena:
    """Zeros on a device, or of the host; pinned for the copies of ``pins_for``, if there is one."""

    def __init__(
        self, size_bytes: int, device: torch.device, *, pins_for: Driver | None = None
    ) -> None:
        self.size_bytes = size_bytes
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._used = 0
        self._pinned_for = pins_for if size_bytes > 0 else None
        if self._pinned_for is not None:
            _pin(self._memory, self._pinned_for)
            _PINNED.add(self)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next part."""
        size = numel * dtype.itemsize
        part = self._memory[self._used : self._used + size]
        self._used += _placed(size)
        assert part.numel() == size, "more is taken than was rehearsed"
        return part.view(dtype)

    def release(self) -> None:
        """Unpin the memory, before it goes."""
        _PINNED.discard(self)
        if self._pinned_for is not None:
            self._pinned_for.unpin(self._memory)
            self._pinned_for = None


_PINNED: WeakSet[Arena] = WeakSet()


def release_all() -> None:
    """Unpin whatever this process still has pinned: of a run that failed, wherever it was."""
    for arena in tuple(_PINNED):
        arena.release()


def _placed(size_bytes: int) -> int:
    return -(-size_bytes // PLACE_BYTES) * PLACE_BYTES


def _pin(memory: Tensor, driver: Driver) -> None:
    status = driver.pin(memory)
    if status != 0:
        message = (
            f"{memory.numel() / 2**30:.2f} GiB of host memory cannot be pinned (error "
            f"{status}): raise the limit of locked memory (ulimit -l), or offload less"
        )
        raise MemoryError(message)
