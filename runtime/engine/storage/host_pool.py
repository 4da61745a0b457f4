"""Host memory for offloaded activations: buffers that all layers and micro-batches share."""

from collections import defaultdict

import torch
from torch import Tensor

from runtime.devices.driver import Driver
from runtime.engine.storage.arena import Arena


class HostPool:
    """Lends a buffer to each storage that is away; the first iteration makes the buffers.

    A storage takes any free buffer of its size. The task that copies a buffer home gives it back. A
    later storage may take the buffer at once: it leaves after its layer has run forward, which
    computes after the layer whose backward pass waited for the copy home.
    """

    def __init__(self, *, pins_for: Driver | None) -> None:
        self._pins_for = pins_for
        self._arenas: list[Arena] = []
        self._free: dict[int, list[Tensor]] = defaultdict(list)

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(arena.size_bytes for arena in self._arenas)

    def take(self, size_bytes: int) -> Tensor:
        """A buffer for a storage of so many bytes."""
        free = self._free[size_bytes]
        if free:
            return free.pop()
        arena = Arena(size_bytes, torch.device("cpu"), pins_for=self._pins_for)
        self._arenas.append(arena)
        return arena.take(size_bytes, torch.uint8)

    def give_back(self, buffer: Tensor) -> None:
        """Take a buffer back for other storages."""
        self._free[buffer.numel()].append(buffer)

    def release(self) -> None:
        """Give all memory back."""
        for arena in self._arenas:
            arena.release()
