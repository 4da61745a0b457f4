"""Points a layer's parameters to their weights and gradients, which are views of flat vectors.

Weights and gradients that are gathered or fetched are whole only in an entry of a ring of two. They
change from one entry to the other, and the parameters follow them.

Gradients of matrices are added to their sums while a layer runs backward. Gradients of vectors are
many and small, and adding each would take a kernel. So autograd leaves them with their parameters,
and one kernel adds them all.
"""

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from mistlab.schedule.stage_shape import RING
from runtime.engine.storage.layout import Layout
from runtime.engine.storage.state import StageState

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

    def add_vectors(self, layer: int, gradients: list[Tensor]) -> None:
        """Add gradients of a layer's vectors to their sums."""
        one = self._layers[layer]
        if one.vectors:
            assert one.gradients_now is not None
            torch._foreach_add_(one.gradients_now.vectors, gradients)


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
