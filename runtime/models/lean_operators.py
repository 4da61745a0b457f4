"""Operators that keep less for their backward pass than PyTorch's (after Tempo).

GELU keeps its output, which the next product keeps anyway, and a bit of a byte a value; LayerNorm
keeps its output in place of its input; attention's written-out core keeps shares and mask, but not
the shares after dropout. Dropout keeps nothing (``runtime.models.dropout``). Gradients are those of
plain operators, to rounding.
"""

from functools import cache
from typing import Any

import torch
from torch import Tensor

# Nodes of the table of GELU's slope, for each side of its minimum: a straight line between two is
# nearer to the slope than a number of 32 bits tells.
NODES = 8192
# Inputs beyond this magnitude have a slope of 0 or 1, and so have the table's ends.
FARTHEST = 9.0
# A gain below this share of the largest does not give the normal values back.
LEAST_GAIN = 1e-3


def _gelu(x: Tensor, approximate: str) -> Tensor:
    return torch.nn.functional.gelu(x, approximate=approximate)


def _slope(x: Tensor, approximate: str) -> Tensor:
    ones = torch.ones_like(x)
    return torch.ops.aten.gelu_backward(ones, x, approximate=approximate)


@cache
def _minimum(approximate: str) -> tuple[float, float]:
    """Where GELU has its minimum, and the minimum."""
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
    """GELU's slope on the left and on the right of its minimum, a row each, at equal steps of the
    root of the height above the minimum; and the last root of each row.

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


class LeanGelu(torch.autograd.Function):
    """GELU that keeps its output, and of its input only on which side of the minimum it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        """The output; a byte a value tells the side."""
        lowest, _ = _minimum(approximate)
        y = _gelu(x, approximate)
        ctx.approximate = approximate
        ctx.save_for_backward(y, x > lowest)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        """The slope, read off by the output's height above the minimum."""
        y, is_right = ctx.saved_tensors
        table, ends = _table(ctx.approximate, y.device)
        _, least = _minimum(ctx.approximate)
        root = (y.float() - least).clamp_(min=0).sqrt_()
        side = is_right.to(torch.int64)
        end = torch.where(is_right, ends[1], ends[0])
        place = (root / end * (NODES - 1)).clamp_(max=NODES - 1)
        node = place.to(torch.int64).clamp_(max=NODES - 2)
        rest = place - node
        flat = table.view(-1)
        index = side * NODES + node
        slope = flat[index] * (1 - rest) + flat[index + 1] * rest
        return (gradients[0].float() * slope).to(gradients[0].dtype), None


def lean_gelu(x: Tensor, approximate: str = "none") -> Tensor:
    """GELU; ``approximate`` is that of ``torch.nn.functional.gelu``."""
    y: Tensor = LeanGelu.apply(x, approximate)
    return y


class LeanLayerNorm(torch.autograd.Function):
    """LayerNorm that keeps its output and one deviation a row.

    Channels whose gain is nearly 0 do not give their normal values back: those alone are kept.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, bias: Tensor, epsilon: float) -> Tensor:
        """The output."""
        y, mean, reciprocal = torch.native_layer_norm(x, (x.shape[-1],), gain, bias, epsilon)
        lost = (gain.abs() <= LEAST_GAIN * gain.abs().max()).nonzero().view(-1)
        kept = ((x[..., lost].float() - mean) * reciprocal).to(x.dtype)
        ctx.save_for_backward(y, reciprocal, gain, bias, lost, kept)
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        """Gradients of input, gain and bias."""
        y, reciprocal, gain, bias, lost, kept = ctx.saved_tensors
        gradient = gradients[0].float()
        divisor = gain.float().index_fill(0, lost, 1.0)
        normal = (y.float() - bias.float()) / divisor
        normal[..., lost] = kept.float()
        scaled = gradient * gain.float()
        of_x = scaled - scaled.mean(-1, keepdim=True)
        of_x = (of_x - normal * (scaled * normal).mean(-1, keepdim=True)) * reciprocal
        of_gain = (gradient * normal).flatten(0, -2).sum(0)
        of_bias = gradient.flatten(0, -2).sum(0)
        return of_x.to(y.dtype), of_gain.to(gain.dtype), of_bias.to(bias.dtype), None


def lean_layer_norm(x: Tensor, gain: Tensor, bias: Tensor, epsilon: float = 1e-5) -> Tensor:
    """LayerNorm over the last dimension."""
    y: Tensor = LeanLayerNorm.apply(x, gain, bias, epsilon)
    return y


class LeanCore(torch.autograd.Function):
    """Attention's written-out core from scores on: softmax, dropout, and the product with values.

    It keeps shares, mask and values; shares after dropout are made again.
    """

    @staticmethod
    def forward(
        ctx: Any, scores: Tensor, value: Tensor, kept: Tensor | None, share: float
    ) -> Tensor:
        """The mixed values."""
        shares = torch.softmax(scores, dim=-1)
        ctx.share = share
        ctx.save_for_backward(shares, value, kept)
        return LeanCore._dropped(shares, kept, share) @ value

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        """Gradients of scores and values."""
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
    """Softmax of scores (..., S, S), dropout of all but ``kept``, and the product with values."""
    mixed: Tensor = LeanCore.apply(scores, value, kept, share)
    return mixed
