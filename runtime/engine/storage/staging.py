"""Room on the device for offloaded optimizer state, while layers take their optimizer steps.

Each step allocates the room anew and frees it, since other tensors need the memory in between.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from runtime.engine.streams.lanes import Streams


class Staging:
    """Entries of a ring; each has ``kinds`` vectors (masters and moments) of ``numel`` elements."""

    def __init__(
        self, entries: Iterable[int], kinds: int, numel: int, device: torch.device
    ) -> None:
        self._entries = sorted(set(entries)) if numel else []
        self._kinds, self._numel, self._device = kinds, numel, device
        self._slots: dict[int, tuple[Tensor, ...]] = {}

    @property
    def size_bytes(self) -> int:
        """Bytes taken now."""
        return sum(slot.nbytes for slots in self._slots.values() for slot in slots)

    def open(self) -> None:
        """Allocate the room."""
        for entry in self._entries:
            self._slots[entry] = tuple(
                torch.empty(self._numel, dtype=torch.float32, device=self._device)
                for _ in range(self._kinds)
            )

    def close(self, streams: Streams) -> None:
        """Free the room."""
        for slots in self._slots.values():
            for slot in slots:
                streams.spoil(slot)
        self._slots.clear()

    def of(self, entry: int, numel: int) -> list[Tensor]:
        """The first ``numel`` elements of each vector of an entry."""
        return [slot[:numel] for slot in self._slots[entry]]
