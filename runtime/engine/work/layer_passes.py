"""Runs single layers forward and backward (tasks F, B and W), and offloads their activations (task
A).

Each layer has its own autograd graph, which ends at the layer's input and output. If no tensor that
a layer saves moves in memory before the layer's backward pass, autograd keeps the saved tensors.
Otherwise this module keeps them: the input enters the graph through a function that hands its
gradient over, so that only the saved tensors refer to the input.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from mistlab.core.values import refuse
from mistlab.graph.treatments import PLAIN, TREATMENTS, treatments_of
from mistlab.plan.plan import StagePlan
from mistlab.stages.stage_program import Op
from mistlab.stages.stage_shape import EMBEDDING
from runtime.devices.cuda import driver_of
from runtime.engine.storage.arena import HostBuffer, HostPool
from runtime.engine.storage.saved import Saved, SavedLayout, storage_of
from runtime.engine.storage.state import ParameterPlaces, StageState
from runtime.engine.streams.lanes import LaneWork, StreamedRanks, Streams
from runtime.engine.work.shared_vectors import SharedVectors
from runtime.models.experts import Experts
from runtime.models.lean_operators import keep_lost_channels
from runtime.models.ranks import bare


class _Boundary(torch.autograd.Function):
    """Autograd function at a layer's input that collects the input's gradient; unlike a leaf of the
    graph, it does not keep the input in memory.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, _anchor: Tensor, handed: list[Tensor]) -> Tensor:
        ctx.handed = handed
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.handed.append(gradient)
        return None, None, None


_enter = bare(_Boundary)
_ENGINE: Any = torch.autograd.Variable._execution_engine  # type: ignore[attr-defined]


@dataclass(slots=True, kw_only=True, eq=False)
class Kept:
    """What one layer keeps of one micro-batch between its forward and backward pass; for a
    recomputed layer, ``again`` returns its input.

    The saved tensors are in ``saved``; if autograd keeps them, ``counted_bytes`` is their size. The
    gradient of the input arrives in ``handed``, or as the gradient of ``entered``.
    """

    targets: Tensor | None
    saved: Saved | None = None
    counted_bytes: int = 0
    edge: GradientEdge | None = None
    entered: Tensor | None = None
    handed: list[Tensor] = field(default_factory=list)
    again: Callable[[], Tensor] | None = None
    away: tuple[list[int], list[HostBuffer]] | None = None

    @property
    def size_bytes(self) -> int:
        """The bytes of the saved tensors that are on the device."""
        return self.counted_bytes if self.saved is None else self.saved.size_bytes


@dataclass(slots=True, kw_only=True, eq=False)
class LeftForWeights:
    """The work that a backward pass for inputs leaves to the pass for weights: GEMMs that
    accumulate gradients of matrices, and gradients of vectors.
    """

    add: Sequence[Callable[[], object]]
    vectors: list[Tensor]
    size_bytes: int


class Passes:
    """Runs the forward and backward passes of a stage's layers, and keeps the tensors that they
    save.
    """

    def __init__(
        self,
        state: StageState,
        modules: dict[int, nn.Module],
        treatments: Mapping[int, str],
        ranks: StreamedRanks,
        streams: Streams,
        device: torch.device,
        *,
        alike: frozenset[int] = frozenset(),
    ) -> None:
        """Prepare the passes. Layers in ``alike`` save tensors of the same shapes for each
        micro-batch, unless they have experts.
        """
        self.state = state
        self.modules = modules
        self.treatments = treatments
        self.ranks = ranks
        self.streams = streams
        self.device = device
        self.kept: dict[tuple[int, int], Kept] = {}
        self.left: dict[tuple[int, int], LeftForWeights] = {}
        self.leaving: list[list[Tensor]] = [[], []]
        self.host = HostPool(pins_for=driver_of(device))
        self.carried_bytes = 0.0
        # The bytes on the device that are kept for later backward passes: now, and at their peak.
        self.held_bytes = 0
        self.peak_bytes = 0
        self._anchor = torch.zeros((), device=device, requires_grad=True)
        self._constants = {
            layer: frozenset(storage_of(buffer) for buffer in module.buffers())
            for layer, module in modules.items()
        }
        self._places = ParameterPlaces(state, modules)
        self.shared = SharedVectors(state, modules, self._places, ranks, device)
        # The bytes that a layer keeps of a micro-batch, counted once, for layers that offload none
        # of them.
        self._sizes: dict[int, int] = {}
        # Layers whose saved bytes vary with the routing of tokens to experts, or with the lengths
        # of documents.
        self._varying = {
            layer
            for layer, module in modules.items()
            if any(isinstance(one, Experts) for one in module.modules())
        }
        # Where saved tensors lie, for layers that save tensors of the same shapes for each
        # micro-batch.
        self._layouts: dict[int, SavedLayout] = {}
        self._alike = alike - self._varying
        self._first_of_chunks = {chunk.blocks.start for chunk in state.shape.chunks}
        offload_of = state.shape.offload_of
        self._leaving_layers = {one for one in modules if offload_of(one).activations > 0}
        self._lean_layers = {
            one for one in modules if LAYER_RUNS[treatments.get(one, PLAIN)].is_lean
        }
        # Lean layers already searched for norms with small gains, whose normalised values must be
        # saved because the output does not determine them.
        self._looked_at: set[int] = set()
        # The shape of each layer's input in its last forward pass.
        self._shapes: dict[int, torch.Size] = {}
        # The layers before the first trained parameter, which have no backward pass.
        self._without_gradients = {
            layer
            for layer, module in modules.items()
            if layer == EMBEDDING and not any(one.requires_grad for one in module.parameters())
        }

    def forward(
        self, layer: int, micro_batch: int, entry: int, x: Tensor, targets: Tensor | None
    ) -> Tensor:
        """Run a layer forward; returns its output, or the loss of the head."""
        # The compute lane has waited for the copies to the host of the storages that were offloaded
        # from this entry, so these storages can be freed.
        self.leaving[entry].clear()
        if self._shapes.setdefault(layer, x.shape) != x.shape:
            self._let_vary(layer)
        kept = self.kept[layer, micro_batch] = Kept(targets=targets)
        if layer in self._without_gradients:
            self._places.take_weights(layer, entry)
            with torch.no_grad():
                y = self._run(layer, x, None)
        elif layer in self._sizes:
            kept.counted_bytes = self._sizes[layer]
            y = self._plainly(layer, x, kept)
        else:
            y = self._taken_apart(layer, entry, x, kept)
        self.held_bytes += kept.size_bytes
        staged = self.state.staging.size_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes + staged)
        return y.detach()

    def _let_vary(self, layer: int) -> None:
        """Let a layer's saved tensors vary in shape between micro-batches, as the lengths of
        documents do.
        """
        self._varying.add(layer)
        self._alike -= {layer}
        self._sizes.pop(layer, None)
        self._layouts.pop(layer, None)

    def backward(self, op: Op, gradient: Tensor) -> Tensor | None:
        """Run a layer backward; returns the gradient of its input, None if it has none. Gradients
        of weights are accumulated, or left to a separate pass.
        """
        layer, entry = op.layer, op.entry
        kept = self.kept.pop((layer, op.micro_batch))
        splits = self.state.shape.passes.splits_backward
        if not splits:
            self.held_bytes -= kept.size_bytes
            self._collect(op)
        if layer in self._without_gradients:
            if splits:
                self._leave(op, (), kept)
            return None
        if kept.saved is not None:
            kept.saved.move_weights(self._places.take_weights(layer, entry))
        if splits and layer == EMBEDDING:
            # All that an embedding's backward pass computes is the gradient of its table.
            add: list[Callable[[], object]] = [lambda: self._run_backward(layer, kept, gradient)]
            self._leave(op, add, kept)
            return None
        if splits and self.state.shape.adds_table_in_b(layer):
            # The token table is the head's only matrix.
            self._begin_table(op)
            self._run_backward(layer, kept, gradient)
            self._leave(op, (), kept)
        elif splits:
            with self.ranks.keeping() as products:
                self._run_backward(layer, kept, gradient)
            self._leave(op, products, kept)
        else:
            self._run_backward(layer, kept, gradient)
            self._add_vectors(op, self._places.take_vectors(layer))
        if kept.entered is not None:
            return kept.entered.grad
        return kept.handed[0] if kept.handed else None

    def of_weights(self, op: Op) -> None:
        """Accumulate the weight gradients that a layer's backward pass left to this pass."""
        layer = op.layer
        left = self.left.pop((layer, op.micro_batch))
        self.held_bytes -= left.size_bytes
        self._collect(op)
        with torch.no_grad():
            for add in left.add:
                add()
            self._add_vectors(op, left.vectors)

    def _add_vectors(self, op: Op, gradients: list[Tensor]) -> None:
        is_last = op.phase == "last_backward"
        self.shared.add(op.layer, gradients, is_first=op.is_of_first, is_last=is_last)

    def _leave(self, op: Op, add: Sequence[Callable[[], object]], kept: Kept) -> None:
        self.left[op.layer, op.micro_batch] = LeftForWeights(
            add=add, vectors=self._places.take_vectors(op.layer), size_bytes=kept.size_bytes
        )

    def _run_backward(self, layer: int, kept: Kept, gradient: Tensor) -> None:
        if kept.again is not None:
            self._plainly(layer, kept.again(), kept)
        assert kept.edge is not None
        # The engine is called directly: ``torch.autograd.backward`` checks its arguments, which
        # takes the host as long as several kernels.
        _ENGINE.run_backward(
            *((kept.edge,), (gradient,), False, False, ()),
            allow_unreachable=True,
            accumulate_grad=True,
        )

    def leave(self, op: Op) -> LaneWork:
        """Copy saved storages of a layer to the host: as many as bring the offloaded share of the
        bytes of all layers so far to the plan's ratio.
        """
        layer, entry = op.layer, op.entry
        kept, shape = self.kept[layer, op.micro_batch], self.state.shape
        saved = kept.saved
        assert saved is not None
        if layer in self._first_of_chunks:
            self.carried_bytes = 0.0
        self.carried_bytes += shape.offload.activations * saved.size_bytes
        numbers, before = saved.largest(self.carried_bytes), saved.size_bytes
        storages = saved.leave(numbers)
        varies = layer in self._varying
        buffers = self.host.take(storages, varies=varies)
        kept.away = (numbers, buffers)
        left_bytes = before - saved.size_bytes
        self.carried_bytes -= left_bytes
        self.held_bytes -= left_bytes
        self.leaving[entry] = storages
        # The copies run later, when the list ``leaving`` may have been emptied, so they refer to a
        # tuple instead.
        copies, sources = [buffer.copy for buffer in buffers], tuple(storages)

        def work() -> None:
            if copies:
                torch._foreach_copy_(copies, sources, non_blocking=True)
                self.streams.spoil(*sources)

        return work

    def let_go(self) -> None:
        """Free the device memory of offloaded storages; their copies to the host must have
        ended.
        """
        for leaving in self.leaving:
            leaving.clear()

    def come_back(self, layer: int, micro_batch: int) -> LaneWork:
        """Copy a layer's offloaded storages back to the device."""
        kept = self.kept[layer, micro_batch]
        saved = kept.saved
        assert saved is not None
        assert kept.away is not None
        (numbers, buffers), before = kept.away, saved.size_bytes
        copies = [buffer.copy for buffer in buffers]
        storages = [torch.empty_like(copy, device=self.device) for copy in copies]
        self.streams.spoil(*storages)
        self.host.give_back(buffers)
        saved.come_back(numbers, storages)
        self.held_bytes += saved.size_bytes - before
        kept.away = None

        def work() -> None:
            if copies:
                torch._foreach_copy_(storages, copies, non_blocking=True)
                self.streams.spoil(*copies)

        return work

    def _plainly(self, layer: int, x: Tensor, kept: Kept) -> Tensor:
        """Run a layer forward and let autograd keep the saved tensors."""
        if self._drops_input(layer):
            x = _enter(x, self._anchor, kept.handed)
        elif x.is_floating_point():
            x = kept.entered = x.detach().requires_grad_()
        y = self._run(layer, x, kept.targets)
        kept.edge = get_gradient_edge(y)
        return y

    def _drops_input(self, layer: int) -> bool:
        """Whether a layer keeps other tensors than its input, so that the input may be freed; then
        the caller must not refer to the input.
        """
        return layer in self._lean_layers

    def _taken_apart(self, layer: int, entry: int, x: Tensor, kept: Kept) -> Tensor:
        """Run a layer forward as its treatment says (plain, recomputed or lean); its saved tensors
        are kept in these passes, and their bytes are counted.
        """
        weights = self._places.take_weights(layer, entry)
        kept.saved = Saved(
            weights=weights, constants=self._constants[layer], layout=self._layouts.get(layer)
        )
        y = LAYER_RUNS[self.treatments.get(layer, PLAIN)].forward(self, layer, x, kept)
        if layer in self._alike:
            self._layouts[layer] = kept.saved.arranged()
        return y

    def keeping_input(self, layer: int, x: Tensor, kept: Kept) -> Tensor:
        """Run a layer forward and keep only its input, because the layer is recomputed before its
        backward pass.
        """
        assert kept.saved is not None
        kept.again = kept.saved.keep(x)
        with torch.no_grad():
            return self._run(layer, x, kept.targets)

    def keeping_all(self, layer: int, x: Tensor, kept: Kept) -> Tensor:
        """Run a layer forward and keep all tensors that it saves."""
        saved = kept.saved
        assert saved is not None
        with saved.hooks():
            if x.is_floating_point():
                x = _enter(x, self._anchor, kept.handed)
            y = self._run(layer, x, kept.targets)
        kept.edge = get_gradient_edge(y)
        leaves = layer in self._leaving_layers
        saved.arranged(leaves_out=None if leaves else y)
        moves = leaves or self.state.shape.rings_weights(layer)
        if not moves and layer not in self._varying:
            self._sizes[layer] = saved.size_bytes
        return y

    def keeping_less(self, layer: int, x: Tensor, kept: Kept) -> Tensor:
        """Run a layer with lean operators forward, and keep the tensors that they save."""
        if layer not in self._looked_at:
            self._looked_at.add(layer)
            keep_lost_channels(self.modules[layer])
        return self.keeping_all(layer, x, kept)

    def _run(self, layer: int, x: Tensor, targets: Tensor | None) -> Tensor:
        module = self.modules[layer]
        y: Tensor = module(x) if targets is None else module(x, targets)
        return y

    def _collect(self, op: Op) -> None:
        """Point a layer's gradients to their sums, which are zeroed if this backward pass is their
        first.
        """
        layer, shape = op.layer, self.state.shape
        gradients = self._places.take_gradients(layer, op.entry)
        if shape.zero >= 2 or (op.is_of_first and self._starts_sums(layer)):
            torch._foreach_zero_(gradients)
        if op.is_of_first and not shape.adds_table_in_b(layer):
            self._begin_table(op)

    def _starts_sums(self, layer: int) -> bool:
        """Whether a layer's gradient sums start from zero in the first backward pass of an
        iteration.
        """
        shape = self.state.shape
        adds_to_fetched = shape.zero < 2 and shape.offload_of(layer).gradients > 0
        has_begun = shape.shares_table and layer == shape.first_layer
        return not adds_to_fetched and not has_begun

    def _begin_table(self, op: Op) -> None:
        """Zero the gradient sum of the token table that the head shares with the embedding, if this
        is the head's first backward pass.
        """
        shape = self.state.shape
        if op.is_of_first and shape.borrows_table(op.layer):
            torch._foreach_zero_(self._places.take_gradients(shape.first_layer, 0))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerRun:
    """How a block with a treatment (plain, recomputed, lean) runs forward, whether it is recomputed
    before its backward pass (``runs_again``), and whether its operators save outputs instead of
    inputs (``is_lean``).
    """

    forward: Callable[[Passes, int, Tensor, Kept], Tensor]
    runs_again: bool = False
    is_lean: bool = False


# The ways to run a block, by the name of its treatment (``mistlab.graph.treatments.TREATMENTS``).
LAYER_RUNS: dict[str, LayerRun] = {
    PLAIN: LayerRun(forward=Passes.keeping_all),
    "recomputed": LayerRun(forward=Passes.keeping_input, runs_again=True),
    "lean": LayerRun(forward=Passes.keeping_less, is_lean=True),
}


def layer_treatments(stage: StagePlan, blocks: Sequence[int]) -> dict[int, str]:
    """How each of a stage's blocks runs (plain, recomputed, lean), by block index; raises an error
    for a treatment that the runtime cannot train.
    """
    names = treatments_of(stage.value)
    for name in names:
        if name not in LAYER_RUNS:
            dimension = TREATMENTS[name].dimension
            refuse(
                dimension,
                f"{name} blocks can be predicted but not trained yet: give 0, and as many "
                "more checkpointed_layers, which keep less",
            )
    return dict(zip(blocks, names, strict=True))
