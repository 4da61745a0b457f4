"""The weights, gradients and optimizer states of a rank's layers, on the device and in host
memory.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import compress
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from mistlab.stages.stage_shape import RING, StageShape
from runtime.devices.cuda import driver_of
from runtime.engine.storage.arena import Arena, Rehearsal, Room
from runtime.engine.storage.layout import Entry, Layout
from runtime.engine.storage.moment_codes import CODES, moment_codes
from runtime.engine.storage.stepped import Kind, Split, Staging, alignment_of, kinds_stepped
from runtime.models.parallel import SmallMatrix

# A rank's weights, gradients and optimizer states of each layer, and the ring buffers.
#
# A section is the part of a layer's parameters that one group of ranks shards. One section has all
# parameters except experts; experts, which another group of ranks shards, are a section of their
# own. A layer's sections lie one after the other in an entry of a ring buffer.
#
# A partly offloaded vector is a ``Split``. Sharded or offloaded weights and gradients are whole
# only in the entries of a ring buffer, which layers use in turn. Optimizer states are never whole:
# the part on the device and the part on the host are stepped separately.


class Begin(NamedTuple):
    """Where a section of a layer begins in an entry of a ring buffer: in vectors of whole
    parameters, of this rank's part, and of offloaded optimizer states.
    """

    whole: int = 0
    part: int = 0
    tail: int = 0

    def after(self, layout: Layout, tail: int) -> "Begin":
        """Where the layer's next section begins in an entry of a ring buffer."""
        return Begin(self.whole + layout.numel, self.part + layout.part_numel, self.tail + tail)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerState:
    """One rank's weights, gradients and optimizer states for a section of a layer.

    ``weights`` are the layer's weights (with ZeRO-3, this rank's part), ``gradients`` the sums over
    micro-batches (from ZeRO-2 on, this rank's part), ``optimizer`` the master weights and two
    moments (from ZeRO-1 on, this rank's part), then their scales if moments are quantised. ``step``
    counts optimizer steps on the device, ``host_step`` those on the host. The host receives
    gradients in ``exchange``, and returns weights in the same memory as ``exchanged_weights``.
    """

    layout: Layout
    begin: Begin
    weights: Split
    gradients: Split
    optimizer: tuple[Split, ...]
    step: Tensor
    host_step: Tensor
    exchange: Tensor
    exchanged_weights: Tensor


class Types(NamedTuple):
    """The data types of weights, accumulated gradients, and moments."""

    weights: torch.dtype
    gradients: torch.dtype
    moments: torch.dtype = torch.float32

    @property
    def stepped(self) -> tuple[Kind, ...]:
        """The types of the vectors that the optimizer steps."""
        return kinds_stepped(self.moments)

    @property
    def alignment(self) -> int:
        """Parameters begin at multiples of this number of elements."""
        return alignment_of(self.moments)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Rings:
    """Ring buffers of two entries each: for whole weights, for whole gradients, and for ranks'
    parts.
    """

    weights: tuple[Tensor, ...]
    gradients: tuple[Tensor, ...]
    sums: tuple[Tensor, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Section:
    """The states of the parameters that one group of ranks shards, by layer index."""

    shape: StageShape
    layers: Mapping[int, LayerState]
    rings: Rings
    staging: Staging

    def whole_weights(self, layer: int, entry: int) -> Tensor:
        """The flat vector of a layer's whole weights, valid while its passes use them."""
        if self.shape.rings_weights(layer):
            return self._entry(self.rings.weights, layer, entry)
        return self.layers[layer].weights.resident

    def own_weights(self, layer: int, entry: int) -> Tensor:
        """This rank's part of the flat vector of a layer's weights."""
        whole, shape = self.whole_weights(layer, entry), self.shape
        return whole[self.layers[layer].layout.own] if shape.zero >= 3 else whole

    def whole_gradients(self, layer: int, entry: int) -> Tensor:
        """The vector in which a backward pass accumulates a layer's gradients."""
        if self.shape.rings_gradients(layer):
            return self._entry(self.rings.gradients, layer, entry)
        return self.layers[layer].gradients.resident

    def sums(self, layer: int, entry: int) -> Tensor:
        """The gradients of a layer summed over micro-batches; from ZeRO-2 on, this rank's part."""
        if not self.shape.offload_of(layer).gradients:
            return self.layers[layer].gradients.resident
        if self.shape.zero < 2:
            return self.whole_gradients(layer, entry)
        state = self.layers[layer]
        return self.rings.sums[entry][state.begin.part :][: state.layout.part_numel]

    def stepped_gradients(self, layer: int, entry: int) -> Tensor:
        """The gradients of the weights that this rank's optimizer steps."""
        sums = self.sums(layer, entry)
        return sums[self.layers[layer].layout.own] if self.shape.zero == 1 else sums

    def set_stepped(self, layer: int, entry: int, begin: int, values: Tensor) -> None:
        """Write updated weights back, from element ``begin`` of the weights that this rank
        steps.
        """
        whole, state, shape = self.whole_weights(layer, entry), self.layers[layer], self.shape
        stepped = whole[state.layout.own] if shape.zero >= 1 else whole
        span = slice(begin, begin + values.numel())
        stepped[span].copy_(values, non_blocking=True)
        if shape.rings_weights(layer) and not shape.offload_of(layer).weights:
            state.weights.resident[span].copy_(stepped[span])

    def staged(self, layer: int, entry: int) -> list[Tensor]:
        """The buffers on the device into which a layer's offloaded master weights and moments are
        copied.
        """
        state = self.layers[layer]
        return self.staging.of(entry, state.begin.tail, state.optimizer[0].tail.numel())

    def _entry(self, ring: tuple[Tensor, ...], layer: int, entry: int) -> Tensor:
        state = self.layers[layer]
        return ring[entry][state.begin.whole :][: state.layout.numel]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageState:
    """The states of all layers of a rank, by section (the parameters that one group of ranks
    shards), and the buffers that sections share. ``frozen`` is the section of frozen weights, which
    have neither gradients nor optimizer states.
    """

    shape: StageShape
    types: Types
    sections: tuple[Section, ...]
    frozen: Section | None
    rings: Rings
    staging: Staging
    device: Arena
    host: Arena

    @classmethod
    def build(
        cls,
        shape: StageShape,
        layouts: Sequence[Mapping[int, Layout]],
        types: Types,
        device: torch.device,
        frozen: Mapping[int, Layout] | None = None,
    ) -> Self:
        """Allocate the state: count its bytes in a rehearsal, allocate them at once, and divide the
        allocation.

        ``layouts`` has for each section the layouts of its layers, ``frozen`` the layouts of frozen
        weights.
        """
        frozen = frozen or {}
        if types.moments == CODES:
            # Make the tables of 8-bit codes now: in a step, the host would wait for the tables'
            # copy.
            moment_codes(device)
        rehearsed = Rehearsal(), Rehearsal()
        _parts(shape, layouts, frozen, types, *rehearsed)
        on_device = Arena(rehearsed[0].size_bytes, device)
        host_device = torch.device("cpu")
        on_host = Arena(rehearsed[1].size_bytes, host_device, pins_for=driver_of(device))
        parts, rings = _parts(shape, layouts, frozen, types, on_device, on_host)
        staging = _staging(shape, parts[: len(layouts)], types.stepped, device)
        sections = [
            Section(shape=shape, layers=layers, rings=rings, staging=staging) for layers in parts
        ]
        return cls(
            shape=shape,
            types=types,
            sections=tuple(sections[: len(layouts)]),
            frozen=sections[-1] if frozen else None,
            rings=rings,
            staging=staging,
            device=on_device,
            host=on_host,
        )

    @property
    def layers(self) -> Mapping[int, LayerState]:
        """The section that every layer has: all trained parameters except experts."""
        return self.sections[0].layers

    def sections_of(self, layer: int) -> list[Section]:
        """The sections of a layer's trained parameters."""
        return [section for section in self.sections if layer in section.layers]

    def all_sections(self) -> list[Section]:
        """All sections, with the section of frozen weights last."""
        return [*self.sections, *([] if self.frozen is None else [self.frozen])]

    def held_bytes(self) -> dict[str, int]:
        """The bytes on the device by class of memory, with the names of predictions: weights,
        gradients, optimizer states.
        """
        layers = [layer for section in self.all_sections() for layer in section.layers.values()]
        rings = self.rings
        slots = [*rings.weights, *rings.gradients, *rings.sums]
        return {
            "weights": sum(layer.weights.resident.nbytes for layer in layers),
            "gradients": sum(layer.gradients.resident.nbytes for layer in layers),
            "optimizer": sum(m.resident.nbytes for layer in layers for m in layer.optimizer),
            "buffers": sum(slot.nbytes for slot in slots) + self.staging.size_bytes,
        }


Layers = dict[int, LayerState]


def _parts(
    shape: StageShape,
    layouts: Sequence[Mapping[int, Layout]],
    frozen: Mapping[int, Layout],
    types: Types,
    device: Room,
    host: Room,
) -> tuple[list[Layers], Rings]:
    """All vectors of a rank's state: each section's layers, frozen weights, then ring buffers."""
    sections: list[Layers] = []
    ends: dict[int, Begin] = {}
    for section in layouts:
        layers: Layers = {}
        for layer, layout in section.items():
            begin = ends.get(layer, Begin())
            state = layers[layer] = _layer(shape, layer, layout, begin, types, device, host)
            ends[layer] = begin.after(layout, state.optimizer[0].tail.numel())
        sections.append(layers)
    whole = {layer: end.whole for layer, end in ends.items()}
    if frozen:
        rooms = types, device, host
        sections.append(
            {
                layer: _frozen_layer(shape, layer, layout, ends.get(layer, Begin()), *rooms)
                for layer, layout in frozen.items()
            }
        )
        whole = {layer: whole.get(layer, 0) + own.numel for layer, own in frozen.items()}
    ringed = [size for layer, size in whole.items() if shape.rings_weights(layer)]
    reduced = [end.whole for layer, end in ends.items() if shape.rings_gradients(layer)]
    summed = [
        end.part
        for layer, end in ends.items()
        if shape.zero >= 2 and shape.offload_of(layer).gradients > 0
    ]
    return sections, Rings(
        weights=_ring(ringed, types.weights, device),
        gradients=_ring(reduced, types.gradients, device),
        sums=_ring(summed, types.gradients, device),
    )


def _staging(
    shape: StageShape,
    sections: Sequence[Layers],
    kinds: Sequence[Kind],
    device: torch.device,
) -> Staging:
    """The buffers on the device for stepping offloaded optimizer states, as large as the largest
    layer needs.
    """
    sizes: dict[int, int] = {}
    for layers in sections:
        for layer, state in layers.items():
            if shape.stages_tail(layer):
                sizes[layer] = sizes.get(layer, 0) + state.optimizer[0].tail.numel()
    return Staging(
        entries=[shape.entry_at_step(layer) for layer in sizes],
        kinds=kinds,
        numel=max(sizes.values(), default=0),
        device=device,
    )


def _layer(
    shape: StageShape,
    layer: int,
    layout: Layout,
    begin: Begin,
    types: Types,
    device: Room,
    host: Room,
) -> LayerState:
    whole, part, offload = layout.numel, layout.part_numel, shape.offload_of(layer)
    weights = part if shape.zero >= 3 else whole
    gradients = part if shape.zero >= 2 else whole
    stepped = part if shape.zero >= 1 else whole
    optimizer = tuple(
        Split.of(stepped, offload.optimizer, kind, device, host, types.alignment)
        for kind in types.stepped
    )
    exchanged = optimizer[0].tail.numel() if shape.steps_tail(layer) else 0
    exchange = host.take(exchanged, types.gradients)
    return LayerState(
        layout=layout,
        begin=begin,
        weights=Split.of(weights, offload.weights, Kind(types.weights), device, host),
        gradients=Split.of(gradients, offload.gradients, Kind(types.gradients), device, host),
        optimizer=optimizer,
        step=device.take(1, torch.float32),
        host_step=torch.zeros(1),
        exchange=exchange,
        exchanged_weights=exchange.view(types.weights)[:exchanged],
    )


def _frozen_layer(
    shape: StageShape,
    layer: int,
    layout: Layout,
    begin: Begin,
    types: Types,
    device: Room,
    host: Room,
) -> LayerState:
    """The state of a layer's frozen weights."""
    numel = layout.part_numel if shape.zero >= 3 else layout.numel
    ratio, nothing = shape.offload_of(layer).weights, device.take(0, types.gradients)
    return LayerState(
        layout=layout,
        begin=begin,
        weights=Split.of(numel, ratio, Kind(types.weights), device, host),
        gradients=Split(resident=nothing, tail=nothing),
        optimizer=(),
        step=nothing,
        host_step=nothing,
        exchange=nothing,
        exchanged_weights=nothing,
    )


def _ring(sizes: list[int], dtype: torch.dtype, device: Room) -> tuple[Tensor, ...]:
    size = max(sizes, default=0)
    return tuple(device.take(size, dtype) for _ in range(RING))


# Points a layer's parameters to their weights and gradients, which are views of flat vectors.
#
# Weights and gradients that are gathered or fetched are whole only in a ring buffer of two entries,
# which layers use in turn; the parameters follow them.
#
# Gradients of matrices are accumulated while a layer runs backward. Gradients of vectors are many
# and small, and accumulating each would take a kernel. So autograd leaves them in the parameters'
# ``grad``, and one kernel accumulates them all. Small matrices, such as a router's, are treated as
# vectors.


# The embedding's name for its token table, which a tied head uses too.
OWN_TABLE = "tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _FlatVector:
    """The flat vectors of a layer's sections, and where each parameter lies in them."""

    wholes: tuple[Tensor, ...]
    views: tuple[Tensor, ...]
    vectors: list[Tensor]

    @classmethod
    def of(
        cls, layouts: Sequence[Layout], wholes: Sequence[Tensor], is_vector: Sequence[bool]
    ) -> Self:
        """Find where a layer's parameters lie in ``wholes``, a flat vector for each section."""
        pairs = zip(layouts, wholes, strict=True)
        views = tuple(view for layout, whole in pairs for view in layout.views(whole).values())
        return cls(wholes=tuple(wholes), views=views, vectors=list(compress(views, is_vector)))


@dataclass(slots=True, kw_only=True, eq=False)
class _Layer:
    """A layer's parameters, where they lie in each entry of the ring buffer, and where they lie
    now.
    """

    parameters: tuple[nn.Parameter, ...]
    is_vector: tuple[bool, ...]
    vectors: list[nn.Parameter]
    weights: list[_FlatVector]
    gradients: list[_FlatVector]
    weights_now: _FlatVector
    gradients_now: _FlatVector | None = None
    widened: list[Tensor] = field(default_factory=list)


class ParameterPlaces:
    """Points the parameters of a stage's layers to where their weights and gradients lie at
    present.
    """

    def __init__(self, state: StageState, modules: dict[int, nn.Module]) -> None:
        self._layers = {layer: _adopt(state, layer, module) for layer, module in modules.items()}
        shape = state.shape
        if shape.shares_table:
            head = modules[shape.last_layer]
            borrower = "projection" if getattr(head, "table", None) is None else "table"
            table = modules[shape.first_layer].get_parameter(OWN_TABLE)
            head.get_submodule(borrower).weight = table
            # Gradients of the shared table start with the head's backward pass.
            self.take_gradients(shape.first_layer, 0)

    def take_weights(self, layer: int, entry: int) -> Tensor:
        """Point a layer's parameters to its whole weights in an entry of the ring buffer; returns
        the flat vector of the layer's first section.
        """
        of_layer = self._layers[layer]
        flat = of_layer.weights[entry]
        if flat is not of_layer.weights_now:
            for parameter, view in zip(of_layer.parameters, flat.views, strict=True):
                parameter.data = view
            of_layer.weights_now = flat
        return flat.wholes[0]

    def take_gradients(self, layer: int, entry: int) -> tuple[Tensor, ...]:
        """Make a layer's gradients views of their sums in an entry of the ring buffer; returns the
        flat vectors.
        """
        of_layer = self._layers[layer]
        flat = of_layer.gradients[entry]
        if flat is not of_layer.gradients_now:
            # Views of frozen weights come last in the list, and have no gradients.
            for parameter, view, is_vector in zip(
                of_layer.parameters, flat.views, of_layer.is_vector, strict=False
            ):
                parameter.grad = None if is_vector else view
            of_layer.gradients_now = flat
        return flat.wholes

    def take_vectors(self, layer: int) -> list[Tensor]:
        """Remove and return the gradients of a layer's vector parameters, which autograd has left
        in ``grad``.
        """
        of_layer = self._layers[layer]
        gradients = [vector.grad for vector in of_layer.vectors if vector.grad is not None]
        for vector in of_layer.vectors:
            vector.grad = None
        return gradients

    def vectors(self, layer: int) -> list[nn.Parameter]:
        """A layer's vector parameters (biases and norm gains), in the order of their gradients."""
        return self._layers[layer].vectors

    def add_vectors(
        self, layer: int, gradients: list[Tensor], of: Sequence[bool] | None = None
    ) -> None:
        """Add gradients of a layer's vector parameters to their sums. ``of`` marks the parameters
        that the gradients belong to; None means all.
        """
        of_layer = self._layers[layer]
        if gradients:
            assert of_layer.gradients_now is not None
            sums, widened = of_layer.gradients_now.vectors, of_layer.widened
            if of is not None:
                sums, widened = list(compress(sums, of)), list(compress(widened, of))
            if widened:
                # One kernel adds only tensors of one type, so gradients are converted first.
                torch._foreach_copy_(widened, gradients)
                gradients = widened
            torch._foreach_add_(sums, gradients)


def _adopt(state: StageState, layer: int, module: nn.Module) -> _Layer:
    """Give memory to the parameters of a module that was built without memory."""
    shape = state.shape
    sections = [section for section in state.all_sections() if layer in section.layers]
    layouts = [section.layers[layer].layout for section in sections]
    entries = [entry for layout in layouts for entry in layout.entries]
    is_trained = [module.get_parameter(entry.name).requires_grad for entry in entries]
    is_vector = [
        trained and _is_vector(module, entry)
        for entry, trained in zip(entries, is_trained, strict=True)
    ]

    def places(of: Sequence[Section], whole: Callable[[Section, int], Tensor]) -> list[_FlatVector]:
        return [
            _FlatVector.of(layouts[: len(of)], [whole(section, entry) for section in of], is_vector)
            for entry in range(RING)
        ]

    weights = places(sections, lambda section, entry: section.whole_weights(layer, entry))
    trained = state.sections_of(layer)
    gradients = places(trained, lambda section, entry: section.whole_gradients(layer, entry))
    parameters = []
    for entry, view, is_own in zip(entries, weights[0].views, is_trained, strict=True):
        path, _, leaf = entry.name.rpartition(".")
        parameters.append(nn.Parameter(view.data, requires_grad=is_own))
        # Gradient sums may be of a wider type than the weights.
        if is_own:
            parameters[-1].grad_dtype = None
        setattr(module.get_submodule(path), leaf, parameters[-1])
    vectors, types = list(compress(parameters, is_vector)), state.types
    is_wider = types.gradients != types.weights
    # Outside ring buffers, weights and gradients lie in the same place for every entry.
    return _Layer(
        parameters=tuple(parameters),
        is_vector=tuple(is_vector),
        vectors=vectors,
        widened=[torch.empty_like(one, dtype=types.gradients) for one in vectors if is_wider],
        weights=weights if shape.rings_weights(layer) else weights[:1] * RING,
        gradients=gradients if shape.rings_gradients(layer) else gradients[:1] * RING,
        weights_now=weights[0],
    )


def _is_vector(module: nn.Module, entry: Entry) -> bool:
    """Whether a parameter is treated as a vector, whose gradient autograd leaves in ``grad``."""
    path, _, leaf = entry.name.rpartition(".")
    is_small = isinstance(module.get_submodule(path), SmallMatrix)
    return len(entry.shape) == 1 or leaf == "bias" or is_small
