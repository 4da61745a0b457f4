"""Traces one training step of a torch model, and makes graphs of its layers from it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch.nn.functional import scaled_dot_product_attention
from torch.overrides import TorchFunctionMode

from mistlab.symbolic.graph import Condition, LayerGraph, ModelGraph
from runtime.sizes import SizeSpace
from runtime.tracing.assumptions import assumptions_of, conditions_of
from runtime.tracing.graph import layer_graph
from runtime.tracing.layers import BLOCK, EMBEDDING, HEAD, LayerRun, find_blocks, keep_one
from runtime.tracing.modules import ModulePaths
from runtime.tracing.recorder import Recorder


def trace(
    model: nn.Module,
    space: SizeSpace,
    loss_of: Callable[[nn.Module], Tensor],
    *,
    name: str,
    attention: str,
    precision: str,
    blocks: str | None = None,
) -> ModelGraph:
    """The graphs of a model built in ``space``; only the first of its blocks is kept and traced.

    ``loss_of`` runs the model and returns its scalar loss. ``blocks`` is the path of the list of
    blocks; without it the largest list is taken.
    """
    path = find_blocks(model, blocks)
    block = keep_one(model, path)
    model.train()
    constants = [*model.parameters(), *model.buffers()]
    with space.fake_mode, torch.no_grad():
        for parameter in model.parameters():
            # With gradients in place the first micro-batch accumulates, as later ones do.
            parameter.grad = torch.zeros_like(parameter)
            constants.append(parameter.grad)
    names = {module: _name_in_block(path, name) for name, module in model.named_modules()}
    recorder = Recorder(space, ModulePaths(names), constants)
    run = LayerRun(block, recorder)
    with space.fake_mode, enable_python_dispatcher(), AsOnGPU():
        run.forward_and_backward(lambda: loss_of(model))
    space.refuse_fixed("the model's own code")

    parameters = _parameters_of(model, path, recorder)

    def graph_of(layer: str) -> LayerGraph:
        return layer_graph(layer, recorder, parameters[layer], run.handed_on[layer])

    return ModelGraph(
        name=name,
        attention=attention,
        precision=precision,
        embedding=graph_of(EMBEDDING),
        block=graph_of(BLOCK),
        head=graph_of(HEAD),
        conditions=tuple(Condition(size=s, divisor=d) for s, d in conditions_of(space)),
        assumptions=tuple(assumptions_of(space)),
    )


class AsOnGPU(TorchFunctionMode):
    """Sends causal attention to its fused operator even with dropout, as a GPU does.

    On a CPU torch writes attention out if there is dropout. The fused operator keeps the same
    tensors with and without dropout, because it draws dropout again from a seed.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call ``func``; if it is attention, without its dropout."""
        options = dict(kwargs or {})
        if func is scaled_dot_product_attention:
            args = args[:4]
            options.pop("dropout_p", None)
        return func(*args, **options)


def _name_in_block(path: str, name: str) -> str:
    block = f"{path}.0"
    return name.removeprefix(block).lstrip(".") if name.startswith(block) else name


def _parameters_of(
    model: nn.Module, path: str, recorder: Recorder
) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Each layer's parameters; one outside the block belongs to the layer that first uses it."""
    found: dict[str, list[tuple[str, nn.Parameter]]] = {EMBEDDING: [], BLOCK: [], HEAD: []}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name.startswith(f"{path}.0."):
            found[BLOCK].append((name.removeprefix(f"{path}.0."), parameter))
            continue
        layer = _layer_using(name.rpartition(".")[0], recorder)
        found[layer].append((name, parameter))
    return found


def _layer_using(module: str, recorder: Recorder) -> str:
    for step in recorder.steps:
        if step.phase == "forward" and f"{step.module}.".startswith(f"{module}."):
            return step.layer
    return HEAD
