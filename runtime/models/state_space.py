"""State-space blocks and their fused operators, each recorded as one operator by a trace.

Axes: B batch, S sequence, H heads, P channels of a head, G groups, N channels of a state. Queries
and keys (N channels each) belong to groups, values (P channels) to heads.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.config import ModelConfig, Structure, shard
from runtime.models.parallel import ColumnLinear, RowLinear
from runtime.models.ranks import Size, TensorParallel, operator

# Fused operators of state-space blocks, each recorded as one operator by a trace.
#
# A state-space block reads a sequence into states of fixed size, head by head (Mamba-2, Dao and Gu
# 2024). GPU kernels process the sequence in chunks: GEMMs inside a chunk, and a state that is
# passed from chunk to chunk. The gated delta rule (Yang et al. 2024) also removes from a state its
# previous value for a key.
#
# The code below is a small CPU reference, which processes a sequence token by token.
#
# Axes: B batch, S sequence, H heads, P channels of a head, G groups, N channels of a state. Queries
# and keys (N channels each) belong to groups, values (P channels) to heads.


EPSILON = 1e-5


def _convolved(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    width = weight.shape[1]
    padded = torch.nn.functional.pad(x.transpose(1, 2), (width - 1, 0))
    made = torch.nn.functional.conv1d(padded, weight[:, None], bias, groups=x.shape[2])
    return torch.nn.functional.silu(made).transpose(1, 2)


def _parts(mixed: Tensor, sizes: list[int]) -> tuple[Tensor, Tensor, Tensor]:
    """Values (B, S, H, P), keys and queries (B, S, H, N), as parts of one tensor."""
    groups, channels, states = sizes
    width = groups * states
    values, keys, queries = mixed.split([mixed.shape[2] - 2 * width, width, width], dim=-1)
    values = values.unflatten(2, (-1, channels))
    each = values.shape[2] // groups
    keys, queries = (
        one.unflatten(2, (groups, states)).repeat_interleave(each, dim=2) for one in (keys, queries)
    )
    return values, keys, queries


def _scanned(
    mixed: Tensor, steps: Tensor, decay: Tensor, shift: Tensor, skip: Tensor, sizes: list[int]
) -> Tensor:
    """Mamba-2's recurrence, token by token; ``steps`` (B, S, H) are the step sizes by which each
    head's state changes.
    """
    values, keys, queries = _parts(mixed, sizes)
    moved = torch.nn.functional.softplus(steps + shift)
    kept = torch.exp(-moved * torch.exp(decay))
    state = values.new_zeros((*values[:, 0].shape, sizes[2]))
    made = []
    for token in range(values.shape[1]):
        written = (moved[:, token, :, None] * values[:, token])[..., None] * keys[:, token, :, None]
        state = kept[:, token, :, None, None] * state + written
        made.append((state * queries[:, token, :, None]).sum(-1))
    return (torch.stack(made, 1) + skip[:, None] * values).flatten(2)


def _by_delta_rule(
    mixed: Tensor, steps: Tensor, decay: Tensor, shift: Tensor, sizes: list[int]
) -> Tensor:
    """The recurrence of the gated delta rule, token by token; ``steps`` (B, S, 2H) are each head's
    write rates, then decays.
    """
    values, keys, queries = _parts(mixed, sizes)
    keys, queries = (torch.nn.functional.normalize(one, dim=-1) for one in (keys, queries))
    rates, forgotten = steps.chunk(2, dim=-1)
    rates = torch.sigmoid(rates)
    kept = torch.exp(-torch.nn.functional.softplus(forgotten + shift) * torch.exp(decay))
    state = values.new_zeros((*values[:, 0].shape, sizes[2]))
    made = []
    for token in range(values.shape[1]):
        state = kept[:, token, :, None, None] * state
        known = (state * keys[:, token, :, None]).sum(-1)
        written = rates[:, token, :, None] * (values[:, token] - known)
        state = state + written[..., None] * keys[:, token, :, None]
        made.append((state * queries[:, token, :, None]).sum(-1))
    return torch.stack(made, 1).flatten(2)


def _gated(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    inner = x * torch.nn.functional.silu(gate)
    return inner * torch.rsqrt(inner.square().mean(-1, keepdim=True) + EPSILON) * weight


def _gradients(
    forward: Callable[..., Tensor], gradient: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of the ``inputs`` of a reference implementation ``forward``, by autograd.

    They are computed in another thread, because inside an operator torch records nothing for
    autograd.
    """

    def derived() -> tuple[Tensor, ...]:
        leaves = [one.detach().requires_grad_() for one in inputs]
        return torch.autograd.grad(forward(*leaves), leaves, gradient)

    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(derived).result()


@operator("x")
def short_convolution(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """SiLU of a short causal convolution over each channel's last few tokens (B, S, channels)."""
    return _convolved(x, weight, bias).contiguous()


@operator("weight", "bias", changes=("of_x",))
def short_convolution_backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Tensor, of_x: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the convolution's weight and bias; the gradient of ``x`` is written to
    ``of_x``.
    """
    of_x_made, *others = _gradients(_convolved, gradient, x, weight, bias)
    of_x.copy_(of_x_made)
    return others[0], others[1]


@torch.library.custom_op("mistlab::chunk_scan", mutates_args=())
def chunk_scan(
    mixed: Tensor, steps: Tensor, decay: Tensor, shift: Tensor, skip: Tensor, sizes: list[int]
) -> Tensor:
    """The outputs (B, S, H P) of Mamba-2's recurrence; ``sizes`` are G, P and N."""
    return _scanned(mixed, steps, decay, shift, skip, sizes).contiguous()


@chunk_scan.register_fake
def _(
    mixed: Tensor, steps: Tensor, decay: Tensor, shift: Tensor, skip: Tensor, sizes: list[int]
) -> Tensor:
    return mixed.new_empty((*mixed.shape[:2], skip.shape[0] * sizes[1]))


@operator("mixed", "decay", "shift", "skip", changes=("of_steps",))
def chunk_scan_backward(  # noqa: PLR0913, PLR0917 (a kernel takes what the forward kernel took)
    gradient: Tensor,
    mixed: Tensor,
    steps: Tensor,
    decay: Tensor,
    shift: Tensor,
    skip: Tensor,
    sizes: list[int],
    of_steps: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients of ``mixed``, ``decay``, ``shift`` and ``skip``; the gradient of ``steps`` is
    written to ``of_steps``.
    """

    def forward(*inputs: Tensor) -> Tensor:
        return _scanned(*inputs, sizes)  # type: ignore[call-arg, arg-type]

    of_mixed, of_steps_made, *others = _gradients(
        forward, gradient, mixed, steps, decay, shift, skip
    )
    of_steps.copy_(of_steps_made)
    return of_mixed, others[0], others[1], others[2]


@torch.library.custom_op("mistlab::delta_rule", mutates_args=())
def delta_rule(
    mixed: Tensor, steps: Tensor, decay: Tensor, shift: Tensor, sizes: list[int]
) -> Tensor:
    """The outputs (B, S, H P) of the gated delta rule's recurrence; ``sizes`` are G, P and N."""
    return _by_delta_rule(mixed, steps, decay, shift, sizes).contiguous()


@delta_rule.register_fake
def _(mixed: Tensor, steps: Tensor, decay: Tensor, shift: Tensor, sizes: list[int]) -> Tensor:
    return mixed.new_empty((*mixed.shape[:2], shift.shape[0] * sizes[1]))


@operator("mixed", "decay", "shift", changes=("of_steps",))
def delta_rule_backward(
    gradient: Tensor,
    mixed: Tensor,
    steps: Tensor,
    decay: Tensor,
    shift: Tensor,
    sizes: list[int],
    of_steps: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of ``mixed``, ``decay`` and ``shift``; the gradient of ``steps`` is written to
    ``of_steps``.
    """

    def forward(*inputs: Tensor) -> Tensor:
        return _by_delta_rule(*inputs, sizes)  # type: ignore[call-arg, arg-type]

    of_mixed, of_steps_made, *others = _gradients(forward, gradient, mixed, steps, decay, shift)
    of_steps.copy_(of_steps_made)
    return of_mixed, others[0], others[1]


@operator("x")
def gated_norm(x: Tensor, gate: Tensor, weight: Tensor) -> Tensor:
    """RMSNorm of the product of ``x`` and SiLU of the gate."""
    return _gated(x, gate, weight).contiguous()


@operator("x", "weight", changes=("of_gate",))
def gated_norm_backward(
    gradient: Tensor, x: Tensor, gate: Tensor, weight: Tensor, of_gate: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of ``x`` and weight of ``gated_norm``; the gate's gradient is written to
    ``of_gate``.
    """
    of_x, of_gate_made, of_weight = _gradients(_gated, gradient, x, gate, weight)
    of_gate.copy_(of_gate_made)
    return of_x, of_weight


@operator("x")
def squared_relu(x: Tensor, weights: Tensor | None) -> Tensor:
    """Squared ReLU, times each row's weight if rows have weights."""
    made = torch.relu(x).square_()
    return made if weights is None else made.mul_(weights[:, None])


@torch.library.custom_op("mistlab::squared_relu_backward", mutates_args=())
def squared_relu_backward(
    gradient: Tensor, x: Tensor, weights: Tensor | None
) -> tuple[Tensor, Tensor]:
    """The gradients of ``squared_relu``'s input and of its weights (empty if there are none)."""
    above = torch.relu(x)
    if weights is None:
        return 2 * above * gradient, x.new_empty((0,))
    of_weights = (gradient.float() * above.float().square()).sum(-1).to(weights.dtype)
    return (2 * above * gradient * weights[:, None]).to(x.dtype), of_weights


@squared_relu_backward.register_fake
def _(gradient: Tensor, x: Tensor, weights: Tensor | None) -> tuple[Tensor, Tensor]:
    of_weights = x.new_empty((0,)) if weights is None else torch.empty_like(weights)
    return torch.empty_like(x), of_weights


class SquaredRelu(torch.autograd.Function):
    """Autograd function of squared ReLU, with or without a weight for each row; saves its input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weights: Tensor | None) -> Tensor:
        """The squared ReLU of each value, times its row's weight if there are weights."""
        ctx.save_for_backward(x, weights)
        return squared_relu(x, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:  # type: ignore[override]
        """The gradients of squared ReLU's input and of the rows' weights."""
        x, weights = ctx.saved_tensors
        of_x, of_weights = squared_relu_backward(gradient, x, weights)
        return of_x, None if weights is None else of_weights


# A state-space mixer, which takes the place of attention (Mamba-2; gated delta networks).
#
# One GEMM computes gate, values, keys, queries and step sizes. A short convolution mixes
# neighbouring tokens. A scan then updates the states token by token and queries them. A gated norm
# and a GEMM follow. Heads and groups are split over tensor-parallel ranks.
#
# GPU kernels save the results of the first GEMM and of the scan, and recompute the convolution in
# the backward pass.


# The number of tokens of a convolution's window, as in all published models.
CONVOLVED = 4


class StateSpace(nn.Module):
    """A state-space mixer on one tensor-parallel rank: a scan over the sequence between two
    GEMMs.
    """

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
        """The output of the mixer for hidden states (B, S, hidden), in the same shape."""
        made = _Core.apply(
            self.enter(x),
            *(self.convolution, self.convolution_bias, self.decay, self.shift, self.skip),
            *(self.norm, self.sizes),
        )
        return self.output(made)


class _Core(torch.autograd.Function):
    """All operators of a state-space mixer between its two GEMMs, as an autograd function; saves
    the results of the first GEMM and of the scan.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, *inputs: Any) -> Tensor:
        convolution, bias, decay, shift, skip, norm, sizes = inputs
        gate, mixed, steps = _split(made, norm, convolution)
        mixed = short_convolution(mixed, convolution, bias)
        if skip is None:
            core = delta_rule(mixed, steps, decay, shift, list(sizes))
        else:
            core = chunk_scan(mixed, steps, decay, shift, skip, list(sizes))
        ctx.save_for_backward(made, core, convolution, bias, decay, shift, skip, norm)
        ctx.sizes = sizes
        return gated_norm(core, gate, norm)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        made, core, convolution, bias, decay, shift, skip, norm = ctx.saved_tensors
        gate, mixed, steps = _split(made, norm, convolution)
        of_made = torch.empty_like(made)
        of_gate, of_mixed, of_steps = _split(of_made, norm, convolution)
        of_said, of_norm = gated_norm_backward(gradient, core, gate, norm, of_gate)
        again, sizes = short_convolution(mixed, convolution, bias), list(ctx.sizes)
        of_skip: Tensor | None = None
        if skip is None:
            of_again, *of_heads = delta_rule_backward(
                of_said, again, steps, decay, shift, sizes, of_steps
            )
        else:
            of_again, *of_heads, of_skip = chunk_scan_backward(
                of_said, again, steps, decay, shift, skip, sizes, of_steps
            )
        of_convolution = short_convolution_backward(of_again, mixed, convolution, bias, of_mixed)
        return of_made, *of_convolution, *of_heads, of_skip, of_norm, None


def _split(made: Tensor, norm: Tensor, convolution: Tensor) -> tuple[Tensor, ...]:
    """The gate, the convolution's input and the step sizes, as parts of the first GEMM's result."""
    inner, mixed = norm.shape[0], convolution.shape[0]
    return made.split([inner, mixed, made.shape[2] - inner - mixed], dim=-1)
