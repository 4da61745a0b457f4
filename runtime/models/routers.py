"""Routers with other rules than a softmax over the chosen experts, and their auxiliary losses.

A sequence's tokens may lie on several ranks: what is said of whole sequences is gathered first, and
no plan changes it.

Axes: B batch, S sequence, T this rank's tokens, A experts a token takes, E experts, N
context-parallel ranks.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from mistlab.plan.routers import Router
from runtime.models.context import ContextRanks, by_rank, in_order
from runtime.models.ranks import TensorParallel

# A number added to the sum by which weights are normalised, as in DeepSeek's code.
TINY = 1e-20


def scores_of(logits: Tensor, router: Router) -> Tensor:
    """The scores (T, E) of all experts in 32 bits."""
    wide = logits.float()
    return wide.sigmoid() if router.scores == "sigmoid" else wide.softmax(-1)


def choice_of(scores: Tensor, correction: Tensor | None, router: Router, active: int) -> Tensor:
    """The experts (T, A) with the largest scores (biased, if there are biases) within the best
    groups of experts.
    """
    by = scores if correction is None else scores + correction
    if router.groups > 1:
        grouped = by.unflatten(-1, (router.groups, -1))
        best = grouped.topk(router.best_of_group, -1).values.sum(-1)
        groups = best.topk(router.active_groups, -1).indices
        outside = torch.ones_like(best, dtype=torch.bool).scatter_(-1, groups, False)
        by = grouped.masked_fill(outside[..., None], -torch.inf).flatten(-2)
    return by.topk(active, -1).indices


class RouteBy(torch.autograd.Function):
    """Chooses experts by a router's rule; keeps its logits and the chosen experts."""

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, correction: Tensor | None, router: Router, active: int
    ) -> tuple[Tensor, Tensor]:
        """The weights and the indices (T, A) of the chosen experts."""
        scores = scores_of(logits, router)
        chosen = choice_of(scores, correction, router, active)
        weights = scores.gather(-1, chosen)
        if router.normalized:
            weights = weights / (weights.sum(-1, keepdim=True) + TINY)
        ctx.mark_non_differentiable(chosen)
        ctx.save_for_backward(logits, chosen)
        ctx.router = router
        return weights * router.scale, chosen

    @staticmethod
    def backward(ctx: Any, gradient: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:  # type: ignore[override]
        """The gradient of the weights, at the chosen experts or, for a softmax, at all."""
        logits, chosen = ctx.saved_tensors
        router: Router = ctx.router
        scores = scores_of(logits, router)
        of_chosen = gradient * router.scale
        if router.normalized:
            of_own = scores.gather(-1, chosen)
            total = of_own.sum(-1, keepdim=True) + TINY
            of_chosen = (of_chosen - (of_chosen * of_own).sum(-1, keepdim=True) / total) / total
        of_scores = torch.zeros_like(scores).scatter_(-1, chosen, of_chosen)
        return of_logits(of_scores, scores, router).to(logits.dtype), None, None, None


def of_logits(of_scores: Tensor, scores: Tensor, router: Router) -> Tensor:
    """The gradient of logits from that of scores."""
    if router.scores == "sigmoid":
        return of_scores * scores * (1 - scores)
    return scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))


# Values of all tokens of sequences, of which each rank has a part.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whose:
    """The tokens of ``batch`` sequences that this rank routes: its part among tensor-parallel
    ``ranks``, which have a part among context-parallel ones.
    """

    batch: int
    ranks: TensorParallel
    context: ContextRanks | None

    @property
    def parts(self) -> int:
        """The number of context-parallel ranks."""
        return 1 if self.context is None else self.context.size

    def whole(self, tensor: Tensor) -> Tensor:
        """The values (B, S, ..) of all tokens of the sequences, from this rank's values ``own`` (T,
        ..).
        """
        width = tensor.shape[-1]
        size = int(self.ranks.size)
        if size > 1:
            tensor = self.ranks.gather_tokens(tensor[None])[0]
        if self.ranks.splits_tokens:
            tensor = tensor.view(size, self.batch, -1, width).transpose(0, 1)
        tensor = tensor.reshape(self.batch, -1, width)
        if self.context is None or self.parts == 1:
            return tensor
        return in_order(self.context.gather(tensor.flatten()).view(self.parts, *tensor.shape))

    def own(self, whole: Tensor) -> Tensor:
        """This rank's tokens (T, ..) of whole sequences (B, S, ..)."""
        if self.context is not None and self.parts > 1:
            whole = by_rank(whole, self.parts)[self.context.rank]
        if self.ranks.splits_tokens:
            return whole.chunk(int(self.ranks.size), 1)[self.ranks.rank].flatten(0, 1)
        return whole.flatten(0, 1).chunk(int(self.ranks.size))[self.ranks.rank]

    def sequences(self, tokens: int, device: torch.device) -> Tensor:
        """The sequence index (T) of each of this rank's tokens."""
        if self.ranks.splits_tokens:
            first, total = 0, tokens
        else:
            first, total = int(self.ranks.rank) * tokens, int(self.ranks.size) * tokens
        places = torch.arange(first, first + tokens, device=device)
        return places // (total // self.batch)


def shares_of_choices(chosen: Tensor, experts: int) -> Tensor:
    """The frequency of each expert among each sequence's choices (B, S, A), times E: (B, E)."""
    batch = chosen.shape[0]
    flat = chosen.flatten(1).long()
    counts = flat.new_zeros(batch, experts, dtype=torch.float32)
    counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float32))
    return counts * (experts / flat.shape[1])


def within_capacity(weights: Tensor, chosen: Tensor, experts: int, most: int) -> Tensor:
    """The choices of experts (B, S, A) that are accepted, where each expert accepts at most
    ``most`` tokens per sequence: those with the largest weights, ties in order.
    """
    batch = chosen.shape[0]
    places = torch.arange(batch, device=chosen.device)[:, None]
    group = (chosen.flatten(1).long() + places * experts).flatten()
    falling = weights.flatten().argsort(descending=True, stable=True)
    order = falling[group[falling].argsort(stable=True)]
    # ``bincount`` would synchronise the host.
    counts = group.new_zeros(batch * experts).scatter_add_(0, group, torch.ones_like(group))
    ends = counts.cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    rank = torch.arange(len(order), device=chosen.device) - begins[group[order]]
    kept = torch.empty_like(order, dtype=torch.bool).index_copy_(0, order, rank < most)
    return kept.view(chosen.shape)


# The auxiliary losses of routers: their gradients are added where the gradients of router logits
# are computed.


class RouterWatch(Protocol):
    """The observer of a block's router in a training run: it scales the router's losses and counts
    its choices.
    """

    def share(self) -> Tensor:
        """The factor of a micro-batch's mean loss on this rank, by which gradients are scaled."""

    def note(self, counts: Tensor, loss: Tensor) -> None:
        """Record the number of tokens (E) per expert in a micro-batch on this rank, and the rank's
        summand of the router's losses.
        """


class Following(NamedTuple):
    """The inputs of a router's losses besides its logits: the router's rule, its tokens' sequences,
    and the scale of gradients.
    """

    router: Router
    whose: Whose
    watch: RouterWatch


class Watched(torch.autograd.Function):
    """Passes the weights of chosen experts through unchanged; its backward pass adds gradients of
    the router's losses to those of its logits, and records the choices.
    """

    @staticmethod
    def forward(
        ctx: Any,
        weights: Tensor,
        logits: Tensor,
        chosen: Tensor,
        shares: Tensor | None,
        following: Following,
    ) -> Tensor:
        """The weights; ``shares`` (B, E) are experts' frequencies among each sequence's choices."""
        ctx.save_for_backward(logits, chosen, shares)
        ctx.following = following
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of the weights, and that of the losses."""
        logits, chosen, shares = ctx.saved_tensors
        router, whose, watch = ctx.following
        flat = chosen.flatten()
        counts = torch.zeros(logits.shape[-1], dtype=torch.float32, device=logits.device)
        counts.scatter_add_(0, flat, torch.ones_like(flat, dtype=torch.float32))
        if not router.has_losses:
            watch.note(counts, counts.new_zeros(()))
            return gradient, None, None, None, None
        made, loss = _losses(logits, shares, router, whose)
        watch.note(counts, loss)
        return gradient, (made * watch.share()).to(logits.dtype), None, None, None


def _losses(
    logits: Tensor, shares: Tensor | None, router: Router, whose: Whose
) -> tuple[Tensor, Tensor]:
    """The gradient of logits from a rank's summand of the losses, and the summand: a mean over the
    tokens that it shares with tensor-parallel ranks, for its own tokens.
    """
    wide = logits.float()
    tokens = len(wide) * int(whose.ranks.size)
    made, loss = torch.zeros_like(wide), wide.new_zeros(())
    if shares is not None:
        scores = scores_of(logits, router)
        total = scores.sum(-1, keepdim=True)
        even = scores / total
        weighed = shares[whose.sequences(len(wide), wide.device)] * (router.balance_loss / tokens)
        loss = loss + (weighed * even).sum()
        of_scores = (weighed - (weighed * even).sum(-1, keepdim=True)) / total
        made += of_logits(of_scores, scores, router)
    if router.z_loss:
        powers = wide.logsumexp(-1, keepdim=True)
        loss = loss + router.z_loss / tokens * powers.square().sum()
        made += (2 * router.z_loss / tokens) * powers * (wide - powers).exp()
    return made, loss
