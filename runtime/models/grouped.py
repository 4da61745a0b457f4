"""Grouped GEMMs, in which each expert's rows are multiplied by that expert's matrix; and the module
that holds a rank's matrices.

Copies of tokens are sorted by expert, so each expert's copies are neighbouring rows. A trace
records each product, and the activation between two products, as one operator.

Axes: R rows, E experts, G experts on this rank.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from runtime.models.config import ExpertRanks
from runtime.models.ranks import Size, operator

# The number of rows of each group (expert): a tensor, or integers where the host knows them.
Counts = Tensor | tuple[int, ...]
# The type of a function that multiplies each group's rows by the group's matrix; its arguments are
# rows, matrices and numbers of rows. The executor of a plan sets another function than the default.
MultiplyGroups = Callable[[Tensor, Tensor, Counts], Tensor]


@torch.library.custom_op("mistlab::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group's rows (R, inputs) times the group's matrix (G, outputs, inputs)."""
    groups = rows.split(counts.tolist())
    return torch.cat([group @ own.t() for group, own in zip(groups, weight, strict=True)])


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


@torch.library.custom_op("mistlab::grouped_product_of_rows", mutates_args=())
def grouped_product_of_rows(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """The gradient of a grouped GEMM's rows."""
    groups = gradient.split(counts.tolist())
    return torch.cat([group @ own for group, own in zip(groups, weight, strict=True)])


@grouped_product_of_rows.register_fake
def _(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return gradient.new_empty((gradient.shape[0], weight.shape[2]))


@torch.library.custom_op("mistlab::grouped_product_of_weight", mutates_args=())
def grouped_product_of_weight(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """The gradient of a grouped GEMM's matrices."""
    sizes = counts.tolist()
    pairs = zip(gradient.split(sizes), rows.split(sizes), strict=True)
    return torch.stack([of_group.t() @ group for of_group, group in pairs])


@grouped_product_of_weight.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return gradient.new_empty((counts.shape[0], gradient.shape[1], rows.shape[1]))


class GroupedProduct(torch.autograd.Function):
    """A grouped GEMM as an autograd function; saves its operands."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """The results (R, outputs) of the grouped GEMM."""
        ctx.save_for_backward(rows, weight, counts)
        return grouped_product(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """The gradients of the grouped GEMM's rows and matrices."""
        rows, weight, counts = ctx.saved_tensors
        of_rows = grouped_product_of_rows(gradient, weight, counts)
        return of_rows, grouped_product_of_weight(gradient, rows, counts), None


@operator(changes=("rows",))
def add_by_group(rows: Tensor, bias: Tensor, counts: Tensor) -> None:
    """Add to each group's rows the group's bias (G, channels), in place."""
    for group, own_bias in zip(rows.split(counts.tolist()), bias, strict=True):
        group.add_(own_bias)


@torch.library.custom_op("mistlab::sum_by_group", mutates_args=())
def sum_by_group(rows: Tensor, counts: Tensor) -> Tensor:
    """The sum (G, channels) of each group's rows."""
    return torch.stack([group.sum(0) for group in rows.split(counts.tolist())])


@sum_by_group.register_fake
def _(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty((counts.shape[0], rows.shape[1]))


class AddByGroup(torch.autograd.Function):
    """Autograd function that adds each group's bias to the group's rows, in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        """The rows with the bias of their group added, in place."""
        ctx.mark_dirty(rows)
        ctx.save_for_backward(counts)
        add_by_group(rows, bias, counts)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """The gradient of the rows, and the gradient of the biases: the sum of the rows' gradients
        over each group.
        """
        return gradient, sum_by_group(gradient, *ctx.saved_tensors), None


@torch.library.custom_op("mistlab::weighted_swiglu", mutates_args=())
def weighted_swiglu(gate_and_up: Tensor, weights: Tensor) -> Tensor:
    """``silu(gate) * up`` of the two halves of each row, times the row's weight."""
    gate, up = gate_and_up.chunk(2, dim=-1)
    return torch.nn.functional.silu(gate).mul_(up).mul_(weights[:, None])


@weighted_swiglu.register_fake
def _(gate_and_up: Tensor, weights: Tensor) -> Tensor:
    rows, columns = gate_and_up.shape
    return gate_and_up.new_empty((rows, columns // 2))


@operator("gate_and_up", "weights")
def weighted_swiglu_backward(
    gradient: Tensor, gate_and_up: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and weights of ``weighted_swiglu``."""
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    of_weights = (gradient.float() * gate * share * up).sum(-1)
    scaled = gradient.float() * weights[:, None]
    of_gate = scaled * up * share * (1 + gate * (1 - share))
    both = torch.cat([of_gate, scaled * gate * share], dim=-1)
    return both.to(gate_and_up.dtype), of_weights.to(weights.dtype)


class WeightedSwiglu(torch.autograd.Function):
    """SwiGLU of each row times the row's weight, as an autograd function; saves its input."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, weights: Tensor) -> Tensor:
        """SwiGLU of each row, times the row's weight."""
        ctx.save_for_backward(gate_and_up, weights)
        return weighted_swiglu(gate_and_up, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The gradients of SwiGLU's rows and of the rows' weights."""
        return weighted_swiglu_backward(gradient, *ctx.saved_tensors)


# The gate of gpt-oss: gates and values are clamped, the sigmoid is steeper (``STEEPNESS``), and 1
# is added to the values.


STEEPNESS = 1.702


@torch.library.custom_op("mistlab::limited_swiglu", mutates_args=())
def limited_swiglu(gate_and_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    """The gated activation of gpt-oss (R, inner), times each row's weight; gates and values are
    clamped at ``limit``.
    """
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    made = (up + 1) * gate * torch.sigmoid(STEEPNESS * gate) * weights[:, None]
    return made.to(gate_and_up.dtype)


@limited_swiglu.register_fake
def _(gate_and_up: Tensor, weights: Tensor, limit: float) -> Tensor:
    rows, columns = gate_and_up.shape
    return gate_and_up.new_empty((rows, columns // 2))


@operator("gate_and_up", "weights")
def limited_swiglu_backward(
    gradient: Tensor, gate_and_up: Tensor, weights: Tensor, limit: float
) -> tuple[Tensor, Tensor]:
    """The gradients of the rows and of their weights; zero where gates or values are clamped."""
    wide = gradient.float()
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    open_gate, open_up = gate <= limit, up.abs() <= limit
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit) + 1
    share = torch.sigmoid(STEEPNESS * gate)
    of_weights = (wide * up * gate * share).sum(-1)
    scaled = wide * weights[:, None]
    of_gate = scaled * up * share * (1 + STEEPNESS * gate * (1 - share)) * open_gate
    both = torch.cat([of_gate, scaled * gate * share * open_up], dim=-1)
    return both.to(gate_and_up.dtype), of_weights.to(weights.dtype)


class LimitedSwiglu(torch.autograd.Function):
    """Autograd function of gpt-oss's gated activation times the rows' weights, with gates and
    values clamped at a limit; saves its input.
    """

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, weights: Tensor, limit: float) -> Tensor:
        """The gated activation of each row, with gates and values clamped, times the row's
        weight.
        """
        ctx.save_for_backward(gate_and_up, weights)
        ctx.limit = limit
        return limited_swiglu(gate_and_up, weights, limit)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """The gradients of the rows and of the rows' weights, with clamped gates and values."""
        gate_and_up, weights = ctx.saved_tensors
        return *limited_swiglu_backward(gradient, gate_and_up, weights, ctx.limit), None


class AddWeighted(torch.autograd.Function):
    """Autograd function that adds each group's bias, times the weight of each row, to the group's
    rows in place. If several ranks hold summands of the rows, only the rank whose ``adds`` is true
    adds it.
    """

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, bias: Tensor, counts: tuple[int, ...], weights: Tensor, adds: bool
    ) -> Tensor:
        """The rows after adding their group's bias times their weights."""
        ctx.mark_dirty(rows)
        ctx.save_for_backward(bias, weights)
        ctx.counts, ctx.adds = counts, adds
        if adds:
            parts = zip(rows.split(counts), bias, weights.split(counts), strict=True)
            for group, own_bias, of_group in parts:
                group.addcmul_(of_group[:, None].to(own_bias.dtype), own_bias)
        return rows

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, gradient: Tensor
    ) -> tuple[Tensor, Tensor, None, Tensor | None, None]:
        """The gradients of the rows, of the biases (the rows' weighted sum over each group), and of
        the weights.
        """
        bias, weights = ctx.saved_tensors
        groups = gradient.split(ctx.counts)
        pairs = zip(groups, weights.split(ctx.counts), strict=True)
        of_bias = torch.stack([of_group.to(group.dtype) @ group for group, of_group in pairs])
        if not ctx.needs_input_grad[3]:
            return gradient, of_bias, None, None, None
        of_weights = torch.zeros_like(weights)
        if ctx.adds:
            of_rows = [group @ own for group, own in zip(groups, bias, strict=True)]
            of_weights.copy_(torch.cat(of_rows))
        return gradient, of_bias, None, of_weights, None


# The module that holds the matrices of a rank's experts.


class ExpertMatrices(nn.Module):
    """A grouped GEMM with a matrix (``outputs``, ``inputs``) for each of this rank's experts.

    Ranks that share experts split the inputs or, if ``blocks`` is above 0, each of ``blocks``
    blocks of the outputs. Sizes are this rank's.
    """

    def __init__(
        self,
        ranks: ExpertRanks,
        groups: Size,
        outputs: Size,
        inputs: Size,
        *,
        biases: bool,
        dtype: torch.dtype,
        blocks: int = 0,
    ) -> None:
        super().__init__()
        self.ranks, self.blocks = ranks, blocks
        self.multiply: MultiplyGroups = GroupedProduct.apply
        self.weight = nn.Parameter(torch.empty(groups, outputs, inputs, dtype=dtype))
        self.bias = nn.Parameter(torch.empty(groups, outputs, dtype=dtype)) if biases else None

    def forward(self, rows: Tensor, counts: Counts, weights: Tensor | None = None) -> Tensor:
        """The products (R, outputs) of the rows with their experts' matrices, plus biases.
        ``weights`` are the routing weights, which the rows already contain; biases are multiplied
        by them.
        """
        made = self.multiply(rows, self.weight, counts)
        if self.bias is None:
            return made
        if weights is None and isinstance(counts, Tensor):
            return AddByGroup.apply(made, self.bias, counts)
        known = tuple(counts.tolist()) if isinstance(counts, Tensor) else counts
        if weights is None:
            weights = made.new_ones(len(made), dtype=torch.float32)
        # Where several ranks hold summands of the results, only one of them adds the bias.
        adds = self.splits("bias") or self.ranks.tensor_rank == 0
        whole: Tensor = AddWeighted.apply(made, self.bias, known, weights, adds)
        return whole

    def splits(self, leaf: str) -> bool:
        """Whether the ranks that share experts hold different parts of a parameter."""
        return self.ranks.tensor > 1 and (leaf == "weight" or self.blocks > 0)

    def part_of(self, leaf: str, whole: Tensor) -> Tensor:
        """This rank's part of a parameter (``leaf`` is its name) of all experts."""
        ranks = self.ranks
        part = whole.chunk(ranks.parallel)[ranks.rank]
        if not self.splits(leaf):
            return part
        if not self.blocks:
            return part.chunk(ranks.tensor, 2)[ranks.tensor_rank]
        parts = [
            one.chunk(ranks.tensor, 1)[ranks.tensor_rank] for one in part.chunk(self.blocks, 1)
        ]
        return torch.cat(parts, 1)
