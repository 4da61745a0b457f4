"""Fused causal attention with sliding windows, attention sinks, values wider or narrower than keys,
or packed documents.

PyTorch's fused attention supports these four on some devices only. A trace records one operator,
which saves what a fused GPU kernel saves: its operands, its result, and a number per query.

Axes: B batch, S sequence, H query heads, K key and value heads, D channels of queries and keys, C
channels of values.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Self

import torch
from torch import Tensor

from runtime.models.ranks import operator


@torch.library.custom_op("mistlab::attention", mutates_args=())
def attention(
    query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int
) -> tuple[Tensor, Tensor]:
    """Attention (B, S, H, C), and each query's log-sum-exp (B, H, S).

    A token attends to the last ``window`` tokens, itself included; 0 stands for all tokens so far.
    A head's sink is a further score in the softmax's sum, without a value.
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
    """The gradient of the attention sinks, one per head (H)."""
    of_total = (gradient.float() * mixed.float()).sum(-1).transpose(1, 2)
    shares = (sinks.float()[:, None] - total).exp()
    return -(shares * of_total).sum((0, 2)).to(sinks.dtype)


class WideAttention(torch.autograd.Function):
    """Autograd function of fused attention of queries (B, S, H, D) to keys (B, S, K, D) and values
    (B, S, K, C) of another width.
    """

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, sinks: Tensor | None, window: int
    ) -> Tensor:
        """The output (B, S, H, C) of fused attention with values of width C."""
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
    """The gradient of keys or values, summed over the query heads that share them."""
    groups = of_heads.unflatten(2, (shared.shape[2], -1))
    return groups.sum(3).to(shared.dtype)


# Documents packed into sequences: a token attends only within its document, and positions restart
# in each document.
#
# Axes: T tokens of all sequences of a micro-batch, N tokens of a document.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Documents:
    """The documents packed into a micro-batch's sequences: their ``lengths`` in order, each token's
    position in its document (B, S), and the index (among T) of each document's first token,
    followed by T.

    The micro-batch's mean loss, over all positions and with 0 for positions without a target, is
    multiplied by ``weight``, so that the mean over micro-batches is that over a step's targets.
    """

    lengths: Sequence[int]
    positions: Tensor
    begins: Tensor
    weight: float = 1.0

    @classmethod
    def of(cls, rows: Sequence[Sequence[int]]) -> Self:
        """The documents of a micro-batch, from the lengths of the documents that fill each
        sequence.
        """
        lengths = [length for row in rows for length in row]
        positions = torch.cat([torch.arange(length) for length in lengths])
        begins = torch.tensor([*accumulate(lengths, initial=0)], dtype=torch.int32)
        return cls(lengths=lengths, positions=positions.view(len(rows), -1), begins=begins)

    def others(self) -> Tensor:
        """Whether a token is in another document than the query (B, S queries, S tokens)."""
        numbers = (self.positions == 0).cumsum(1)
        return numbers[:, :, None] != numbers[:, None]


@dataclass(slots=True, eq=False)
class CurrentDocuments:
    """The documents of a step's micro-batches, and ``now``, the documents of the micro-batch that a
    rank's layers compute (None for whole sequences).
    """

    of_step: Sequence[Documents] = ()
    now: Documents | None = None

    def select(self, number: int) -> None:
        """Say that the rank's layers now compute the micro-batch with this number."""
        self.now = self.of_step[number] if self.of_step else None

    @property
    def weight(self) -> float:
        """The factor of the current micro-batch's mean loss."""
        return 1.0 if self.now is None else self.now.weight

    def weighed(self, loss: Tensor) -> Tensor:
        """The current micro-batch's mean loss, multiplied by its weight."""
        return loss if self.now is None else loss * self.now.weight


class DocumentAttention(torch.autograd.Function):
    """Fused causal attention within documents, as an autograd function; saves the same tensors as
    for whole sequences.

    On a GPU plain attention is FlashAttention-2's kernel for sequences of unequal lengths; on a CPU
    a kernel runs document by document. With sinks or a window ``attention`` runs document by
    document.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sinks: Tensor | None,
        window: int,
        documents: Documents,
    ) -> Tensor:
        """The output (B, S, H, D) of causal attention within documents."""
        ctx.documents, ctx.window, ctx.random = documents, window, ()
        ctx.is_plain = sinks is None and not window
        flat = [one.flatten(0, 1) for one in (query, key, value)]
        if ctx.is_plain and query.is_cuda:
            mixed, total, *ctx.random = _varied(flat, documents)
        else:
            mixed = torch.empty_like(flat[0], memory_format=torch.contiguous_format)
            total = query.new_empty((query.shape[2], len(mixed)), dtype=torch.float32)
            for span in _spans(documents):
                parts = [one[None, span] for one in flat]
                made, sums = _by_cpu(parts) if ctx.is_plain else attention(*parts, sinks, window)
                mixed[span], total[:, span] = made[0], sums[0]
        ctx.save_for_backward(query, key, value, sinks, mixed, total)
        return mixed.view(query.shape)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None, None, None]:
        """The gradients of queries, keys and values of attention within documents."""
        *operands, sinks, mixed, total = ctx.saved_tensors
        flat = [one.flatten(0, 1) for one in (gradient, *operands)]
        made = DocumentAttention._gradients(ctx, flat, mixed, total)
        of_query, of_key, of_value = (
            one.view(operand.shape) for one, operand in zip(made, operands, strict=True)
        )
        of_sinks = None
        if sinks is not None:
            of_sinks = sinks_backward(flat[0][None], mixed[None], sinks, total[None])
        return of_query, of_key, of_value, of_sinks, None, None

    @staticmethod
    def _gradients(
        ctx: Any, flat: Sequence[Tensor], mixed: Tensor, total: Tensor
    ) -> Sequence[Tensor]:
        """The gradients of queries, keys and values (T, .., D). ``flat`` has the output's gradient,
        then the operands.
        """
        if ctx.random:
            return _varied_gradients(flat, mixed, total, ctx.random, ctx.documents)
        whole = [torch.empty_like(one, memory_format=torch.contiguous_format) for one in flat[1:]]
        for span in _spans(ctx.documents):
            parts, sums = [one[None, span] for one in (*flat, mixed)], total[None, :, span]
            if ctx.is_plain:
                made = _by_cpu_backward(parts, sums)
            else:
                gradient, query, key, value, output = parts
                made = attention_backward(gradient, query, key, value, output, sums, ctx.window)
            for result, part in zip(whole, made, strict=True):
                result[span] = part[0]
        return whole


def within_documents(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    documents: Documents,
    sinks: Tensor | None = None,
    window: int = 0,
) -> Tensor:
    """Fused causal attention (B, S, H, D) of queries to the keys and values of their own
    documents.
    """
    mixed: Tensor = DocumentAttention.apply(query, key, value, sinks, window, documents)
    return mixed


def _spans(documents: Documents) -> list[slice]:
    """For each document of a micro-batch, the slice of its tokens."""
    return [slice(*ends) for ends in pairwise(accumulate(documents.lengths, initial=0))]


def _by_cpu(operands: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """The output (1, N, H, D) of the CPU's attention kernel for one document, and each query's
    log-sum-exp (1, H, N).
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    made, total = kernel(*(one.transpose(1, 2) for one in operands), 0.0, True)
    return made.transpose(1, 2), total


def _by_cpu_backward(parts: Sequence[Tensor], total: Tensor) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values of one document by the CPU's kernel. ``parts`` has
    the output's gradient, the operands and the output.
    """
    kernel = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    made = kernel(*(one.transpose(1, 2) for one in parts), total, 0.0, True)
    return tuple(one.transpose(1, 2) for one in made)


def _bounds(documents: Documents) -> tuple[Any, ...]:
    """The arguments of FlashAttention-2 that describe documents: where they begin, and the longest
    length, each once for queries and once for keys.
    """
    longest = max(documents.lengths)
    return documents.begins, documents.begins, longest, longest, 0.0, True


def _varied(operands: Sequence[Tensor], documents: Documents) -> tuple[Tensor, ...]:
    """The output (T, H, D) of FlashAttention-2 for documents of unequal lengths, each query's
    log-sum-exp (H, T), and the state of its random numbers.
    """
    made = torch.ops.aten._flash_attention_forward(*operands, *_bounds(documents), False)
    return tuple(made[:4])


def _varied_gradients(
    operands: Sequence[Tensor],
    mixed: Tensor,
    total: Tensor,
    random: Sequence[Tensor],
    documents: Documents,
) -> tuple[Tensor, ...]:
    """The gradients of queries, keys and values by FlashAttention-2. ``operands`` has the output's
    gradient first.
    """
    made = torch.ops.aten._flash_attention_backward(
        *operands, mixed, total, *_bounds(documents), *random
    )
    return tuple(made)
