"""Host memory of activations that are away: buffers of exactly the sizes that layers save."""

import torch
from torch import Tensor

from runtime.devices.driver import Driver
from runtime.engine.storage.arena import Arena

# Layer, which of the micro-batches in flight, and which of what the layer saves.
SavedKey = tuple[int, int, int]


class HostPool:
    """A buffer for each place; the first iteration makes them."""

    def __init__(self, *, pins_for: Driver | None) -> None:
        self._pins_for = pins_for
        self._arenas: dict[SavedKey, Arena] = {}
        self._buffers: dict[SavedKey, Tensor] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes of all buffers."""
        return sum(arena.size_bytes for arena in self._arenas.values())

    def take(self, place: SavedKey, size_bytes: int) -> Tensor:
        """The buffer of a place, which always has the same size."""
        if place not in self._arenas:
            arena = Arena(size_bytes, torch.device("cpu"), pins_for=self._pins_for)
            self._arenas[place] = arena
            self._buffers[place] = arena.take(size_bytes, torch.uint8)
        return self._buffers[place]

    def release(self) -> None:
        """Unpin everything."""
        for arena in self._arenas.values():
            arena.release()
