"""States of layers on the device: rooms for offloaded states, and where each tensor lies."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import compress
from typing import Self

import torch
from torch import Tensor, nn

from mistlab.stages.stage_shape import RING, StageShape
from runtime.devices.cuda import driver_of
from runtime.engine.storage.arena import Arena, Rehearsal, Room
from runtime.engine.storage.layout import Layout, kept_elements
from runtime.engine.streams.lanes import Streams

# Room on the device for offloaded optimizer state, while layers take their optimizer steps.
#
# Each step allocates the room anew and frees it, since other tensors need the memory in between.


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


# A rank's weights, gradients and optimizer state of each layer, and the rings of buffers.
#
# A vector that is partly offloaded is ``Split``: its beginning stays on the device, and its tail
# is on the host. Weights and gradients are whole only in an entry of a ring, which layers use in
# turn. The optimizer's vectors are never whole: their two pieces are stepped separately.


# Master weights and two moments.
OPTIMIZER_VECTORS = 3


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Split:
    """A flat vector whose tail is on the host."""

    resident: Tensor
    tail: Tensor

    @classmethod
    def of(cls, numel: int, ratio: float, dtype: torch.dtype, device: Room, host: Room) -> Self:
        """Take room for ``numel`` elements, ``ratio`` of them on the host."""
        kept = kept_elements(numel, ratio)
        return cls(resident=device.take(kept, dtype), tail=host.take(numel - kept, dtype))

    @property
    def kept(self) -> int:
        """Number of elements on the device."""
        return self.resident.numel()

    def load(self, whole: Tensor) -> None:
        """Copy the two pieces into ``whole``."""
        whole[: self.kept].copy_(self.resident)
        whole[self.kept :].copy_(self.tail, non_blocking=True)

    def store(self, whole: Tensor) -> None:
        """Copy ``whole`` into the two pieces."""
        self.resident.copy_(whole[: self.kept])
        self.tail.copy_(whole[self.kept :], non_blocking=True)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerState:
    """One layer's vectors on one rank.

    ``weights`` holds the layer's weights (with ZeRO-3, this rank's part). ``gradients`` holds the
    sums over micro-batches (from ZeRO-2 on, this rank's part). ``optimizer`` holds master weights
    and two moments (from ZeRO-1 on, this rank's part). ``step`` counts the optimizer's steps on the
    device, ``host_step`` those on the host. Through ``exchange`` the host gets gradients and gives
    weights back.
    """

    layout: Layout
    weights: Split
    gradients: Split
    optimizer: tuple[Split, ...]
    step: Tensor
    host_step: Tensor
    exchange: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageState:
    """All layers of a rank by number, and its rings, each with two entries."""

    shape: StageShape
    dtype: torch.dtype
    layers: Mapping[int, LayerState]
    weight_slots: tuple[Tensor, ...]
    gradient_slots: tuple[Tensor, ...]
    sum_slots: tuple[Tensor, ...]
    staging: Staging
    device: Arena
    host: Arena

    @classmethod
    def build(
        cls,
        shape: StageShape,
        layouts: Mapping[int, Layout],
        dtype: torch.dtype,
        device: torch.device,
    ) -> Self:
        """Allocate the state: rehearse to know the sizes, allocate, hand out the parts."""
        rehearsed = Rehearsal(), Rehearsal()
        _parts(shape, layouts, dtype, *rehearsed)
        on_device = Arena(rehearsed[0].size_bytes, device)
        host_device = torch.device("cpu")
        on_host = Arena(rehearsed[1].size_bytes, host_device, pins_for=driver_of(device))
        layers, rings = _parts(shape, layouts, dtype, on_device, on_host)
        weights, gradients, sums = rings
        return cls(
            shape=shape,
            dtype=dtype,
            layers=layers,
            weight_slots=weights,
            gradient_slots=gradients,
            sum_slots=sums,
            staging=_staging(shape, layers, device),
            device=on_device,
            host=on_host,
        )

    def held_bytes(self) -> dict[str, int]:
        """Bytes on the device for each class of memory, under the names that predictions use."""
        layers = self.layers.values()
        slots = [*self.weight_slots, *self.gradient_slots, *self.sum_slots]
        return {
            "weights": sum(layer.weights.resident.nbytes for layer in layers),
            "gradients": sum(layer.gradients.resident.nbytes for layer in layers),
            "optimizer": sum(m.resident.nbytes for layer in layers for m in layer.optimizer),
            "buffers": sum(slot.nbytes for slot in slots) + self.staging.size_bytes,
        }

    def whole_weights(self, layer: int, entry: int) -> Tensor:
        """The vector in which a layer's weights are whole while they are used."""
        if self.shape.rings_weights(layer):
            return self.weight_slots[entry][: self.layers[layer].layout.numel]
        return self.layers[layer].weights.resident

    def own_weights(self, layer: int, entry: int) -> Tensor:
        """The part of the whole weights that this rank keeps."""
        whole, shape = self.whole_weights(layer, entry), self.shape
        return whole[self.layers[layer].layout.own] if shape.zero >= 3 else whole

    def whole_gradients(self, layer: int, entry: int) -> Tensor:
        """The vector to which a backward pass adds a layer's gradients."""
        if self.shape.rings_gradients(layer):
            return self.gradient_slots[entry][: self.layers[layer].layout.numel]
        return self.layers[layer].gradients.resident

    def sums(self, layer: int, entry: int) -> Tensor:
        """The vector of sums over micro-batches; from ZeRO-2 on, this rank's part."""
        if not self.shape.offload_of(layer).gradients:
            return self.layers[layer].gradients.resident
        if self.shape.zero < 2:
            return self.whole_gradients(layer, entry)
        own = self.layers[layer].layout.own
        return self.sum_slots[entry][: own.stop - own.start]

    def stepped_gradients(self, layer: int, entry: int) -> Tensor:
        """The gradients of the weights that the rank steps."""
        sums = self.sums(layer, entry)
        return sums[self.layers[layer].layout.own] if self.shape.zero == 1 else sums

    def set_stepped(self, layer: int, entry: int, begin: int, values: Tensor) -> None:
        """Write stepped weights back, at ``begin`` of the weights that the rank steps."""
        whole, own, shape = self.whole_weights(layer, entry), self.layers[layer], self.shape
        stepped = whole[own.layout.own] if shape.zero >= 1 else whole
        place = slice(begin, begin + values.numel())
        stepped[place].copy_(values, non_blocking=True)
        if shape.rings_weights(layer) and not shape.offload_of(layer).weights:
            own.weights.resident[place].copy_(stepped[place])


Rings = list[tuple[Tensor, ...]]


def _parts(
    shape: StageShape,
    layouts: Mapping[int, Layout],
    dtype: torch.dtype,
    device: Room,
    host: Room,
) -> tuple[dict[int, LayerState], Rings]:
    layers = {
        layer: _layer(shape, layer, layout, dtype, device, host)
        for layer, layout in layouts.items()
    }
    whole = {layer: layout.numel for layer, layout in layouts.items()}
    part = {layer: layout.numel // layout.parts for layer, layout in layouts.items()}
    ringed = [n for layer, n in whole.items() if shape.rings_weights(layer)]
    reduced = [n for layer, n in whole.items() if shape.rings_gradients(layer)]
    summed = [
        n for layer, n in part.items() if shape.zero >= 2 and shape.offload_of(layer).gradients > 0
    ]
    return layers, [_ring(sizes, dtype, device) for sizes in (ringed, reduced, summed)]


def _staging(shape: StageShape, layers: Mapping[int, LayerState], device: torch.device) -> Staging:
    staged = [layer for layer in layers if shape.stages_tail(layer)]
    return Staging(
        entries=[shape.entry_at_step(layer) for layer in staged],
        kinds=OPTIMIZER_VECTORS,
        numel=max((layers[layer].optimizer[0].tail.numel() for layer in staged), default=0),
        device=device,
    )


def _layer(
    shape: StageShape, layer: int, layout: Layout, dtype: torch.dtype, device: Room, host: Room
) -> LayerState:
    whole, part, offload = layout.numel, layout.numel // layout.parts, shape.offload_of(layer)
    weights = part if shape.zero >= 3 else whole
    gradients = part if shape.zero >= 2 else whole
    stepped = part if shape.zero >= 1 else whole
    optimizer = tuple(
        Split.of(stepped, offload.optimizer, torch.float32, device, host)
        for _ in range(OPTIMIZER_VECTORS)
    )
    exchanged = optimizer[0].tail.numel() if shape.steps_tail(layer) else 0
    return LayerState(
        layout=layout,
        weights=Split.of(weights, offload.weights, dtype, device, host),
        gradients=Split.of(gradients, offload.gradients, dtype, device, host),
        optimizer=optimizer,
        step=device.take(1, torch.float32),
        host_step=torch.zeros(1),
        exchange=host.take(exchanged, dtype),
    )


def _ring(sizes: list[int], dtype: torch.dtype, device: Room) -> tuple[Tensor, ...]:
    size = max(sizes, default=0)
    return tuple(device.take(size, dtype) for _ in range(RING))


# Points a layer's parameters to their weights and gradients, which are views of flat vectors.
#
# Weights and gradients that are gathered or fetched are whole only in an entry of a ring of two.
# They change from one entry to the other, and the parameters follow them.
#
# Gradients of matrices are added to their sums while a layer runs backward. Gradients of vectors
# are many and small, and adding each would take a kernel. So autograd leaves them with their
# parameters, and one kernel adds them all.


# The embedding's name for the table that the head may borrow.
OWN_TABLE = "tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FlatVector:
    """A flat vector and a layer's parameters in it; ``vectors`` have one dimension."""

    whole: Tensor
    views: tuple[Tensor, ...]
    vectors: list[Tensor]

    @classmethod
    def of(cls, layout: Layout, whole: Tensor) -> Self:
        """Find a layer's parameters in the flat vector ``whole``."""
        views = tuple(layout.views(whole).values())
        return cls(whole=whole, views=views, vectors=[one for one in views if one.dim() == 1])


@dataclass(slots=True, kw_only=True, eq=False)
class _Layer:
    """A layer's own parameters, their places by entry of the rings, and their places now."""

    parameters: tuple[nn.Parameter, ...]
    vectors: list[nn.Parameter]
    weights: list[_FlatVector]
    gradients: list[_FlatVector]
    weights_now: _FlatVector
    gradients_now: _FlatVector | None = None


class ParameterPlaces:
    """Points the parameters of a stage's layers to their places."""

    def __init__(self, state: StageState, modules: dict[int, nn.Module]) -> None:
        self._layers = {layer: _adopt(state, layer, module) for layer, module in modules.items()}
        shape = state.shape
        if shape.shares_table:
            modules[shape.last_layer].get_submodule("projection").weight = modules[
                shape.first_layer
            ].get_parameter(OWN_TABLE)
            # The head's backward pass is the first to add to the table's gradients.
            self.take_gradients(shape.first_layer, 0)

    def take_weights(self, layer: int, entry: int) -> Tensor:
        """Point a layer's parameters to its whole weights of an entry; return the flat vector."""
        one = self._layers[layer]
        place = one.weights[entry]
        if place is not one.weights_now:
            for parameter, view in zip(one.parameters, place.views, strict=True):
                parameter.data = view
            one.weights_now = place
        return place.whole

    def take_gradients(self, layer: int, entry: int) -> Tensor:
        """Point a layer's gradients to their sums of an entry; return the flat vector."""
        one = self._layers[layer]
        place = one.gradients[entry]
        if place is not one.gradients_now:
            for parameter, view in zip(one.parameters, place.views, strict=True):
                parameter.grad = view if view.dim() > 1 else None
            one.gradients_now = place
        return place.whole

    def take_vectors(self, layer: int) -> list[Tensor]:
        """Take the gradients that a backward pass has left with a layer's vectors."""
        one = self._layers[layer]
        gradients = [vector.grad for vector in one.vectors if vector.grad is not None]
        for vector in one.vectors:
            vector.grad = None
        return gradients

    def vectors(self, layer: int) -> list[nn.Parameter]:
        """A layer's vectors, in the order of their gradients."""
        return self._layers[layer].vectors

    def add_vectors(
        self, layer: int, gradients: list[Tensor], of: Sequence[bool] | None = None
    ) -> None:
        """Add gradients of a layer's vectors, or of those that ``of`` marks, to their sums."""
        one = self._layers[layer]
        if gradients:
            assert one.gradients_now is not None
            sums = one.gradients_now.vectors
            torch._foreach_add_(sums if of is None else list(compress(sums, of)), gradients)


def _adopt(state: StageState, layer: int, module: nn.Module) -> _Layer:
    """Give a module without storage real parameters."""
    layout, shape = state.layers[layer].layout, state.shape
    weights = [_FlatVector.of(layout, state.whole_weights(layer, entry)) for entry in range(RING)]
    gradients = [
        _FlatVector.of(layout, state.whole_gradients(layer, entry)) for entry in range(RING)
    ]
    parameters = []
    for entry, view in zip(layout.entries, weights[0].views, strict=True):
        path, _, leaf = entry.name.rpartition(".")
        parameters.append(nn.Parameter(view.data))
        setattr(module.get_submodule(path), leaf, parameters[-1])
    # Weights and gradients that use no ring have one place for every entry.
    return _Layer(
        parameters=tuple(parameters),
        vectors=[one for one in parameters if one.dim() == 1],
        weights=weights if shape.rings_weights(layer) else weights[:1] * RING,
        gradients=gradients if shape.rings_gradients(layer) else gradients[:1] * RING,
        weights_now=weights[0],
    )
