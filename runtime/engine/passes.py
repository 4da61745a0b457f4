"""Forward and backward of single layers, each an autograd graph of its own: F, B and A.

No graph reaches from one layer to the next: a layer's input enters through a boundary that hands
its gradient over, and nothing refers to the input but what the layer itself has saved.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from runtime.devices.table import driver_of
from runtime.engine.host_pool import HostPool
from runtime.engine.places import Places
from runtime.engine.saved import Saved, storage_of
from runtime.engine.state import StageState
from runtime.engine.streams import Streams, Work


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
        # What is kept on the device for backward passes to come, now and at its most.
        self.held_bytes = 0
        self.peak_bytes = 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._constants = {
            layer: frozenset(storage_of(buffer) for buffer in module.buffers())
            for layer, module in modules.items()
        }
        self._places = Places(state, modules)
        # Bytes that a layer keeps of a micro-batch, as counted once, where nothing of it moves.
        self._sizes: dict[int, int] = {}

    def forward(
        self, layer: int, micro_batch: int, entry: int, x: Tensor, targets: Tensor | None
    ) -> Tensor:
        """A layer's output, or the head's loss."""
        # What left the ring's entry before has been copied: compute has waited for that.
        self.leaving[entry].clear()
        weights = self._places.take_weights(layer, entry)
        saved = Saved(weights=weights, constants=self._constants[layer])
        kept = self.kept[layer, micro_batch] = _Kept(saved=saved, targets=targets)
        if layer in self.checkpointed:
            kept.again = saved.keep(x)
            with torch.no_grad():
                y = self._run(layer, x, targets)
        else:
            with self._taken_apart(layer, saved):
                y = self._run(layer, self._entered(x, kept), targets)
            kept.edge = get_gradient_edge(y)
        self.held_bytes += saved.size_bytes
        staged = self.state.staging.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + staged)
        return y.detach()

    def backward(self, layer: int, micro_batch: int, entry: int, gradient: Tensor) -> Tensor | None:
        """Add the gradients of a layer's weights up; the gradient of its input, if it has one."""
        kept = self.kept.pop((layer, micro_batch))
        self.held_bytes -= kept.saved.size_bytes
        kept.saved.move_weights(self._places.take_weights(layer, entry))
        self._collect(layer, micro_batch, entry)
        if kept.again is not None:
            y = self._run(layer, self._entered(kept.again(), kept), kept.targets)
            kept.edge = get_gradient_edge(y)
            del y
        assert kept.edge is not None
        torch.autograd.backward([kept.edge], [gradient])
        return kept.handed[0] if kept.handed else None

    def leave(self, layer: int, micro_batch: int, entry: int) -> Work:
        """Take storages away to the host, as many as the ratio says over layers so far."""
        kept, shape = self.kept[layer, micro_batch], self.state.shape
        if layer == shape.blocks.start:
            self.carried_bytes = 0.0
        self.carried_bytes += shape.offload.activations * kept.saved.size_bytes
        moves = []
        for number in kept.saved.largest(self.carried_bytes):
            storage = kept.saved.leave(number)
            copy = self.host.take((layer, shape.held(micro_batch), number), storage.numel())
            kept.away.append((number, copy))
            moves.append((storage, copy))
            self.carried_bytes -= storage.numel()
            self.held_bytes -= storage.numel()
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
            kept.saved.come_back(number, storage)
            self.held_bytes += storage.numel()
            moves.append((storage, copy))
        kept.away.clear()

        def work() -> None:
            for storage, copy in moves:
                storage.copy_(copy, non_blocking=True)
                self.streams.spoil(copy)

        return work

    @contextmanager
    def _taken_apart(self, layer: int, saved: Saved) -> Iterator[None]:
        """Where a layer runs forward whose weights or saved tensors may move until its backward.

        Where neither does, autograd keeps them by itself, once they have been counted.
        """
        if layer in self._sizes:
            saved.size_bytes = self._sizes[layer]
            yield
            return
        with saved.hooks():
            yield
        shape = self.state.shape
        if not shape.rings_weights(layer) and shape.offload_of(layer).activations == 0:
            self._sizes[layer] = saved.size_bytes

    def _run(self, layer: int, x: Tensor, targets: Tensor | None) -> Tensor:
        module = self.modules[layer]
        y: Tensor = module(x) if targets is None else module(x, targets)
        return y

    def _entered(self, x: Tensor, kept: _Kept) -> Tensor:
        if not x.is_floating_point():
            return x
        entered: Tensor = _Boundary.apply(x, self._anchor, kept.handed)
        return entered

    def _collect(self, layer: int, micro_batch: int, entry: int) -> None:
        """Let a layer's gradients add up where they belong."""
        shape, gradients = self.state.shape, self._places.take_gradients(layer, entry)
        adds_to_fetched = shape.zero < 2 and shape.offload_of(layer).gradients > 0
        has_begun = shape.shares_table and layer == shape.first_layer
        if shape.zero >= 2 or (micro_batch == 0 and not adds_to_fetched and not has_begun):
            gradients.zero_()
        if shape.borrows_table(layer) and micro_batch == 0:
            # The head's come first.
            self._places.take_gradients(shape.first_layer, 0).zero_()
