"""Written-out attention without copies: its products read and write heads where they lie.

A batched product needs its matrices at a constant stride. In the tensor of queries, keys and
values, and in the layer's output, the heads of one sequence lie at a constant stride, but the heads
of several sequences do not. So there is one product for each sequence, and operands, results and
gradients need no copies. This works only if each head has keys and values of its own.

Axes: B batch, S sequence, H the rank's heads, D channels a head.
"""

import math
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.attention import Attention
from runtime.models.config import ModelConfig
from runtime.models.operators import causal_softmax, causal_softmax_backward


class _InPlace(torch.autograd.Function):
    """Attention (B, S, H, D) of queries, keys and values (B, S, 3 H, D).

    Keeps its input and the shares (B, H, S, S).
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor) -> Tensor:
        query, key, value = _by_head(qkv).chunk(3, dim=1)
        scores = _product(query, key.mT, _factor(qkv))
        size = scores.shape[-1]
        shares = causal_softmax(scores.view(-1, size, size), size).view_as(scores)
        ctx.save_for_backward(qkv, shares)
        mixed = torch.empty_like(qkv[:, :, : query.shape[1]], memory_format=torch.contiguous_format)
        _product(shares, value, out=_by_head(mixed))
        return mixed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        qkv, shares = ctx.saved_tensors
        query, key, value = _by_head(qkv).chunk(3, dim=1)
        of_qkv = torch.empty_like(qkv)
        of_query, of_key, of_value = _by_head(of_qkv).chunk(3, dim=1)
        of_mixed = _by_head(gradient)
        _product(shares.mT, of_mixed, out=of_value)
        of_scores = causal_softmax_backward(_product(of_mixed, value.mT), shares)
        _product(of_scores, key, _factor(qkv), out=of_query)
        _product(of_scores.mT, query, _factor(qkv), out=of_key)
        return of_qkv


def attend_in_place(qkv: Tensor, of: Attention) -> Tensor:
    """Written-out attention without dropout, with as many heads of keys as of queries."""
    mixed: Tensor = _InPlace.apply(qkv)
    return mixed


def let_attend_in_place(module: nn.Module) -> None:
    """Let a module's written-out attention work without copies, if its heads share no keys."""
    for one in module.modules():
        if isinstance(one, Attention) and _is_written_out(one.config):
            one.attend = attend_in_place


def _is_written_out(config: ModelConfig) -> bool:
    is_plain = config.heads == config.kv_heads and not config.dropout
    return config.attention == "math" and is_plain


def _by_head(x: Tensor) -> Tensor:
    return x.transpose(1, 2)


def _factor(qkv: Tensor) -> float:
    return 1 / math.sqrt(qkv.shape[-1])


def _product(left: Tensor, right: Tensor, factor: float = 1.0, out: Tensor | None = None) -> Tensor:
    """``factor * left @ right`` of tensors of four dimensions, one sequence after another."""
    if out is None:
        out = left.new_empty(*left.shape[:-1], right.shape[-1])
    for one, other, result in zip(left, right, out, strict=True):
        result.baddbmm_(one, other, beta=0.0, alpha=factor)
    return out
