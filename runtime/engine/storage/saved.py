"""Holds the tensors that a layer saves for its backward pass, on the device or in host memory.

Autograd's hooks give each saved tensor to this module, which returns a number in its place. A saved
view of the layer's weights follows the weights if they lie elsewhere in the backward pass. Other
saved tensors are views of storages. A storage counts once, however many views it has, and may be
offloaded to the host until the backward pass. Which tensors share a storage is worked out once per
layer, since the layer runs the same code for all micro-batches.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Self, cast

import torch
from torch import Tensor

# A storage smaller than a layer's saved bytes divided by this number, such as attention's random
# state, is not offloaded: each copy costs a call, and each host buffer a registration.
LEAST_SHARE = 8192
_Place = tuple[torch.dtype, torch.Size, tuple[int, ...], int]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _KeptStorage:
    """A storage that a layer saves for its backward pass: the indices of the saved tensors that are
    views of it, and the index of a tensor that covers all of it contiguously, if there is one.
    ``dtype`` is the data type that all views have, or bytes if they differ.
    """

    size_bytes: int
    dtype: torch.dtype
    views: tuple[int, ...]
    whole: int | None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SavedLayout:
    """Which storages a layer's saved tensors are views of, equal for all micro-batches of the
    layer.

    ``places`` are each tensor's type, size, strides and offset. Tensors ``at_home`` are views of
    the layer's weights; these, constants and empty tensors are ``staying`` on the device.
    ``by_size`` are the indices of the storages large enough to offload, largest first.
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
        """Which storages the saved tensors are views of. ``home`` is the storage of the layer's
        weights. ``left_out`` is a storage that is not counted, because the next layer counts it as
        its input.
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

    ``size_bytes`` counts their storages on the device. ``weights`` is the layer's flat vector of
    weights in the forward pass. ``constants`` are storages that always stay on the device.
    ``layout`` may come from an earlier micro-batch, if all micro-batches save the same tensors.
    """

    weights: Tensor
    constants: frozenset[int] = frozenset()
    layout: SavedLayout | None = None
    _away_bytes: int = 0
    _moved: int = 0
    # The saved tensors, by the number that autograd holds instead; None once used or offloaded.
    _tensors: list[Tensor | None] = field(default_factory=list)

    @property
    def size_bytes(self) -> int:
        """The bytes of this layer's saved storages on the device."""
        return self.arranged().size_bytes - self._away_bytes

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """A context in which a layer's forward pass saves its tensors here."""
        return torch.autograd.graph.saved_tensors_hooks(self._pack, self._unpack)

    def keep(self, tensor: Tensor) -> Callable[[], Tensor]:
        """Save a tensor as autograd would; returns a function that gives the tensor back."""
        return partial(self._unpack, self._pack(tensor))

    def arranged(self, leaves_out: Tensor | None = None) -> SavedLayout:
        """Which storages the saved tensors are views of, known once the layer has run;
        ``leaves_out`` is a tensor that is not counted, because the next layer counts it as its
        input.
        """
        known = self.layout
        if known is None or len(known.places) != len(self._tensors):
            tensors = cast("list[Tensor]", self._tensors)
            left_out = None if leaves_out is None else storage_of(leaves_out)
            known = SavedLayout.of(tensors, storage_of(self.weights), self.constants, left_out)
            self.layout = known
        return known

    def move_weights(self, weights: Tensor) -> None:
        """Say that a layer's weights have moved before its backward pass, so that saved views of
        the weights follow.
        """
        self._moved = int(weights.storage_offset() - self.weights.storage_offset())

    def largest(self, most_bytes: float) -> list[int]:
        """The indices of the largest saved storages, largest first, of at most ``most_bytes`` in
        total; storages too small to offload are left out.
        """
        chosen, left, layout = [], most_bytes, self.arranged()
        for number in layout.by_size:
            size = layout.storages[number].size_bytes
            if size <= left:
                chosen.append(number)
                left -= size
        return chosen

    def leave(self, numbers: Sequence[int]) -> list[Tensor]:
        """Release saved storages on the device; returns contiguous tensors of their bytes, to be
        copied to the host.
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
        # The tensor is saved without its autograd history: a parameter's data may move, and an
        # output that saves itself would never be freed. ``data`` takes a fifth of the host time of
        # ``detach``.
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
        # The reference is dropped when the operator that needs the tensor takes it, so that the
        # memory is freed after this operator, as without hooks.
        self._tensors[number] = None
        return tensor


def storage_of(tensor: Tensor) -> int:
    """An identifier of a tensor's storage, unique while the storage lives.

    Unlike a memory address, it also exists for tensors without memory.
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
    """A view with a tensor's type, size, strides and offset, of the storage that ``flat``
    covers.
    """
    if flat.dtype == dtype:
        return flat.as_strided(size, stride, offset)
    empty = torch.empty(0, dtype=dtype, device=flat.device)
    return empty.set_(flat.untyped_storage(), offset, size, stride)
