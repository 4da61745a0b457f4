"""Fused causal attention with sliding windows, sinks, and values of another width than keys.

PyTorch's fused attention has none of the three on every device. A trace sees one operator, which
keeps what a fused GPU kernel keeps: its operands, its result, and one number for each query.

Axes: B batch, S sequence, H query heads, K key and value heads, D channels of queries and keys, C
channels of values.
"""

import math
from typing import Any

import torch
from torch import Tensor

from runtime.models.ranks import operator


@torch.library.custom_op("mistlab::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """Attention (B, S, H, C), and each query's log-sum-exp (B, H, S).

    A token attends to the last ``window`` tokens, itself included; 0 stands for all tokens so far.
    A head's sink is one more score in its sum, without a value.
    """
    scores = _scores(query, key, window)
    total = scores.logsumexp(-1)
    if sinks is not None:
        total = torch.logaddexp(total, sinks.float()[:, None])
    shares = (scores - total[..., None]).exp()
    mixed = torch.einsum("bhst,bthc->bshc", shares, _repeated(value, query).float())
    return mixed.to(value.dtype).contiguous(), total


@attention.register_fake
def _(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, _ = query.shape
    return (
        query.new_empty((batch, sequence, heads, value.shape[-1])),
        query.new_empty((batch, heads, sequence), dtype=torch.float32),
    )


@operator("query", "key", "value")
def attention_backward(
    gradient: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mixed: Tensor,
    total: Tensor,
    window: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values; the scores are recomputed."""
    shares = (_scores(query, key, window) - total[..., None]).exp()
    of_mixed, keys, values = gradient.float(), _repeated(key, query), _repeated(value, query)
    of_shares = torch.einsum("bshc,bthc->bhst", of_mixed, values.float())
    of_total = (of_mixed * mixed.float()).sum(-1).transpose(1, 2)
    of_scores = shares * (of_shares - of_total[..., None]) / math.sqrt(query.shape[-1])
    of_query = torch.einsum("bhst,bthd->bshd", of_scores, keys.float())
    of_key = torch.einsum("bhst,bshd->bthd", of_scores, query.float())
    of_value = torch.einsum("bhst,bshc->bthc", shares, of_mixed)
    return of_query.to(query.dtype), _summed(of_key, key), _summed(of_value, value)


@operator("sinks")
def sinks_backward(gradient: Tensor, mixed: Tensor, sinks: Tensor, total: Tensor) -> Tensor:
    """The gradient of the attention sinks (H)."""
    of_total = (gradient.float() * mixed.float()).sum(-1).transpose(1, 2)
    shares = (sinks.float()[:, None] - total).exp()
    return -(shares * of_total).sum((0, 2)).to(sinks.dtype)


class WideAttention(torch.autograd.Function):
    """Fused attention of queries (B, S, H, D) on keys (B, S, K, D) and values (B, S, K, C) of
    another width.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int
    ) -> Tensor:
        """The output (B, S, H, C)."""
        mixed, total = attention(query, key, value, sinks, window)
        ctx.save_for_backward(query, key, value, sinks, mixed, total)
        ctx.window = window
        return mixed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None]:
        """The gradients of queries, keys, values and sinks."""
        query, key, value, sinks, mixed, total = ctx.saved_tensors
        made = attention_backward(gradient, query, key, value, mixed, total, ctx.window)
        of_sinks = None if sinks is None else sinks_backward(gradient, mixed, sinks, total)
        return *made, of_sinks, None


def _scores(query: Tensor, key: Tensor, window: int) -> Tensor:
    """The scaled scores (B, H, S, S) of attention in 32 bits; masked ones are -inf."""
    sequence, channels = query.shape[1], query.shape[-1]
    scores = torch.einsum("bshd,bthd->bhst", query.float(), _repeated(key, query).float())
    positions = torch.arange(sequence, device=query.device)
    behind = positions[:, None] - positions
    hidden = (behind < 0) | (behind >= (window or sequence))
    return (scores / math.sqrt(channels)).masked_fill_(hidden, -math.inf)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values (B, S, H, ..) repeated for each query head."""
    return shared.repeat_interleave(query.shape[2] // shared.shape[2], dim=2)


def _summed(of_heads: Tensor, shared: Tensor) -> Tensor:
    """The gradient of shared keys or values, summed over the query heads that share them."""
    groups = of_heads.unflatten(2, (shared.shape[2], -1))
    return groups.sum(3).to(shared.dtype)
