"""Routers of experts with other rules than a softmax over the chosen experts, and the routers'
auxiliary losses.

A sequence's tokens may lie on several ranks. Values of whole sequences that a rule or a loss needs
are gathered first, so results do not depend on the plan.

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

# A small number added to the sum that normalises routing weights, as in DeepSeek's code.
TINY = 1e-20


def scores_of(logits: Tensor, router: Router) -> Tensor:
    """The scores (T, E) of all experts for each token, in 32 bits."""
    wide = logits.float()
    return wide.sigmoid() if router.scores == "sigmoid" else wide.softmax(-1)


def choice_of(scores: Tensor, correction: Tensor | None, router: Router, active: int) -> Tensor:
    """The experts (T, A) with the largest scores, plus ``correction`` if it is given, among the
    best groups of experts.
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
    """Autograd function that chooses experts by a router's rule; saves the logits and the chosen
    experts.
    """

    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, correction: Tensor | None, router: Router, active: int
    ) -> tuple[Tensor, Tensor]:
        """The routing weights and the indices (T, A) of the chosen experts."""
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
        """The gradient of the logits, from the gradient of the chosen experts' weights."""
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
    """The gradient of the router's logits from the gradient of its scores."""
    if router.scores == "sigmoid":
        return of_scores * scores * (1 - scores)
    return scores * (of_scores - (of_scores * scores).sum(-1, keepdim=True))


# Gathers values of whole sequences from ranks that each have some of the tokens, and selects a
# rank's tokens from values of whole sequences.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Whose:
    """Which tokens of ``batch`` sequences this rank routes: the part of its context-parallel rank
    (``context``), divided over the tensor-parallel ``ranks``.
    """

    batch: int
    ranks: TensorParallel
    context: ContextRanks | None

    @property
    def parts(self) -> int:
        """The number of context-parallel ranks."""
        return 1 if self.context is None else self.context.size

    def whole(self, tensor: Tensor) -> Tensor:
        """The values (B, S, ..) of all tokens of the sequences, gathered from this rank's values
        (T, ..) and other ranks'.
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
        """The values (T, ..) of this rank's tokens, from the values of whole sequences (B, S,
        ..).
        """
        if self.context is not None and self.parts > 1:
            whole = by_rank(whole, self.parts)[self.context.rank]
        if self.ranks.splits_tokens:
            return whole.chunk(int(self.ranks.size), 1)[self.ranks.rank].flatten(0, 1)
        return whole.flatten(0, 1).chunk(int(self.ranks.size))[self.ranks.rank]

    def sequences(self, tokens: int, device: torch.device) -> Tensor:
        """For each of this rank's tokens (T), the index of its sequence in the batch."""
        if self.ranks.splits_tokens:
            first, total = 0, tokens
        else:
            first, total = int(self.ranks.rank) * tokens, int(self.ranks.size) * tokens
        places = torch.arange(first, first + tokens, device=device)
        return places // (total // self.batch)


def shares_of_choices(chosen: Tensor, experts: int) -> Tensor:
    """How often each expert was chosen in a sequence (B, E), relative to an even distribution, from
    each token's choices (B, S, A).
    """
    batch = chosen.shape[0]
    flat = chosen.flatten(1).long()
    counts = flat.new_zeros(batch, experts, dtype=torch.float32)
    counts.scatter_add_(1, flat, torch.ones_like(flat, dtype=torch.float32))
    return counts * (experts / flat.shape[1])


def within_capacity(weights: Tensor, chosen: Tensor, experts: int, most: int) -> Tensor:
    """Which choices of experts (B, S, A) are accepted, where each expert accepts at most ``most``
    tokens of a sequence: those with the largest weights, earlier tokens first among equals.
    """
    batch = chosen.shape[0]
    places = torch.arange(batch, device=chosen.device)[:, None]
    group = (chosen.flatten(1).long() + places * experts).flatten()
    falling = weights.flatten().argsort(descending=True, stable=True)
    order = falling[group[falling].argsort(stable=True)]
    # ``scatter_add_`` counts without making the host wait for the device, as ``bincount`` would.
    counts = group.new_zeros(batch * experts).scatter_add_(0, group, torch.ones_like(group))
    ends = counts.cumsum(0)
    begins = torch.cat([ends.new_zeros(1), ends[:-1]])
    rank = torch.arange(len(order), device=chosen.device) - begins[group[order]]
    kept = torch.empty_like(order, dtype=torch.bool).index_copy_(0, order, rank < most)
    return kept.view(chosen.shape)


# Auxiliary losses of routers: their gradients are added to the gradients of the router's logits.


class RouterWatch(Protocol):
    """Observes the router of a block in a training run: scales the gradients of the router's
    losses, and records its choices.
    """

    def share(self) -> Tensor:
        """The factor by which a micro-batch's mean loss on this rank counts, and by which gradients
        of the router's losses are scaled.
        """

    def note(self, counts: Tensor, loss: Tensor) -> None:
        """Record how many tokens each expert took (E) in a micro-batch on this rank, and this
        rank's summand of the router's losses.
        """


class Following(NamedTuple):
    """What a router's losses need besides its logits: the router's rule, the tokens' sequences, and
    the observer that scales gradients.
    """

    router: Router
    whose: Whose
    watch: RouterWatch


class Watched(torch.autograd.Function):
    """Autograd function that returns the weights of the chosen experts unchanged. Its backward pass
    adds gradients of the router's losses to those of the logits, and records the choices.
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
        """The routing weights unchanged; ``shares`` (B, E) says how often each expert was chosen in
        each sequence.
        """
        ctx.save_for_backward(logits, chosen, shares)
        ctx.following = following
        return weights.view_as(weights)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        """The gradient of the routing weights, unchanged, and the gradient of the logits from the
        router's losses.
        """
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
    """The gradient of the logits from the router's losses, and this rank's summand of the losses:
    the sum over its tokens, divided by the tokens of all tensor-parallel ranks.
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
