"""Forward and backward of single layers, each an autograd graph of its own: F, B and A.

No graph reaches from one layer to the next: a layer's input enters through a boundary that hands
its gradient over, and nothing refers to the input but what the layer itself has saved.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from runtime.devices.table import driver_of
from runtime.engine.host_pool import HostPool
from runtime.engine.saved import Saved, storage_of
from runtime.engine.state import StageState
from runtime.engine.streams import Streams, Work

# The table that embedding and head may share, as either calls it.
OWN_TABLE, BORROWED_TABLE = "tokens.weight", "projection.weight"


class _Boundary(torch.autograd.Function):
    """Hands the gradient of a layer's input over, without a leaf that would hold the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, handed: list[Tensor]) -> Tensor:
        ctx.handed = handed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.handed.append(gradient)
        return None, None, None


@dataclass(slots=True, kw_only=True, eq=False)
class _Kept:
    """A layer of a micro-batch between its passes; ``again`` gives the input to compute it from."""

    saved: Saved
    targets: Tensor | None
    edge: GradientEdge | None = None
    handed: list[Tensor] = field(default_factory=list)
    again: Callable[[], Tensor] | None = None
    away: list[tuple[int, Tensor]] = field(default_factory=list)


class Passes:
    """Runs a stage's layers; keeps what they save."""

    def __init__(
        self,
        state: StageState,
        modules: dict[int, nn.Module],
        checkpointed: range,
        streams: Streams,
        device: torch.device,
    ) -> None:
        self.state = state
        self.modules = modules
        self.checkpointed = checkpointed
        self.streams = streams
        self.device = device
        self.kept: dict[tuple[int, int], _Kept] = {}
        self.leaving: list[list[Tensor]] = [[], []]
        self.host = HostPool(pins_for=driver_of(device))
        self.carried_bytes = 0.0
        self.peak_bytes = 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._constants = {
            layer: frozenset(storage_of(buffer) for buffer in module.buffers())
            for layer, module in modules.items()
        }
        for layer, module in modules.items():
            _adopt(module, state.layers[layer].layout.views(state.whole_weights(layer, 0)))
        shape = state.shape
        if shape.shares_table:
            table = modules[shape.first_layer].get_parameter(OWN_TABLE)
            modules[shape.last_layer].get_submodule("projection").weight = table

    @property
    def held_bytes(self) -> int:
        """What is kept on the device for backward passes to come."""
        return sum(one.saved.size_bytes for one in self.kept.values())

    def forward(
        self, layer: int, micro_batch: int, entry: int, x: Tensor, targets: Tensor | None
    ) -> Tensor:
        """A layer's output, or the head's loss."""
        # What left the ring's entry before has been copied: compute has waited for that.
        self.leaving[entry].clear()
        weights = self._home(layer, entry)
        saved = Saved(weights=weights, constants=self._constants[layer])
        kept = self.kept[layer, micro_batch] = _Kept(saved=saved, targets=targets)
        if layer in self.checkpointed:
            kept.again = saved.keep(x)
            with torch.no_grad():
                y = self._run(layer, x, targets)
        else:
            with saved.hooks():
                y = self._run(layer, self._entered(x, kept), targets)
            kept.edge = get_gradient_edge(y)
        staged = self.state.staging.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + staged)
        return y.detach()

    def backward(self, layer: int, micro_batch: int, entry: int, gradient: Tensor) -> Tensor | None:
        """Add the gradients of a layer's weights up; the gradient of its input, if it has one."""
        kept = self.kept.pop((layer, micro_batch))
        kept.saved.weights = self._home(layer, entry)
        self._collect(layer, micro_batch, entry)
        if kept.again is not None:
            y = self._run(layer, self._entered(kept.again(), kept), kept.targets)
            kept.edge = get_gradient_edge(y)
            del y
        assert kept.edge is not None
        torch.autograd.backward([kept.edge], [gradient])
        for parameter in self.modules[layer].parameters():
            parameter.grad = None
        return kept.handed[0] if kept.handed else None

    def leave(self, layer: int, micro_batch: int, entry: int) -> Work:
        """Take storages away to the host, as many as the ratio says over layers so far."""
        kept, shape = self.kept[layer, micro_batch], self.state.shape
        if layer == shape.blocks.start:
            self.carried_bytes = 0.0
        self.carried_bytes += shape.offload.activations * kept.saved.size_bytes
        moves = []
        for number in kept.saved.largest(self.carried_bytes):
            storage = kept.saved.storages[number]
            assert storage is not None
            kept.saved.storages[number] = None
            place = (layer, shape.held(micro_batch), number)
            copy = self.host.take(place, storage.numel())
            kept.away.append((number, copy))
            moves.append((storage, copy))
            self.carried_bytes -= storage.numel()
        self.leaving[entry] = [storage for storage, _ in moves]

        def work() -> None:
            for storage, copy in moves:
                copy.copy_(storage, non_blocking=True)
                self.streams.spoil(storage)

        return work

    def let_go(self) -> None:
        """Drop what has left: compute has waited for that."""
        for leaving in self.leaving:
            leaving.clear()

    def come_back(self, layer: int, micro_batch: int) -> Work:
        """Bring a layer's storages back to the device."""
        kept = self.kept[layer, micro_batch]
        moves = []
        for number, copy in kept.away:
            storage = torch.empty_like(copy, device=self.device)
            self.streams.spoil(storage)
            kept.saved.storages[number] = storage
            moves.append((storage, copy))
        kept.away.clear()

        def work() -> None:
            for storage, copy in moves:
                storage.copy_(copy, non_blocking=True)
                self.streams.spoil(copy)

        return work

    def _run(self, layer: int, x: Tensor, targets: Tensor | None) -> Tensor:
        module = self.modules[layer]
        y: Tensor = module(x) if targets is None else module(x, targets)
        return y

    def _entered(self, x: Tensor, kept: _Kept) -> Tensor:
        if not x.is_floating_point():
            return x
        entered: Tensor = _Boundary.apply(x, self._anchor, kept.handed)
        return entered

    def _home(self, layer: int, entry: int) -> Tensor:
        """Let a layer's parameters be where its weights are whole."""
        weights = self.state.whole_weights(layer, entry)
        if self.state.shape.rings_weights(layer):
            views = self.state.layers[layer].layout.views(weights)
            for name, parameter in self.modules[layer].named_parameters():
                parameter.data = views[name]
        return weights

    def _collect(self, layer: int, micro_batch: int, entry: int) -> None:
        """Let a layer's gradients add up where they belong."""
        shape, gradients = self.state.shape, self.state.whole_gradients(layer, entry)
        adds_to_fetched = shape.zero < 2 and shape.offload_of(layer).gradients > 0
        has_begun = shape.shares_table and layer == shape.first_layer
        if shape.zero >= 2 or (micro_batch == 0 and not adds_to_fetched and not has_begun):
            gradients.zero_()
        views = self.state.layers[layer].layout.views(gradients)
        if shape.borrows_table(layer):
            views[BORROWED_TABLE] = self._table_gradients(starts=micro_batch == 0)
        for name, parameter in self.modules[layer].named_parameters():
            parameter.grad = views[name]

    def _table_gradients(self, *, starts: bool) -> Tensor:
        """The gradients of the table that the head shares; the head's come first."""
        first = self.state.shape.first_layer
        gradients = self.state.whole_gradients(first, 0)
        if starts:
            gradients.zero_()
        return self.state.layers[first].layout.views(gradients)[OWN_TABLE]


def _adopt(module: nn.Module, views: dict[str, Tensor]) -> None:
    """Put real parameters in place of a module's shapes."""
    for name, view in views.items():
        path, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(path), leaf, nn.Parameter(view.data))
