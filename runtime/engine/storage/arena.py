"""Memory for a whole run: one allocation of exactly the required size, divided into tensors.

The size comes from a rehearsal: the code that takes tensors runs twice, first with a ``Rehearsal``,
which only counts bytes.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol
from weakref import WeakSet

import torch
from torch import Tensor

from runtime.devices.driver import Driver, lend

# Tensors begin at multiples of this number of bytes, which suits every data type and vector
# instruction.
PLACE_BYTES = 256


class Room(Protocol):
    """Memory from which flat tensors are taken one after another."""

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Take the next flat tensor of ``numel`` elements."""


class Rehearsal:
    """Counts the bytes that tensors require, and returns tensors without memory."""

    def __init__(self) -> None:
        self.size_bytes = 0

    def take(self, numel: int, dtype: torch.dtype) -> Tensor:
        """Count the bytes of a tensor, and return one without memory."""
        self.size_bytes += _rounded_up(numel * dtype.itemsize)
        return torch.empty(numel, dtype=dtype, device="meta")


class Arena:
    """One allocation of zeros on a device or in host memory, from which tensors are taken.

    With ``pins_for`` the host memory is pinned, for copies by this driver.
    """

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
        """Take the next tensor from the preallocated memory."""
        size = numel * dtype.itemsize
        part = self._memory[self._used : self._used + size]
        self._used += _rounded_up(size)
        assert part.numel() == size, "more is taken than was rehearsed"
        return part.view(dtype)

    def release(self) -> None:
        """Return the pinned host memory to the system; nothing may use it any more."""
        _LENT.discard(self)
        if self._lent is not None:
            self._lent.give_back()
            self._lent = None


# Allocations of pinned host memory that this process has not yet returned.
_LENT: WeakSet[Arena] = WeakSet()


def release_all() -> None:
    """Return all pinned host memory of this process, after a run has failed."""
    for arena in tuple(_LENT):
        arena.release()


def _rounded_up(size_bytes: int) -> int:
    return -(-size_bytes // PLACE_BYTES) * PLACE_BYTES


# Host memory for offloaded activations, in buffers that all layers and micro-batches share.


@dataclass(slots=True, kw_only=True, eq=False)
class HostBuffer:
    """A buffer in host memory for an offloaded storage, viewed as a tensor of the storage's
    shape.
    """

    memory: Tensor
    copy: Tensor


class HostPool:
    """Lends a host buffer to each offloaded storage; the buffers are allocated in the first
    iteration.

    A storage takes any free buffer of its size. If sizes vary with the routing of tokens or with
    documents (``varies``), they are rounded up by at most an eighth, so that few sizes are needed.
    The task that copies a buffer back to the device frees it, and a later storage may take it at
    once. This is safe: the later storage is copied to the host after its layer's forward pass,
    which runs after the backward pass that waited for the copy to the device.
    """

    def __init__(self, *, pins_for: Driver | None) -> None:
        self._pins_for = pins_for
        self._arenas: list[Arena] = []
        self._free: dict[int, list[HostBuffer]] = defaultdict(list)

    @property
    def size_bytes(self) -> int:
        """The bytes of all host buffers."""
        return sum(arena.size_bytes for arena in self._arenas)

    def take(self, storages: Sequence[Tensor], *, varies: bool = False) -> list[HostBuffer]:
        """A host buffer for each offloaded storage, which must be contiguous."""
        taken = []
        for storage in storages:
            size_bytes = storage.nbytes
            if varies:
                step = max(1, 1 << max(size_bytes.bit_length() - 4, 0))
                size_bytes = -(-size_bytes // step) * step
            free = self._free[size_bytes]
            buffer = free.pop() if free else self._made(size_bytes)
            copy = buffer.copy
            if copy.shape != storage.shape or copy.dtype != storage.dtype:
                used = buffer.memory[: storage.nbytes]
                buffer.copy = used.view(storage.dtype).view(storage.shape)
            taken.append(buffer)
        return taken

    def give_back(self, buffers: Iterable[HostBuffer]) -> None:
        """Return host buffers, so that other storages can use them."""
        for buffer in buffers:
            self._free[buffer.memory.nbytes].append(buffer)

    def release(self) -> None:
        """Free all host buffers."""
        for arena in self._arenas:
            arena.release()

    def _made(self, size_bytes: int) -> HostBuffer:
        arena = Arena(size_bytes, torch.device("cpu"), pins_for=self._pins_for)
        self._arenas.append(arena)
        memory = arena.take(size_bytes, torch.uint8)
        return HostBuffer(memory=memory, copy=memory)
