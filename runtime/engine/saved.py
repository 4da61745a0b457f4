"""What a layer saves for its backward pass: kept on the device, or on the host, or computed again.

Autograd's saved tensors are taken apart while a layer runs: a view of its weights becomes a place
in them, found again wherever the weights are then; any other is a view of a storage, which is kept
once however many views there are, and may live on the host meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

Where = tuple[torch.dtype, torch.Size, tuple[int, ...], int]


@dataclass(slots=True, kw_only=True, eq=False)
class Saved:
    """The storages that one layer of one micro-batch keeps, as flat bytes; None while away, and
    after the last use.

    ``weights`` is where the layer's weights are whole when it runs, ``constants`` are numbers of
    storages that stay anyway.
    """

    weights: Tensor
    constants: frozenset[int] = frozenset()
    storages: list[Tensor | None] = field(default_factory=list)
    _numbers: dict[int, int] = field(default_factory=dict)
    _uses: list[int] = field(default_factory=list)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Where the layer runs forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor as if autograd had saved it; how to get it back."""
        packed = self._pack(tensor)
        return lambda: self._unpack(packed)

    def largest(self, most_bytes: float) -> list[int]:
        """Storages that together have at most so many bytes, large ones first."""
        chosen, left = [], most_bytes
        sizes = [(s.numel(), n) for n, s in enumerate(self.storages) if s is not None]
        for size, number in sorted(sizes, key=lambda found: (-found[0], found[1])):
            if 0 < size <= left:
                chosen.append(number)
                left -= size
        return chosen

    @property
    def size_bytes(self) -> int:
        """Bytes of all storages that are here."""
        return sum(storage.numel() for storage in self.storages if storage is not None)

    def _pack(self, tensor: Tensor) -> Any:
        storage = storage_of(tensor)
        if storage == storage_of(self.weights):
            offset = tensor.storage_offset() - self.weights.storage_offset()
            return (None, (tensor.dtype, tensor.shape, tensor.stride(), offset))
        if storage in self.constants or tensor.untyped_storage().nbytes() == 0:
            return tensor
        number = self._numbers.get(storage)
        if number is None:
            # Kept here as long as the layer runs forward: no other storage gets its number.
            number = self._numbers[storage] = len(self.storages)
            self.storages.append(_bytes_of(tensor))
            self._uses.append(0)
        self._uses[number] += 1
        where = (tensor.dtype, tensor.shape, tensor.stride(), tensor.storage_offset())
        return (number, where)

    def _unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        number, (dtype, size, stride, offset) = packed
        if number is None:
            return self.weights.as_strided(size, stride, self.weights.storage_offset() + offset)
        storage = self.storages[number]
        assert storage is not None, "a saved tensor is needed that is away"
        self._uses[number] -= 1
        if not self._uses[number]:
            # The last that needs it: it goes as soon as that has run, as autograd's own would.
            self.storages[number] = None
        empty = torch.empty(0, dtype=dtype, device=storage.device)
        return empty.set_(storage.untyped_storage(), offset, size, stride)


def storage_of(tensor: Tensor) -> int:
    """The number of the storage that a tensor is a view of: no other has it while that one lives.

    Unlike an address of memory, it is there for tensors without any memory too.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
