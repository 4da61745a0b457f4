"""A transformer in plain torch functions, written apart from the runtime's layers.

It takes weights by the names that the runtime gives them, whole. Each token of a sequence looks at
all tokens before it, or of an encoder at all tokens, by a softmax over a table of scores; nothing
is fused, split or kept.

Axes: B batch, S sequence, H heads, K key and value heads, D channels of a head.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn import functional

from mistlab.plan.model_parts import Experts
from mistlab.plan.rotary import RotaryScaling
from mistlab.plan.workload import ModelSpec
from tests.runtime.plain_masks import FIRST, SECOND, Masks

Weights = Mapping[str, Tensor]


class Part:
    """The weights of a part of the model, by the names behind its path."""

    def __init__(self, weights: Weights, path: str) -> None:
        self._weights, self._path = weights, path

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[f"{self._path}.{name}"]

    def get(self, name: str) -> Tensor | None:
        return self._weights.get(f"{self._path}.{name}")

    def inside(self, name: str) -> "Part":
        return Part(self._weights, f"{self._path}.{name}")

    def linear(self, x: Tensor) -> Tensor:
        made = functional.linear(x, self["weight"], self.get("bias"))
        own = self.inside("adapter")
        if (down := own.get("down.weight")) is not None:
            return made + x @ down.T @ own["up.weight"].T
        parts: list[Tensor] = []
        while (down := own.get(f"down.{len(parts)}.weight")) is not None:
            parts.append(x @ down.T @ own[f"up.{len(parts)}.weight"].T)
        return made + torch.cat(parts, -1) if parts else made


@dataclass(kw_only=True)
class Routing:
    """What is known of routers besides weights: an expert takes ``capacity`` times the mean number
    of a sequence's choices at most. Notes the sum of routers' losses, choices by block, and the
    ``nearest`` that a number came to where the model, or its gradient, jumps: another expert would
    be chosen, or a gate would be cut off. Two right runs part there if they round otherwise."""

    capacity: float | None = None
    loss: Tensor = field(default_factory=lambda: torch.zeros(()))
    losses: list[Tensor] = field(default_factory=list)
    choices: dict[int, Tensor] = field(default_factory=dict)
    nearest: float = math.inf

    def pass_by(self, distances: Tensor) -> None:
        """Note distances to such places."""
        if distances.numel():
            self.nearest = min(self.nearest, float(distances.detach().abs().min()))


def loss_of(
    spec: ModelSpec,
    weights: Weights,
    tokens: Tensor,
    targets: Tensor,
    masks: Masks | None = None,
    *,
    routing: Routing | None = None,
) -> Tensor:
    """The mean loss of targets, of an encoder those of hidden tokens (others are -100), without
    routers' losses; with ``masks`` dropout drops. The mean loss of tokens after them counts three
    tenths."""
    routing = routing or Routing()
    x = made_by_blocks(spec, weights, tokens, masks, routing)
    logits = by_head(spec, weights, x, "head.norm")
    loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
    for number in range(spec.further_tokens):
        # The first of them sees the target of each token, and predicts the one after; the last
        # tokens of a sequence have none.
        own = Part(weights, f"head.further.{number}")
        vectors = functional.embedding(targets[:, number:], weights["embedding.tokens.weight"])
        vectors = functional.pad(vectors, (0, 0, 0, number))
        both = norm(spec, own.inside("norm"), x), norm(spec, own.inside("token_norm"), vectors)
        x = own.inside("joint").linear(torch.cat(both, -1))
        place = spec.layers + number
        x = block_of(spec, spec.layers - 1, own.inside("block"), x, masks, routing, place)
        logits = by_head(spec, weights, x, f"head.further.{number}.last_norm")[:, : -number - 1]
        further = targets[:, number + 1 :]
        one = functional.cross_entropy(logits.flatten(0, 1), further.flatten())
        loss = loss + 0.3 / spec.further_tokens * one
    return loss


def logits_of(
    spec: ModelSpec,
    weights: Weights,
    tokens: Tensor,
    masks: Masks | None = None,
    *,
    routing: Routing | None = None,
) -> Tensor:
    """The logits (B, S, vocabulary)."""
    x = made_by_blocks(spec, weights, tokens, masks, routing or Routing())
    return by_head(spec, weights, x, "head.norm")


def by_head(spec: ModelSpec, weights: Weights, x: Tensor, own: str) -> Tensor:
    """The logits of what blocks have made, by a norm and the head's matrix."""
    name = "embedding.tokens.weight" if spec.tied_embeddings else "head.projection.weight"
    if spec.is_encoder:
        x = functional.gelu(Part(weights, "head.transform").linear(x))
    return functional.linear(norm(spec, Part(weights, own), x), weights[name])


def made_by_blocks(
    spec: ModelSpec, weights: Weights, tokens: Tensor, masks: Masks | None, routing: Routing
) -> Tensor:
    """What the last block makes of tokens."""
    x = functional.embedding(tokens, weights["embedding.tokens.weight"])
    if spec.position_embedding == "absolute":
        x = x + weights["embedding.positions"][: tokens.shape[1]]
    if spec.is_encoder:
        x = norm(spec, Part(weights, "embedding.norm"), x)
    x = dropped(spec, x, masks, 0, FIRST)
    for block in range(spec.layers):
        x = block_of(spec, block, Part(weights, f"blocks.{block}"), x, masks, routing, block)
    return x


def dropped(spec: ModelSpec, x: Tensor, masks: Masks | None, layer: int, mask: int) -> Tensor:
    """Tokens with dropout; the embedding is layer 0, the first block layer 1."""
    return masks.of_tokens(x, layer, mask, spec.dropout) if masks and spec.dropout else x


def block_of(
    spec: ModelSpec,
    block: int,
    own: Part,
    x: Tensor,
    masks: Masks | None,
    routing: Routing,
    place: int,
) -> Tensor:
    """The output of a block like the model's ``block``: attention and a network, one after the
    other or side by side. Its ``place`` is its own number; those of further heads come last."""
    layer = place + 1
    if spec.is_encoder:
        made = attention(spec, block, own.inside("attention"), x, masks, layer)
        x = norm(spec, own.inside("attention_norm"), x + dropped(spec, made, masks, layer, FIRST))
        made = network(spec, own.inside("mlp"), x)
        return norm(spec, own.inside("mlp_norm"), x + dropped(spec, made, masks, layer, SECOND))
    inner = norm(spec, own.inside("attention_norm"), x)
    attend = latent_attention if spec.latent is not None else attention
    made = attend(spec, block, own.inside("attention"), inner, masks, layer)
    if spec.post_norms:
        made = norm(spec, own.inside("attention_post_norm"), made)
    if spec.parallel_block:
        made = made + network_of(spec, block, own, inner, routing, place)
        return x + dropped(spec, made, masks, layer, FIRST)
    x = x + dropped(spec, made, masks, layer, FIRST)
    inner = norm(spec, own.inside("mlp_norm"), x)
    made = network_of(spec, block, own, inner, routing, place)
    if spec.post_norms:
        made = norm(spec, own.inside("mlp_post_norm"), made)
    return x + dropped(spec, made, masks, layer, SECOND)


def norm(spec: ModelSpec, own: Part, x: Tensor) -> Tensor:
    if spec.norm == "layernorm":
        return functional.layer_norm(x, x.shape[-1:], own["weight"], own["bias"], spec.norm_epsilon)
    return rms(spec, x, own["weight"])


def rms(spec: ModelSpec, x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().mean(-1, keepdim=True) + spec.norm_epsilon).sqrt() * weight


# Networks: one for all tokens, or experts of which each token takes a few.


def network_of(
    spec: ModelSpec, block: int, own: Part, x: Tensor, routing: Routing, place: int
) -> Tensor:
    """What a block's network makes: experts, where the block has some."""
    experts = spec.experts
    turns = spec.pattern or "A"
    is_dense = turns[block % len(turns)] == "D"
    if experts is None or is_dense or block < experts.dense_blocks:
        return network(spec, own.inside("mlp"), x)
    inside = own.inside("experts")
    taken = torch.cat([routed(spec, place, inside, one, routing) for one in x])
    routing.loss = routing.loss + torch.stack(routing.losses).mean()
    routing.losses.clear()
    made = experts_of(spec, inside, x.flatten(0, 1), taken, routing).view(x.shape)
    return made + network(spec, own.inside("shared"), x) if experts.shared_ffn else made


def network(spec: ModelSpec, own: Part, x: Tensor) -> Tensor:
    return own.inside("down").linear(activated(spec, own.inside("up").linear(x)))


def activated(spec: ModelSpec, inner: Tensor) -> Tensor:
    if spec.mlp_type == "gated_mlp":
        gate, up = inner.chunk(2, -1)
        return functional.silu(gate) * up
    return ACTIVATIONS[spec.activation](inner)


ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "silu": functional.silu,
    "relu2": lambda x: functional.relu(x).square(),
}


def experts_of(
    spec: ModelSpec, own: Part, tokens: Tensor, taken: Tensor, routing: Routing
) -> Tensor:
    """Each token's sum over experts, weighed by what it takes (T, E) of each."""
    assert spec.experts is not None
    made = torch.zeros_like(tokens)
    ups, downs = own.inside("up"), own.inside("down")
    for expert in range(spec.experts.count):
        rows = taken[:, expert].nonzero().squeeze(1)
        weights, inputs = taken[rows, expert, None], tokens[rows]
        if spec.experts.router.weighs_inputs:
            weights, inputs = torch.ones_like(weights), inputs * weights
        inner = functional.linear(inputs, ups["weight"][expert], bias_of(ups, expert))
        limit = spec.experts.gate_limit
        inner = limited(inner, limit, routing) if limit else activated(spec, inner)
        outcome = functional.linear(inner, downs["weight"][expert], bias_of(downs, expert))
        made = made.index_add(0, rows, outcome * weights)
    return made


def bias_of(own: Part, expert: int) -> Tensor | None:
    biases = own.get("bias")
    return None if biases is None else biases[expert]


def limited(inner: Tensor, limit: float, routing: Routing) -> Tensor:
    """The gate of gpt-oss."""
    gate, up = inner.chunk(2, -1)
    routing.pass_by(torch.cat([gate - limit, up.abs() - limit]))
    gate = torch.minimum(gate, torch.full_like(gate, limit))
    up = torch.minimum(torch.maximum(up, torch.full_like(up, -limit)), torch.full_like(up, limit))
    return gate / (1 + torch.exp(-1.702 * gate)) * (up + 1)


def routed(spec: ModelSpec, block: int, own: Part, tokens: Tensor, routing: Routing) -> Tensor:
    """What each token of a sequence takes (S, E) of each expert; 0 of those it did not choose, and
    of those that have no room for it."""
    experts = spec.experts
    assert experts is not None
    router = experts.router
    logits = own.inside("router").linear(tokens)
    scores = logits.softmax(-1) if router.scores == "softmax" else logits.sigmoid()
    with torch.no_grad():
        chosen = choices_of(experts, scores, own.get("correction"), routing)
    taken = scores * chosen
    if router.normalized:
        taken = taken / taken.sum(-1, keepdim=True)
    taken = taken * router.scale
    share = chosen.mean(0) * experts.count / experts.active
    even = (scores / scores.sum(-1, keepdim=True)).mean(0)
    loss = router.balance_loss * (share * even).sum()
    loss = loss + router.z_loss * logits.exp().sum(-1).log().square().mean()
    routing.losses.append(loss)
    routing.choices[block] = routing.choices.get(block, 0) + chosen.sum(0)
    if routing.capacity is None:
        return taken
    most = math.ceil(routing.capacity * len(tokens) * experts.active / experts.count)
    # One expert that gets the whole of a token gives all of them the same weight.
    is_even = router.normalized and experts.active == 1
    return taken * with_room(taken.detach(), most, None if is_even else routing)


def choices_of(
    experts: Experts, scores: Tensor, correction: Tensor | None, routing: Routing
) -> Tensor:
    """1 for each expert (S, E) that a token chooses, 0 for others."""
    router = experts.router
    own = scores if correction is None else scores + correction
    size = experts.count // router.groups
    if router.groups > 1:
        grouped = own.view(len(own), router.groups, size)
        best = grouped.sort(-1, descending=True)[0][..., : router.best_of_group].sum(-1)
        routing.pass_by(gaps(best, router.active_groups))
        good = best.argsort(-1, descending=True)[:, : router.active_groups]
        places = torch.arange(experts.count) // size
        allowed = (good[:, :, None] == places).any(1)
        own = own.masked_fill(~allowed, -math.inf)
    routing.pass_by(gaps(own, experts.active))
    first = own.argsort(-1, descending=True)[:, : experts.active]
    return torch.zeros_like(scores).scatter(1, first, 1.0)


def gaps(numbers: Tensor, count: int) -> Tensor:
    """By how much the smallest of the ``count`` largest of each row is above the next."""
    order = numbers.sort(-1, descending=True)[0]
    return order[..., count - 1 : count] - order[..., count : count + 1]


def with_room(taken: Tensor, most: int, routing: Routing | None) -> Tensor:
    """1 for each token (S, E) that is among the ``most`` with the largest weights of an expert."""
    room = torch.zeros_like(taken)
    for expert, weights in enumerate(taken.T):
        if routing is not None and (weights > 0).sum() > most:
            routing.pass_by(gaps(weights, most))
        order = weights.argsort(descending=True, stable=True)[:most]
        room[order, expert] = 1
    return room


# Attention.


def attention(
    spec: ModelSpec, block: int, own: Part, x: Tensor, masks: Masks | None = None, layer: int = 0
) -> Tensor:
    """Queries, keys and values by one product, attention over heads, and the output product."""
    batch, tokens, _ = x.shape
    made = own.inside("qkv").linear(x).view(batch, tokens, -1, spec.head_dim)
    counts = [spec.heads, spec.kv_heads, spec.kv_heads, *[spec.heads] * spec.attention_gate]
    query, key, value, *gate = made.split(counts, 2)
    if spec.qk_norm:
        query = rms(spec, query, own["query_norm.weight"])
        key = rms(spec, key, own["key_norm.weight"])
    if spec.position_embedding == "rotary":
        channels = round(spec.head_dim * spec.rotary_fraction)
        query, key = (rotated(spec, one, channels) for one in (query, key))

    def drop(shares: Tensor) -> Tensor:
        share = spec.dropped_shares
        return masks.of_shares(shares, layer, share) if masks and share else shares

    mixed = attended(
        *(query, key, value, window_of(spec, block), own.get("sinks"), drop),
        is_causal=not spec.is_encoder,
    )
    if gate:
        mixed = mixed * gate[0].sigmoid()
    return own.inside("output").linear(mixed.flatten(2))


def window_of(spec: ModelSpec, block: int) -> int | None:
    """How many tokens a block's queries look back at, themselves included; None for all."""
    window = spec.window
    if window is None or (window.full_every and block % window.full_every == window.full_every - 1):
        return None
    return window.size


def latent_attention(
    spec: ModelSpec, block: int, own: Part, x: Tensor, masks: Masks | None = None, layer: int = 0
) -> Tensor:
    """Queries, and keys with values, of short vectors; one rotated part of all heads' keys."""
    latent = spec.latent
    assert latent is not None
    batch, tokens, _ = x.shape
    channels = round(spec.head_dim * spec.rotary_fraction)
    short = x
    if latent.query_rank is not None:
        short = rms(spec, own.inside("query_down").linear(x), own["query_norm.weight"])
    query = own.inside("query_up").linear(short).view(batch, tokens, spec.heads, spec.head_dim)
    query = rotated(spec, query, channels)
    if spec.rotary_scaling is not None:
        query = query * spec.rotary_scaling.score_factor
    short, shared = own.inside("key_down").linear(x).split([latent.key_rank, channels], -1)
    made = own.inside("key_up").linear(rms(spec, short, own["key_norm.weight"]))
    key, value = made.view(batch, tokens, spec.heads, -1).split(
        [spec.head_dim - channels, latent.value_dim], -1
    )
    turned = rotated(spec, shared[:, :, None], channels).expand(-1, -1, spec.heads, -1)
    mixed = attended(query, torch.cat([turned, key], -1), value, None, None)
    return own.inside("output").linear(mixed.flatten(2))


def rotated(spec: ModelSpec, heads: Tensor, channels: int) -> Tensor:
    """Pairs of the first ``channels`` of each head turned by their token's angles: channel i and
    the one half of ``channels`` behind it."""
    half = channels // 2
    frequency = spec.rotary_base ** (-torch.arange(half, dtype=torch.float64) / half)
    amplitude = 1.0
    if spec.rotary_scaling is not None:
        frequency = slowed(frequency, spec.rotary_base, spec.rotary_scaling, tokens=heads.shape[1])
        amplitude = spec.rotary_scaling.amplitude
    angle = torch.arange(heads.shape[1], dtype=torch.float64)[:, None, None] * frequency
    first, second, rest = heads.split([half, half, heads.shape[-1] - channels], -1)
    cosine, sine = (amplitude * one.to(heads.dtype) for one in (angle.cos(), angle.sin()))
    turned = first * cosine - second * sine, second * cosine + first * sine
    return torch.cat([*turned, rest], -1)


def slowed(frequency: Tensor, base: float, scaling: RotaryScaling, *, tokens: int) -> Tensor:
    """Frequencies that are divided by a factor, all or those of slow channels, or where sequences
    have more tokens than those of the first training."""
    is_longer = tokens > scaling.positions
    if scaling.kind == "dynamic":
        # The slowest channel turns slower by how much the sequence, so stretched, is too long.
        slowest = 1 + scaling.factor * (tokens / scaling.positions - 1) if is_longer else 1.0
        return frequency * slowest ** (-torch.arange(len(frequency)) / (len(frequency) - 1))
    if scaling.kind == "longrope":
        return frequency / torch.tensor(scaling.long if is_longer else scaling.short).double()
    if scaling.kind == "linear":
        return frequency / scaling.factor
    length = 2 * math.pi / frequency
    if scaling.kind == "llama3":
        smooth = (scaling.positions / length - scaling.low) / (scaling.high - scaling.low)
        smooth = smooth.clamp(0, 1)
        return (1 - smooth) * frequency / scaling.factor + smooth * frequency
    half = len(frequency)
    first, last = (
        half * math.log(scaling.positions / (2 * math.pi * turns)) / math.log(base)
        for turns in (scaling.high, scaling.low)
    )
    if scaling.truncates:
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, 2 * half - 1)
    last = last + 0.001 if first == last else last
    ramp = ((torch.arange(half) - first) / (last - first)).clamp(0, 1)
    return frequency / scaling.factor * ramp + frequency * (1 - ramp)


def attended(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    window: int | None,
    sinks: Tensor | None,
    drop: Callable[[Tensor], Tensor] = lambda shares: shares,
    *,
    is_causal: bool = True,
) -> Tensor:
    """Attention (B, S, H, C) of queries, causal or not; a head's sink is one more score without a
    value."""
    group = query.shape[2] // key.shape[2]
    key, value = (one.repeat_interleave(group, 2) for one in (key, value))
    scores = torch.einsum("bshd,bthd->bhst", query, key) / math.sqrt(query.shape[-1])
    places = torch.arange(query.shape[1])
    behind = places[:, None] - places
    hidden = behind < 0 if is_causal else torch.zeros_like(behind, dtype=torch.bool)
    if window is not None:
        hidden = hidden | (behind >= window)
    scores = scores.masked_fill(hidden, -math.inf)
    if sinks is not None:
        extra = sinks.view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, extra], -1)
    shares = drop(scores.softmax(-1)[..., : key.shape[1]])
    return torch.einsum("bhst,bthc->bshc", shares, value)


# The corrections of routers, which no gradient moves.


def corrected(
    spec: ModelSpec, corrections: Mapping[str, Tensor], choices: Mapping[int, Tensor]
) -> None:
    """Move each expert's correction by its choices in a step: up if it has fewer than the mean."""
    assert spec.experts is not None
    for place, counts in choices.items():
        further = place - spec.layers
        block = f"blocks.{place}" if further < 0 else f"head.further.{further}.block"
        step = spec.experts.router.correction_rate * (counts.mean() - counts).sign()
        corrections[f"{block}.experts.correction"].add_(step)
