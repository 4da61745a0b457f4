"""Cuts a model into embedding, block and head, and runs each forward and backward by itself.

The cut is made while the model runs: the block's input and output are detached. So each part has
an autograd graph of its own, as it has when a plan is executed.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_unflatten

from runtime.models.sizes import Size
from runtime.sizes import TraceError
from runtime.tracing.recorder import Recorder

EMBEDDING, BLOCK, HEAD = "embedding", "block", "head"


def find_blocks(model: nn.Module, path: str | None = None) -> str:
    """The path of a model's list of blocks: ``path`` if given, else that of the largest list."""
    lists = {name: m for name, m in model.named_modules() if isinstance(m, nn.ModuleList) and m}
    if path is not None and path not in lists:
        message = f"no list of blocks at {path!r}: the model has {', '.join(lists) or 'none'}"
        raise TraceError(message)
    if not lists:
        message = (
            "the model has no torch.nn.ModuleList of blocks: keep its repeated layers in one, so "
            "that embedding, block and head can be told apart"
        )
        raise TraceError(message)
    chosen = path or max(lists, key=lambda name: sum(1 for _ in lists[name].parameters()))
    _refuse_unlike(chosen, lists[chosen])
    return chosen


def keep_one(model: nn.Module, path: str) -> nn.Module:
    """Keep only the first block of the list of blocks, in place, and return this block."""
    parent, _, name = path.rpartition(".")
    block = model.get_submodule(path)[0]  # type: ignore[index]
    setattr(model.get_submodule(parent), name, nn.ModuleList([block]))
    return block  # type: ignore[no-any-return]


class LayerRun:
    """Runs a model with one block under a recorder: forward, then backward layer by layer."""

    def __init__(self, block: nn.Module, recorder: Recorder) -> None:
        self._block = block
        self._recorder = recorder
        self._edges: dict[str, GradientEdge] = {}
        self._inputs: dict[str, Tensor] = {}
        self.handed_on: dict[str, Size] = {}

    def forward_and_backward(self, loss_of: Callable[[], Tensor]) -> None:
        """Run the whole model once; ``loss_of`` calls the model and returns a scalar loss."""
        recorder = self._recorder
        entering = self._block.register_forward_pre_hook(self._enter_block, with_kwargs=True)
        leaving = self._block.register_forward_hook(self._leave_block)
        try:
            with recorder.watching():
                recorder.layer = EMBEDDING
                loss = loss_of()
                self.handed_on[HEAD] = loss.untyped_storage().nbytes()
                if HEAD not in self._inputs:
                    message = "the model's forward does not call its block: nothing to trace"
                    raise TraceError(message)
                recorder.phase = "backward"
                torch.autograd.backward(loss)
                del loss
                self._backward(BLOCK, self._inputs.pop(HEAD))
                self._backward(EMBEDDING, self._inputs.pop(BLOCK))
        finally:
            entering.remove()
            leaving.remove()

    def _backward(self, layer: str, output: Tensor) -> None:
        gradient, output.grad = output.grad, None
        del output
        assert gradient is not None
        self._recorder.layer = layer
        self._recorder.adopt(gradient)
        torch.autograd.backward((self._edges.pop(layer),), (gradient,))

    def _enter_block(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        return self._cut((args, kwargs), EMBEDDING, BLOCK)

    def _leave_block(self, _module: nn.Module, _args: Any, output: Any) -> Any:
        return self._cut(output, BLOCK, HEAD)

    def _cut(self, values: Any, before: str, after: str) -> Any:
        leaves, structure = tree_flatten(values)
        place = next((i for i, x in enumerate(leaves) if _carries_gradient(x)), None)
        if place is None:
            message = f"no tensor with a gradient passes from the {before} to the {after}"
            raise TraceError(message)
        self.handed_on[before] = leaves[place].untyped_storage().nbytes()
        self._edges[before] = get_gradient_edge(leaves[place])
        leaves[place] = leaves[place].detach().requires_grad_()
        self._inputs[after] = leaves[place]
        self._recorder.layer = after
        self._recorder.adopt(leaves[place])
        return tree_unflatten(leaves, structure)


def _carries_gradient(value: object) -> bool:
    return isinstance(value, Tensor) and value.requires_grad and value.grad_fn is not None


def _refuse_unlike(path: str, blocks: nn.ModuleList) -> None:
    def shapes(block: nn.Module) -> list[tuple[str, str]]:
        return [(name, str(tuple(p.shape))) for name, p in block.named_parameters()]

    first = shapes(blocks[0])
    for number, block in enumerate(blocks):
        if shapes(block) != first:
            message = (
                f"block {number} of {path} has other parameters than block 0: a plan counts "
                "blocks, so they must be alike"
            )
            raise TraceError(message)


def differing_settings(blocks: nn.ModuleList) -> list[str]:
    """Names of plain attributes that are not equal in all blocks, such as ``attention.window``.

    A layer's number differs by design and is left out.
    """
    first = _settings(blocks[0])
    others = [_settings(block) for block in blocks]
    names = {name for other in others for name in first if other.get(name) != first[name]}
    return sorted(name for name in names if not name.endswith(("layer_idx", "layer_number")))


def _settings(block: nn.Module) -> dict[str, object]:
    return {
        f"{path}.{name}".lstrip("."): value
        for path, module in block.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, int | float | str | None) and not name.startswith("_")
    }
