"""Attention over sequences that are split over context-parallel ranks: by a ring, by gathering keys
and values, or by exchanging tokens for heads.

A sequence is cut into two chunks for each rank. Of N ranks, rank r has chunks r and 2 N - 1 - r, so
that causal attention is equal work for all ranks. The first half of a rank's tokens comes before
the second half in the sequence. A chunk of another rank comes entirely before or entirely after
each of these halves, so attention to other ranks' keys needs no mask; attention to a rank's own
keys is causal.

Axes: B batch, S tokens of a rank, H query heads, K key and value heads, D channels of queries and
keys, C channels of values, N ranks.
"""

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from mistlab.schedule.context_ways import GATHER, RING
from runtime.models.ranks import Carried

# Attention of a rank's queries to part of the keys of their sequence.
#
# ``mixed`` (B, S, H, C) is the output, ``sums`` (B, H, S) the log-sum-exp of each query's scores.
# With both, the attention to several sets of keys can be combined, and the gradients of each part
# follow from ``mixed`` and ``sums`` of the attention to all keys.


def attended(query: Tensor, key: Tensor, value: Tensor, *, causal: bool) -> tuple[Tensor, Tensor]:
    """Attention of queries (B, S, H, D) to keys and values: the output ``mixed`` (B, S, H, C), and
    the log-sum-exp ``sums`` (B, H, S) of each query's scores.
    """
    if not _has_kernel(query, value):
        return _written_out(query, key, value, causal=causal)
    heads = _by_head(query, key, value)
    if query.device.type == "cpu":
        mixed, sums = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_ungrouped(*heads), 0.0, causal
        )
    else:
        mixed, sums, *_ = torch.ops.aten._scaled_dot_product_flash_attention(*heads, 0.0, causal)
    return mixed.transpose(1, 2), sums


def attended_backward(
    gradient: Tensor,
    operands: Sequence[Tensor],
    mixed: Tensor,
    sums: Tensor,
    *,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of queries, keys and values, where the keys may be only a part of all.
    ``mixed`` and ``sums`` are the output and the log-sum-exp of the queries' attention to all keys.
    """
    query, key, value = operands
    if not _has_kernel(query, value):
        return _written_out_backward(gradient, operands, mixed, sums, causal=causal)
    heads = _by_head(gradient, query, key, value, mixed)
    if query.device.type == "cpu":
        of_mixed, *plain, whole = heads
        made = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            *(of_mixed.contiguous(), *_ungrouped(*plain)), *(whole, sums.contiguous(), 0.0, causal)
        )
    else:
        tokens, keys = query.shape[1], key.shape[1]
        seed = torch.empty(0, dtype=torch.int64, device=query.device)
        made = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            *(*heads, sums.contiguous(), None, None),
            *(tokens, keys, 0.0, causal, seed, seed),
        )
    of_query, of_key, of_value = (one.transpose(1, 2) for one in made)
    return of_query, _summed(of_key, key), _summed(of_value, value)


def joined(
    mixed: Tensor, sums: Tensor, further: Tensor, further_sums: Tensor
) -> tuple[Tensor, Tensor]:
    """The attention of queries to two disjoint sets of keys together, from the output and the
    log-sum-exp for each set.
    """
    total = torch.logaddexp(sums, further_sums)
    return mixed * _share(sums, total) + further * _share(further_sums, total), total


def _share(sums: Tensor, total: Tensor) -> Tensor:
    return (sums - total).exp().transpose(1, 2)[..., None]


def _has_kernel(query: Tensor, value: Tensor) -> bool:
    """Whether torch has a fused kernel that also returns the log-sum-exp."""
    if query.shape[-1] != value.shape[-1]:
        return False
    on_gpu = query.device.type == "cuda" and query.dtype != torch.float32
    return on_gpu or query.device.type == "cpu"


def _by_head(*tensors: Tensor) -> list[Tensor]:
    return [one.transpose(1, 2) for one in tensors]


def _ungrouped(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values as (B, H, S, D), with keys and values repeated for each query head,
    as the CPU's kernel requires.
    """
    group = query.shape[1] // key.shape[1]
    if group == 1:
        return query, key, value
    return query, key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)


def _summed(of_heads: Tensor, shared: Tensor) -> Tensor:
    """The gradient of keys or values that several query heads share, summed over these heads."""
    if of_heads.shape[2] == shared.shape[2]:
        return of_heads
    return of_heads.unflatten(2, (shared.shape[2], -1)).sum(3)


def _written_out(
    query: Tensor, key: Tensor, value: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor]:
    scores = _scores(query, key, causal=causal)
    sums = scores.logsumexp(-1)
    shares = (scores - sums[..., None]).exp()
    mixed = torch.einsum("bhst,bthc->bshc", shares, _repeated(value, query))
    return mixed.to(value.dtype), sums


def _written_out_backward(
    gradient: Tensor, operands: Sequence[Tensor], mixed: Tensor, sums: Tensor, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    query, key, value = operands
    shares = (_scores(query, key, causal=causal) - sums[..., None]).exp()
    of_mixed = gradient.float()
    of_shares = torch.einsum("bshc,bthc->bhst", of_mixed, _repeated(value, query))
    of_sums = (of_mixed * mixed.float()).sum(-1).transpose(1, 2)
    of_scores = shares * (of_shares - of_sums[..., None]) / math.sqrt(query.shape[-1])
    of_query = torch.einsum("bhst,bthd->bshd", of_scores, _repeated(key, query))
    of_key = torch.einsum("bhst,bshd->bthd", of_scores, query.float())
    of_value = torch.einsum("bhst,bshc->bthc", shares, of_mixed)
    of_keys = (_summed(of_key, key).to(key.dtype), _summed(of_value, value).to(value.dtype))
    return of_query.to(query.dtype), *of_keys


def _scores(query: Tensor, key: Tensor, *, causal: bool) -> Tensor:
    """The scaled scores (B, H, S, S) of attention, in 32 bits."""
    scores = torch.einsum("bshd,bthd->bhst", query.float(), _repeated(key, query))
    scores = scores / math.sqrt(query.shape[-1])
    if not causal:
        return scores
    hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu_(1)
    return scores.masked_fill_(hidden, -math.inf)


def _repeated(shared: Tensor, query: Tensor) -> Tensor:
    """Keys or values (B, S, H, ..) repeated for each query head, in 32 bits."""
    return shared.repeat_interleave(query.shape[2] // shared.shape[2], dim=2).float()


# Context-parallel ranks, and which tokens of a sequence each rank has.


class ContextRanks(Protocol):
    """The ranks that share each sequence, a part per rank; how they exchange keys and values is a
    ``way`` of ``mistlab.schedule.context_ways``.
    """

    way: int

    @property
    def size(self) -> int:
        """The number of context-parallel ranks."""

    @property
    def rank(self) -> int:
        """The index of this rank among the context-parallel ranks."""

    def pass_on(
        self, given: Sequence[Tensor], taken: Sequence[Tensor], work: Callable[[], object]
    ) -> None:
        """Send tensors to the next rank and receive from the previous one, overlapped with
        ``work``.
        """

    def gather(self, flat: Tensor) -> Tensor:
        """The flat tensors of all ranks, one row per rank (N, ..)."""

    def scatter(self, whole: Tensor) -> Tensor:
        """Reduce-scatter of ``whole`` (N, ..), whose row r belongs to rank r: this rank's row,
        summed over the ranks. ``whole`` is overwritten.
        """

    def trade(self, given: Sequence[Tensor], taken: Sequence[Tensor]) -> None:
        """All-to-all: row r of each given tensor (N, ..) goes to rank r; row r of each taken tensor
        comes from rank r.
        """


def chunks_of(rank: int, ranks: int) -> tuple[int, int]:
    """The two chunks of a sequence that a rank has, of 2 N chunks over N ranks, chosen so that
    causal attention is equal work for all ranks.

    >>> [chunks_of(rank, 2) for rank in range(2)]
    [(0, 3), (1, 2)]
    """
    return rank, 2 * ranks - 1 - rank


def own_positions(tokens: int, rank: int, ranks: int) -> Tensor:
    """The positions (S) of a rank's tokens in a sequence of this length.

    >>> own_positions(8, 0, 2).tolist()
    [0, 1, 6, 7]
    """
    size = tokens // (2 * ranks)
    return torch.cat([torch.arange(size) + one * size for one in chunks_of(rank, ranks)])


def in_order(parts: Tensor) -> Tensor:
    """Whole sequences in order (B, N S, ..), from the parts of all ranks (N, B, S, ..)."""
    half = parts.shape[2] // 2
    chunks = torch.cat([parts[:, :, :half], parts[:, :, half:].flip(0)])
    return chunks.transpose(0, 1).flatten(1, 2)


def by_rank(whole: Tensor, ranks: int) -> Tensor:
    """The parts that ranks have (N, B, S, ..), from whole sequences in order (B, N S, ..)."""
    chunks = whole.unflatten(1, (2 * ranks, -1)).transpose(0, 1)
    return torch.cat([chunks[:ranks], chunks[ranks:].flip(0)], 2)


def attend_in_context(query: Tensor, key: Tensor, value: Tensor, ranks: ContextRanks) -> Tensor:
    """Causal attention (B, S, H, C) of a rank's queries to the keys of all ranks, by a ring or by
    gathering.
    """
    mixed: Tensor = _WAYS[ranks.way].apply(query, key, value, ranks)
    return mixed


# Ring attention: keys and values travel round a ring of ranks; at each step a rank attends to the
# keys that it holds then.


class RingAttention(torch.autograd.Function):
    """Ring attention as an autograd function; saves this rank's queries, keys and values, the
    output and the log-sum-exps.

    In step t rank r holds the keys of rank r - t, counted round the ring. If that rank has a lower
    number than r, all queries of rank r attend to the first half of the keys; if it has a higher
    number, the second half of the queries attends to all keys. The next keys arrive meanwhile.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ranks: ContextRanks) -> Tensor:
        """The output of ring attention for this rank's queries."""
        sofar = _SoFar()
        held: Sequence[Tensor] = [key.contiguous(), value.contiguous()]
        for step in range(ranks.size):
            part = _Part.at(step, ranks, query.shape[1])

            def attend(part: _Part = part, held: Sequence[Tensor] = held) -> None:
                sofar.join(part, *part.attended(query, *held))

            if step < ranks.size - 1:
                coming = [torch.empty_like(one) for one in held]
                ranks.pass_on(held, coming, attend)
                held = coming
            else:
                attend()
        mixed, sums = sofar.mixed.to(value.dtype), sofar.sums
        ctx.save_for_backward(query, key, value, mixed, sums)
        ctx.ranks = ranks
        return mixed

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of this rank's queries, keys and values. Gradients of keys and values
        travel round the ring together with the keys and values.
        """
        query, key, value, mixed, sums = ctx.saved_tensors
        ranks: ContextRanks = ctx.ranks
        of_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        held: list[Tensor] = [key.contiguous(), value.contiguous()]
        # The gradients of the previous step's keys, on their way to the next rank.
        gone: list[Tensor] = []
        for step in range(ranks.size):
            part = _Part.at(step, ranks, query.shape[1])
            of_keys_here: list[Tensor] = []

            def differentiate(
                part: _Part = part,
                held: list[Tensor] = held,
                of_keys_here: list[Tensor] = of_keys_here,
            ) -> None:
                of_queries, *of_keys = part.backward(gradient, query, held, mixed, sums)
                of_query[:, part.queries] += of_queries
                of_keys_here += of_keys

            given = held if step < ranks.size - 1 else []
            coming, sofar = ([torch.empty_like(one) for one in of] for of in (given, gone))
            ranks.pass_on([*given, *gone], [*coming, *sofar], differentiate)
            gone = sofar or [torch.zeros_like(one) for one in held]
            for whole, further in zip(gone, of_keys_here, strict=True):
                whole[:, part.keys] += further
            held = coming
        of_key, of_value = (torch.empty_like(one) for one in gone)
        ranks.pass_on(gone, [of_key, of_value], _nothing)
        return of_query, of_key, of_value, None


def _nothing() -> None:
    """A function that does nothing, where no work can overlap with the last messages."""


class _SoFar:
    """The attention of a rank's queries to all keys received so far, in 32 bits."""

    mixed: Tensor
    sums: Tensor

    def join(self, part: "_Part", mixed: Tensor, sums: Tensor) -> None:
        """Include the attention to further keys, given as its output ``mixed`` and log-sum-exp
        ``sums``. The first call is for the rank's own keys and covers all queries.
        """
        if part.is_own:
            self.mixed, self.sums = mixed.float(), sums
            return
        queries = part.queries
        sofar = self.mixed[:, queries], self.sums[:, :, queries]
        self.mixed[:, queries], self.sums[:, :, queries] = joined(*sofar, mixed, sums)


class _Part:
    """A step of the ring on one rank: which queries attend to which of the keys that the rank holds
    then.
    """

    def __init__(self, queries: slice, keys: slice, *, is_own: bool) -> None:
        self.queries, self.keys, self.is_own = queries, keys, is_own

    @classmethod
    def at(cls, step: int, ranks: ContextRanks, tokens: int) -> "_Part":
        """The queries and keys of a step of the ring, for a rank with ``tokens`` tokens of a
        sequence.
        """
        everything, half = slice(0, tokens), tokens // 2
        if step == 0:
            return cls(everything, everything, is_own=True)
        if step <= ranks.rank:
            return cls(everything, slice(0, half), is_own=False)
        return cls(slice(half, tokens), everything, is_own=False)

    def attended(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        met = key[:, self.keys], value[:, self.keys]
        return attended(query[:, self.queries], *met, causal=self.is_own)

    def backward(
        self, gradient: Tensor, query: Tensor, held: Sequence[Tensor], mixed: Tensor, sums: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        key, value = (one[:, self.keys] for one in held)
        queries = self.queries
        operands = query[:, queries], key, value
        return attended_backward(
            gradient[:, queries],
            operands,
            mixed[:, queries],
            sums[:, :, queries],
            causal=self.is_own,
        )


# Gathered attention: for each pass every rank gathers all keys and values; between passes it saves
# only its own keys and values.


class GatheredAttention(torch.autograd.Function):
    """Attention to gathered keys as an autograd function; saves this rank's operands, the output
    and the log-sum-exps. The backward pass gathers keys and values again.

    Each half of the queries attends to all keys of earlier chunks, and causally to the keys of its
    own chunk.
    """

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, ranks: ContextRanks) -> Tensor:
        """The output of attention to gathered keys, for this rank's queries."""
        keys, values = _gathered(ranks, key, value)
        mixed, sums = zip(
            *(
                _attended_so_far(query[:, half], keys[:, seen], values[:, seen])
                for half, seen in _halves(ranks, query.shape[1])
            ),
            strict=True,
        )
        whole, of_whole = torch.cat(mixed, 1).to(value.dtype), torch.cat(sums, 2)
        ctx.save_for_backward(query, key, value, whole, of_whole)
        ctx.ranks = ranks
        return whole

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, None]:
        """The gradients of this rank's queries, keys and values; gradients of keys and values are
        summed over the ranks.
        """
        query, key, value, mixed, sums = ctx.saved_tensors
        ranks: ContextRanks = ctx.ranks
        keys, values = _gathered(ranks, key, value)
        of_keys, of_values = torch.zeros_like(keys), torch.zeros_like(values)
        of_query = torch.zeros_like(query, memory_format=torch.contiguous_format)
        for half, seen in _halves(ranks, query.shape[1]):
            size = half.stop - half.start
            own_half = slice(seen.stop - size, seen.stop)
            for met, causal in ((slice(0, own_half.start), False), (own_half, True)):
                if met.stop > met.start:
                    operands = query[:, half], keys[:, met], values[:, met]
                    added = attended_backward(
                        gradient[:, half],
                        operands,
                        mixed[:, half],
                        sums[:, :, half],
                        causal=causal,
                    )
                    of_query[:, half] += added[0]
                    of_keys[:, met] += added[1]
                    of_values[:, met] += added[2]
        flat = [by_rank(one, ranks.size).flatten(1) for one in (of_keys, of_values)]
        own_keys, own_values = ranks.scatter(torch.cat(flat, 1)).split([key.numel(), value.numel()])
        return of_query, own_keys.view(key.shape), own_values.view(value.shape), None


def _halves(ranks: ContextRanks, tokens: int) -> list[tuple[slice, slice]]:
    """For each half of a rank's queries: the slice of the half, and the slice of the gathered keys
    up to the half's last token.
    """
    half = tokens // 2
    first, second = chunks_of(ranks.rank, ranks.size)
    return [
        (slice(0, half), slice(0, (first + 1) * half)),
        (slice(half, tokens), slice(0, (second + 1) * half)),
    ]


def _attended_so_far(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
    """Causal attention of queries to keys that end at the same token as the queries."""
    before = key.shape[1] - query.shape[1]
    mixed, sums = attended(query, key[:, before:], value[:, before:], causal=True)
    if not before:
        return mixed.float(), sums
    further = attended(query, key[:, :before], value[:, :before], causal=False)
    return joined(mixed.float(), sums, *further)


def _gathered(ranks: ContextRanks, key: Tensor, value: Tensor) -> list[Tensor]:
    """The keys and the values of all ranks' tokens in order, by one gather."""
    flat = torch.cat([key.flatten(), value.flatten()])
    of_ranks = ranks.gather(flat).split([key.numel(), value.numel()], 1)
    shapes = (ranks.size, *key.shape), (ranks.size, *value.shape)
    parts = zip(of_ranks, shapes, strict=True)
    return [in_order(one.reshape(shape)) for one, shape in parts]


# Head exchange (all-to-all): ranks exchange tokens for heads, so that during attention each rank
# has all tokens of some heads.


def heads_of_all(ranks: ContextRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    """Tensors of some heads and all tokens in order (B, N S, H/N, D), from this rank's tokens of
    all heads (B, S, H, D).
    """
    made: tuple[Tensor, ...] = Carried.apply(
        partial(_to_heads, ranks), partial(_to_tokens, ranks), *tensors
    )
    return made


def tokens_of_own(ranks: ContextRanks, tensor: Tensor) -> Tensor:
    """A tensor of this rank's tokens and all heads (B, S, H, C), from all tokens of some heads (B,
    N S, H/N, C).
    """
    made: tuple[Tensor, ...] = Carried.apply(
        partial(_to_tokens, ranks), partial(_to_heads, ranks), tensor
    )
    return made[0]


def _to_heads(ranks: ContextRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    given = [_by_first(one.unflatten(2, (ranks.size, -1)), 2) for one in tensors]
    taken = [torch.empty_like(one) for one in given]
    ranks.trade(given, taken)
    return tuple(in_order(one) for one in taken)


def _to_tokens(ranks: ContextRanks, *tensors: Tensor) -> tuple[Tensor, ...]:
    given = [by_rank(one, ranks.size) for one in tensors]
    taken = [torch.empty_like(one) for one in given]
    ranks.trade(given, taken)
    return tuple(one.permute(1, 2, 0, 3, 4).flatten(2, 3) for one in taken)


def _by_first(tensor: Tensor, axis: int) -> Tensor:
    return tensor.movedim(axis, 0).contiguous()


_WAYS: dict[int, Any] = {RING: RingAttention, GATHER: GatheredAttention}
