"""Layers with experts (MoE): the router, the exchange of tokens between ranks, and fused operators,
each a single operator in a trace.

Axes: T tokens, A experts a token takes, R = T A copies of tokens (rows), E experts, G experts on
this rank.
"""

import math
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from runtime.models.config import ExpertRanks, ModelConfig, Structure, shard
from runtime.models.context import ContextRanks
from runtime.models.grouped import Counts, ExpertMatrices, LimitedSwiglu, WeightedSwiglu
from runtime.models.parallel import SmallMatrix
from runtime.models.ranks import Size, TensorParallel, carried, counted, operator, value_of
from runtime.models.routers import (
    Following,
    RouteBy,
    RouterWatch,
    Watched,
    Whose,
    shares_of_choices,
    within_capacity,
)
from runtime.models.state_space import SquaredRelu

# Operators of layers with experts; a trace records each as a single operator.
#
# A token is copied once for each expert that it takes. The copies are sorted by expert, for the
# grouped GEMMs of ``runtime.models.grouped``.
#
# Axes: T tokens, A experts per token, R = T A copies (rows), E experts, G experts on this rank.


@torch.library.custom_op("mistlab::route", mutates_args=())
def route(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    """For each token the A = ``active`` experts with the largest ``logits`` (T, E): a softmax over
    their logits only, and their indices, both (T, A).
    """
    largest, chosen = logits.float().topk(active, dim=-1)
    return torch.softmax(largest, dim=-1), chosen


@route.register_fake
def _(logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
    shape = (logits.shape[0], active)
    return logits.new_empty(shape, dtype=torch.float32), logits.new_empty(shape, dtype=torch.int64)


@operator("like")
def route_backward(gradient: Tensor, weights: Tensor, chosen: Tensor, like: Tensor) -> Tensor:
    """The gradient of the router's logits, in the shape and precision of ``like``: the softmax's
    gradient for the chosen experts, zero for the other experts.
    """
    inner = weights * (gradient - (gradient * weights).sum(-1, keepdim=True))
    return torch.zeros_like(like).scatter_(-1, chosen, inner.to(like.dtype))


class Route(torch.autograd.Function):
    """Autograd function by which a router chooses experts for tokens; saves the chosen experts,
    their weights and the logits for the backward pass.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, active: int) -> tuple[Tensor, Tensor]:
        """The weights and the indices (T, A) of the chosen experts."""
        weights, chosen = route(logits, active)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(weights, chosen, logits)
        return weights, chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        """The gradient of the logits: the softmax's gradient for the chosen experts, zero for the
        other experts.
        """
        return route_backward(gradient, *ctx.saved_tensors), None


@torch.library.custom_op("mistlab::permute", mutates_args=())
def permute(tokens: Tensor, weights: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Copies (R, channels) of tokens sorted by expert, each copy's routing weight, and each copy's
    index in the flattened ``chosen`` (T, A).
    """
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
    """The sum of the outputs of each token's experts (T, channels).

    ``order`` has an index for each copy of a token: ``token * A + choice``, if each token goes to
    ``A`` experts.
    """
    each = len(rows) // tokens
    back = torch.empty_like(rows, dtype=torch.float32).index_copy_(0, order, rows.float())
    return back.view(tokens, each, -1).sum(1).to(rows.dtype)


@unpermute.register_fake
def _(rows: Tensor, order: Tensor, tokens: int) -> Tensor:
    return rows.new_empty((tokens, rows.shape[1]))


@operator("like")
def weights_in_place(gradient: Tensor, order: Tensor, like: Tensor) -> Tensor:
    """Gradients of the copies' routing weights, reordered from the copies' order by expert to the
    shape (T, A) of the weights.
    """
    return torch.empty_like(like).view(-1).index_copy_(0, order, gradient).view(like.shape)


class Permute(torch.autograd.Function):
    """Autograd function that copies tokens for their experts; saves only the copies' indices and
    the routing weights for the backward pass.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, chosen: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The copies of tokens in the order of their experts, the weights of the copies, and their
        indices.
        """
        rows, of_rows, order = permute(tokens, weights, chosen)
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order, weights)
        ctx.tokens = tokens.shape[0]
        return rows, of_rows, order

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_copies: Tensor, of_weights: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """The gradients of tokens, each the sum over the token's copies, and of the routing
        weights.
        """
        order, weights = ctx.saved_tensors
        return (
            unpermute(of_copies, order, ctx.tokens),
            weights_in_place(of_weights, order, weights),
            None,
        )


@torch.library.custom_op("mistlab::copies", mutates_args=())
def copies(tokens: Tensor, order: Tensor) -> Tensor:
    """The rows of ``tokens`` (T, channels) copied in the order of their experts (R, channels)."""
    return tokens[order // (len(order) // len(tokens))]


@copies.register_fake
def _(tokens: Tensor, order: Tensor) -> Tensor:
    return tokens.new_empty((order.shape[0], tokens.shape[1]))


class WeightedRows(torch.autograd.Function):
    """Autograd function that multiplies copies of tokens by their routing weights; saves the
    weights and the products, which the next GEMM saves anyway.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor) -> Tensor:
        """The copies of tokens times their routing weights."""
        weighted = rows * weights[:, None].to(rows.dtype)
        ctx.save_for_backward(weighted, weights)
        return weighted

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        """The gradients of the copies and of their weights. The gradient of a weight is divided by
        the weight, so a weight of zero, which no router's score gives, gets zero.
        """
        weighted, weights = ctx.saved_tensors
        of_weights = (gradient.float() * weighted.float()).sum(-1) / weights
        of_weights = of_weights.masked_fill_(weights == 0, 0.0)
        return gradient * weights[:, None].to(gradient.dtype), of_weights


class Unpermute(torch.autograd.Function):
    """Autograd function that sums the experts' outputs over each token's copies; saves only the
    copies' indices.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, tokens: int) -> Tensor:
        """The sum of the experts' outputs over the copies of each token."""
        ctx.save_for_backward(order)
        return unpermute(rows, order, tokens)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The gradient of each copy, which is the gradient of its token."""
        return copies(gradient, *ctx.saved_tensors), None, None


# The functions below are for dispatch with a capacity, where copies beyond the capacity are
# dropped; ``rows`` is the number of copies that are kept.


class PermuteKept(torch.autograd.Function):
    """``Permute`` for experts with a capacity: only the first ``rows`` copies are made. Dropped
    copies have an index beyond the last expert, so that they sort last.
    """

    @staticmethod
    def forward(
        ctx: Any, tokens: Tensor, weights: Tensor, chosen: Tensor, rows: int
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The kept copies of tokens in the order of their experts, the routing weights of these
        copies, and their indices.
        """
        order = chosen.flatten().argsort(stable=True)[:rows].clone()
        ctx.mark_non_differentiable(order)
        ctx.save_for_backward(order)
        ctx.shape = chosen.shape
        return tokens[order // chosen.shape[1]], weights.flatten()[order], order

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: Any, of_copies: Tensor, of_weights: Tensor, _: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        """The gradients of tokens, each the sum over its kept copies, and of the routing weights,
        zero for dropped copies.
        """
        (order,) = ctx.saved_tensors
        whole = of_weights.new_zeros(ctx.shape).view(-1).index_copy_(0, order, of_weights)
        return _summed_kept(of_copies, order, ctx.shape), whole.view(ctx.shape), None, None


class UnpermuteKept(torch.autograd.Function):
    """``Unpermute`` for experts with a capacity: sums over the copies that were kept."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, order: Tensor, shape: tuple[int, int]) -> Tensor:
        """The sum of each token's kept copies; ``shape`` is (T, A)."""
        ctx.save_for_backward(order)
        ctx.each = shape[1]
        return _summed_kept(rows, order, shape)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        """The gradient of each kept copy, which is the gradient of its token."""
        (order,) = ctx.saved_tensors
        return gradient[order // ctx.each], None, None


def _summed_kept(rows: Tensor, order: Tensor, shape: tuple[int, int]) -> Tensor:
    tokens, each = shape
    back = rows.new_zeros((tokens * each, rows.shape[1]), dtype=torch.float32)
    return back.index_copy_(0, order, rows.float()).view(tokens, each, -1).sum(1).to(rows.dtype)


# The feed-forward part of a layer with experts.
#
# The router chooses experts for each token. Copies of tokens are sent to the ranks that hold the
# experts, pass through two grouped GEMMs there, are sent back, and are summed per token. Where all
# ranks of a tensor-parallel group hold the same tokens, each rank sends its share of the tokens.
#
# Axes: B batch, S sequence, T this rank's tokens, R copies (rows) that its experts take.


# The name of the buffer that holds the correction of a router's scores: a bias per expert.
CORRECTION = "experts.correction"


class Experts(nn.Module):
    """The feed-forward part of a layer with experts: a router, and two grouped GEMMs around an
    activation.
    """

    def __init__(self, config: ModelConfig, structure: Structure, ranks: TensorParallel) -> None:
        super().__init__()
        self.config, self.structure, self.ranks = config, structure, ranks
        self.own = shard(config.experts, config.expert_ranks.parallel, "a number of experts of")
        inner = shard(config.expert_ffn, config.expert_ranks.tensor, "an expert's width of")
        width = 2 * inner if structure.gated_mlp else inner
        hidden, dtype = config.hidden, config.dtype
        self.router = SmallMatrix(config.experts, hidden, biases=config.biases, dtype=dtype)
        self.shorter: SmallMatrix | None = None
        self.longer: SmallMatrix | None = None
        if structure.latent_experts:
            short = config.expert_hidden
            self.shorter = SmallMatrix(short, hidden, biases=False, dtype=dtype)
            self.longer = SmallMatrix(hidden, short, biases=False, dtype=dtype)
            hidden = short
        kind: dict[str, Any] = {"biases": config.biases, "dtype": dtype}
        blocks = 2 if structure.gated_mlp else 1
        ranks_of = config.expert_ranks
        self.up = ExpertMatrices(ranks_of, self.own, width, hidden, **kind, blocks=blocks)
        self.down = ExpertMatrices(ranks_of, self.own, hidden, inner, **kind)
        # How copies of tokens reach their experts, when a model runs on several ranks.
        self.trips: Trips | None = None
        # ``context``: the ranks that hold the other tokens of each sequence; ``watch``: the
        # observer of the router; None where there is neither.
        self.context: ContextRanks | None = None
        self.watch: RouterWatch | None = None
        self.correction: Tensor | None
        corrects = config.router is not None and config.router.correction
        count = value_of(config.experts) if corrects else 0
        self.register_buffer("correction", torch.zeros(count) if corrects else None)

    def forward(self, x: Tensor) -> Tensor:
        """The sum of the outputs of each token's experts, weighted by the router; input and output
        are (B, S, hidden).
        """
        tokens = x.flatten(0, 1) if self.ranks.splits_tokens else own_tokens(x, self.ranks)
        made = self._routed(tokens, x.shape[0])
        if self.ranks.splits_tokens:
            return made.view(x.shape)
        return all_tokens(made, self.ranks).view(x.shape)

    def _routed(self, tokens: Tensor, batch: Size) -> Tensor:
        logits = self.router(tokens)
        router = self.config.router
        if router is None or router.is_plain:
            weights, chosen = Route.apply(logits, self.config.active)
        else:
            weights, chosen = RouteBy.apply(logits, self.correction, router, self.config.active)
        kept = None
        if router is not None:
            weights, kept = self._watched(weights, logits, chosen, batch)
        if self.shorter is not None:
            tokens = self.shorter(tokens)
        if kept is not None:
            return self._of_kept(tokens, weights, chosen.masked_fill(~kept, self.config.experts))
        rows, of_rows, order = Permute.apply(tokens, weights, chosen)
        if self.trips is not None:
            trip = self.trips.trip(chosen, self.own)
            rows, of_rows = (carried(each, trip.there, trip.back) for each in (rows, of_rows))
            rows, of_rows = self._weighed(rows, of_rows)
            made = carried(self._made(rows, of_rows, trip.counts), trip.back, trip.there)
        elif self.config.expert_ranks.is_one:
            counts = chosen.flatten().bincount(minlength=self.own)
            rows, of_rows = self._weighed(rows, of_rows)
            made = self._made(rows, of_rows, counts)
        else:
            ranks, sent = self.config.expert_ranks, rows.shape[0]
            counts = chosen.new_empty((self.own,))
            taken = tokens.shape[0] * ranks.taken
            rows, of_rows = (exchanged(each, taken, ranks) for each in (rows, of_rows))
            rows, of_rows = (over_parts(each, ranks) for each in (rows, of_rows))
            # Copies arrive sorted by rank, and the grouped GEMMs need them sorted by expert.
            rows, of_rows = rows.clone(), of_rows.clone()
            made = self._made(rows, of_rows, counts)
            made = exchanged(summed_parts(made.clone(), ranks), sent, ranks)
        back: Tensor = Unpermute.apply(made, order, tokens.shape[0])
        return back if self.longer is None else self.longer(back)

    def _watched(
        self, weights: Tensor, logits: Tensor, chosen: Tensor, batch: Size
    ) -> tuple[Tensor, Tensor | None]:
        """Attach the router's auxiliary losses to the routing weights. Returns the weights, and
        which choices (T, A) fit in the experts' capacity (None without a capacity).
        """
        config, router = self.config, self.config.router
        assert router is not None
        whose = Whose(batch=value_of(batch), ranks=self.ranks, context=self.context)
        balances = self.watch is not None and router.balance_loss > 0
        kept = shares = None
        if balances or config.capacity:
            with torch.no_grad():
                pairs = torch.stack([weights, chosen.float()], -1).flatten(1)
                of_all, all_chosen = whose.whole(pairs).unflatten(-1, (-1, 2)).unbind(-1)
                experts = value_of(config.experts)
                if balances:
                    shares = shares_of_choices(all_chosen, experts)
                if config.capacity:
                    mean = all_chosen[0].numel() / experts
                    most = math.ceil(config.capacity * mean)
                    kept = whose.own(within_capacity(of_all, all_chosen, experts, most))
        if self.watch is not None:
            following = Following(router, whose, self.watch)
            weights = Watched.apply(weights, logits, chosen, shares, following)
        return weights, kept

    def _of_kept(self, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """The sum of the experts' outputs over each token's kept copies. An entry of ``chosen`` (T,
        A) equal to the number of experts marks a dropped copy, which is not sent.
        """
        if self.trips is not None:
            trip = self.trips.trip(chosen, self.own)
            rows, of_rows, order = PermuteKept.apply(tokens, weights, chosen, trip.rows)
            rows, of_rows = (carried(each, trip.there, trip.back) for each in (rows, of_rows))
            rows, of_rows = self._weighed(rows, of_rows)
            made = carried(self._made(rows, of_rows, trip.counts), trip.back, trip.there)
        else:
            counts = chosen.flatten().bincount(minlength=self.own + 1)[: self.own]
            rows, of_rows, order = PermuteKept.apply(tokens, weights, chosen, int(counts.sum()))
            rows, of_rows = self._weighed(rows, of_rows)
            made = self._made(rows, of_rows, counts)
        back: Tensor = UnpermuteKept.apply(made, order, chosen.shape)
        return back if self.longer is None else self.longer(back)

    def _weighed(self, rows: Tensor, of_rows: Tensor) -> tuple[Tensor, Tensor]:
        """The rows that enter the experts, and the weights of the experts' outputs. Where the
        router weighs the experts' inputs, the copies are multiplied by their routing weights and
        outputs have weight 1.
        """
        if self.config.router is None or not self.config.router.weighs_inputs:
            return rows, of_rows
        return WeightedRows.apply(rows, of_rows), of_rows.new_ones(1).expand(of_rows.shape)

    def _made(self, rows: Tensor, of_rows: Tensor, counts: Counts) -> Tensor:
        """The outputs of this rank's experts for ``rows``, of which each expert takes its number in
        ``counts``.
        """
        inner = self.up(rows, counts)
        # The trace for layer graphs, which has no router's rule, adds biases without routing
        # weights, since the time to weight them does not count.
        weights = of_rows if self.config.router is not None else None
        return self.down(self._activated(inner, of_rows), counts, weights)

    def _activated(self, inner: Tensor, weights: Tensor) -> Tensor:
        if self.config.gate_limit:
            limited: Tensor = LimitedSwiglu.apply(inner, weights, self.config.gate_limit)
            return limited
        if self.structure.gated_mlp:
            gated: Tensor = WeightedSwiglu.apply(inner, weights)
            return gated
        if self.structure.activation == "relu2":
            squares: Tensor = SquaredRelu.apply(inner, weights)
            return squares
        return nn.functional.gelu(inner, approximate="tanh") * weights.unsqueeze(1).to(inner.dtype)


class Trip(Protocol):
    """The route of a micro-batch's copies of tokens to their experts and back."""

    @property
    def counts(self) -> tuple[int, ...]:
        """The number of rows of each expert (G) of this rank."""

    @property
    def rows(self) -> int:
        """The number of copies that this rank sends."""

    def there(self, rows: Tensor) -> Tensor:
        """Send this rank's copies, sorted by expert, to the ranks that hold the experts; returns
        the rows that this rank's experts receive, sorted by expert.
        """

    def back(self, rows: Tensor) -> Tensor:
        """The way back of ``there``: send the outputs of this rank's experts to the ranks that sent
        the copies; returns the outputs for this rank's copies, sorted by expert.
        """


class Trips(Protocol):
    """The exchange of copies of tokens among the ranks that share a layer's experts."""

    def trip(self, chosen: Tensor, each_has: int) -> Trip:
        """Plan the exchange of copies for the ``chosen`` experts (T, A), of which each rank holds
        ``each_has``. An index beyond the last expert marks a copy that is not sent.
        """


def own_tokens(x: Tensor, ranks: TensorParallel) -> Tensor:
    """This rank's share (T, channels) of tokens (B, S, channels) that all ranks of the
    tensor-parallel group hold.
    """
    flat = x.flatten(0, 1)
    each = shard(flat.shape[0], ranks.size, "a number of tokens of")
    return carried(flat, partial(_of_rank, ranks, each), partial(_of_ranks, ranks))


def all_tokens(x: Tensor, ranks: TensorParallel) -> Tensor:
    """The tokens (ranks T, channels) of all ranks of the tensor-parallel group, of which ``x`` is
    this rank's share.
    """
    return carried(x, partial(_of_ranks, ranks), partial(_of_rank, ranks, x.shape[0]))


def _of_rank(ranks: TensorParallel, each: Size, tokens: Tensor) -> Tensor:
    return tokens[ranks.rank * each : (ranks.rank + 1) * each]


def _of_ranks(ranks: TensorParallel, tokens: Tensor) -> Tensor:
    return ranks.gather_tokens(tokens[None])[0]


def exchanged(x: Tensor, rows: Size, ranks: ExpertRanks) -> Tensor:
    """Send each row by all-to-all to the rank that holds its expert, or back to the rank it came
    from; returns the ``rows`` rows that arrive.
    """
    there, back = (partial(_all_to_all, rows=r, ranks=ranks.parallel) for r in (rows, x.shape[0]))
    return carried(x, there, back)


def over_parts(x: Tensor, ranks: ExpertRanks) -> Tensor:
    """Gather rows from all ranks that split the same experts."""
    gather, scatter = (partial(one, ranks=ranks.tensor) for one in (_gather_rows, _scatter_rows))
    return carried(x, gather, scatter)


def summed_parts(x: Tensor, ranks: ExpertRanks) -> Tensor:
    """Reduce-scatter rows over the ranks that split the same experts; returns this rank's rows."""
    gather, scatter = (partial(one, ranks=ranks.tensor) for one in (_gather_rows, _scatter_rows))
    return carried(x, scatter, gather)


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
