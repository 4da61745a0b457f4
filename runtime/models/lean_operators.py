"""Operators that save fewer bytes for their backward pass than PyTorch's (after Tempo).

GELU saves its output, which the next GEMM saves anyway, and a byte per value that says on which
side of GELU's minimum the input was. LayerNorm saves its output instead of its input. Unfused
attention saves the attention probabilities before dropout and the mask, but not the probabilities
after dropout. Dropout saves nothing (``runtime.models.dropout``). Gradients equal those of torch's
operators up to rounding.
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

# The number of points in the table of GELU's slope on each side of GELU's minimum, enough that
# linear interpolation is exact in 32 bits.
NODES = 8192
# The largest magnitude of inputs in the table of GELU's slope; beyond it the slope is 0 or 1.
FARTHEST = 9.0
# A LayerNorm's normalised values are recomputed from its output by dividing by the gain (the
# weight). Channels whose gain is below this share of the largest gain cannot be recomputed.
LEAST_GAIN = 1e-3


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def _slope(x: Tensor, approximate: str) -> Tensor:
    ones = torch.ones_like(x)
    return torch.ops.aten.gelu_backward(ones, x, approximate=approximate)


@cache
def _minimum(approximate: str) -> tuple[float, float]:
    """The input at which GELU has its minimum, and the minimum itself."""
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
    """A table of GELU's slope as a function of GELU's output, for each side of the minimum (rows);
    and the last abscissa of each row.

    The abscissa is the square root of the output's height above the minimum, in equal steps. As a
    function of the root the slope is nearly linear at the minimum, which suits interpolation.
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
    """GELU's output, and for each value whether the input is right of GELU's minimum (a byte)."""
    return _gelu(x, approximate), x > _minimum(approximate)[0]


@gelu_and_side.register_fake
def _(x: Tensor, approximate: str) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(x, dtype=torch.bool)


@operator("gradient")
def lean_gelu_backward(gradient: Tensor, y: Tensor, is_right: Tensor, approximate: str) -> Tensor:
    """The gradient of GELU's input; the slope is interpolated from GELU's output ``y`` and the side
    of the minimum.
    """
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
    """GELU as an autograd function that saves its output instead of its input, and for each value
    on which side of GELU's minimum the input is.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """The output of GELU; a byte per value, saved, says on which side of the minimum the input
        is.
        """
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
    """GELU that saves its output instead of its input; ``approximate`` is the argument of
    ``torch.nn.functional.gelu``.
    """
    y: Tensor = LeanGelu.apply(x, approximate)
    return y


# LayerNorm that recomputes its normalised values from its output, as (output - bias) / gain.
#
# Channels whose gain (weight) is nearly 0 cannot be recomputed. The normalised values of the
# ``KEPT_CHANNELS`` channels with the smallest gains are always saved. Since their number does not
# depend on the gains, the host need not wait for the device, and the bytes are known in advance. A
# small gain whose values were not saved gives NaN gradients, not wrong ones.


@torch.library.custom_op("mistlab::lean_layer_norm", mutates_args=())
def norm_and_kept(
    x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, channels: int
) -> tuple[Tensor, Tensor, Tensor]:
    """LayerNorm's output, the reciprocal standard deviation of each row, and the normalised values
    of the channels with the smallest gains.
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
    """The gradients of a LayerNorm's input, gain and bias, from its output ``y`` and the normalised
    values ``kept`` of the channels with the smallest gains.
    """
    smallest = _smallest(gain, kept.shape[-1])
    is_lost = gain.abs() <= LEAST_GAIN * gain.abs().max()
    divisor = torch.where(is_lost, math.nan, gain.float()).index_fill_(0, smallest, 1.0)
    normal = ((y.float() - bias.float()) / divisor).to(y.dtype)
    normal.index_copy_(-1, smallest, kept)
    # The gradient is computed as for an input with mean 0 and deviation 1, and then scaled.
    zeros, ones = torch.zeros_like(reciprocal), torch.ones_like(reciprocal)
    of_x, of_gain, of_bias = torch.ops.aten.native_layer_norm_backward(
        *(gradient.contiguous(), normal, (y.shape[-1],), zeros, ones, gain, bias),
        [True, True, True],
    )
    return of_x.mul_(reciprocal), of_gain, of_bias


def _smallest(gain: Tensor, channels: int) -> Tensor:
    """The indices of the channels with the smallest gains by magnitude, smallest first."""
    return gain.abs().argsort(stable=True)[:channels]


def lost_channels(gain: Tensor) -> int:
    """The number of channels whose normalised values cannot be recomputed from the output, because
    their gain is too small; the host waits for the device.
    """
    return int((gain.abs() <= LEAST_GAIN * gain.abs().max()).sum())


class LeanLayerNorm(torch.autograd.Function):
    """LayerNorm as an autograd function that saves its output instead of its input, with each row's
    deviation and the normalised values of a few channels.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, epsilon: float, channels: int
    ) -> Tensor:
        """The output of LayerNorm, from which the backward pass recomputes the input's normalised
        values.
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
    """LayerNorm over the last dimension that saves its output instead of its input; the normalised
    values of the ``channels`` channels with the smallest gains are saved too.
    """
    y: Tensor = LeanLayerNorm.apply(x, gain, bias, epsilon, channels)
    return y


class LeanCore(torch.autograd.Function):
    """Unfused attention after the scores, as an autograd function: softmax, dropout, and the GEMM
    with values.

    It saves the attention probabilities, the mask and the values; the backward pass recomputes the
    probabilities after dropout.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, value: Tensor, kept: Tensor | None, share: float
    ) -> Tensor:
        """The output of unfused attention, from scores and values."""
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
    """The output of unfused attention: softmax of scores (..., S, S), dropout of the probabilities
    that ``kept`` does not mark, and the GEMM with values.
    """
    mixed: Tensor = LeanCore.apply(scores, value, kept, share)
    return mixed


# Functions that make a block's operators save fewer bytes for their backward pass.


def make_lean(block: nn.Module, kinds: Collection[str]) -> None:
    """Let a block's operators of these kinds (``mistlab.plan.lean_sets``) save fewer bytes.

    Norms of the outputs of attention and the network (post-norms) stay as they are: no GEMM saves
    their output.
    """
    for name, module in block.named_modules():
        if isinstance(module, MLP) and "gelu" in kinds:
            module.gelu = lean_gelu
        elif isinstance(module, LayerNorm) and "norms" in kinds and not name.endswith("post_norm"):
            module.normalise = partial(_normalise, channels=KEPT_CHANNELS)


def keep_lost_channels(block: nn.Module) -> None:
    """Let lean norms save the normalised values of all channels that cannot be recomputed with the
    present gains; the host waits for the device.
    """
    for norm in block.modules():
        if isinstance(norm, LayerNorm) and norm.normalise is not None:
            lost = lost_channels(norm.weight)
            norm.normalise = partial(_normalise, channels=max(KEPT_CHANNELS, lost))


def _normalise(x: Tensor, norm: LayerNorm, *, channels: int) -> Tensor:
    return lean_layer_norm(x, norm.weight, norm.bias, norm.epsilon, channels)
