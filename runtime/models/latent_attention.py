"""Multi-head latent attention (DeepSeek-V2): queries, keys and values are made of low-rank vectors,
called latent.

Axes: B batch, S sequence, H this rank's heads, D channels of queries and keys, R of them rotated, C
channels of values.
"""

from typing import Any

import torch
from torch import Tensor, nn

from mistlab.schedule.context_ways import HEADS
from runtime.models.attention import RotaryTables
from runtime.models.config import ModelConfig, Structure, shard
from runtime.models.context import ContextRanks, attend_in_context, heads_of_all, tokens_of_own
from runtime.models.operators import RMSNorm, Rotary, rotate_
from runtime.models.parallel import ColumnLinear, Multiply, RowLinear, enter, product
from runtime.models.ranks import Size, TensorParallel, carried
from runtime.models.wide_attention import WideAttention


@torch.library.custom_op("mistlab::keys_and_values", mutates_args=())
def keys_and_values(
    made: Tensor, shared: Tensor, cosine: Tensor, sine: Tensor, values: int
) -> tuple[Tensor, Tensor]:
    """Keys (B, S, H, D) and values (B, S, H, C), from the up-projected latent vectors ``made`` (B,
    S, H, D - R + C) and the channels ``shared`` by all heads (B, S, R).

    The first R channels of each head's key are ``shared`` after rotary embedding.
    """
    key, value = made.split([made.shape[-1] - values, values], dim=-1)
    turned = shared[:, :, None].clone()
    rotate_(turned, cosine, sine)
    return torch.cat([turned.expand(*key.shape[:3], -1), key], dim=-1), value.contiguous()


@keys_and_values.register_fake
def _(
    made: Tensor, shared: Tensor, cosine: Tensor, sine: Tensor, values: int
) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, width = made.shape
    keys = width - values + shared.shape[-1]
    return (
        made.new_empty((batch, sequence, heads, keys)),
        made.new_empty((batch, sequence, heads, values)),
    )


@torch.library.custom_op("mistlab::keys_and_values_backward", mutates_args=())
def keys_and_values_backward(
    of_keys: Tensor, of_values: Tensor, cosine: Tensor, sine: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the up-projected latent vectors ``made`` and of the channels ``shared`` by
    all heads.
    """
    rotated = 2 * cosine.shape[-1]
    of_shared = of_keys[..., :rotated].sum(2, keepdim=True)
    rotate_(of_shared, cosine, -sine)
    return torch.cat([of_keys[..., rotated:], of_values], dim=-1), of_shared[:, :, 0]


@keys_and_values_backward.register_fake
def _(of_keys: Tensor, of_values: Tensor, cosine: Tensor, sine: Tensor) -> tuple[Tensor, Tensor]:
    batch, sequence, heads, keys = of_keys.shape
    rotated = 2 * cosine.shape[-1]
    width = keys - rotated + of_values.shape[-1]
    return (
        of_keys.new_empty((batch, sequence, heads, width)),
        of_keys.new_empty((batch, sequence, rotated)),
    )


class KeysAndValues(torch.autograd.Function):
    """Autograd function that makes the keys and values of all heads from up-projected latent
    vectors; saves only the rotary tables.
    """

    @staticmethod
    def forward(
        ctx: Any, made: Tensor, shared: Tensor, cosine: Tensor, sine: Tensor, values: int
    ) -> tuple[Tensor, Tensor]:
        """The keys and values of all heads, from up-projected latent vectors."""
        ctx.save_for_backward(cosine, sine)
        return keys_and_values(made, shared, cosine, sine, values)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_keys: Tensor, of_values: Tensor
    ) -> tuple[Tensor, Tensor, None, None, None]:
        """The gradients of the up-projected latents and of the shared channels."""
        made = keys_and_values_backward(of_keys, of_values, *ctx.saved_tensors)
        return *made, None, None, None


class LatentAttention(nn.Module):
    """Attention with two down-projections to latent vectors, two up-projections to heads, attention
    over heads, and the output GEMM.

    With ``structure.whole_queries`` queries are made of tokens by one GEMM, without latent vectors.
    Every tensor-parallel rank computes all latent vectors; heads are split. The output is this
    rank's summand, as in ``runtime.models.attention.Attention``; gradients of latent vectors are
    summed over the ranks inside this module.
    """

    def __init__(
        self,
        config: ModelConfig,
        structure: Structure,
        ranks: TensorParallel,
        rotary: RotaryTables,
    ) -> None:
        super().__init__()
        self.config, self.ranks, self.rotary = config, ranks, rotary
        # The context-parallel ranks that hold the other tokens of each sequence; None if there are
        # none.
        self.context: ContextRanks | None = None
        self.heads = shard(config.heads, ranks.size, "a number of heads of")
        plain = config.head_dim - config.rotated
        self.query_down: Down | None = None
        self.query_norm: RMSNorm | None = None
        if not structure.whole_queries:
            self.query_down = Down(config.hidden, config.query_rank, config.dtype)
            self.query_norm = RMSNorm(config.query_rank, config.dtype)
        self.key_down = Down(config.hidden, config.key_rank + config.rotated, config.dtype)
        self.key_norm = RMSNorm(config.key_rank, config.dtype)
        self.query_up = ColumnLinear(
            config.hidden if structure.whole_queries else config.query_rank,
            (config.heads * config.head_dim,),
            ranks,
            biases=False,
            dtype=config.dtype,
        )
        self.key_up = ColumnLinear(
            config.key_rank,
            (config.heads * (plain + config.value_dim),),
            ranks,
            biases=False,
            dtype=config.dtype,
        )
        self.output = RowLinear(
            config.heads * config.value_dim,
            config.hidden,
            ranks,
            biases=False,
            dtype=config.dtype,
        )

    def forward(self, x: Tensor) -> Tensor:
        """The attention output (B, S, hidden) of an input of this shape; under sequence parallelism
        the input has only this rank's tokens.
        """
        config, batch, sequence = self.config, x.shape[0], x.shape[1]
        if self.ranks.splits_tokens:
            sequence = sequence * self.ranks.size
        tables = self.rotary.cosine[:sequence], self.rotary.sine[:sequence]
        queries = self._up(self.query_up, self._of_queries(x))
        shape = (batch, sequence, self.heads, config.head_dim)
        queries = Rotary.apply(queries, *tables, shape, self.heads)
        if config.rotary_scaling is not None and config.rotary_scaling.score_factor != 1:
            queries = queries * config.rotary_scaling.score_factor
        latent, shared = self.key_down(x).split([config.key_rank, config.rotated], dim=-1)
        made = self._up(self.key_up, self.key_norm(latent)).view(
            batch, sequence, self.heads, config.head_dim - config.rotated + config.value_dim
        )
        if self.ranks.splits_tokens:
            shared = gathered(shared, self.ranks)
        else:
            shared = enter(shared, self.ranks)
        keys, values = KeysAndValues.apply(made, shared, *tables, config.value_dim)
        mixed = self._mixed(queries.view(shape), keys, values)
        return self.output(mixed.reshape(batch, sequence, self.heads * config.value_dim))

    def _mixed(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """Attention (B, S, H, C) of this rank's tokens to all tokens of their sequences, including
        other context-parallel ranks' tokens.
        """
        ranks = self.context
        if ranks is None:
            mixed: Tensor = WideAttention.apply(query, key, value, None, 0)
            return mixed
        if ranks.way == HEADS:
            whole = WideAttention.apply(*heads_of_all(ranks, query, key, value), None, 0)
            return tokens_of_own(ranks, whole)
        return attend_in_context(query, key, value, ranks)

    def _of_queries(self, x: Tensor) -> Tensor:
        """The input of the query projection: latent vectors, or the tokens (B, S, hidden)
        themselves.
        """
        if self.query_down is None or self.query_norm is None:
            return x
        latent: Tensor = self.query_norm(self.query_down(x))
        return latent

    def _up(self, product_up: ColumnLinear, latent: Tensor) -> Tensor:
        """The up-projection of latent vectors to heads; the latent vectors may be overwritten."""
        if self.ranks.splits_tokens:
            return product_up(latent)
        return product_up(enter(latent, self.ranks).flatten(0, 1))


class Down(nn.Module):
    """A GEMM of all tokens with a weight that every tensor-parallel rank holds whole, and whose
    whole gradient each rank computes.
    """

    def __init__(
        self, inputs: Size, outputs: Size, dtype: torch.dtype, *, biases: bool = False
    ) -> None:
        super().__init__()
        self.multiply: Multiply = product
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """The result (B, S, outputs) of a GEMM whose weight every rank holds whole."""
        return self.multiply(x, self.weight, self.bias)


def gathered(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Whole sequences from each rank's part (B, S / ranks, ..); the backward pass reduce-scatters
    gradients.
    """
    return carried(x, ranks.gather_tokens, ranks.scatter_tokens)
