"""A state-space mixer: what a block may have in place of attention (Mamba-2; gated delta nets).

One product makes a gate, values, keys, queries and steps. A short convolution mixes neighbouring
tokens, a scan reads them into states and asks the states, a gated norm and a product come last.
Heads and groups are split over tensor-parallel ranks.

Kernels keep the product's result and the scan's, and convolve again in the backward pass.
"""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.config import ModelConfig, Structure, shard
from runtime.models.parallel import ColumnLinear, RowLinear
from runtime.models.ranks import TensorParallel
from runtime.models.sizes import Size
from runtime.models.state_space_operators import (
    chunk_scan,
    chunk_scan_backward,
    delta_rule,
    delta_rule_backward,
    gated_norm,
    gated_norm_backward,
    short_convolution,
    short_convolution_backward,
)

# Tokens that a convolution sees, as all published models have it.
CONVOLVED = 4


class StateSpace(nn.Module):
    """A scan between two products, on one tensor-parallel rank."""

    def __init__(self, config: ModelConfig, structure: Structure, ranks: TensorParallel) -> None:
        super().__init__()
        dtype, self.by_delta_rule = config.dtype, structure.delta_rule
        inner = config.scan_heads * config.scan_channels
        of_groups = config.scan_groups * config.states
        steps = config.scan_heads * (2 if structure.delta_rule else 1)
        self.heads = shard(config.scan_heads, ranks.size, "a number of heads of")
        self.sizes = (
            shard(config.scan_groups, ranks.size, "a number of groups of"),
            config.scan_channels,
            config.states,
        )
        self.enter = ColumnLinear(
            config.hidden,
            (inner, inner, of_groups, of_groups, steps),
            ranks,
            biases=False,
            dtype=dtype,
        )
        groups, channels, states = self.sizes
        mixed = self.heads * channels + 2 * groups * states

        def parameter(*shape: Size) -> nn.Parameter:
            return nn.Parameter(torch.empty(*shape, dtype=dtype))

        self.convolution, self.convolution_bias = parameter(mixed, CONVOLVED), parameter(mixed)
        self.decay, self.shift = parameter(self.heads), parameter(self.heads)
        self.skip = None if structure.delta_rule else parameter(self.heads)
        self.norm = parameter(self.heads * channels)
        self.output = RowLinear(inner, config.hidden, ranks, biases=False, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """Mix tokens; input and output are (B, S, hidden)."""
        made = _Core.apply(
            self.enter(x),
            *(self.convolution, self.convolution_bias, self.decay, self.shift, self.skip),
            *(self.norm, self.sizes),
        )
        return self.output(made)


class _Core(torch.autograd.Function):
    """Everything between the two products; keeps the first product's result and the scan's."""

    @staticmethod
    def forward(ctx: Any, made: Tensor, *inputs: Any) -> Tensor:
        convolution, bias, decay, shift, skip, norm, sizes = inputs
        gate, mixed, steps = _split(made, norm, convolution)
        mixed = short_convolution(mixed, convolution, bias)
        if skip is None:
            said = delta_rule(mixed, steps, decay, shift, list(sizes))
        else:
            said = chunk_scan(mixed, steps, decay, shift, skip, list(sizes))
        ctx.save_for_backward(made, said, convolution, bias, decay, shift, skip, norm)
        ctx.sizes = sizes
        return gated_norm(said, gate, norm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        made, said, convolution, bias, decay, shift, skip, norm = ctx.saved_tensors
        gate, mixed, steps = _split(made, norm, convolution)
        of_made = torch.empty_like(made)
        of_gate, of_mixed, of_steps = _split(of_made, norm, convolution)
        of_said, of_norm = gated_norm_backward(gradient, said, gate, norm, of_gate)
        again, sizes = short_convolution(mixed, convolution, bias), list(ctx.sizes)
        if skip is None:
            of_again, *others = delta_rule_backward(
                of_said, again, steps, decay, shift, sizes, of_steps
            )
            others.append(None)
        else:
            of_again, *others = chunk_scan_backward(
                of_said, again, steps, decay, shift, skip, sizes, of_steps
            )
        of_convolution = short_convolution_backward(of_again, mixed, convolution, bias, of_mixed)
        return of_made, *of_convolution, *others, of_norm, None


def _split(made: Tensor, norm: Tensor, convolution: Tensor) -> tuple[Tensor, ...]:
    """Gate, what is convolved, and steps, as parts of the first product's result."""
    inner, mixed = norm.shape[0], convolution.shape[0]
    return made.split([inner, mixed, made.shape[2] - inner - mixed], dim=-1)
