"""Where a layer's parameters find their weights and gradients: views of flat vectors, made once.

Weights and gradients that come and go are whole in an entry of a ring, now in the one and now in
the other; parameters follow them there.
"""

from dataclasses import dataclass
from typing import Self

from torch import Tensor, nn

from runtime.engine.layout import Layout
from runtime.engine.shape import RING
from runtime.engine.state import StageState

# The table that the head may borrow, as the embedding calls it.
OWN_TABLE = "tokens.weight"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Place:
    """A flat vector, and a layer's parameters in it."""

    whole: Tensor
    views: tuple[Tensor, ...]

    @classmethod
    def of(cls, layout: Layout, whole: Tensor) -> Self:
        """Find the parameters."""
        return cls(whole=whole, views=tuple(layout.views(whole).values()))


@dataclass(slots=True, kw_only=True, eq=False)
class _Layer:
    """A layer's own parameters; where they may be, by entry of the rings; where they are."""

    parameters: tuple[nn.Parameter, ...]
    weights: list[_Place]
    gradients: list[_Place]
    weights_now: _Place
    gradients_now: _Place | None = None


class Places:
    """The places of a stage's parameters."""

    def __init__(self, state: StageState, modules: dict[int, nn.Module]) -> None:
        self._layers = {layer: _adopt(state, layer, module) for layer, module in modules.items()}
        shape = state.shape
        if shape.shares_table:
            modules[shape.last_layer].get_submodule("projection").weight = modules[
                shape.first_layer
            ].get_parameter(OWN_TABLE)
            # The head adds to the table's gradients first.
            self.take_gradients(shape.first_layer, 0)

    def take_weights(self, layer: int, entry: int) -> Tensor:
        """Let a layer's parameters be where its weights are whole: in the vector returned."""
        one = self._layers[layer]
        place = one.weights[entry]
        if place is not one.weights_now:
            for parameter, view in zip(one.parameters, place.views, strict=True):
                parameter.data = view
            one.weights_now = place
        return place.whole

    def take_gradients(self, layer: int, entry: int) -> Tensor:
        """Let a layer's gradients add up where they belong: in the vector returned."""
        one = self._layers[layer]
        place = one.gradients[entry]
        if place is not one.gradients_now:
            for parameter, view in zip(one.parameters, place.views, strict=True):
                parameter.grad = view
            one.gradients_now = place
        return place.whole


def _adopt(state: StageState, layer: int, module: nn.Module) -> _Layer:
    """Put real parameters in place of a module's shapes."""
    layout, shape = state.layers[layer].layout, state.shape
    weights = [_Place.of(layout, state.whole_weights(layer, entry)) for entry in range(RING)]
    gradients = [_Place.of(layout, state.whole_gradients(layer, entry)) for entry in range(RING)]
    parameters = []
    for entry, view in zip(layout.entries, weights[0].views, strict=True):
        path, _, leaf = entry.name.rpartition(".")
        parameters.append(nn.Parameter(view.data))
        setattr(module.get_submodule(path), leaf, parameters[-1])
    # What stays is at one place, whatever the entry.
    return _Layer(
        parameters=tuple(parameters),
        weights=weights if shape.rings_weights(layer) else weights[:1] * RING,
        gradients=gradients if shape.rings_gradients(layer) else gradients[:1] * RING,
        weights_now=weights[0],
    )
