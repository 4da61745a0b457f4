"""Fused operators that eager PyTorch lacks, and norms built from them; a trace records each as a
single operator.
"""

import math
import warnings
from collections.abc import Callable
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from mistlab.plan.workload import NORM_EPSILON
from runtime.models.ranks import Size, direct, is_watched, operator

# Fused operators that eager PyTorch lacks; a trace records each as a single operator.
#
# They save the same tensors for the backward pass as a fused GPU kernel: RMSNorm its input and a
# number per row, SwiGLU its input, causal softmax its output, rotary embedding (in place) nothing.
# With Triton, softmax, SwiGLU and rotary embedding are one kernel each
# (``runtime.models.kernels``); elsewhere torch runs several kernels for each.


# How deep ``_hide_future`` recurses: it halves the square blocks on the diagonal this many times,
# and masks the rest.
HALVINGS = 4
# The longest row of scores that a Triton kernel holds in a GPU's registers.
LONGEST_ROW = 32_768


def kernels_for(x: Tensor) -> ModuleType | None:
    """The module of Triton kernels for a tensor on a GPU, or None."""
    return _triton() if x.device.type == "cuda" else None


@cache
def _triton() -> ModuleType | None:
    """The module of Triton kernels; None, with a warning, if Triton does not work on this
    machine.
    """
    try:
        kernels = import_module("runtime.models.kernels")
        kernels.causal_softmax(torch.zeros(16, 16, device="cuda"), 16)
    except Exception as error:  # Compilers fail in many ways, and none is fatal.
        warnings.warn(
            "softmax, SwiGLU and rotary embedding run as several kernels each, which takes longer "
            f"than predicted, because Triton does not work here: {error}",
            stacklevel=2,
        )
        return None
    return kernels


def _rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    """RMSNorm times its weight, and each row's reciprocal root mean square."""
    if x.is_cuda:
        return torch.ops.aten._fused_rms_norm(x, (x.shape[-1],), weight, epsilon)
    reciprocal = x.float().square().mean(-1, keepdim=True).add_(epsilon).rsqrt_()
    return (x * reciprocal).to(x.dtype).mul_(weight), reciprocal


_rms_norm_operator = torch.library.custom_op("mistlab::rms_norm", _rms_norm, mutates_args=())
rms_norm = direct(_rms_norm_operator, _rms_norm)


@_rms_norm_operator.register_fake
def _(x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), x.new_empty((*x.shape[:-1], 1), dtype=torch.float32)


@operator("x", "weight")
def rms_norm_backward(
    gradient: Tensor, x: Tensor, reciprocal: Tensor, weight: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``rms_norm`` with respect to ``x`` and ``weight``."""
    if x.is_cuda:
        shape = (x.shape[-1],)
        return torch.ops.aten._fused_rms_norm_backward(
            gradient, x, shape, reciprocal, weight, [True, True]
        )
    normal, wide = x.float() * reciprocal, gradient.float()
    of_weight = (wide * normal).flatten(0, -2).sum(0)
    scaled = wide * weight.float()
    mean = (scaled * normal).mean(-1, keepdim=True)
    of_x = scaled.addcmul_(normal, mean, value=-1).mul_(reciprocal)
    return of_x.to(x.dtype), of_weight.to(weight.dtype)


class RMSNormed(torch.autograd.Function):
    """RMSNorm as an autograd function; saves its input and each row's reciprocal root mean
    square.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> tuple[Tensor, Tensor]:
        """The normalised values, and each row's reciprocal root mean square, which has no
        gradient.
        """
        normal, reciprocal = rms_norm(x, weight, epsilon)
        ctx.mark_non_differentiable(reciprocal)
        # In a trace, torch would record zeros as gradients of unused results, unless told not to
        # make them.
        ctx.set_materialize_grads(is_watched(x))
        ctx.save_for_backward(x, reciprocal, weight)
        return normal, reciprocal

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor, _of_reciprocal: Tensor | None
    ) -> tuple[Tensor, Tensor, None]:
        """The gradients of RMSNorm's input and weight."""
        x, reciprocal, weight = ctx.saved_tensors
        of_x, of_weight = rms_norm_backward(gradient, x, reciprocal, weight)
        return of_x, of_weight, None


def _swiglu(gate_and_up: Tensor) -> Tensor:
    """``silu(gate) * up``, where gate and up are the two halves of the last dimension."""
    if kernels := kernels_for(gate_and_up):
        return kernels.swiglu(gate_and_up)
    gate, up = gate_and_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up)


_swiglu_operator = torch.library.custom_op("mistlab::swiglu", _swiglu, mutates_args=())
swiglu = direct(_swiglu_operator, _swiglu)


@_swiglu_operator.register_fake
def _(gate_and_up: Tensor) -> Tensor:
    *rows, columns = gate_and_up.shape
    return gate_and_up.new_empty((*rows, columns // 2))


@operator("gate_and_up")
def swiglu_backward(gradient: Tensor, gate_and_up: Tensor) -> Tensor:
    """The gradient of ``swiglu``, computed without scratch memory besides its result."""
    if kernels := kernels_for(gate_and_up):
        return kernels.swiglu_backward(gradient, gate_and_up)
    result = torch.empty_like(gate_and_up)
    gate, up = gate_and_up.chunk(2, dim=-1)
    of_gate, of_up = result.chunk(2, dim=-1)
    torch.mul(gradient, up, out=of_gate)
    torch.ops.aten.silu_backward.grad_input(of_gate, gate, grad_input=of_gate)
    torch.ops.aten.silu.out(gate, out=of_up)
    of_up.mul_(gradient)
    return result


class SwiGLU(torch.autograd.Function):
    """SwiGLU as an autograd function; saves its input."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor) -> Tensor:
        """SwiGLU's output, ``silu(gate) * up`` of the two halves of the last dimension."""
        ctx.save_for_backward(gate_and_up)
        return swiglu(gate_and_up)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """The gradients of SwiGLU's gate and up projection."""
        return swiglu_backward(gradient, *ctx.saved_tensors)


@operator(changes=("heads",))
def rotate_(heads: Tensor, cosine: Tensor, sine: Tensor) -> None:
    """Rotary embedding in place: rotate pairs of the first channels of each head by the angle of
    the token's position. ``heads`` is (batch, sequence, heads, channels).

    The tables are (sequence, rotated channels / 2). Further channels are unchanged.
    """
    if kernels := kernels_for(heads):
        kernels.rotate_(heads, cosine, sine)
        return
    half = cosine.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    cosine, sine = cosine[:, None].to(heads.dtype), sine[:, None].to(heads.dtype)
    turned = (first * cosine).addcmul_(second, sine, value=-1)
    second.mul_(cosine).addcmul_(first, sine)
    first.copy_(turned)


class Rotary(torch.autograd.Function):
    """Autograd function of rotary position embedding, applied in place to the first heads of a
    projection.
    """

    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        cosine: Tensor,
        sine: Tensor,
        shape: tuple[Any, ...],
        rotated: Any,
    ) -> Tensor:
        """Rotate the first ``rotated`` heads of ``projection``, viewed as ``shape`` (B, S, H,
        D).
        """
        ctx.mark_dirty(projection)
        ctx.save_for_backward(cosine, sine)
        ctx.shape, ctx.rotated = shape, rotated
        rotate_(projection.view(shape)[:, :, :rotated], cosine, sine)
        return projection

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None, None]:
        """The gradient of the projection: rotated heads are rotated back by the same angles, in
        place.
        """
        cosine, sine = ctx.saved_tensors
        turned = gradient.clone()
        rotate_(turned.view(ctx.shape)[:, :, : ctx.rotated], cosine, -sine)
        return turned, None, None, None, None


class RotaryByPosition(torch.autograd.Function):
    """``Rotary`` for tokens at any positions (B, S); saves the whole tables and the positions."""

    @staticmethod
    def forward(
        ctx: Any,
        projection: Tensor,
        cosine: Tensor,
        sine: Tensor,
        positions: Tensor,
        shape: tuple[Any, ...],
        rotated: Any,
    ) -> Tensor:
        """Rotate the first ``rotated`` heads of ``projection``, viewed as ``shape``."""
        ctx.mark_dirty(projection)
        ctx.save_for_backward(cosine, sine)
        ctx.positions, ctx.shape, ctx.rotated = positions, (1, -1, *shape[2:]), rotated
        places = positions.flatten()
        rotate_(projection.view(ctx.shape)[:, :, :rotated], cosine[places], sine[places])
        return projection

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None, None, None]:
        """The gradient of the projection: rotated heads are rotated back, each token by the angles
        of its position.
        """
        cosine, sine = ctx.saved_tensors
        places = ctx.positions.flatten()
        turned = gradient.clone(memory_format=torch.contiguous_format)
        rotate_(turned.view(ctx.shape)[:, :, : ctx.rotated], cosine[places], -sine[places])
        return turned, None, None, None, None, None


@operator("scores", changes=("scores",))
def causal_softmax(scores: Tensor, sequence: int) -> Tensor:
    """Softmax of attention scores (.., S) over the key positions up to the query's own position.
    Rows are in order of query position. The scores of future positions may be overwritten.
    """
    if sequence <= LONGEST_ROW and (kernels := kernels_for(scores)):
        return kernels.causal_softmax(scores, sequence)
    _hide_future(scores.view(-1, sequence, sequence))
    return torch.softmax(scores, dim=-1)


def _hide_future(scores: Tensor) -> None:
    """Set the scores (.., S, S) of key positions after the query's position to minus infinity.

    The upper right quarter of the whole square is filled without being read. The same happens in
    the two squares left on the diagonal, and so on, ``HALVINGS`` times. Only the small squares that
    remain on the diagonal are masked, which reads and writes them.
    """
    size, squares = scores.shape[-1], 1
    while squares < 2**HALVINGS and size % 2 == 0:
        size //= 2
        _squares(scores, squares, 2 * size, size)[..., size:].fill_(-math.inf)
        squares *= 2
    future = scores.new_ones(size, size, dtype=torch.bool).triu_(1)
    _squares(scores, squares, size, size).masked_fill_(future, -math.inf)


def _squares(scores: Tensor, count: int, size: int, rows: int) -> Tensor:
    """A view (.., count, rows, size) of the first ``rows`` rows of each of the ``count`` square
    blocks on the diagonal of a matrix.
    """
    whole = scores.shape[-1]
    strides = (whole * whole, size * (whole + 1), whole, 1)
    return scores.as_strided((len(scores), count, rows, size), strides, scores.storage_offset())


@operator("shares")
def causal_softmax_backward(gradient: Tensor, shares: Tensor) -> Tensor:
    """Gradient of ``causal_softmax``; probabilities of future positions are already zero."""
    of_scores: Tensor = torch.ops.aten._softmax_backward_data(gradient, shares, -1, shares.dtype)
    return of_scores


class CausalSoftmax(torch.autograd.Function):
    """Causal softmax as an autograd function; saves only its output."""

    @staticmethod
    def forward(ctx: Any, scores: Tensor, sequence: Any, others: Tensor | None = None) -> Tensor:
        """Attention probabilities (.., S) of ``scores`` (.., S). Scores of future positions, and of
        tokens that ``others`` (B, S, S) marks, are overwritten by minus infinity.
        """
        if others is not None:
            hide(scores, others)
        shares = causal_softmax(scores, sequence)
        ctx.save_for_backward(shares)
        return shares

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None]:
        """The gradient of attention scores, from that of their causal softmax."""
        (shares,) = ctx.saved_tensors
        return causal_softmax_backward(gradient, shares), None, None


def hide(scores: Tensor, others: Tensor) -> None:
    """Set the scores (.., S, S) where ``others`` (B, S, S) is true for the sequence to minus
    infinity.
    """
    batch, size, _ = others.shape
    scores.view(batch, -1, size, size).masked_fill_(others[:, None], -math.inf)


# Cross entropy per token in one pass over the logits, and the gradient, in place, in a second pass.
#
# With torch's operators (``runtime.models.parallel.VocabularyCrossEntropy``) cross entropy takes
# nine to twelve passes, and two tensors of the logits' size at a time. Here the first pass computes
# each token's largest logit, the sum of exponentials and the target's logit; the second overwrites
# the logits with their gradient. Accumulation is in 32 bits. With Triton each pass is one kernel.


# The number of logits that torch processes at a time where there is no Triton kernel: about as many
# as fit in a CPU's cache.
LOGITS_TOGETHER = 2**18
# The rows of the first pass's result: each token's largest logit, sum of exponentials, and logit at
# the target.
LARGEST, TOTAL, AT_TARGET = range(3)


@operator(changes=("sums",))
def sum_rows(sums: Tensor, logits: Tensor, targets: Tensor, first: int, used: int) -> None:
    """For each token its largest logit, the sum of exponentials of the differences to the largest,
    and the target's logit, written to ``sums`` (3, tokens; 32 bits).

    ``logits`` (tokens, columns) belong to this rank's part of the vocabulary: the columns from
    token ``first`` on, ``used`` of which are not padding. For a target on another rank the logit is
    0.
    """
    if kernels := kernels_for(logits):
        kernels.sum_rows(sums, logits, targets, first, used)
        return
    if not used:
        sums.zero_()[LARGEST] = -torch.inf
        return
    local = targets - first
    here = (local >= 0) & (local < used)
    local = local.where(here, 0)
    for rows in _parts(logits):
        wide = logits[rows, :used].float()
        largest = sums[LARGEST, rows] = wide.amax(-1)
        sums[AT_TARGET, rows] = wide.gather(-1, local[rows, None])[:, 0] * here[rows]
        sums[TOTAL, rows] = (wide - largest[:, None]).exp_().sum(-1)


@operator(changes=("logits",))
def to_gradient_(
    logits: Tensor, gradient: Tensor, totals: Tensor, targets: Tensor, first: int, used: int
) -> None:
    """Overwrite logits with the gradient of the losses: each token's probabilities, minus 1 at the
    target, times ``gradient``.

    ``totals`` are each token's log-sum-exp over all ranks; other arguments are as in ``sum_rows``.
    """
    if kernels := kernels_for(logits):
        kernels.to_gradient_(logits, gradient, totals, targets, first, used)
        return
    columns = torch.arange(first, first + used, device=logits.device)
    for rows in _parts(logits):
        part = logits[rows, :used]
        shares = (part - totals[rows, None]).exp_()
        shares.sub_((targets[rows, None] == columns).float())
        part.copy_(shares.mul_(gradient[rows, None]))
    logits[:, used:] = 0


def _parts(logits: Tensor) -> list[slice]:
    rows, columns = logits.shape
    step = max(1, LOGITS_TOGETHER // columns)
    return [slice(begin, begin + step) for begin in range(0, rows, step)]


# Normalisations over the last dimension of a tensor.


class LayerNorm(nn.Module):
    """LayerNorm: zero mean and unit variance, with weight and bias."""

    def __init__(self, width: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.width, self.epsilon = width, NORM_EPSILON
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(width, dtype=dtype))
        # A function that replaces torch's LayerNorm; None for torch's.
        self.normalise: Callable[[Tensor, LayerNorm], Tensor] | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Normalise to zero mean and unit variance over the last dimension (LayerNorm)."""
        if self.normalise is not None:
            return self.normalise(x, self)
        return nn.functional.layer_norm(x, (self.width,), self.weight, self.bias, self.epsilon)


class RMSNorm(nn.Module):
    """RMSNorm: unit root mean square, with a weight."""

    def __init__(self, width: Size, dtype: torch.dtype) -> None:
        super().__init__()
        self.epsilon = NORM_EPSILON
        self.weight = nn.Parameter(torch.empty(width, dtype=dtype))

    def forward(self, x: Tensor) -> Tensor:
        """Normalise to unit root mean square over the last dimension (RMSNorm)."""
        normal: Tensor = RMSNormed.apply(x, self.weight, self.epsilon)[0]
        return normal


class HeadNorm(RMSNorm):
    """RMSNorm per head. Every tensor-parallel rank holds the whole weight; its gradient comes from
    this rank's heads only, and must be summed over the ranks.
    """


def add_in_norms(module: nn.Module, epsilon: float) -> None:
    """Set ``epsilon`` of all norms in a module."""
    for norm in module.modules():
        if isinstance(norm, LayerNorm | RMSNorm):
            norm.epsilon = epsilon
