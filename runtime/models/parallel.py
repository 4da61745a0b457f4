"""Linear layers, an embedding and a loss that are split over tensor-parallel ranks.

Each takes a ``TensorParallel``, which knows the number of ranks and this rank's index, and which
reduces and gathers tensors. In a trace there are no other ranks: collectives are only recorded.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.config import shard
from runtime.models.grouped import ExpertMatrices
from runtime.models.operators import (
    AT_TARGET,
    LARGEST,
    TOTAL,
    HeadNorm,
    sum_rows,
    to_gradient_,
)
from runtime.models.ranks import CountedRanks, Size, TensorParallel, bare, carried

# Names of parameters with a value per head, which ranks split as they split heads.
OF_HEADS = ("sinks",)
# The type of a function that computes ``x @ weight.T + bias`` over the last dimension of ``x``; its
# result may be overwritten. The default is ``product``; the executor of a plan sets another
# function.
Multiply = Callable[[Tensor, Tensor, Tensor | None], Tensor]
# The type of a function that adds an adapter's output in place, given a GEMM's input and result.
Adds = Callable[[Tensor, Tensor], Tensor]
# The type of a function that gathers the ranks' parts of sequences and multiplies them by a weight.
MultiplyGathered = Callable[[Tensor, Tensor, Tensor | None, TensorParallel], Tensor]
# The type of a function that looks up the rows of tokens in a table.
LookUp = Callable[[Tensor, Tensor], Tensor]
# The type of a function that computes each token's loss, from logits (tokens, rank's vocabulary),
# targets (tokens), ranks, and the number of padding tokens at the end of the vocabulary.
LossOfTokens = Callable[[Tensor, Tensor, TensorParallel, Size], Tensor]


class _Leave(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: TensorParallel) -> Tensor:
        ctx.mark_dirty(x)
        ranks.all_reduce_(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return gradient, None


_leave = bare(_Leave)


class _GatheredLinear(torch.autograd.Function):
    """Autograd function of ``x @ weight.T + bias`` over the tokens of all ranks, gathered from
    ``x``, this rank's tokens; saves only this rank's tokens.

    The backward pass gathers the tokens again, for the weight's gradient, while it computes the
    input's gradient; and it reduce-scatters the input's gradient while it computes the weight's.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorParallel
    ) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.ranks, ctx.has_bias = ranks, bias is not None
        return nn.functional.linear(ranks.gather_tokens(x).flatten(0, 1), weight, bias)

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None, None]:
        x, weight = ctx.saved_tensors
        of_bias = gradient.sum(0) if ctx.has_bias else None
        whole = ctx.ranks.gather_tokens(x, again=True)
        of_whole = gradient.mm(weight).view(whole.shape)
        of_x = ctx.ranks.scatter_tokens(of_whole, of_input=True)
        del of_whole
        return of_x, gradient.t().mm(whole.flatten(0, 1)), of_bias, None


def gathered_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, ranks: TensorParallel
) -> Tensor:
    """``x @ weight.T + bias`` over the tokens of all ranks, flattened; ``x`` has this rank's
    tokens.
    """
    made: Tensor = _GatheredLinear.apply(x, weight, bias, ranks)
    return made


def enter(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Enter the tensor-parallel region: identity in the forward pass, all-reduce of gradients in
    the backward pass.

    Under sequence parallelism it does nothing, since the GEMM that follows gathers the ranks'
    tokens.
    """
    if ranks.splits_tokens or _is_alone(ranks):
        return x

    def summed(gradient: Tensor) -> Tensor:
        # The GEMMs' backward pass just made this gradient, and nothing else refers to it, so it may
        # be overwritten.
        ranks.all_reduce_(gradient)
        return gradient

    return carried(x, lambda each: each.view_as(each), summed)


def leave(x: Tensor, ranks: TensorParallel) -> Tensor:
    """Leave the tensor-parallel region: all-reduce, in place, in the forward pass; identity in the
    backward pass.

    Under sequence parallelism each rank gets its tokens of the sum, and the backward pass gathers
    gradients.
    """
    if _is_alone(ranks):
        return x
    if ranks.splits_tokens:
        return carried(x, ranks.scatter_tokens, ranks.gather_tokens)
    left: Tensor = _leave(x, ranks)
    return left


def _is_alone(ranks: TensorParallel) -> bool:
    """Whether there is no other tensor-parallel rank, and no trace that records collectives."""
    return not isinstance(ranks, CountedRanks) and ranks.size == 1


# A view that autograd and in-place operators treat as a separate tensor.
unsafe_view: Callable[[Tensor, Sequence[Size]], Tensor] = torch.ops.aten._unsafe_view.default


def product(
    x: Tensor, weight: Tensor, bias: Tensor | None, of_matrices: Multiply = nn.functional.linear
) -> Tensor:
    """``x @ weight.T + bias`` over flattened tokens; the result may be overwritten.

    Tokens are flattened because with more than two dimensions torch 2.11 would need sizes as
    numbers, which a trace refuses.
    """
    flat = of_matrices(x.flatten(0, -2), weight, bias)
    return unsafe_view(flat, (*x.shape[:-1], flat.shape[-1]))


class ColumnLinear(nn.Module):
    """A linear layer ``x @ W.T`` with the rows of W split over ranks: whole input, split output.

    ``outputs`` lists blocks of rows (such as query, key and value); each block is split separately.
    Under sequence parallelism the input has this rank's tokens, and the output all tokens.
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
        self.ranks = ranks
        self.multiply: Multiply = product
        self.multiply_gathered: MultiplyGathered = gathered_linear
        # The adapter whose output is added to the result, where the weight is frozen; None without
        # one.
        self.adapter: Adds | None = None
        rows = sum(shard(size, ranks.size, "a column-split width of") for size in outputs)
        self.weight = nn.Parameter(torch.empty(rows, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(rows, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's columns of a linear layer's result."""
        made = self._product(x)
        return made if self.adapter is None else self.adapter(x, made)

    def _product(self, x: Tensor) -> Tensor:
        if not self.ranks.splits_tokens:
            return self.multiply(x, self.weight, self.bias)
        flat = self.multiply_gathered(x, self.weight, self.bias, self.ranks)
        shape = (x.shape[0], x.shape[1] * self.ranks.size, flat.shape[-1])
        return unsafe_view(flat, shape)


class RowLinear(nn.Module):
    """A linear layer ``x @ W.T`` with the columns of W split over ranks.

    Each rank's output is a summand of the result. The code that sums the outputs adds the bias,
    once.
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
        self.ranks = ranks
        self.multiply: Multiply = product
        self.adapter: Adds | None = None
        columns = shard(inputs, ranks.size, "a row-split width of")
        self.weight = nn.Parameter(torch.empty(outputs, columns, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """This rank's summand of the result, without the bias; an all-reduce makes the result."""
        made = self.multiply(x, self.weight, None)
        return made if self.adapter is None else self.adapter(x, made)


def vectors_of(tokens: Tensor, weight: Tensor, ranks: TensorParallel, look_up: LookUp) -> Tensor:
    """Each token's vector, from a table whose rows are split over ranks: a rank's result is zero
    for rows that other ranks hold. Tokens below 0 are padding, with zero vectors.
    """
    local, elsewhere = own_rows(tokens, weight.shape[0], ranks.rank)
    vectors = look_up(local, weight).masked_fill_(elsewhere[..., None], 0.0)
    return leave(vectors, ranks)


def whole_columns(x: Tensor, ranks: TensorParallel) -> Tensor:
    """The result (B, S, columns) of a column-parallel GEMM, gathered over ranks; under sequence
    parallelism, for this rank's tokens only.
    """
    if ranks.size == 1:
        return x

    def own_tokens(whole: Tensor) -> Tensor:
        return whole.chunk(ranks.size, 1)[ranks.rank] if ranks.splits_tokens else whole

    def own_columns(gradient: Tensor) -> Tensor:
        whole = ranks.gather_tokens(gradient) if ranks.splits_tokens else gradient
        return whole.chunk(ranks.size, -1)[ranks.rank].contiguous()

    return carried(x, lambda part: own_tokens(ranks.all_gather(part)).contiguous(), own_columns)


class VocabularyEmbedding(nn.Module):
    """A table of token vectors whose rows (the vocabulary) are split over tensor-parallel ranks."""

    def __init__(
        self, vocab: Size, hidden: Size, ranks: TensorParallel, dtype: torch.dtype
    ) -> None:
        super().__init__()
        self.ranks = ranks
        rows = shard(vocab, ranks.size, "a vocabulary of")
        self.weight = nn.Parameter(torch.empty(rows, hidden, dtype=dtype))

    def forward(self, tokens: Tensor) -> Tensor:
        """The embedding vector of each token, summed over ranks that hold different rows of the
        table.
        """
        return vectors_of(tokens, self.weight, self.ranks, nn.functional.embedding)


class SmallMatrix(nn.Module):
    """A GEMM with a small matrix that every tensor-parallel rank holds whole. Its gradient is
    reduced over the ranks, like the gradients of norms.
    """

    def __init__(self, outputs: Size, inputs: Size, *, biases: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(outputs, dtype=dtype)) if biases else None

    def forward(self, x: Tensor) -> Tensor:
        """The result (T, outputs) of a GEMM with a small matrix that every rank holds whole."""
        return product(x, self.weight, self.bias)


# Adapters (LoRA, Hu et al. 2021): two low-rank GEMMs beside a frozen GEMM.
#
# A GEMM's adapter adds ``up(down(x))`` to the result of its frozen weight, with the factor 1 (alpha
# is the rank). Fused GEMMs, such as that of queries, keys and values, have an adapter for each
# part. Tensor-parallel ranks split ``up`` where they split the rows of the frozen weight, and
# ``down`` where they split its columns. Every rank holds the other factor whole, and has a summand
# of its gradient.


class _AddParts(torch.autograd.Function):
    """Autograd function that adds the outputs of adapters (T, columns of each), side by side, to a
    GEMM's result (T, columns), in place; saves nothing.
    """

    @staticmethod
    def forward(ctx: Any, made: Tensor, *parts: Tensor) -> Tensor:
        ctx.mark_dirty(made)
        ctx.columns = [part.shape[-1] for part in parts]
        for output, part in zip(made.split(ctx.columns, -1), parts, strict=True):
            output.add_(part)
        return made

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:  # type: ignore[override]
        return gradient, *gradient.split(ctx.columns, -1)


class ColumnAdapter(nn.Module):
    """The adapters of a GEMM whose weight has its rows split over ranks: one adapter for each block
    of the outputs.
    """

    def __init__(self, of: ColumnLinear, rank: int) -> None:
        super().__init__()
        inputs, dtype = of.weight.shape[1], of.weight.dtype
        self.down = nn.ModuleList(
            SmallMatrix(rank, inputs, biases=False, dtype=dtype) for _ in of.blocks
        )
        self.up = nn.ModuleList(
            ColumnLinear(rank, (rows,), of.ranks, biases=False, dtype=dtype) for rows in of.blocks
        )

    def forward(self, x: Tensor, made: Tensor) -> Tensor:
        """The frozen GEMM's result ``made`` for ``x``, plus the outputs of its adapters."""
        pairs = zip(self.down, self.up, strict=True)
        added: Tensor = _AddParts.apply(made, *(up(down(x)) for down, up in pairs))
        return added


class RowAdapter(nn.Module):
    """The adapter of a GEMM whose weight has its columns split over ranks; each rank's result is a
    summand of the whole.
    """

    def __init__(self, of: RowLinear, rank: int) -> None:
        super().__init__()
        outputs, inputs = of.weight.shape
        dtype = of.weight.dtype
        # ``inputs`` counts only this rank's columns, since the frozen layer has been sharded
        # already.
        self.down = RowLinear(inputs * of.ranks.size, rank, of.ranks, biases=False, dtype=dtype)
        self.up = SmallMatrix(outputs, rank, biases=False, dtype=dtype)

    def forward(self, x: Tensor, made: Tensor) -> Tensor:
        """The frozen GEMM's result ``made`` for ``x``, plus the output of its adapter."""
        added: Tensor = _AddParts.apply(made, self.up(self.down(x)))
        return added


# Parameters that every tensor-parallel rank holds whole, and this rank's part of the parameters
# that are split.


def shared_parameters(module: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters that every tensor-parallel rank holds whole. Under sequence parallelism each
    rank has a summand of their gradients.
    """
    for layer in module.modules():
        if isinstance(layer, RowLinear):
            if layer.bias is not None:
                yield layer.bias
        elif not isinstance(layer, ColumnLinear | VocabularyEmbedding | ExpertMatrices):
            named = layer.named_parameters(recurse=False)
            yield from (parameter for name, parameter in named if name not in OF_HEADS)


def parameters_of_own_tokens(module: nn.Module, *, splits_tokens: bool) -> Iterator[nn.Parameter]:
    """The parameters that every tensor-parallel rank holds whole, but of whose gradients each rank
    has only a summand: under sequence parallelism all shared parameters; otherwise the small
    matrices of experts and adapters, and norms per head.
    """
    if splits_tokens:
        yield from shared_parameters(module)
        return
    for layer in module.modules():
        if isinstance(layer, SmallMatrix | HeadNorm):
            yield from layer.parameters(recurse=False)


def own_rows(tokens: Tensor, rows: Size, rank: int) -> tuple[Tensor, Tensor]:
    """Row numbers of tokens in this rank's part of a table, and a mask of the tokens whose rows
    other ranks hold (their row number is 0).
    """
    local = tokens - rank * rows if rank else tokens.clone()
    elsewhere = (local < 0) | (local >= rows)
    return local.masked_fill_(elsewhere, 0), elsewhere


class VocabularyCrossEntropy(torch.autograd.Function):
    """Cross-entropy loss of each token, from logits whose vocabulary is split over ranks.

    It saves one tensor of the logits' size and type: the probabilities, which the backward pass
    turns into the gradient in place. At its peak it holds two such tensors. Sums are in 32 bits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ranks: TensorParallel) -> Tensor:
        """The losses, from ``logits`` (tokens, rank's vocabulary) and ``targets`` (tokens)."""
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
        """The gradient of the logits: probabilities, minus 1 at the target, times the loss's
        gradient.
        """
        of_logits, local, elsewhere = ctx.saved_tensors
        here = (~elsewhere).to(of_logits.dtype)[:, None]
        of_target = of_logits.gather(-1, local[:, None]).sub_(here)
        of_logits.scatter_(-1, local[:, None], of_target)
        return of_logits.mul_(gradient[:, None]), None, None


class TokenLosses(torch.autograd.Function):
    """Cross-entropy loss of each token, from logits whose vocabulary is split over ranks.

    It saves the logits and a number per token. The backward pass overwrites the logits with their
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, targets: Tensor, ranks: TensorParallel, unused: int
    ) -> Tensor:
        """The losses, from ``logits`` (tokens, rank's vocabulary) and ``targets`` (tokens); the
        last ``unused`` tokens of the vocabulary are padding.
        """
        columns = logits.shape[-1]
        first = ranks.rank * columns
        used = min(max(ranks.size * columns - unused - first, 0), columns)
        sums = logits.new_empty((3, len(logits)), dtype=torch.float32)
        sum_rows(sums, logits, targets, first, used)
        if ranks.size > 1:
            largest = sums[LARGEST].clone()
            ranks.all_reduce_(sums[LARGEST], "max")
            sums[TOTAL].mul_(largest.sub_(sums[LARGEST]).exp_())
            ranks.all_reduce_(sums[TOTAL:])
        totals = sums[TOTAL].log().add_(sums[LARGEST])
        ctx.save_for_backward(logits, targets, totals)
        ctx.first, ctx.used = first, used
        return totals - sums[AT_TARGET]

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, None, None, None]:
        """The gradient of the logits, which overwrites them."""
        logits, targets, totals = ctx.saved_tensors
        of_logits: Tensor = logits.detach()
        to_gradient_(of_logits, gradient, totals, targets, ctx.first, ctx.used)
        return of_logits, None, None, None


def token_losses(logits: Tensor, targets: Tensor, ranks: TensorParallel, unused: int) -> Tensor:
    """The loss of each token, like ``eager_losses``, in two passes over the logits."""
    made: Tensor = TokenLosses.apply(logits, targets, ranks, unused)
    return made


def eager_losses(logits: Tensor, targets: Tensor, ranks: TensorParallel, unused: Size) -> Tensor:
    """The loss of each token by torch's operators, which a trace records."""
    losses: Tensor = VocabularyCrossEntropy.apply(without(logits, ranks, unused), targets, ranks)
    return losses


def without(logits: Tensor, ranks: TensorParallel, unused: Size) -> Tensor:
    """Logits (.., rank's vocabulary), with minus infinity for padding tokens of the vocabulary."""
    if not unused:
        return logits
    columns = logits.shape[-1]
    used = ranks.size * columns - unused - ranks.rank * columns
    tokens = torch.arange(columns, device=logits.device)
    return logits.masked_fill(tokens >= used, -math.inf)


# Cuts the tensors of a whole model into the shards of one tensor-parallel rank.


def shard_of(
    model: nn.Module, tensors: Mapping[str, Tensor], *, rank: int, ranks: int
) -> dict[str, Tensor]:
    """A tensor-parallel rank's shard of each tensor; ``tensors`` are named as the parameters of the
    unsplit ``model``.
    """
    modules = dict(model.named_modules())
    parts = {}
    for name, tensor in tensors.items():
        path, _, leaf = name.rpartition(".")
        parts[name] = _part(modules[path], leaf, tensor, rank, ranks)
    return parts


def _part(module: nn.Module, leaf: str, tensor: Tensor, rank: int, ranks: int) -> Tensor:
    if isinstance(module, ExpertMatrices):
        return module.part_of(leaf, tensor)
    split = split_of(module, leaf, tensor.shape)
    if split is None:
        return tensor
    axis, blocks = split
    return torch.cat([one.chunk(ranks, axis)[rank] for one in tensor.split(blocks, axis)], axis)


def split_of(module: nn.Module, leaf: str, shape: Sequence[int]) -> tuple[int, list[int]] | None:
    """The axis along which ranks split a parameter of the given whole ``shape``, and the sizes of
    the blocks on this axis that are split separately; None if each rank holds the parameter whole.
    """
    if isinstance(module, ColumnLinear):
        return 0, list(module.blocks)
    if isinstance(module, RowLinear) and leaf == "weight":
        return 1, [shape[1]]
    if isinstance(module, VocabularyEmbedding) or leaf in OF_HEADS:
        return 0, [shape[0]]
    return None
