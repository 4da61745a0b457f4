"""Operators that keep less for their backward pass than PyTorch's (after Tempo).

GELU keeps its output, which the next product keeps anyway, and a bit of a byte a value; LayerNorm
keeps its output in place of its input; attention's written-out core keeps shares and mask, but not
the shares after dropout. Dropout keeps nothing (``runtime.models.dropout``). Gradients are those of
plain operators, to rounding.
"""

import math
from collections.abc import Collection
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn

from mistlab.graph.lean import KEPT_CHANNELS
from runtime.models.operators import LayerNorm
from runtime.models.ranks import operator
from runtime.models.transformer import MLP

# The number of nodes in the table of GELU's slope, on each side of its minimum: linear
# interpolation is exact to 32-bit precision.
NODES = 8192
# Inputs beyond this magnitude have a slope of 0 or 1, as at the ends of the table.
FARTHEST = 9.0
# A gain below this share of the largest one cannot be inverted to reconstruct normalised values.
LEAST_GAIN = 1e-3


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def _slope(x: Tensor, approximate: str) -> Tensor:
    ones = torch.ones_like(x)
    return torch.ops.aten.gelu_backward(ones, x, approximate=approximate)


@cache
def _minimum(approximate: str) -> tuple[float, float]:
    """The input at which GELU is smallest, and its value there."""
    low = torch.tensor(-1.5, dtype=torch.float64)
    high = torch.tensor(0.0, dtype=torch.float64)
    for _ in range(80):
        middle = (low + high) / 2
        if _slope(middle, approximate) < 0:
            low = middle
        else:
            high = middle
    return float(low), float(_gelu(low, approximate))


@cache
def _table(approximate: str, device: torch.device) -> tuple[Tensor, tuple[float, float]]:
    """GELU's slope as a function of its output, left and right of the minimum (rows), at equal
    steps of the square root of the height above the minimum; and the last square root of each row.

    The root makes the curve near its minimum a straight line, so the slope has no kink there.
    """
    lowest, least = _minimum(approximate)
    rows, ends = [], []
    for far in (-FARTHEST, FARTHEST):
        end = float((_gelu(torch.tensor(far, dtype=torch.float64), approximate) - least).sqrt())
        roots = torch.linspace(0, end, NODES, dtype=torch.float64)
        near = torch.full_like(roots, lowest)
        away = torch.full_like(roots, far)
        for _ in range(80):
            middle = (near + away) / 2
            is_low = (_gelu(middle, approximate) - least).clamp(min=0).sqrt() < roots
            near, away = torch.where(is_low, middle, near), torch.where(is_low, away, middle)
        rows.append(_slope((near + away) / 2, approximate))
        ends.append(end)
    return torch.stack(rows).to(torch.float32).to(device), (ends[0], ends[1])


@torch.library.custom_op("mistlab::lean_gelu", mutates_args=())
def gelu_and_side(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    """GELU, and a byte per value that says on which side of GELU's minimum the input is."""
    return _gelu(x, approximate), x > _minimum(approximate)[0]


@gelu_and_side.register_fake
def _(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@operator("gradient")
def lean_gelu_backward(gradient: Tensor, y: Tensor, is_right: Tensor, approximate: str) -> Tensor:
    """The gradient of GELU's input, with the slope interpolated from the output."""
    table, ends = _table(approximate, y.device)
    _, least = _minimum(approximate)
    root = (y.float() - least).clamp_(min=0).sqrt_()
    end = torch.where(is_right, ends[1], ends[0])
    scaled = (root / end * (NODES - 1)).clamp_(max=NODES - 1)
    node = scaled.to(torch.int64).clamp_(max=NODES - 2)
    rest = scaled - node
    flat = table.view(-1)
    index = is_right.to(torch.int64) * NODES + node
    slope = flat[index] * (1 - rest) + flat[index + 1] * rest
    return (gradient.float() * slope).to(gradient.dtype)


class LeanGelu(torch.autograd.Function):
    """GELU that saves its output, and for each value on which side of GELU's minimum the input
    is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """The output of GELU; a byte per value records the side of the minimum."""
        y, is_right = gelu_and_side(x, approximate)
        ctx.approximate = approximate
        ctx.save_for_backward(y, is_right)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The gradient of GELU's input: the output's gradient times the slope."""
        y, is_right = ctx.saved_tensors
        return lean_gelu_backward(gradients[0], y, is_right, ctx.approximate), None


def lean_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU; ``approximate`` is that of ``torch.nn.functional.gelu``."""
    y: Tensor = LeanGelu.apply(x, approximate)
    return y


# LayerNorm reconstructed from its output: normalised values are (output - bias) / gain.
#
# Channels whose gain is nearly 0 cannot be reconstructed. Those of the ``KEPT_CHANNELS`` smallest
# gains are always kept, a number independent of values, so that no host waits for a device, and
# bytes are known in advance. A small gain without kept values gives NaN gradients, rather than
# wrong ones.


@torch.library.custom_op("mistlab::lean_layer_norm", mutates_args=())
def norm_and_kept(
    x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm, the reciprocal standard deviation of each row, and the normalised values of the
    channels with the smallest gains.
    """
    y, mean, reciprocal = torch.native_layer_norm(x, (x.shape[-1],), gain, bias, epsilon)
    kept = x.index_select(-1, _smallest(gain, channels))
    return y, reciprocal, ((kept - mean) * reciprocal).to(x.dtype)


@norm_and_kept.register_fake
def _(
    x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    rows = x.shape[:-1]
    return torch.empty_like(x), x.new_empty((*rows, 1)), x.new_empty((*rows, channels))


@operator("y", "gain", "bias")
def lean_layer_norm_backward(
    gradient: Tensor, y: Tensor, reciprocal: Tensor, kept: Tensor, gain: Tensor, bias: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of input, gain and bias of a LayerNorm."""
    smallest = _smallest(gain, kept.shape[-1])
    is_lost = gain.abs() <= LEAST_GAIN * gain.abs().max()
    divisor = torch.where(is_lost, math.nan, gain.float()).index_fill_(0, smallest, 1.0)
    normal = ((y.float() - bias.float()) / divisor).to(y.dtype)
    normal.index_copy_(-1, smallest, kept)
    # The gradient is that of a LayerNorm whose input already has mean 0 and deviation 1.
    zeros, ones = torch.zeros_like(reciprocal), torch.ones_like(reciprocal)
    of_x, of_gain, of_bias = torch.ops.aten.native_layer_norm_backward(
        *(gradient.contiguous(), normal, (y.shape[-1],), zeros, ones, gain, bias),
        [True, True, True],
    )
    return of_x.mul_(reciprocal), of_gain, of_bias


def _smallest(gain: Tensor, channels: int) -> Tensor:
    """The indices of the channels with the smallest gains, in order."""
    return gain.abs().argsort(stable=True)[:channels]


def lost_channels(gain: Tensor) -> int:
    """The number of channels that cannot be reconstructed; synchronises the host with the
    device.
    """
    return int((gain.abs() <= LEAST_GAIN * gain.abs().max()).sum())


class LeanLayerNorm(torch.autograd.Function):
    """LayerNorm that saves its output, a deviation per row and the normalised values of a few
    channels.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, channels: int
    ) -> Tensor:
        """The output of LayerNorm, which the backward pass reconstructs the input's normalised
        values from.
        """
        y, reciprocal, kept = norm_and_kept(x, gain, bias, epsilon, channels)
        ctx.save_for_backward(y, reciprocal, kept, gain, bias)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None, None]:
        """The gradients of LayerNorm's input, gain and bias."""
        return *lean_layer_norm_backward(gradients[0], *ctx.saved_tensors), None, None


def lean_layer_norm(
    x: Tensor,
    gain: Tensor,
    bias: Tensor,
    epsilon: float = 1e-5,
    channels: int = KEPT_CHANNELS,
) -> Tensor:
    """LayerNorm over the last dimension; the normalised values of this many channels, with the
    smallest gains, are kept.
    """
    y: Tensor = LeanLayerNorm.apply(x, gain, bias, epsilon, channels)
    return y


class LeanCore(torch.autograd.Function):
    """The unfused core of attention after the scores: softmax, dropout, and the GEMM with values.

    It keeps shares, mask and values; shares after dropout are made again.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, value: Tensor, kept: Tensor | None, share: float
    ) -> Tensor:
        """The output of unfused attention, from its scores and values."""
        shares = torch.softmax(scores, dim=-1)
        ctx.share = share
        ctx.save_for_backward(shares, value, kept)
        return LeanCore._dropped(shares, kept, share) @ value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of attention scores and values."""
        shares, value, kept = ctx.saved_tensors
        of_value = LeanCore._dropped(shares, kept, ctx.share).transpose(-1, -2) @ gradients[0]
        of_shares = LeanCore._dropped(gradients[0] @ value.transpose(-1, -2), kept, ctx.share)
        sums = (of_shares * shares).sum(-1, keepdim=True)
        return (of_shares - sums) * shares, of_value, None, None

    @staticmethod
    def _dropped(x: Tensor, kept: Tensor | None, share: float) -> Tensor:
        return x if kept is None else x * kept / (1 - share)


def lean_core(
    scores: Tensor, value: Tensor, kept: Tensor | None = None, share: float = 0
) -> Tensor:
    """Softmax of scores (..., S, S), dropout of all but ``kept``, and the GEMM with values."""
    mixed: Tensor = LeanCore.apply(scores, value, kept, share)
    return mixed


# Blocks of a model whose operators keep less for their backward pass.


def make_lean(block: nn.Module, kinds: Collection[str]) -> None:
    """Let a block's operators of these kinds (``mistlab.plan.lean_sets``) keep less.

    Norms of what attention and the network make are left: no product keeps what they give.
    """
    for name, module in block.named_modules():
        if isinstance(module, MLP) and "gelu" in kinds:
            module.gelu = lean_gelu
        elif isinstance(module, LayerNorm) and "norms" in kinds and not name.endswith("post_norm"):
            module.normalise = partial(_normalise, channels=KEPT_CHANNELS)


def keep_lost_channels(block: nn.Module) -> None:
    """Let lean norms keep the values of all channels that their outputs do not tell, as their gains
    are now; the host waits for the device."""
    for norm in block.modules():
        if isinstance(norm, LayerNorm) and norm.normalise is not None:
            lost = lost_channels(norm.weight)
            norm.normalise = partial(_normalise, channels=max(KEPT_CHANNELS, lost))


def _normalise(x: Tensor, norm: LayerNorm, *, channels: int) -> Tensor:
    return lean_layer_norm(x, norm.weight, norm.bias, norm.epsilon, channels)
