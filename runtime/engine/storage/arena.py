"""Memory that lives as long as a run: one allocation of exactly what is needed, and its parts.

Sizes come from a rehearsal: what takes parts does so twice, first from a ``Rehearsal``.
"""

from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from runtime.devices.driver import Driver
from runtime.devices.pinned import lend

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
        self._lent = None if pins_for is None or not size_bytes else lend(size_bytes, pins_for)
        self._memory = (
            torch.zeros(size_bytes, dtype=torch.uint8, device=device)
            if self._lent is None
            else self._lent.memory
        )
        if self._lent is not None:
            _LENT.add(self)
        self._used = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next part."""
        size = numel * dtype.itemsize
        part = self._memory[self._used : self._used + size]
        self._used += _placed(size)
        assert part.numel() == size, "more is taken than was rehearsed"
        return part.view(dtype)

    def release(self) -> None:
        """Give pinned memory back, which nothing uses any more."""
        _LENT.discard(self)
        if self._lent is not None:
            self._lent.give_back()
            self._lent = None


# Arenas of this process in pinned memory.
_LENT: WeakSet[Arena] = WeakSet()


def release_all() -> None:
    """Give all pinned memory back: of a run that failed, wherever it was."""
    for arena in tuple(_LENT):
        arena.release()


def _placed(size_bytes: int) -> int:
    return -(-size_bytes // PLACE_BYTES) * PLACE_BYTES
