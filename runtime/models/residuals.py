"""Operators that add the output of a branch (attention or feed-forward network) to the residual
stream and normalise the sum.

The bias, the dropout and the residual sum of a branch are one operator; where a norm follows the
sum, the operator computes the norm too. The backward operator of a norm also adds the gradient that
arrives through the residual. On GPUs with Triton each operator is one kernel
(``runtime.models.kernels``); elsewhere it calls several operators of torch. For the backward pass
they save the tensors that unfused sums and norms would save.
"""

# ruff: noqa: PLR0913, PLR0917

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.dropout import Drop, dropped, hashes_of_rows, threshold_of
from runtime.models.operators import LayerNorm, RMSNorm, kernels_for, rms_norm, rms_norm_backward
from runtime.models.ranks import bare, direct

_layer_norm_backward = torch.ops.aten.native_layer_norm_backward.default

# The number of columns of the widest row that a norm kernel holds; wider rows are added and
# normalised by separate kernels.
WIDEST = 8192


# The dropout arguments of an operator: row numbers (None without dropout), the share that is
# dropped, and the keys by which rows and columns are hashed.
_Drawn = tuple[Tensor | None, float, int, int]


def _drawn(drop: Drop | None, x: Tensor) -> _Drawn:
    if drop is None:
        return None, 0.0, 0, 0
    return drop.rows.numbers(x.shape[0]), drop.share, *drop.rows.key


def _sum(x: Tensor, part: Tensor, bias: Tensor | None, drawn: _Drawn) -> Tensor:
    rows, share, *key = drawn
    if bias is None and rows is None:
        return x + part
    whole = part if bias is None else part + bias
    if rows is not None:
        whole = dropped(whole, rows, share, (key[0], key[1]))
    return whole.add_(x)


def _for_kernels(drawn: _Drawn) -> tuple[Tensor, int, int, float] | None:
    rows, share, of_rows, of_columns = drawn
    if rows is None:
        return None
    hashes = hashes_of_rows(rows.reshape(-1), (of_rows, of_columns))
    return hashes, of_columns, threshold_of(share), 1 / (1 - share)


def _add_part(
    x: Tensor,
    part: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    share: float,
    row_key: int,
    column_key: int,
) -> Tensor:
    """The residual ``x`` plus ``part``, the output of a branch, after its bias and dropout."""
    drawn = (rows, share, row_key, column_key)
    if kernels := kernels_for(x):
        made: Tensor = kernels.added(x, part, bias, _for_kernels(drawn))
        return made
    return _sum(x, part, bias, drawn)


_add_part_operator = torch.library.custom_op("mistlab::add_part", _add_part, mutates_args=())
add_part = direct(_add_part_operator, _add_part)


@_add_part_operator.register_fake
def _(x: Tensor, *_: Any) -> Tensor:
    return x.new_empty(x.shape)


def _add_part_and_norm(
    x: Tensor,
    part: Tensor,
    bias: Tensor | None,
    rows: Tensor | None,
    share: float,
    row_key: int,
    column_key: int,
    weight: Tensor,
    shift: Tensor | None,
    epsilon: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The residual sum of ``_add_part``, its norm, and each row's mean and reciprocal standard
    deviation. Without ``shift`` the norm is RMSNorm, which has a reciprocal root mean square
    instead.
    """
    drawn = (rows, share, row_key, column_key)
    if x.shape[-1] <= WIDEST and (kernels := kernels_for(x)):
        made: tuple[Tensor, Tensor, Tensor, Tensor] = kernels.added_and_normed(
            *(x, part, bias, _for_kernels(drawn), weight, shift, epsilon)
        )
        return made
    whole = _sum(x, part, bias, drawn)
    return whole, *_norm(whole, weight, shift, epsilon)


def _norm(
    x: Tensor, weight: Tensor, shift: Tensor | None, epsilon: float
) -> tuple[Tensor, Tensor, Tensor]:
    if shift is None:
        normal, reciprocal = rms_norm(x, weight, epsilon)
        return normal, x.new_empty(0), reciprocal
    normal, mean, reciprocal = torch.native_layer_norm(x, (x.shape[-1],), weight, shift, epsilon)
    return normal, mean, reciprocal


_norm_operator = torch.library.custom_op(
    "mistlab::add_part_and_norm", _add_part_and_norm, mutates_args=()
)
add_part_and_norm = direct(_norm_operator, _add_part_and_norm)


@_norm_operator.register_fake
def _(x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
    has_mean, rows = arguments[-2] is not None, (*x.shape[:-1], 1)
    wide = x.new_empty(rows, dtype=torch.float32)
    mean = torch.empty_like(wide) if has_mean else x.new_empty(0)
    return x.new_empty(x.shape), x.new_empty(x.shape), mean, wide


def _norm_and_add_backward(
    gradient: Tensor,
    x: Tensor,
    mean: Tensor | None,
    reciprocal: Tensor,
    weight: Tensor,
    shift: Tensor | None,
    residual: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a norm's input (plus the ``residual`` gradient), weight and bias. RMSNorm
    has no bias: an empty tensor stands for its gradient.
    """
    if x.shape[-1] <= WIDEST and (kernels := kernels_for(x)):
        gradients: tuple[Tensor, Tensor, Tensor] = kernels.norm_backward(
            *(gradient, x, reciprocal if mean is None else mean, reciprocal, weight, residual),
            centers=mean is not None,
        )
        return gradients
    if mean is None:
        of_x, of_weight = rms_norm_backward(gradient, x, reciprocal, weight)
        of_shift = x.new_empty(0)
    else:
        of_x, of_weight, of_shift = _layer_norm_backward(
            *(gradient, x, (x.shape[-1],), mean, reciprocal, weight, shift), (True, True, True)
        )
    if residual is not None:
        of_x.add_(residual)
    return of_x, of_weight, of_shift


_backward_operator = torch.library.custom_op(
    "mistlab::norm_and_add_backward", _norm_and_add_backward, mutates_args=()
)
norm_and_add_backward = direct(_backward_operator, _norm_and_add_backward)


@_backward_operator.register_fake
def _(gradient: Tensor, x: Tensor, mean: Tensor | None, *others: Any) -> tuple[Tensor, ...]:
    _, weight, *_ = others
    of_shift = x.new_empty(0) if mean is None else weight.new_empty(weight.shape)
    return x.new_empty(x.shape), weight.new_empty(weight.shape), of_shift


# Autograd functions that add a branch to the residual or normalise it, by the operators above.


class AddedPart(torch.autograd.Function):
    """Autograd function that adds a branch's output, after bias and dropout, to ``x``; saves no
    tensor.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, part: Tensor, bias: Tensor | None, drop: Drop | None
    ) -> Tensor:
        """The residual ``x`` plus a branch with its bias and dropout."""
        ctx.drop = drop
        return add_part(x, part, bias, *_drawn(drop, part))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        """The gradients of the residual, the branch and the bias."""
        (gradient,) = gradients
        of_part, of_bias = _of_part(ctx, gradient)
        return gradient, of_part, of_bias, None


class NormOfSum(torch.autograd.Function):
    """Autograd function that adds a branch's output to ``x``, and normalises the sum; saves the
    sum, and each row's mean and reciprocal deviation (RMSNorm: only the latter).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        part: Tensor,
        bias: Tensor | None,
        drop: Drop | None,
        weight: Tensor,
        shift: Tensor | None,
        epsilon: float,
    ) -> tuple[Tensor, Tensor]:
        """The residual plus a branch's output after its bias and dropout, and the norm of this
        sum.
        """
        ctx.drop = drop
        drawn = _drawn(drop, part)
        whole, normal, mean, reciprocal = add_part_and_norm(
            x, part, bias, *drawn, weight, shift, epsilon
        )
        ctx.set_materialize_grads(False)
        _keep(ctx, whole, mean, reciprocal, weight, shift)
        return whole, normal

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_whole: Tensor | None, of_normal: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the residual, the branch, its bias, and the norm's weight and bias."""
        of_x, of_weight, of_shift = _of_norm(ctx, of_normal, of_whole)
        of_part, of_bias = _of_part(ctx, of_x)
        return of_x, of_part, of_bias, None, of_weight, of_shift, None


class NormBeside(torch.autograd.Function):
    """Autograd function that returns the residual unchanged, and its norm; saves the residual, and
    each row's mean and reciprocal deviation (RMSNorm: only the latter).
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, shift: Tensor | None, epsilon: float
    ) -> tuple[Tensor, Tensor]:
        """The residual unchanged, and its norm."""
        normal, mean, reciprocal = _norm(x, weight, shift, epsilon)
        ctx.set_materialize_grads(False)
        _keep(ctx, x, mean, reciprocal, weight, shift)
        return x.view_as(x), normal

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_x: Tensor | None, of_normal: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Gradients of the residual, and of the norm's weight and bias."""
        return *_of_norm(ctx, of_normal, of_x), None


def _of_part(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor | None]:
    """The gradients of a branch and of its bias, from the gradient of the sum."""
    of_part = gradient if ctx.drop is None else ctx.drop.of(gradient)
    if not ctx.needs_input_grad[2]:
        return of_part, None
    return of_part, of_part.sum(tuple(range(of_part.dim() - 1)))


def _keep(
    ctx: Any, x: Tensor, mean: Tensor, reciprocal: Tensor, weight: Tensor, shift: Tensor | None
) -> None:
    """Save a norm's input and row statistics for the backward pass. The norm's weight and bias are
    not saved: the backward pass reads them from ``ctx``, wherever their storage is by then.
    """
    ctx.weight, ctx.shift = weight, shift
    if shift is None:
        ctx.save_for_backward(x, reciprocal)
    else:
        ctx.save_for_backward(x, mean, reciprocal)


def _of_norm(
    ctx: Any, of_normal: Tensor, residual: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """The gradients of a norm's input (plus the ``residual`` gradient), and of its weight and bias;
    None for a vector that is absent or not trained.
    """
    x, *mean, reciprocal = ctx.saved_tensors
    of_x, of_weight, of_shift = norm_and_add_backward(
        *(of_normal, x, mean[0] if mean else None, reciprocal, ctx.weight, ctx.shift, residual)
    )
    *_, wants_weight, wants_shift, _ = ctx.needs_input_grad
    return of_x, of_weight if wants_weight else None, of_shift if wants_shift else None


# The functions for residual sums and norms that a transformer block calls.

_add, _add_and_norm, _norm_beside = map(bare, (AddedPart, NormOfSum, NormBeside))


def added(x: Tensor, part: Tensor, bias: Tensor | None, drop: Drop | None) -> Tensor:
    """The residual plus a branch with its bias and dropout."""
    if bias is None and drop is None:
        return x + part
    made: Tensor = _add(x, part, bias, drop)
    return made


def added_and_normed(
    x: Tensor, part: Tensor, bias: Tensor | None, drop: Drop | None, norm: nn.Module
) -> tuple[Tensor, Tensor]:
    """The residual plus a branch, and the norm of this sum."""
    made: tuple[Tensor, Tensor] = _add_and_norm(x, part, bias, drop, *_vectors(norm))
    return made


def normed_beside(x: Tensor, norm: nn.Module) -> tuple[Tensor, Tensor]:
    """The residual unchanged, and its norm. The norm's backward pass adds the residual's gradient
    to that of the norm's input.
    """
    made: tuple[Tensor, Tensor] = _norm_beside(x, *_vectors(norm))
    return made


def _vectors(norm: nn.Module) -> tuple[Tensor, Tensor | None, float]:
    if isinstance(norm, LayerNorm):
        return norm.weight, norm.bias, norm.epsilon
    assert isinstance(norm, RMSNorm)
    return norm.weight, None, norm.epsilon


def is_plain(norm: nn.Module) -> bool:
    """Whether a norm is torch's LayerNorm or RMSNorm without a function of its own that normalises,
    so that it may be fused with the addition before it.
    """
    return not isinstance(norm, LayerNorm) or norm.normalise is None
