from typing import Any

import pytest

from mistlab.core.values import FieldError, to_mapping
from mistlab.plan.workload import ModelSpec

SHAPE: dict[str, Any] = {"hidden": 2048, "layers": 24, "heads": 16}


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        (
            "gpt",
            {
                "mlp_type": "mlp",
                "ffn": 8192,
                "norm": "layernorm",
                "activation": "gelu_tanh",
                "position_embedding": "absolute",
                "rotary_fraction": 0.0,
                "parallel_block": False,
            },
        ),
        (
            "llama",
            {
                "mlp_type": "gated_mlp",
                "ffn": 5632,
                "norm": "rmsnorm",
                "activation": "silu",
                "position_embedding": "rotary",
                "rotary_fraction": 1.0,
                "parallel_block": False,
            },
        ),
        (
            "falcon",
            {
                "mlp_type": "mlp",
                "ffn": 8192,
                "norm": "layernorm",
                "activation": "gelu_tanh",
                "position_embedding": "rotary",
                "rotary_fraction": 1.0,
                "parallel_block": True,
            },
        ),
    ],
)
def test_a_family_fills_what_is_not_given(family: Any, expected: dict[str, Any]) -> None:
    spec = ModelSpec.of(family=family, **SHAPE)
    assert {name: getattr(spec, name) for name in expected} == expected
    assert (spec.kv_heads, spec.head_dim, spec.vocab) == (16, 128, 50304)
    assert (spec.tied_embeddings, spec.biases, spec.dropout) == (False, False, 0.0)


def test_given_fields_stand_over_the_family() -> None:
    spec = ModelSpec.of(family="gpt", **SHAPE, ffn=1000, biases=True, head_dim=64, kv_heads=4)
    assert (spec.ffn, spec.biases, spec.head_dim, spec.kv_heads) == (1000, True, 64, 4)


@pytest.mark.parametrize(
    ("hidden", "ffn"), [(4096, 11008), (5120, 13824), (8192, 22016)], ids=["7B", "13B", "65B"]
)
def test_llama_widths_are_those_of_its_paper(hidden: int, ffn: int) -> None:
    assert ModelSpec.of(family="llama", hidden=hidden, layers=1, heads=32).ffn == ffn


@pytest.mark.parametrize(
    ("vocab", "tensor_parallel", "padded"),
    [(50304, 1, 50304), (50304, 8, 50304), (50257, 1, 50257), (50257, 2, 50432), (50304, 5, 50560)],
)
def test_the_vocabulary_is_padded_only_where_it_must(
    vocab: int, tensor_parallel: int, padded: int
) -> None:
    spec = ModelSpec.of(family="gpt", **SHAPE, vocab=vocab)
    assert spec.padded_vocab(tensor_parallel) == padded


def test_rotated_channels() -> None:
    assert ModelSpec.of(family="llama", **SHAPE, rotary_fraction=0.25).rotated_channels == 32
    assert ModelSpec.of(family="gpt", **SHAPE).rotated_channels == 0


BAD = {
    "heads that do not divide": ({"heads": 3}, "heads: 3 does not divide hidden 2048: give"),
    "kv_heads that do not divide": ({"kv_heads": 3}, "kv_heads: 3 does not divide heads 16: give"),
    "odd rotation": (
        {"family": "llama", "head_dim": 6, "rotary_fraction": 0.5},
        "rotary_fraction: 0.5 of head_dim 6 is 3 channels, which do not pair up: give",
    ),
    "part of a channel": (
        {"family": "llama", "rotary_fraction": 0.3},
        "rotary_fraction: 0.3 of head_dim 128 is 38.4 channels",
    ),
    "rotation without rotary": (
        {"rotary_fraction": 0.5},
        "rotary_fraction: 0.5 does not go with position_embedding absolute: give 0",
    ),
    "rotary without rotation": (
        {"family": "llama", "rotary_fraction": 0},
        "rotary_fraction: 0 does not go with position_embedding rotary: give a share above 0",
    ),
    "a base without rotary": (
        {"rotary_base": 500000},
        "rotary_base: 500000 does not go with position_embedding absolute: leave it out, or give",
    ),
    "a base of nothing": (
        {"family": "llama", "rotary_base": 0},
        "rotary_base: 0.0 is too small: give a number above 0",
    ),
    "gate without silu": (
        {"family": "llama", "activation": "gelu"},
        "activation: 'gelu' cannot gate a gated_mlp: give silu",
    ),
    "graph of a known family": (
        {"graph_file": "a.json"},
        "graph_file: 'a.json' is for family custom, but family is gpt: give",
    ),
    "gates alone": (
        {"attention_gate": True},
        "attention_gate: true, but it is supported only together with qk_norm: give",
    ),
    "norms after halves that lie side by side": (
        {"family": "falcon", "post_norms": True},
        "post_norms: true, but it is not supported together with pattern or parallel_block",
    ),
    "a window in no block": (
        {"window": {"size": 128, "full_every": 1}},
        "window.full_every: 1 says that every block attends to all tokens: leave the window out",
    ),
    "unknown family": ({"family": "gtp"}, "family: 'gtp' is unknown: did you mean 'gpt'?"),
    "unknown key": ({"hiden": 1}, "hiden: unknown key: did you mean 'hidden'?"),
    "text for a size": ({"hidden": "big"}, "hidden: 'big' is not a whole number: give"),
    "negative size": ({"ffn": -1}, "ffn: -1 is too small: give a whole number of at least 1"),
    "dropout above 1": ({"dropout": 2}, "dropout: 2.0 is not a ratio: give a number"),
}


@pytest.mark.parametrize(("change", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_model_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(FieldError) as caught:
        ModelSpec.from_mapping({"family": "gpt", **SHAPE, **change}, "workload.model")
    assert str(caught.value).startswith(f"workload.model.{message}")


def test_a_model_of_before_rotary_bases_has_the_one_that_all_had() -> None:
    spec = ModelSpec.of(family="llama", **SHAPE)
    mapping = to_mapping(spec)
    del mapping["rotary_base"]
    assert ModelSpec.from_mapping(mapping) == spec
    assert spec.rotary_base == 10_000


@pytest.mark.parametrize("name", ["family", "hidden", "layers", "heads"])
def test_a_model_needs_its_shape(name: str) -> None:
    mapping = {"family": "gpt", **SHAPE}
    del mapping[name]
    with pytest.raises(FieldError, match=f"^{name}: missing: give"):
        ModelSpec.from_mapping(mapping)
