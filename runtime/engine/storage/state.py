"""A rank's weights, gradients and optimizer state of each layer, and the rings of buffers.

A vector that is partly offloaded is ``Split``: its beginning stays on the device, and its tail is
on the host. Weights and gradients are whole only in an entry of a ring, which layers use in turn.
The optimizer's vectors are never whole: their two pieces are stepped separately.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from mistlab.schedule.stage_shape import RING, StageShape
from runtime.devices.table import driver_of
from runtime.engine.storage.arena import Arena, Rehearsal, Room
from runtime.engine.storage.layout import Layout, kept_elements
from runtime.engine.storage.staging import Staging

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
