"""Products of linear layers that add the gradients of their weights up themselves.

Autograd makes a weight's gradient anew and adds it to the one that is there: three more passes over
the weight's bytes, and a tensor of its size meanwhile. Here the product that makes the gradient
adds it to the sums, which are in place before a backward pass begins
(``runtime.engine.storage.places``). Where the gradient of a layer's input is summed up over
tensor-parallel ranks, those of the weights that it went through are put off until that sum is under
way.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from runtime.engine.streams.ranks import StreamedRanks
from runtime.models.parallel import ColumnLinear, RowLinear

# Takes work that is to be done now or later in the same backward pass of a layer.
RunBeside = Callable[[Callable[[], object]], None]


class _AddingUp(torch.autograd.Function):
    """``x @ weight.T + bias``, both of two dimensions; autograd hears of no weight's gradient."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, schedule: RunBeside
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        # What is saved may be elsewhere by then: the sums are the parameter's own.
        ctx.parameter, ctx.has_bias, ctx.schedule = weight, bias is not None, schedule
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_bias = gradient.sum(0) if ctx.has_bias else None
        sums = ctx.parameter.grad
        ctx.schedule(lambda: sums.addmm_(gradient.t(), x))
        return gradient.mm(weight), None, of_bias, None


def adding_up(x: Tensor, weight: Tensor, bias: Tensor | None, schedule: RunBeside) -> Tensor:
    """torch's ``linear`` with a backward pass that adds to ``weight.grad``, which is there."""
    made: Tensor = _AddingUp.apply(x, weight, bias, schedule)
    return made


def add_up_inside(module: nn.Module, ranks: StreamedRanks) -> None:
    """Let the linear layers of a module add the gradients of their weights up: of those whose rows
    are split over ranks, beside the sum over ranks that the gradient of their input waits for."""
    for one in module.modules():
        if isinstance(one, ColumnLinear):
            one.multiply = partial(adding_up, schedule=ranks.put_off)
        elif isinstance(one, RowLinear):
            one.multiply = partial(adding_up, schedule=_now)


def _now(product: Callable[[], object]) -> None:
    product()
