"""Linears, embedding and loss that are split over tensor-parallel ranks.

A rank is told by a ``TensorParallel``: how many ranks there are, which one this is, and how to
reduce and gather. In a trace the ranks are only counted and the collectives only recorded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.config import shard
from runtime.models.ranks import TensorParallel
from runtime.models.sizes import Size

# ``x @ weight.T + bias`` of two dimensions: torch's own, or one that a model's runner puts there.
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]


class _Enter(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        # The gradient comes fresh from the products just differentiated: nobody else holds it.
        ctx.ranks.all_reduce_(gradient)
        return gradient, None


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.mark_dirty(x)
        ranks.all_reduce_(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


def enter(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Into the split region: identity forward, sum of the ranks' gradients backward."""
    entered: Tensor = _Enter.apply(x, ranks)
    return entered


def leave(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Out of the split region: sum of the ranks' outputs forward, in place; identity backward."""
    left: Tensor = _Leave.apply(x, ranks)
    return left


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, multiply: Multiply = nn.functional.linear
) -> Tensor:
    """``x @ weight.T + bias`` over flat tokens; the result may be changed in place.

    Given more dimensions, torch 2.11 asks for them as numbers, which a trace refuses.
    """
    flat = multiply(x.flatten(0, -2), weight, bias)
    shaped: Tensor = torch.ops.aten._unsafe_view(flat, (*x.shape[:-1], weight.shape[0]))
    return shaped


class ColumnLinear(nn.Module):
    """``x @ W.T`` with the rows of W split over ranks; the input is whole, the output split.

    ``outputs`` lists blocks of rows that are split each on its own (query, key and value, say).
    """

    def __init__(
        self,
        inputs: Size,
        outputs: tuple[Size, ...],
        ranks: TensorParallel,
        *,
        biases: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.blocks = outputs
        self.multiply: Multiply = nn.functional.linear
        rows = sum(shard(size, ranks.size, "a column-split width of") for size in outputs)
        self.weight = nn.Parameter(torch.empty(rows, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """The rank's columns of the product."""
        return product(x, self.weight, self.bias, self.multiply)


class RowLinear(nn.Module):
    """``x @ W.T`` with the columns of W split over ranks; the output is a part of a sum.

    Its bias is added by whoever completes the sum, once.
    """

    def __init__(
        self,
        inputs: Size,
        outputs: Size,
        ranks: TensorParallel,
        *,
        biases: bool,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.multiply: Multiply = nn.functional.linear
        columns = shard(inputs, ranks.size, "a row-split width of")
        self.weight = nn.Parameter(torch.empty(outputs, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """The rank's part of the product."""
        return product(x, self.weight, None, self.multiply)


class VocabularyEmbedding(nn.Module):
    """A table of token vectors, its rows split over ranks."""

    def __init__(
        self, vocab: Size, hidden: Size, ranks: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ranks = ranks
        rows = shard(vocab, ranks.size, "a vocabulary of")
        self.weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """Each token's vector; a rank contributes zeros for rows that it does not have."""
        local, elsewhere = own_rows(tokens, self.weight.shape[0], self.ranks.rank)
        vectors = nn.functional.embedding(local, self.weight)
        vectors = vectors.masked_fill_(elsewhere[..., None], 0.0)
        return leave(vectors, self.ranks)


def own_rows(tokens: Tensor, rows: Size, rank: int) -> tuple[Tensor, Tensor]:
    """Tokens as this rank's row numbers, and which of them belong to other ranks."""
    local = tokens - rank * rows if rank else tokens.clone()
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill_(elsewhere, 0), elsewhere


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy of logits whose vocabulary is split over ranks, a loss for each token.

    Keeps one tensor of the logits' size and type (the probabilities, which become the gradient in
    place) and holds two at its peak. Sums run in 32-bit floats.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: TensorParallel) -> Tensor:
        """Losses of ``logits`` (tokens, rank's vocabulary) against ``targets`` (tokens)."""
        largest = logits.amax(-1)
        ranks.all_reduce_(largest, "max")
        powers = logits - largest[:, None]
        local, elsewhere = own_rows(targets, logits.shape[-1], ranks.rank)
        at_target = powers.gather(-1, local[:, None]).squeeze(-1).float()
        at_target.masked_fill_(elsewhere, 0.0)
        ranks.all_reduce_(at_target)
        powers.exp_()
        total = powers.sum(-1, dtype=torch.float32)
        ranks.all_reduce_(total)
        powers.div_(total[:, None])
        ctx.save_for_backward(powers, local, elsewhere)
        return total.log_().sub_(at_target)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """Probabilities less one at the target, scaled."""
        of_logits, local, elsewhere = ctx.saved_tensors
        here = (~elsewhere).to(of_logits.dtype)[:, None]
        of_target = of_logits.gather(-1, local[:, None]).sub_(here)
        of_logits.scatter_(-1, local[:, None], of_target)
        return of_logits.mul_(gradient[:, None]), None, None
