"""Gates of what attention gives, channel by channel; a trace sees one operator in each pass.

Axes: B batch, S sequence, H the rank's query heads, D channels of a head.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("mistlab::output_gate", mutates_args=())
def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """``x`` (B, S, H, D) times the sigmoid of its gates."""
    return (x * torch.sigmoid(gate)).contiguous()


@output_gate.register_fake
def _(x: Tensor, gate: Tensor) -> Tensor:
    return x.new_empty(x.shape)


@torch.library.custom_op("mistlab::output_gate_backward", mutates_args=())
def output_gate_backward(gradient: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of ``x`` and of the gates."""
    share = torch.sigmoid(gate)
    of_gate = gradient * x * share * (1 - share)
    return (gradient * share).contiguous(), of_gate.contiguous()


@output_gate_backward.register_fake
def _(gradient: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape), x.new_empty(x.shape)


class OutputGate(torch.autograd.Function):
    """Gated results of attention; keeps both operands."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        """The gated results."""
        ctx.save_for_backward(x, gate)
        return output_gate(x, gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Gradients of results and gates."""
        return output_gate_backward(gradient, *ctx.saved_tensors)
