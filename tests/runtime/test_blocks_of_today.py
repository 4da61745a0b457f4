"""Blocks with experts, latent attention, sinks and windows: real small models against plain torch.

Gradients are compared with those that torch derives from a plain text of the same arithmetic, and
parameters and kept bytes with those of the shipped graphs.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn  # noqa: E402

from mistlab.symbolic.library import Variant, shipped  # noqa: E402
from runtime.models.config import ModelConfig  # noqa: E402
from runtime.models.experts import Experts  # noqa: E402
from runtime.models.ranks import OneRank  # noqa: E402
from runtime.models.state_space import chunk_scan, delta_rule  # noqa: E402
from runtime.models.transformer import Block, RotaryTables  # noqa: E402
from runtime.models.wide_attention import WideAttention  # noqa: E402
from runtime.tracing.traced_families import structure_with  # noqa: E402

SIZES: Mapping[str, int] = dict(
    *({"b": 2, "s": 6, "h": 32, "n": 4, "k": 2, "d": 8, "r": 4, "f": 40, "V": 64, "tp": 1},),
    w=3,
    u=12,
    m=10,
    v=6,
    E=6,
    a=2,
    A=2,
    j=20,
    y=24,
    ep=1,
    et=1,
    l=16,
    q=4,
    p=8,
    g=2,
    e=6,
)


def variant(*parts: str, biases: bool = False) -> Variant:
    return Variant(family="llama", attention="flash", precision="half", biases=biases, parts=parts)


def hybrid(*parts: str) -> Variant:
    return replace(variant(*parts), family="nemotron")


VARIANTS = [
    variant("qk_norm"),
    variant("qk_norm", "experts"),
    variant("experts", "shared_experts"),
    variant("sinks", "window", "experts", biases=True),
    variant("latent"),
    variant("latent", "experts", "shared_experts"),
    variant("latent", "whole_queries"),
    variant("latent", "whole_queries", "experts", "shared_experts"),
    hybrid("state_space", "network_missing"),
    hybrid("network_missing"),
    hybrid("mixer_missing"),
    hybrid("experts", "shared_experts", "mixer_missing"),
    hybrid("experts", "shared_experts", "latent_experts", "mixer_missing"),
    variant("experts", "shared_experts", "state_space", "delta_rule"),
    variant("state_space", "delta_rule"),
    variant("qk_norm", "attention_gate"),
    variant("qk_norm", "attention_gate", "experts", "shared_experts"),
    variant("qk_norm", "experts", "shared_experts"),
    variant(biases=True),
    variant("post_norms"),
    variant("qk_norm", "post_norms"),
    replace(variant("rotary", biases=True), family="gpt"),
    replace(variant("positionless", biases=True), family="gpt"),
    replace(variant(biases=True), family="falcon"),
    replace(variant("gated"), family="falcon"),
    hybrid("rotary"),
    hybrid("rotary", "qk_norm"),
]


def block_of(one: Variant, dtype: torch.dtype) -> Block:
    size = SIZES
    config = ModelConfig(
        hidden=size["h"],
        heads=size["n"],
        kv_heads=size["k"],
        head_dim=size["d"],
        ffn=size["f"],
        vocab=size["V"],
        positions=size["s"],
        rotated=size["r"],
        dtype=dtype,
        biases=one.biases,
        window=size["w"],
        query_rank=size["u"],
        key_rank=size["m"],
        value_dim=size["v"],
        experts=size["E"],
        active=size["a"],
        expert_ffn=size["j"],
        shared_ffn=size["y"],
        expert_hidden=size["l"],
        scan_heads=size["q"],
        scan_channels=size["p"],
        scan_groups=size["g"],
        states=size["e"],
    )
    torch.manual_seed(0)
    block = Block(config, structure_with(one), OneRank(), RotaryTables(config))
    for parameter in block.parameters():
        nn.init.normal_(parameter, std=0.2)
    return block


def value(text: Any) -> int:
    return int(eval(str(text), {}, dict(SIZES)))


@pytest.mark.parametrize("one", VARIANTS, ids=lambda one: one.name)
def test_a_block_has_the_parameters_of_its_graph(one: Variant) -> None:
    graph = shipped(one).block
    shapes = {p.name: tuple(value(size) for size in p.shape) for p in graph.parameters}
    own = block_of(one, torch.bfloat16).named_parameters()
    assert shapes == {name: tuple(parameter.shape) for name, parameter in own}


@pytest.mark.parametrize("one", VARIANTS, ids=lambda one: one.name)
def test_a_block_keeps_the_bytes_of_its_graph(one: Variant) -> None:
    block = block_of(one, torch.bfloat16)
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in constants:
            kept[storage.data_ptr()] = storage.nbytes()
        alive.append(tensor)
        return tensor

    alive: list[Tensor] = []
    buffers = [*block.parameters(), *block.buffers()]
    constants = {tensor.untyped_storage().data_ptr() for tensor in buffers}
    x = torch.randn(SIZES["b"], SIZES["s"], SIZES["h"], dtype=torch.bfloat16, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        block(x)
    assert sum(kept.values()) == value(shipped(one).block.saved_bytes)


@pytest.mark.parametrize("one", VARIANTS, ids=lambda one: one.name)
def test_gradients_are_those_of_differences(one: Variant) -> None:
    """Along a random direction, the gradient is the difference of losses."""
    block = block_of(one, torch.float64)
    shape = SIZES["b"], SIZES["s"], SIZES["h"]
    x = torch.randn(*shape, dtype=torch.float64, requires_grad=True)
    along = torch.randn(*shape, dtype=torch.float64)
    weights = [parameter for parameter in block.parameters() if parameter.requires_grad]
    # Norms and attention compute in 32 bits.
    step = 2e-4
    loss = (block(x) * along).sum()
    gradients = torch.autograd.grad(loss, [x, *weights])
    directions = [torch.randn_like(tensor) for tensor in (x, *weights)]
    for tensor, gradient, direction in zip((x, *weights), gradients, directions, strict=True):
        ends = []
        for sign in (step, -step):
            with torch.no_grad():
                tensor.add_(direction, alpha=sign)
                ends.append(float((block(x) * along).sum()))
                tensor.sub_(direction, alpha=sign)
        expected = (ends[0] - ends[1]) / (2 * step)
        found = float((gradient * direction).sum())
        assert found == pytest.approx(expected, rel=1e-2, abs=5e-2), tensor.shape


def test_experts_are_networks_of_the_tokens_that_choose_them() -> None:
    one = replace(variant("experts"), biases=False)
    block = block_of(one, torch.float32)
    experts = block.experts
    assert isinstance(experts, Experts)
    x = torch.randn(2, 6, 32)
    logits = x.flatten(0, 1) @ experts.router.weight.t()
    largest, chosen = logits.topk(2, dim=-1)
    shares = largest.softmax(-1)
    expected = torch.zeros(12, 32)
    for token in range(12):
        for share, expert in zip(shares[token], chosen[token], strict=True):
            gate, up = (experts.up.weight[expert] @ x.flatten(0, 1)[token]).chunk(2)
            inner = nn.functional.silu(gate) * up
            expected[token] += share * (experts.down.weight[expert] @ inner)
    torch.testing.assert_close(experts(x).flatten(0, 1), expected, rtol=1e-4, atol=1e-4)


def test_a_window_of_the_whole_sequence_is_plain_attention() -> None:
    query, key, own = (torch.randn(2, 6, heads, 8) for heads in (4, 2, 2))
    plain = nn.functional.scaled_dot_product_attention(
        *(part.transpose(1, 2) for part in (query, key, own)), is_causal=True, enable_gqa=True
    )
    windowed = WideAttention.apply(query, key, own, None, 6)
    torch.testing.assert_close(windowed, plain.transpose(1, 2))
    narrow = WideAttention.apply(query, key, own, None, 1)
    # A token that sees itself alone takes its own value.
    torch.testing.assert_close(narrow, own.repeat_interleave(2, dim=2))


def test_a_scan_is_attention_with_weights_that_fade() -> None:
    """Mamba-2's recurrence, written out as a product over all pairs of tokens (section 6)."""
    heads, channels, groups, states, tokens = 4, 3, 2, 5, 6
    mixed = torch.randn(1, tokens, heads * channels + 2 * groups * states)
    steps, decay, shift, skip = (
        torch.randn(*shape) for shape in ((1, tokens, 4), (4,), (4,), (4,))
    )
    made = chunk_scan(mixed, steps, decay, shift, skip, [groups, channels, states])
    moved = nn.functional.softplus(steps + shift)[0]
    fading = (-moved * decay.exp()).cumsum(0)
    values, keys, queries = mixed[0].split([12, 10, 10], dim=-1)
    expected = torch.zeros(tokens, heads, channels)
    for head in range(heads):
        key, query = (one.view(tokens, groups, states)[:, head // 2] for one in (keys, queries))
        value = values.view(tokens, heads, channels)[:, head]
        fade = (fading[:, None, head] - fading[None, :, head]).exp().tril()
        expected[:, head] = (query @ key.t() * fade * moved[:, head]) @ value + skip[head] * value
    torch.testing.assert_close(made[0].view(tokens, heads, channels), expected)


def test_a_state_under_the_delta_rule_says_what_was_last_written_to_a_key() -> None:
    key = nn.functional.normalize(torch.randn(4), dim=0)
    first, last = torch.randn(4), torch.randn(4)
    mixed = torch.stack([torch.cat([value, key, key]) for value in (first, last)])[None]
    # Rates of 1 take back all that the state says; without forgetting nothing else is lost.
    steps = torch.tensor([[[40.0, -40.0]] * 2])
    made = delta_rule(mixed, steps, torch.zeros(1), torch.zeros(1), [1, 4, 4])
    torch.testing.assert_close(made[0], torch.stack([first, last]))
