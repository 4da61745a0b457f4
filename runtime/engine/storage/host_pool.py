"""Host memory for offloaded activations: one buffer for each tensor that a layer saves."""

import torch
from torch import Tensor

from runtime.devices.driver import Driver
from runtime.engine.storage.arena import Arena

# Number of the layer, of the micro-batch in flight, and of the tensor that the layer saves.
SavedKey = tuple[int, int, int]


class HostPool:
    """A buffer for each saved tensor; the first iteration makes the buffers."""

    def __init__(self, *, pins_for: Driver | None) -> None:
        self._pins_for = pins_for
        self._arenas: dict[SavedKey, Arena] = {}
        self._buffers: dict[SavedKey, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(arena.size_bytes for arena in self._arenas.values())

    def take(self, place: SavedKey, size_bytes: int) -> Tensor:
        """The buffer for a saved tensor, whose size is the same in each iteration."""
        if place not in self._arenas:
            arena = Arena(size_bytes, torch.device("cpu"), pins_for=self._pins_for)
            self._arenas[place] = arena
            self._buffers[place] = arena.take(size_bytes, torch.uint8)
        return self._buffers[place]

    def release(self) -> None:
        """Give all buffers back."""
        for arena in self._arenas.values():
            arena.release()
