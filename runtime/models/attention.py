"""Attention layers whose heads are split over tensor-parallel ranks, some with gates of their
output.

Axes: B batch, S sequence, H this rank's query heads, D channels of a head.
"""

import importlib
import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from mistlab.plan.rotary import frequencies
from mistlab.schedule.context_ways import HEADS
from runtime.models.attention_kernel import settled_kernel
from runtime.models.config import ModelConfig, Structure, shard
from runtime.models.context import (
    ContextRanks,
    attend_in_context,
    heads_of_all,
    tokens_of_own,
)
from runtime.models.dropout import LayerDraws, MaskRows, MixedByDropped
from runtime.models.operators import CausalSoftmax, HeadNorm, Rotary, RotaryByPosition
from runtime.models.parallel import ColumnLinear, RowLinear
from runtime.models.ranks import Size, TensorParallel, bare, carried, operator, value_of
from runtime.models.wide_attention import (
    CurrentDocuments,
    Documents,
    WideAttention,
    within_documents,
)

# Gates of attention's output, one per channel; a trace records one operator in each pass.
#
# Axes: B batch, S sequence, H this rank's query heads, D channels of a head.


@operator("x")
def output_gate(x: Tensor, gate: Tensor) -> Tensor:
    """The output of attention ``x`` (B, S, H, D) times the sigmoid of its gates."""
    return (x * torch.sigmoid(gate)).contiguous()


@operator("x", "x")
def output_gate_backward(gradient: Tensor, x: Tensor, gate: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients of attention's output ``x`` and of its gates."""
    share = torch.sigmoid(gate)
    of_gate = gradient * x * share * (1 - share)
    return (gradient * share).contiguous(), of_gate.contiguous()


class OutputGate(torch.autograd.Function):
    """Autograd function of attention's gated output; saves the ungated output and the gates."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, gate: Tensor) -> Tensor:
        """The output of attention times the sigmoid of its gates."""
        ctx.save_for_backward(x, gate)
        return output_gate(x, gate)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The gradients of attention's output and of its gates."""
        return output_gate_backward(gradient, *ctx.saved_tensors)


# Causal self-attention, either fused in one kernel (``flash``) or written out as several
# (``math``).
#
# Axes: B batch, S sequence, H this rank's query heads, K this rank's key and value heads, D
# channels of a head.


# The type of a function that computes attention (B, S, H, D) from one tensor of queries, keys and
# values (B, S, H + 2 K, D). Each model has a default; the executor of a plan may set another.
Attend = Callable[[Tensor, "Attention"], Tensor]
# The sizes of a tensor that is viewed by heads: batch, sequence, number of heads, channels of a
# head.
HeadsShape = tuple[Size, Size, Size, Size]


class KeptKeys(Protocol):
    """The key-value cache of an attention layer: keys and values of earlier tokens."""

    def attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Add the new tokens' keys and values to the cache, and compute the attention of the new
        queries to all tokens of their sequences.
        """


class RotaryTables(nn.Module):
    """Cosines and sines of rotary embedding (positions, rotary channels / 2), shared by all blocks
    of a model.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        half = config.rotated // 2
        steps = torch.arange(half, dtype=torch.float32)
        frequency = torch.exp(steps * (-math.log(config.rotary_base) / half))
        scaling, amplitude = config.rotary_scaling, 1.0
        if scaling is not None:
            sizes = value_of(half * 2), config.rotary_base, scaling, value_of(config.positions)
            frequency = torch.tensor(frequencies(*sizes))
            amplitude = scaling.amplitude
        angle = torch.arange(config.positions, dtype=torch.float32)[:, None] * frequency
        self.cosine: Tensor
        self.sine: Tensor
        cosine, sine = angle.cos(), angle.sin()
        if amplitude != 1.0:
            cosine, sine = cosine * amplitude, sine * amplitude
        self.register_buffer("cosine", cosine.to(config.dtype), persistent=False)
        self.register_buffer("sine", sine.to(config.dtype), persistent=False)


class Attention(nn.Module):
    """Attention of a transformer block: a GEMM for queries, keys and values, attention over heads,
    and the output GEMM.

    It works between ``enter`` and ``leave`` of ``runtime.models.parallel``: each tensor-parallel
    rank's output is a summand, and their sum is the result. With ``gates`` the first GEMM also
    computes a gate for each query channel. If it ``sees_all``, a token attends to all tokens of its
    sequence, otherwise to those up to its own position.
    """

    def __init__(
        self,
        config: ModelConfig,
        ranks: TensorParallel,
        rotary: RotaryTables | None,
        *,
        gates: bool = False,
        sees_all: bool = False,
    ) -> None:
        super().__init__()
        self.config = config
        self.gates = gates
        self.is_causal = not sees_all
        self.attend: Attend = _attend_to_parts
        # The context-parallel ranks that hold the other tokens of each sequence; None if there are
        # none.
        self.context: ContextRanks | None = None
        # The source of dropout masks for attention probabilities; None if masks do not depend on
        # position.
        self.draws: LayerDraws | None = None
        # The documents packed into each sequence, so that tokens attend only within their document;
        # None for whole sequences.
        self.packed: CurrentDocuments | None = None
        # The key-value cache of a model that serves; None in training.
        self.kept: KeptKeys | None = None
        self.rotary = rotary
        self.ranks = ranks
        self.heads = shard(config.heads, ranks.size, "a number of heads of")
        self.kv_heads = shard(config.kv_heads, ranks.size, "a number of key-value heads of")
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        made = (queries, keys, keys, queries) if gates else (queries, keys, keys)
        self.qkv = ColumnLinear(
            config.hidden, made, ranks, biases=config.biases, dtype=config.dtype
        )
        self.output = RowLinear(
            queries, config.hidden, ranks, biases=config.biases, dtype=config.dtype
        )

    def forward(self, x: Tensor) -> Tensor:
        """The output of attention for hidden states (B, S, hidden), in the same shape. Under
        sequence parallelism both have only this rank's tokens.
        """
        qkv, shape = self._projected(x)
        qkv = self._rotated(qkv, shape, self.heads + self.kv_heads)
        mixed = self.attend(qkv.view(shape), self)
        return self.output(mixed.reshape(*shape[:2], self.heads * self.config.head_dim))

    def mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention (B, S, H, D) of this rank's tokens to all tokens of their sequences, including
        tokens of other context-parallel ranks.
        """
        if self.kept is not None:
            return self.kept.attend(query, key, value)
        ranks = self.context
        if ranks is None:
            return self.mixed_here(query, key, value)
        if ranks.way == HEADS:
            return tokens_of_own(ranks, self.mixed_here(*heads_of_all(ranks, query, key, value)))
        return attend_in_context(query, key, value, ranks)

    @property
    def documents(self) -> Documents | None:
        """The documents packed into the micro-batch; None for whole sequences."""
        return None if self.packed is None else self.packed.now

    def mixed_here(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention (B, S, H, D) among the tokens of this rank, without other ranks' keys and
        values.
        """
        dropout, documents = self.config.dropped_shares if self.training else 0.0, self.documents
        others = None if documents is None else documents.others
        if dropout and self.draws is not None:
            rows = self.rows_of_shares()
            return written_out(
                *(query, key, value, dropout, rows, others), is_causal=self.is_causal
            )
        if documents is not None and self.config.attention == "flash":
            return within_documents(query, key, value, documents)
        if others is not None:
            return written_out(query, key, value, dropout, None, others)
        attend = ATTENTION[self.config.attention]
        if self.is_causal:
            return attend(query, key, value, dropout)
        return attend(query, key, value, dropout, is_causal=False)

    def rows_of_shares(self) -> MaskRows:
        """The row numbers of the dropout mask for this rank's attention probabilities, for masks
        that depend on position.
        """
        assert self.draws is not None
        first = self.ranks.rank * self.heads
        return self.draws.of_shares(range(first, first + self.heads), self.config.heads)

    def _projected(self, x: Tensor) -> tuple[Tensor, HeadsShape]:
        """Queries, keys and values of all tokens from one GEMM, and their shape by heads."""
        batch, sequence, _ = x.shape
        if self.ranks.splits_tokens:
            sequence = sequence * self.ranks.size
        # With flattened tokens the GEMM's result is a tensor of its own, not a view, so rotary
        # embedding can change it in place.
        qkv = self.qkv(x if self.ranks.splits_tokens else x.flatten(0, 1))
        heads = self.heads * (2 if self.gates else 1) + 2 * self.kv_heads
        return qkv, (batch, sequence, heads, self.config.head_dim)

    def _rotated(self, x: Tensor, shape: HeadsShape, heads: Size) -> Tensor:
        """``x`` after rotary embedding of its first ``heads`` heads, in place; unchanged in models
        without rotary embedding.
        """
        if self.rotary is None:
            return x
        if self.documents is not None:
            whole, places = (self.rotary.cosine, self.rotary.sine), self.documents.positions
            placed: Tensor = _rotate_by_position(x, *whole, places, shape, heads)
            return placed
        tables = self.rotary.cosine[: shape[1]], self.rotary.sine[: shape[1]]
        turned: Tensor = _rotate(x, *tables, shape, heads)
        return turned


_rotate = bare(Rotary)
_rotate_by_position = bare(RotaryByPosition)


class PartedAttention(Attention):
    """Attention with further parts: normalised queries and keys, a gated output, attention sinks,
    or a sliding window.

    With ``sees_window`` a token attends only to the last ``config.window`` tokens.
    """

    def __init__(
        self,
        config: ModelConfig,
        structure: Structure,
        ranks: TensorParallel,
        rotary: RotaryTables | None,
    ) -> None:
        super().__init__(config, ranks, rotary, gates=structure.attention_gate)
        self.sees_window = structure.window
        self.query_norm = self.key_norm = self.sinks = None
        if structure.qk_norm:
            self.query_norm = HeadNorm(config.head_dim, config.dtype)
            self.key_norm = HeadNorm(config.head_dim, config.dtype)
        if structure.sinks:
            self.sinks = nn.Parameter(torch.empty(self.heads, dtype=config.dtype))

    def forward(self, x: Tensor) -> Tensor:
        """The output of attention with its further parts (gates, norms, sinks, window), for hidden
        states of this rank's tokens.
        """
        qkv, shape = self._projected(x)
        batch, sequence, _, channels = shape
        if self.query_norm is None:
            qkv = self._rotated(qkv, shape, self.heads + self.kv_heads)
        parts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        query, key, value, *gate = qkv.view(shape).split(parts if self.gates else parts[:3], dim=2)
        if self.query_norm is not None and self.key_norm is not None:
            of_query = (batch, sequence, self.heads, channels)
            of_key = (batch, sequence, self.kv_heads, channels)
            query = self._rotated(self.query_norm(query), of_query, self.heads)
            key = self._rotated(self.key_norm(key), of_key, self.kv_heads)
        mixed = self.mixed(query, key, value)
        if gate:
            mixed = OutputGate.apply(mixed, gate[0])
        return self.output(mixed.reshape(batch, sequence, self.heads * channels))

    def mixed_here(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention among the tokens of this rank, with attention sinks and a sliding window where
        the model has them.
        """
        if self.sinks is None and not self.sees_window:
            return super().mixed_here(query, key, value)
        window = self.config.window if self.sees_window else 0
        sinks: Tensor | None = self.sinks
        if self.documents is not None:
            return within_documents(query, key, value, self.documents, sinks, window)
        if sinks is not None and self.context is not None and self.context.way == HEADS:
            sinks = sinks.chunk(self.context.size)[self.context.rank]
        mixed: Tensor = WideAttention.apply(query, key, value, sinks, window)
        return mixed


def _attend_to_parts(qkv: Tensor, of: Attention) -> Tensor:
    """Attention (B, S, H, D) from one tensor (B, S, H + 2 K, D) of queries, keys and values, which
    is split first.
    """
    return of.mixed(*qkv.split([of.heads, of.kv_heads, of.kv_heads], dim=2))


def fused(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, *, is_causal: bool = True
) -> Tensor:
    """Attention of queries (B, S, H, D) to keys and values (B, S, K, D) in one kernel, which never
    stores the scores.
    """
    of_package = settled_kernel() == "flash-attn"
    return (_by_package if of_package else _by_torch)(query, key, value, dropout, is_causal)


def written_out(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    dropout: float,
    rows: MaskRows | None = None,
    others: Callable[[], Tensor] | None = None,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Attention like ``fused``, but as two GEMMs with a softmax of the scores (B K, H/K S, S)
    between them. Dropout uses the row numbers ``rows`` if they are given. A query does not attend
    to the tokens that ``others`` (B, S, S) marks.

    Copies are made by ``clone`` and not by ``contiguous``, so that the same operators run even if a
    size is 1.
    """
    batch, sequence, heads, channels = query.shape
    kv_heads = key.shape[2]
    group = heads // kv_heads
    query = query.unflatten(2, (kv_heads, group)).permute(0, 2, 3, 1, 4)
    query = _copy(query).view(batch * kv_heads, group * sequence, channels)
    key, value = (
        _copy(t.transpose(1, 2)).view(batch * kv_heads, sequence, channels) for t in (key, value)
    )
    nothing = query.new_zeros(1).expand(batch * kv_heads, group * sequence, sequence)
    # No size depends on the scores' scale factor, so it is a plain number even where ``channels``
    # is a symbol of a trace.
    factor = 1 / math.sqrt(value_of(channels))
    scores = torch.baddbmm(nothing, query, key.transpose(1, 2), beta=0.0, alpha=factor)
    if is_causal:
        hidden = None if others is None else others()
        shares = CausalSoftmax.apply(scores, sequence, hidden)
        del hidden
    else:
        shares = torch.softmax(scores, -1)
    if rows is not None:
        mixed = MixedByDropped.apply(shares, value, rows, dropout)
    else:
        if dropout:
            shares = torch.native_dropout(shares, dropout, True)[0]
        mixed = torch.bmm(shares, value)
    return carried(mixed.view(batch, heads, sequence, channels), _swapped, _swapped)


ATTENTION: Mapping[str, Callable[..., Tensor]] = {"flash": fused, "math": written_out}


def _swapped(mixed: Tensor) -> Tensor:
    """A contiguous copy of a tensor (B, S, H, D or B, H, S, D) with its two middle axes
    exchanged.
    """
    return _copy(mixed.transpose(1, 2))


def _by_torch(query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool) -> Tensor:
    """PyTorch's fused attention, with the backend that ``settle_kernel`` has chosen for the
    process.
    """
    query, key, value = (heads.transpose(1, 2) for heads in (query, key, value))
    grouped = bool(query.shape[1] != key.shape[1])
    mixed = scaled_dot_product_attention(
        query, key, value, dropout_p=dropout, is_causal=is_causal, enable_gqa=grouped
    )
    return mixed.transpose(1, 2)


def _by_package(
    query: Tensor, key: Tensor, value: Tensor, dropout: float, is_causal: bool
) -> Tensor:
    """Fused attention by the kernel of the package flash-attn, which takes (B, S, H, D) without a
    transpose.
    """
    mixed: Tensor = importlib.import_module("flash_attn").flash_attn_func(
        *(query, key, value),
        dropout_p=dropout,
        causal=is_causal,
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return mixed


def _copy(x: Tensor) -> Tensor:
    return x.clone(memory_format=torch.contiguous_format)
