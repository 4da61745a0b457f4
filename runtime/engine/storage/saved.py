"""Holds the tensors that a layer saves for its backward pass, on the device or on the host.

Hooks see each tensor that autograd saves while a layer runs. A view of the layer's weights is moved
along if the weights are at another place in the backward pass. Any other tensor is a view of a
storage. A storage is counted once, however many views it has, and may live on the host meanwhile.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

# A storage smaller than this fraction of a layer's saved bytes stays on the device, such as
# attention's random state: each copy costs a call, and each host buffer a registration.
LEAST_SHARE = 8192


@dataclass(slots=True, eq=False)
class _View:
    """A saved tensor; while its storage is offloaded, only its type and its position in the
    storage.
    """

    tensor: Tensor | None
    place: tuple[torch.dtype, torch.Size, tuple[int, ...], int] | None = None

    def leave(self) -> None:
        """Drop the tensor, and record its position."""
        tensor = self.tensor
        assert tensor is not None
        self.place = (tensor.dtype, tensor.shape, tensor.stride(), int(tensor.storage_offset()))
        self.tensor = None

    def come_back(self, flat: Tensor) -> None:
        """Become a view of a new storage with the same bytes."""
        assert self.place is not None
        dtype, size, stride, offset = self.place
        empty = torch.empty(0, dtype=dtype, device=flat.device)
        self.tensor = empty.set_(flat.untyped_storage(), offset, size, stride)

    def taken(self) -> Tensor:
        """Give the tensor to the one operator that needs it, and drop it here.

        So its memory is freed when the operator has run, as without hooks.
        """
        tensor = self.tensor
        assert tensor is not None, "a saved tensor is needed that is away"
        self.tensor = None
        return tensor


@dataclass(slots=True, kw_only=True, eq=False)
class _SavedStorage:
    """A storage that a layer keeps, with all its views."""

    size_bytes: int
    views: list[_View] = field(default_factory=list)
    is_here: bool = True


@dataclass(slots=True, kw_only=True, eq=False)
class Saved:
    """The storages that one layer keeps for one micro-batch.

    ``size_bytes`` counts those that are on the device. ``weights`` is the layer's flat vector of
    weights in the forward pass. ``constants`` are numbers of storages that stay in any case.
    """

    weights: Tensor
    constants: frozenset[int] = frozenset()
    size_bytes: int = 0
    _home: int = field(init=False)
    _moved: int = 0
    # Keys are identifiers of storages; no new storage gets the identifier of one with views here.
    _storages: dict[int, _SavedStorage] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._home = storage_of(self.weights)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for the layer's forward pass, which saves its tensors here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Save a tensor as autograd would; returns a function that returns it."""
        packed = self._pack(tensor)
        return lambda: self._unpack(packed)

    def move_weights(self, weights: Tensor) -> None:
        """Record where the weights are during the backward pass."""
        self._moved = int(weights.storage_offset() - self.weights.storage_offset())

    def largest(self, most_bytes: float) -> list[int]:
        """The identifiers of storages of at most ``most_bytes`` together; large storages come
        first, and those too small to be worth a copy are omitted.
        """
        chosen, left = [], most_bytes
        least = self.size_bytes / LEAST_SHARE
        sizes = [
            (s.size_bytes, n)
            for n, s in enumerate(self._storages.values())
            if s.is_here and s.size_bytes >= least
        ]
        for size, number in sorted(sizes, key=lambda found: (-found[0], found[1])):
            if size <= left:
                chosen.append(number)
                left -= size
        return chosen

    def leave(self, number: int) -> Tensor:
        """Drop a storage; returns its bytes, for the copy to the host."""
        storage = self._storage(number)
        tensor = storage.views[0].tensor
        assert tensor is not None
        flat = _bytes_of(tensor)
        for view in storage.views:
            view.leave()
        storage.is_here = False
        self.size_bytes -= storage.size_bytes
        return flat

    def come_back(self, number: int, flat: Tensor) -> None:
        """Replace an offloaded storage by a new one; its bytes may still be in transfer."""
        storage = self._storage(number)
        for view in storage.views:
            view.come_back(flat)
        storage.is_here = True
        self.size_bytes += storage.size_bytes

    def leave_out(self, tensor: Tensor) -> None:
        """Stop counting a tensor, since the next layer counts it as its input."""
        storage = self._storages.pop(storage_of(tensor), None)
        if storage is not None:
            self.size_bytes -= storage.size_bytes

    def _storage(self, number: int) -> _SavedStorage:
        return list(self._storages.values())[number]

    def _pack(self, tensor: Tensor) -> "_View | Tensor":
        storage = tensor.untyped_storage()
        number = storage._cdata
        # Detached, since a parameter's data changes place, and an output that keeps itself would
        # never be freed.
        tensor = tensor.detach()
        if number == self._home or number in self.constants:
            return tensor
        known = self._storages.get(number)
        if known is None:
            size_bytes = storage.nbytes()
            if size_bytes == 0:
                return tensor
            known = self._storages[number] = _SavedStorage(size_bytes=size_bytes)
            self.size_bytes += size_bytes
        view = _View(tensor)
        known.views.append(view)
        return view

    def _unpack(self, packed: "_View | Tensor") -> Tensor:
        if isinstance(packed, _View):
            return packed.taken()
        if self._moved and storage_of(packed) == self._home:
            offset = packed.storage_offset() + self._moved
            return packed.as_strided(packed.shape, packed.stride(), offset)
        return packed


def storage_of(tensor: Tensor) -> int:
    """The identifier of a tensor's storage, unique while the storage lives.

    Unlike an address of memory, tensors without memory have it too.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def _bytes_of(tensor: Tensor) -> Tensor:
    storage = tensor.untyped_storage()
    empty = torch.empty(0, dtype=torch.uint8, device=tensor.device)
    return empty.set_(storage, 0, (storage.nbytes(),), (1,))
