"""Memory that lives as long as a run: one allocation of exactly what is needed, and its parts.

Sizes come from a rehearsal: what takes parts does so twice, first from a ``Rehearsal``.
"""

from typing import Protocol

import torch
from torch import Tensor

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
    """Zeros on a device, or of the host; pinned for CUDA's copies if asked.

    Pinning registers memory that is already there: torch's own pinned allocator would round sizes
    up to powers of two.
    """

    def __init__(self, size_bytes: int, device: torch.device, *, pins: bool = False) -> None:
        self.size_bytes = size_bytes
        self._memory = torch.zeros(size_bytes, dtype=torch.uint8, device=device)
        self._used = 0
        self._is_pinned = pins and size_bytes > 0
        if self._is_pinned:
            _pin(self._memory)

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """The next part."""
        size = numel * dtype.itemsize
        part = self._memory[self._used : self._used + size]
        self._used += _placed(size)
        assert part.numel() == size, "more is taken than was rehearsed"
        return part.view(dtype)

    def release(self) -> None:
        """Unpin the memory, before it goes."""
        if self._is_pinned:
            torch.cuda.cudart().cudaHostUnregister(self._memory.data_ptr())
            self._is_pinned = False


def _placed(size_bytes: int) -> int:
    return -(-size_bytes // PLACE_BYTES) * PLACE_BYTES


def _pin(memory: Tensor) -> None:
    status = int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))
    if status != 0:
        message = (
            f"{memory.numel() / 2**30:.2f} GiB of host memory cannot be pinned (CUDA error "
            f"{status}): raise the limit of locked memory (ulimit -l), or offload less"
        )
        raise MemoryError(message)
