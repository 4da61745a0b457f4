"""Holds the tensors that a layer saves for its backward pass, on the device or on the host.

Hooks see each tensor that autograd saves while a layer runs, and only number it. A view of the
layer's weights is moved along if the weights are at another place in the backward pass. Any other
tensor is a view of a storage. A storage is counted once, however many views it has, and may live on
the host meanwhile. Which tensors share a storage is worked out once, for all micro-batches of a
layer: its code is the same for each.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor

# A storage smaller than this fraction of a layer's saved bytes stays on the device, such as
# attention's random state: each copy costs a call, and each host buffer a registration.
LEAST_SHARE = 8192
_Place = tuple[torch.dtype, torch.Size, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _KeptStorage:
    """A storage that a layer saves for its backward pass: the indices of the saved tensors that are
    views of it, and of one that covers it contiguously. ``dtype`` is the data type of all views, or
    that of bytes.
    """

    size_bytes: int
    dtype: torch.dtype
    views: tuple[int, ...]
    whole: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedLayout:
    """The arrangement of a layer's saved tensors in storages, equal for all of its micro-batches.

    ``places`` are the type, size, strides and offset of each tensor. Tensors ``at_home`` are views
    of the layer's weights; these, constants and empty tensors are ``staying``. ``by_size`` are the
    numbers of storages that are worth a copy, the largest first.
    """

    places: tuple[_Place, ...]
    storages: tuple[_KeptStorage, ...]
    at_home: frozenset[int]
    staying: frozenset[int]
    size_bytes: int
    by_size: tuple[int, ...]

    @classmethod
    def of(
        cls,
        tensors: Sequence[Tensor],
        home: int,
        constants: frozenset[int],
        left_out: int | None = None,
    ) -> Self:
        """The arrangement of saved tensors: ``home`` is the storage of weights, and ``left_out``
        that of a tensor that the next layer counts as its input.
        """
        views_of: dict[int, list[int]] = {}
        for number, tensor in enumerate(tensors):
            views_of.setdefault(storage_of(tensor), []).append(number)
        at_home = frozenset(views_of.get(home, ()))
        kept = [
            _storage(tensors, views)
            for storage, views in views_of.items()
            if storage != home
            and storage not in constants
            and tensors[views[0]].untyped_storage().nbytes()
        ]
        moving = {number for storage in kept for number in storage.views}
        size_bytes = sum(storage.size_bytes for storage in kept)
        if left_out in views_of:
            first = views_of[left_out][0]
            gone = [storage for storage in kept if storage.views[0] == first]
            size_bytes -= sum(storage.size_bytes for storage in gone)
            kept = [storage for storage in kept if storage not in gone]
        sizes = [storage.size_bytes for storage in kept]
        worth = [n for n, size in enumerate(sizes) if size >= size_bytes / LEAST_SHARE]
        return cls(
            places=tuple(
                (one.dtype, one.shape, one.stride(), int(one.storage_offset())) for one in tensors
            ),
            storages=tuple(kept),
            at_home=at_home,
            staying=frozenset(range(len(tensors))) - moving,
            size_bytes=size_bytes,
            by_size=tuple(sorted(worth, key=lambda number: (-sizes[number], number))),
        )


def _storage(tensors: Sequence[Tensor], views: Sequence[int]) -> _KeptStorage:
    size_bytes = tensors[views[0]].untyped_storage().nbytes()
    whole = [
        number
        for number in views
        if tensors[number].nbytes == size_bytes
        and tensors[number].dim()
        and tensors[number].is_contiguous()
    ]
    dtypes = {tensors[number].dtype for number in views}
    dtype = dtypes.pop() if len(dtypes) == 1 else torch.uint8
    return _KeptStorage(
        size_bytes=size_bytes,
        dtype=dtype if size_bytes % dtype.itemsize == 0 else torch.uint8,
        views=tuple(views),
        whole=next(iter(whole), None),
    )


@dataclass(slots=True, kw_only=True, eq=False)
class Saved:
    """The tensors that one layer saves for one micro-batch.

    ``size_bytes`` counts their storages that are on the device. ``weights`` is the layer's flat
    vector of weights in the forward pass. ``constants`` are numbers of storages that stay in any
    case. ``layout`` may be given by a micro-batch before, if all are alike.
    """

    weights: Tensor
    constants: frozenset[int] = frozenset()
    layout: SavedLayout | None = None
    _away_bytes: int = 0
    _moved: int = 0
    # The saved tensors by the index that autograd holds in place of each; None once used or
    # offloaded.
    _tensors: list[Tensor | None] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The bytes of this layer's saved storages on the device."""
        return self.arranged().size_bytes - self._away_bytes

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context for the layer's forward pass, which saves its tensors here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Save a tensor as autograd would; returns a function that returns it."""
        return partial(self._unpack, self._pack(tensor))

    def arranged(self, leaves_out: Tensor | None = None) -> SavedLayout:
        """The arrangement of all saved tensors, known after the layer has run; ``leaves_out`` is a
        tensor that the next layer counts as its input.
        """
        known = self.layout
        if known is None or len(known.places) != len(self._tensors):
            tensors = cast("list[Tensor]", self._tensors)
            left_out = None if leaves_out is None else storage_of(leaves_out)
            known = SavedLayout.of(tensors, storage_of(self.weights), self.constants, left_out)
            self.layout = known
        return known

    def move_weights(self, weights: Tensor) -> None:
        """Record that a layer's weights have moved for the backward pass, so that saved views of
        weights follow.
        """
        self._moved = int(weights.storage_offset() - self.weights.storage_offset())

    def largest(self, most_bytes: float) -> list[int]:
        """The indices of the largest saved storages, of at most ``most_bytes`` in total, largest
        first; storages too small to be worth a copy are omitted.
        """
        chosen, left, layout = [], most_bytes, self.arranged()
        for number in layout.by_size:
            size = layout.storages[number].size_bytes
            if size <= left:
                chosen.append(number)
                left -= size
        return chosen

    def leave(self, numbers: Sequence[int]) -> list[Tensor]:
        """Release saved storages; returns contiguous tensors of their bytes, for copies to the
        host.
        """
        tensors, storages, left = self._tensors, self.arranged().storages, []
        for number in numbers:
            storage = storages[number]
            tensor = tensors[storage.views[0] if storage.whole is None else storage.whole]
            assert tensor is not None
            left.append(_all_of(tensor, storage.dtype) if storage.whole is None else tensor)
            for view in storage.views:
                tensors[view] = None
            self._away_bytes += storage.size_bytes
        return left

    def come_back(self, numbers: Sequence[int], new: Sequence[Tensor]) -> None:
        """Give offloaded tensors new storages on the device, into which their bytes may still be
        being copied.
        """
        tensors, layout = self._tensors, self.arranged()
        for number, flat in zip(numbers, new, strict=True):
            storage = layout.storages[number]
            for view in storage.views:
                tensors[view] = flat if view == storage.whole else _view(flat, *layout.places[view])
            self._away_bytes -= storage.size_bytes

    def _pack(self, tensor: Tensor) -> int:
        # A tensor without its autograd history is kept, since a parameter's data moves, and an
        # output that saves itself would never be freed. ``data`` takes the host a fifth of the time
        # of ``detach``.
        tensors = self._tensors
        tensors.append(tensor.data)
        return len(tensors) - 1

    def _unpack(self, number: int) -> Tensor:
        tensor, layout = self._tensors[number], self.layout or self.arranged()
        assert tensor is not None, "a saved tensor is needed that is away"
        if number in layout.staying:
            if self._moved and number in layout.at_home:
                offset = tensor.storage_offset() + self._moved
                return tensor.as_strided(tensor.shape, tensor.stride(), offset)
            return tensor
        # The reference is dropped when the one operator that needs the tensor takes it, so that its
        # memory is freed after the operator, as without saved-tensor hooks.
        self._tensors[number] = None
        return tensor


def storage_of(tensor: Tensor) -> int:
    """The identifier of a tensor's storage, unique while the storage lives.

    Unlike an address of memory, tensors without memory have it too.
    """
    number: int = tensor.untyped_storage()._cdata
    return number


def _all_of(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """The whole storage that a tensor is a view of, as a flat tensor."""
    storage = tensor.untyped_storage()
    numel = storage.nbytes() // dtype.itemsize
    if tensor.dtype == dtype:
        return tensor.as_strided((numel,), (1,), 0)
    empty = torch.empty(0, dtype=dtype, device=tensor.device)
    return empty.set_(storage, 0, (numel,), (1,))


def _view(
    flat: Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int
) -> Tensor:
    """A view of a storage, which ``flat`` covers, with a tensor's shape and position in it."""
    if flat.dtype == dtype:
        return flat.as_strided(size, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), offset, size, stride)
