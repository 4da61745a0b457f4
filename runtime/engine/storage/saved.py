"""What a layer saves for its backward pass: kept on the device, or on the host, or computed again.

Autograd's saved tensors are taken apart while a layer runs. A view of its weights is moved along
when the weights are elsewhere in the backward pass. Any other is a view of a storage, which is
counted once however many views there are, and which may live on the host meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(slots=True, eq=False)
class _View:
    """A saved tensor until it is needed; while its storage is away, its type and place in it."""

    tensor: Tensor | None
    place: tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None = None

    def leave(self) -> None:
        """Let go of the storage."""
        one = self.tensor
        assert one is not None
        self.place = (one.dtype, one.shape, one.stride(), int(one.storage_offset()))
        self.tensor = None

    def come_back(self, flat: Tensor) -> None:
        """Be a view of a storage that has the same bytes."""
        assert self.place is not None
        dtype, size, stride, offset = self.place
        empty = torch.empty(0, dtype=dtype, device=flat.device)
        self.tensor = empty.set_(flat.untyped_storage(), offset, size, stride)

    def taken(self) -> Tensor:
        """The tensor, for the one operator that needs it: it goes as soon as that has run, as
        autograd's own would."""
        one = self.tensor
        assert one is not None, "a saved tensor is needed that is away"
        self.tensor = None
        return one


@dataclass(slots=True, kw_only=True, eq=False)
class _Storage:
    """A storage that a layer keeps, by all its views."""

    size_bytes: int
    views: list[_View] = field(default_factory=list)
    is_here: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Saved:
    """The storages that one layer of one micro-batch keeps; ``size_bytes`` are of those that are
    here.

    ``weights`` is where the layer's weights are whole when it runs forward, ``constants`` are
    numbers of storages that stay anyway.
    """

    weights: Tensor
    constants: frozenset[int] = frozenset()
    size_bytes: int = 0
    _home: int = field(init=False)
    _moved: int = 0
    # By number: no other storage gets the number of one that has views here.
    _storages: dict[int, _Storage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._home = storage_of(self.weights)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Where the layer runs forward."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Keep a tensor as if autograd had saved it; how to get it back."""
        packed = self._pack(tensor)
        return lambda: self._unpack(packed)

    def move_weights(self, weights: Tensor) -> None:
        """Say where in their storage the weights are in the backward pass."""
        self._moved = int(weights.storage_offset() - self.weights.storage_offset())

    def largest(self, most_bytes: float) -> list[int]:
        """Places of storages that together have at most so many bytes, large ones first."""
        chosen, left = [], most_bytes
        sizes = [(s.size_bytes, n) for n, s in enumerate(self._storages.values()) if s.is_here]
        for size, place in sorted(sizes, key=lambda found: (-found[0], found[1])):
            if size <= left:
                chosen.append(place)
                left -= size
        return chosen

    def leave(self, place: int) -> Tensor:
        """Let go of a storage; its bytes, for who copies them."""
        storage = self._place(place)
        one = storage.views[0].tensor
        assert one is not None
        flat = _bytes_of(one)
        for view in storage.views:
            view.leave()
        storage.is_here = False
        self.size_bytes -= storage.size_bytes
        return flat

    def come_back(self, place: int, flat: Tensor) -> None:
        """Take a storage back that has the bytes of one that left, or will have."""
        storage = self._place(place)
        for view in storage.views:
            view.come_back(flat)
        storage.is_here = True
        self.size_bytes += storage.size_bytes

    def _place(self, place: int) -> _Storage:
        return list(self._storages.values())[place]

    def _pack(self, tensor: Tensor) -> "_View | Tensor":
        storage = tensor.untyped_storage()
        number = storage._cdata
        # A parameter is re-pointed by others, and an output that keeps itself would never go.
        tensor = tensor.detach()
        if number == self._home or number in self.constants:
            return tensor
        found = self._storages.get(number)
        if found is None:
            size_bytes = storage.nbytes()
            if size_bytes == 0:
                return tensor
            found = self._storages[number] = _Storage(size_bytes=size_bytes)
            self.size_bytes += size_bytes
        view = _View(tensor)
        found.views.append(view)
        return view

    def _unpack(self, packed: "_View | Tensor") -> Tensor:
        if isinstance(packed, _View):
            return packed.taken()
        if self._moved and storage_of(packed) == self._home:
            offset = packed.storage_offset() + self._moved
            return packed.as_strided(packed.shape, packed.stride(), offset)
        return packed


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
