"""Room on the device for optimizer state that is fetched to be stepped: there while layers step.

Each step takes it anew, and gives it back to what needs memory most when nothing steps.
"""

from collections.abc import Iterable

import torch
from torch import Tensor

from runtime.engine.streams.lanes import Streams


class Staging:
    """A ring's entries, each with master weights and two moments of ``numel`` elements."""

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
        """Take the room."""
        for entry in self._entries:
            self._slots[entry] = tuple(
                torch.empty(self._numel, dtype=torch.float32, device=self._device)
                for _ in range(self._kinds)
            )

    def close(self, streams: Streams) -> None:
        """Give it back."""
        for slots in self._slots.values():
            for slot in slots:
                streams.spoil(slot)
        self._slots.clear()

    def of(self, entry: int, numel: int) -> list[Tensor]:
        """An entry's parts for so many elements."""
        return [slot[:numel] for slot in self._slots[entry]]
