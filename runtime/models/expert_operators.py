"""Fused operators of blocks with experts; a trace sees each as one operator.

Tokens go to experts as copies, one copy for each expert that a token takes. Copies lie in the order
of experts, so each expert's copies are neighbouring rows of one matrix. A grouped product
multiplies each group of rows with the group's own matrix.

Axes: T tokens, A experts a token takes, R = T A rows, E experts, G experts on this rank.
"""

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("mistlab::route", mutates_args=())
def route(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """The experts (T, A) with the largest ``logits`` (T, E), and a softmax over these alone."""
    largest, chosen = logits.float().topk(active, dim=-1)
    return torch.softmax(largest, dim=-1), chosen


@route.register_fake
def _(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], active)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@torch.library.custom_op("mistlab::route_backward", mutates_args=())
def route_backward(gradient: Tensor, weights: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """Gradient of the logits, which are shaped ``like`` another tensor."""
    inner = weights * (gradient - (gradient * weights).sum(-1, keepdim=True))
    return torch.zeros_like(like).scatter_(-1, chosen, inner.to(like.dtype))


@route_backward.register_fake
def _(gradient: Tensor, weights: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like)


class Route(torch.autograd.Function):
    """Chooses experts; keeps the chosen experts and their weights."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
        """Weights and numbers (T, A) of the chosen experts."""
        weights, chosen = route(logits, active)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(weights, chosen, logits)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The softmax's derivative, at the chosen experts."""
        return route_backward(gradient, *ctx.saved_tensors), None


@torch.library.custom_op("mistlab::permute", mutates_args=())
def permute(tokens: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies (R, channels) of tokens in the order of experts, each copy's weight, and its place in
    ``chosen``."""
    order = chosen.flatten().argsort(stable=True)
    return tokens[order // chosen.shape[1]], weights.flatten()[order], order


@permute.register_fake
def _(tokens: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    rows = chosen.numel()
    return (
        tokens.new_empty((rows, tokens.shape[1])),
        weights.new_empty((rows,)),
        chosen.new_empty((rows,)),
    )


@torch.library.custom_op("mistlab::unpermute", mutates_args=())
def unpermute(rows: Tensor, order: Tensor, tokens: int) -> Tensor:
    """The sum (T, channels) of each token's copies."""
    each = len(rows) // tokens
    back = torch.empty_like(rows, dtype=torch.float32).index_copy_(0, order, rows.float())
    return back.view(tokens, each, -1).sum(1).to(rows.dtype)


@unpermute.register_fake
def _(rows: Tensor, order: Tensor, tokens: int) -> Tensor:
    return rows.new_empty((tokens, rows.shape[1]))


@torch.library.custom_op("mistlab::weights_in_place", mutates_args=())
def weights_in_place(gradient: Tensor, order: Tensor, like: Tensor) -> Tensor:
    """Gradients of copies' weights, back in the places (T, A) of the weights."""
    return torch.empty_like(like).view(-1).index_copy_(0, order, gradient).view(like.shape)


@weights_in_place.register_fake
def _(gradient: Tensor, order: Tensor, like: Tensor) -> Tensor:
    return torch.empty_like(like)


class Permute(torch.autograd.Function):
    """Copies tokens for their experts; keeps only the copies' places."""

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Copies, their weights and their places."""
        rows, of_rows, order = permute(tokens, weights, chosen)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order, weights)
        ctx.tokens = tokens.shape[0]
        return rows, of_rows, order

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_copies: Tensor, of_weights: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """The sum of the gradients of a token's copies."""
        order, weights = ctx.saved_tensors
        return (
            unpermute(of_copies, order, ctx.tokens),
            weights_in_place(of_weights, order, weights),
            None,
        )


@torch.library.custom_op("mistlab::copies", mutates_args=())
def copies(tokens: Tensor, order: Tensor) -> Tensor:
    """The rows (R, channels) of tokens (T, channels) in an order of copies."""
    return tokens[order // (len(order) // len(tokens))]


@copies.register_fake
def _(tokens: Tensor, order: Tensor) -> Tensor:
    return tokens.new_empty((order.shape[0], tokens.shape[1]))


class Unpermute(torch.autograd.Function):
    """Adds up what the experts made of a token's copies; keeps only the copies' places."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int) -> Tensor:
        """The sum of each token's copies."""
        ctx.save_for_backward(order)
        return unpermute(rows, order, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """A token's gradient is that of each copy."""
        return copies(gradient, *ctx.saved_tensors), None, None


@torch.library.custom_op("mistlab::grouped_product", mutates_args=())
def grouped_product(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Each group's rows (R, inputs) times the group's own matrix (G, outputs, inputs)."""
    groups = rows.split(counts.tolist())
    return torch.cat([group @ own.t() for group, own in zip(groups, weight, strict=True)])


@grouped_product.register_fake
def _(rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


@torch.library.custom_op("mistlab::grouped_product_of_rows", mutates_args=())
def grouped_product_of_rows(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    """Gradient of a grouped product's rows."""
    groups = gradient.split(counts.tolist())
    return torch.cat([group @ own for group, own in zip(groups, weight, strict=True)])


@grouped_product_of_rows.register_fake
def _(gradient: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
    return gradient.new_empty((gradient.shape[0], weight.shape[2]))


@torch.library.custom_op("mistlab::grouped_product_of_weight", mutates_args=())
def grouped_product_of_weight(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    """Gradient of a grouped product's matrices."""
    sizes = counts.tolist()
    pairs = zip(gradient.split(sizes), rows.split(sizes), strict=True)
    return torch.stack([of_group.t() @ group for of_group, group in pairs])


@grouped_product_of_weight.register_fake
def _(gradient: Tensor, rows: Tensor, counts: Tensor) -> Tensor:
    return gradient.new_empty((counts.shape[0], gradient.shape[1], rows.shape[1]))


class GroupedProduct(torch.autograd.Function):
    """A grouped product; keeps its rows."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        """The products (R, outputs)."""
        ctx.save_for_backward(rows, weight, counts)
        return grouped_product(rows, weight, counts)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """Gradients of rows and matrices."""
        rows, weight, counts = ctx.saved_tensors
        of_rows = grouped_product_of_rows(gradient, weight, counts)
        return of_rows, grouped_product_of_weight(gradient, rows, counts), None


@torch.library.custom_op("mistlab::add_by_group", mutates_args=("rows",))
def add_by_group(rows: Tensor, bias: Tensor, counts: Tensor) -> None:
    """Add to each group's rows the group's own bias (G, channels), in place."""
    for group, own in zip(rows.split(counts.tolist()), bias, strict=True):
        group.add_(own)


@add_by_group.register_fake
def _(rows: Tensor, bias: Tensor, counts: Tensor) -> None:
    return None


@torch.library.custom_op("mistlab::sum_by_group", mutates_args=())
def sum_by_group(rows: Tensor, counts: Tensor) -> Tensor:
    """The sum (G, channels) of each group's rows."""
    return torch.stack([group.sum(0) for group in rows.split(counts.tolist())])


@sum_by_group.register_fake
def _(rows: Tensor, counts: Tensor) -> Tensor:
    return rows.new_empty((counts.shape[0], rows.shape[1]))


class AddByGroup(torch.autograd.Function):
    """Adds a bias of each group to a fresh product, in place."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
        """The rows with their group's bias."""
        ctx.mark_dirty(rows)
        ctx.save_for_backward(counts)
        add_by_group(rows, bias, counts)
        return rows

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        """The gradient itself, and its sum over each group."""
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


@torch.library.custom_op("mistlab::weighted_swiglu_backward", mutates_args=())
def weighted_swiglu_backward(
    gradient: Tensor, gate_and_up: Tensor, weights: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of ``weighted_swiglu``."""
    gate, up = gate_and_up.float().chunk(2, dim=-1)
    share = torch.sigmoid(gate)
    of_weights = (gradient.float() * gate * share * up).sum(-1)
    scaled = gradient.float() * weights[:, None]
    of_gate = scaled * up * share * (1 + gate * (1 - share))
    both = torch.cat([of_gate, scaled * gate * share], dim=-1)
    return both.to(gate_and_up.dtype), of_weights.to(weights.dtype)


@weighted_swiglu_backward.register_fake
def _(gradient: Tensor, gate_and_up: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    return torch.empty_like(gate_and_up), torch.empty_like(weights)


class WeightedSwiglu(torch.autograd.Function):
    """SwiGLU of each row times the row's weight; keeps its input."""

    @staticmethod
    def forward(ctx: Any, gate_and_up: Tensor, weights: Tensor) -> Tensor:
        """The weighted inner vectors."""
        ctx.save_for_backward(gate_and_up, weights)
        return weighted_swiglu(gate_and_up, weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """Gradients of the rows and of their weights."""
        return weighted_swiglu_backward(gradient, *ctx.saved_tensors)
