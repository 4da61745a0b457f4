"""The feed-forward part of a block with experts.

A router chooses experts for each token. Copies of tokens go to the ranks that have their experts,
through two products there, and back, where they are summed. Ranks of a tensor-parallel group, which
have the same tokens, take a part of the tokens each.

Axes: B batch, S sequence, T this rank's tokens, R rows that its experts take.
"""

from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.config import ExpertRanks, ModelConfig, Structure, shard
from runtime.models.counted import counted
from runtime.models.expert_operators import (
    AddByGroup,
    GroupedProduct,
    Permute,
    Route,
    Unpermute,
    WeightedSwiglu,
)
from runtime.models.parallel import product
from runtime.models.ranks import TensorParallel
from runtime.models.sizes import Size
from runtime.models.state_space_operators import SquaredRelu


class Experts(nn.Module):
    """A router, and two grouped products around an activation."""

    def __init__(self, config: ModelConfig, structure: Structure, ranks: TensorParallel) -> None:
        super().__init__()
        self.config, self.structure, self.ranks = config, structure, ranks
        self.own = shard(config.experts, config.expert_ranks.parallel, "a number of experts of")
        inner = shard(config.expert_ffn, config.expert_ranks.tensor, "an expert's width of")
        width = 2 * inner if structure.gated_mlp else inner
        hidden, dtype = config.hidden, config.dtype
        self.router = _Matrix(config.experts, hidden, biases=config.biases, dtype=dtype)
        self.shorter: _Matrix | None = None
        self.longer: _Matrix | None = None
        if structure.latent_experts:
            short = config.expert_hidden
            self.shorter = _Matrix(short, hidden, biases=False, dtype=dtype)
            self.longer = _Matrix(hidden, short, biases=False, dtype=dtype)
            hidden = short
        self.up = _Matrices(self.own, width, hidden, biases=config.biases, dtype=dtype)
        self.down = _Matrices(self.own, hidden, inner, biases=config.biases, dtype=dtype)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of what each token's experts make of it; input and output are (B, S, hidden)."""
        tokens = x.flatten(0, 1) if self.ranks.splits_tokens else own_tokens(x, self.ranks)
        made = self._routed(tokens)
        if self.ranks.splits_tokens:
            return made.view(x.shape)
        return all_tokens(made, self.ranks).view(x.shape)

    def _routed(self, tokens: Tensor) -> Tensor:
        ranks = self.config.expert_ranks
        weights, chosen = Route.apply(self.router(tokens), self.config.active)
        if self.shorter is not None:
            tokens = self.shorter(tokens)
        rows, of_rows, order = Permute.apply(tokens, weights, chosen)
        sent = rows.shape[0]
        if ranks.is_one:
            counts = chosen.flatten().bincount(minlength=self.own)
        else:
            counts = chosen.new_empty((self.own,))
            taken = tokens.shape[0] * ranks.taken
            rows, of_rows = (exchanged(each, taken, ranks) for each in (rows, of_rows))
            rows, of_rows = (over_parts(each, ranks) for each in (rows, of_rows))
            # Copies come by ranks, and the products want them by experts.
            rows, of_rows = rows.clone(), of_rows.clone()
        made = self.down(self._activated(self.up(rows, counts), of_rows), counts)
        if not ranks.is_one:
            made = exchanged(summed_parts(made.clone(), ranks), sent, ranks)
        back: Tensor = Unpermute.apply(made, order, tokens.shape[0])
        return back if self.longer is None else self.longer(back)

    def _activated(self, inner: Tensor, weights: Tensor) -> Tensor:
        if self.structure.gated_mlp:
            gated: Tensor = WeightedSwiglu.apply(inner, weights)
            return gated
        if self.structure.activation == "relu2":
            squares: Tensor = SquaredRelu.apply(inner, weights)
            return squares
        return nn.functional.gelu(inner, approximate="tanh") * weights.unsqueeze(1).to(inner.dtype)


class _Matrix(nn.Module):
    """A product with a matrix that every rank has whole."""

    def __init__(self, outputs: Size, inputs: Size, *, biases: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """The product (T, outputs)."""
        return product(x, self.weight, self.bias)


class _Matrices(nn.Module):
    """A grouped product with a matrix for each of this rank's experts."""

    def __init__(
        self, groups: Size, outputs: Size, inputs: Size, *, biases: bool, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(groups, outputs, dtype=dtype)) if biases else None

    def forward(self, rows: Tensor, counts: Tensor) -> Tensor:
        """The products (R, outputs)."""
        made: Tensor = GroupedProduct.apply(rows, self.weight, counts)
        return made if self.bias is None else AddByGroup.apply(made, self.bias, counts)


class _OwnTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        each = shard(x.shape[0], ranks.size, "a number of tokens of")
        return x[ranks.rank * each : (ranks.rank + 1) * each]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return ctx.ranks.gather_tokens(gradient[None])[0], None


class _AllTokens(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks, ctx.each = ranks, x.shape[0]
        return ranks.gather_tokens(x[None])[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient[ctx.ranks.rank * ctx.each : (ctx.ranks.rank + 1) * ctx.each], None


def own_tokens(x: Tensor, ranks: TensorParallel) -> Tensor:
    """This rank's part (T, channels) of tokens (B, S, channels) that all ranks have."""
    own: Tensor = _OwnTokens.apply(x.flatten(0, 1), ranks)
    return own


def all_tokens(x: Tensor, ranks: TensorParallel) -> Tensor:
    """The tokens (ranks T, channels) of all ranks."""
    whole: Tensor = _AllTokens.apply(x, ranks)
    return whole


class _Exchanged(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Any, ranks: Any) -> Tensor:
        ctx.rows, ctx.ranks = x.shape[0], ranks
        return _all_to_all(x, rows, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        return _all_to_all(gradient, ctx.rows, ctx.ranks), None, None


class _OverParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        return _gather_rows(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _scatter_rows(gradient, ctx.ranks), None


class _SummedParts(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: Any) -> Tensor:
        ctx.ranks = ranks
        return _scatter_rows(x, ranks)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return _gather_rows(gradient, ctx.ranks), None


def exchanged(x: Tensor, rows: Size, ranks: ExpertRanks) -> Tensor:
    """All to all: each row goes to the rank that has its expert, or back."""
    there: Tensor = _Exchanged.apply(x, rows, ranks.parallel)
    return there


def over_parts(x: Tensor, ranks: ExpertRanks) -> Tensor:
    """The rows of all ranks that have parts of the same experts."""
    whole: Tensor = _OverParts.apply(x, ranks.tensor)
    return whole


def summed_parts(x: Tensor, ranks: ExpertRanks) -> Tensor:
    """This rank's rows, summed over the ranks that have parts of the same experts."""
    own: Tensor = _SummedParts.apply(x, ranks.tensor)
    return own


_REMEDY = "experts run on one rank alone here"


def _sent(x: Tensor, rows: int, ranks: int) -> Tensor:
    return x.new_empty((rows, *x.shape[1:]))


def _gathered(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] * ranks, *x.shape[1:]))


def _scattered(x: Tensor, ranks: int) -> Tensor:
    return x.new_empty((x.shape[0] // ranks, *x.shape[1:]))


_all_to_all = counted("all_to_all", _sent, _REMEDY)
_gather_rows = counted("gather_rows", _gathered, _REMEDY)
_scatter_rows = counted("scatter_rows", _scattered, _REMEDY)
