"""Released configurations: their parameters as published, and what of them is seen or refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.economy.bill import model_parameters
from mistlab.graph.library import graph_of, sequence_graph_of
from mistlab.huggingface.configurations import model_of_config
from mistlab.huggingface.type_keys import model_types, refused_types
from mistlab.job.job import model_from
from mistlab.plan.workload import ModelSpec, Workload

# Sizes as released, without keys that equal the defaults, and the parameters that releases count.
RELEASED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("released_configurations.json").read_text(encoding="utf-8")
)

# The same keys as released, of models that the catalogue has.
IN_CATALOGUE: dict[str, dict[str, Any]] = {
    "qwen3-next-80b-a3b": {
        "model_type": "qwen3_next",
        "full_attention_interval": 4,
        "intermediate_size": 5120,
        "partial_rotary_factor": 0.25,
        "rope_theta": 10000000,
        "mlp_only_layers": [],
    },
    "qwen3.6-35b-a3b": {
        "model_type": "qwen3_5_moe_text",
        "layer_types": [*["linear_attention"] * 3, "full_attention"] * 10,
        "rope_parameters": {"rope_theta": 10000000, "partial_rotary_factor": 0.25},
    },
    "llama4-scout": {"model_type": "llama4_text"},
    "llama4-maverick": {
        "model_type": "llama4_text",
        "num_local_experts": 128,
        "interleave_moe_layer_step": 2,
        "moe_layers": [*range(1, 48, 2)],
        "use_qk_norm": False,
    },
    "nemotron-h-8b": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M*-M-M-M-M-M-",
        "num_hidden_layers": 52,
        "attention_head_dim": 128,
    },
    "nemotron-3-nano": {
        "model_type": "nemotron_h",
        "hybrid_override_pattern": "MEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEM*EMEMEMEM*EMEMEMEME",
        "hidden_size": 2688,
        "num_key_value_heads": 2,
        "head_dim": 128,
        "intermediate_size": 1856,
        "mamba_num_heads": 64,
        "n_routed_experts": 128,
        "num_experts_per_tok": 6,
        "moe_intermediate_size": 1856,
        "moe_shared_expert_intermediate_size": 3712,
        "routed_scaling_factor": 2.5,
    },
}


# What default configurations lack, so that there is a model.
COMPLETED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {"num_experts_per_tok": 6},
    "dots1": {"num_experts_per_tok": 6, "n_routed_experts": 64},
    "glm4_moe": {"head_dim": 128},
}


def parameters(model: ModelSpec, sequence_length: int = 2048) -> int:
    return model_parameters(
        Workload(
            model=model,
            sequence_length=sequence_length,
            global_batch=1,
            attention="flash",
            precision="bf16",
        )
    )


@pytest.mark.parametrize("name", RELEASED)
def test_parameters_are_those_published(name: str) -> None:
    config, published = RELEASED[name]["config"], RELEASED[name]["parameters"]
    # Learned positions are as many as a sequence is long: GPT-2 has 1,024.
    length = 1024 if config["model_type"] == "gpt2" else 2048
    assert parameters(model_of_config(config, name), length) == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(
    ("config", "published"),
    [
        ({"model_type": "mistral", "vocab_size": 32000, "hidden_size": 4096}, 7_241_732_096),
        ({"model_type": "deepseek_v3", "hidden_size": 7168}, 671_026_404_352),
        (
            {
                "model_type": "qwen3",
                "hidden_size": 1024,
                "intermediate_size": 3072,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "vocab_size": 151936,
            },
            751_632_384,
        ),
    ],
    ids=["mistral-7b", "deepseek-v3", "qwen3-0.6b, untied"],
)
def test_keys_that_are_left_out_take_the_type_s_defaults(
    config: dict[str, Any], published: int
) -> None:
    assert parameters(model_of_config(config, "")) == published


@pytest.mark.parametrize("name", IN_CATALOGUE)
def test_a_released_configuration_is_the_model_of_the_catalogue(name: str) -> None:
    assert model_of_config(IN_CATALOGUE[name], name) == catalog.model(name)


def test_the_table_has_forty_types_at_least_and_refuses_none_of_them() -> None:
    assert len(model_types()) >= 40
    assert not model_types().keys() & refused_types().keys()


@pytest.mark.parametrize("kind", model_types())
def test_a_default_that_is_written_or_left_out_is_the_same(kind: str) -> None:
    written = {"model_type": kind, **model_types()[kind].defaults}
    completed = COMPLETED.get(kind, {})
    whole = model_of_config({**written, **completed}, "")
    assert model_of_config({"model_type": kind, **completed}, "") == whole
    for key in written.keys() - {"model_type", *completed}:
        others = {name: value for name, value in written.items() if name != key}
        assert model_of_config({**others, **completed}, "") == whole, key


@pytest.mark.parametrize("kind", model_types())
def test_every_type_has_graphs_for_sequences_longer_than_its_windows(kind: str) -> None:
    model = model_of_config({"model_type": kind, **COMPLETED.get(kind, {})}, kind)
    workload = Workload(
        model=model, sequence_length=16384, global_batch=1, attention="flash", precision="bf16"
    )
    graph, split = graph_of(workload), sequence_graph_of(workload)
    assert split is not None
    kinds = [graph.mapping["block"], *graph.mapping.get("further_blocks", ())]
    sees_windows = any(
        operator["name"] == "mistlab.attention" and "w" in operator["flop"]
        for block in kinds
        for operator in block["operators"]
    )
    assert sees_windows == (model.window is not None)


@pytest.mark.parametrize(
    ("name", "kind", "more"),
    [
        ("bert-base", "bert", {}),
        ("bert-large", "bert", {}),
        ("roberta-large", "roberta", {"layer_norm_eps": 1e-5, "vocab_size": 50265}),
    ],
)
def test_configurations_of_encoders_are_the_catalogue_s(
    name: str, kind: str, more: dict[str, Any]
) -> None:
    known = catalog.model(name)
    sizes = {
        "hidden_size": known.hidden,
        "num_hidden_layers": known.layers,
        "num_attention_heads": known.heads,
        "intermediate_size": known.ffn,
    }
    read = model_of_config({"model_type": kind, **sizes, **more}, name)
    assert replace(read, remarks=(), trained=known.trained) == known
    dropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    assert model_of_config({"model_type": kind, **sizes, **dropped}, name).dropout == 0


LLAMA = RELEASED["llama-3-8b"]["config"]


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"tie_word_embeddings": "false"}, r"tie_word_embeddings: 'false' is neither true nor fal"),
        ({"attention_bias": 1}, r"attention_bias: 1 is neither true nor false"),
        ({"num_key_value_heads": "8"}, r"num_key_value_heads: '8' is not a whole number"),
        ({"num_hidden_layers": 32.0}, r"num_hidden_layers: 32.0 is not a whole number"),
        ({"vocab_size": True}, r"vocab_size: true is not a whole number"),
        ({"hidden_size": -1}, r"hidden_size: -1 is too small: give a number of at least 1"),
        ({"num_hidden_layers": 999_999_999}, r"num_hidden_layers: 999999999 is too large"),
        ({"rope_theta": "1e6"}, r"rope_theta: '1e6' is not a number"),
        ({"rope_theta": 0}, r"rope_theta: 0 is not a positive number"),
        ({"rope_parameters": {"rope_theta": True}}, r"rope_parameters.rope_theta: true is not a n"),
        ({"rope_scaling": "yarn"}, r"rope_scaling: 'yarn' is not a mapping"),
        (
            {"partial_rotary_factor": 0.29},
            r"partial_rotary_factor: would rotate 37 of a head",
        ),
        (
            {"partial_rotary_factor": 1.5},
            r"partial_rotary_factor: would rotate 192 of",
        ),
        ({"hidden_act": "mish"}, r"hidden_act: 'mish' is unknown: give one of silu, .*trace"),
    ],
)
def test_a_wrong_value_is_refused_by_key_value_and_remedy(
    change: dict[str, Any], problem: str
) -> None:
    with pytest.raises(InputError, match=problem):
        model_of_config({**LLAMA, **change}, "")


@pytest.mark.parametrize(
    ("config", "problem"),
    [
        (
            {"model_type": "lama"},
            r"'lama' is not supported \(did you mean 'llama'.*\): give one of .* trace the model",
        ),
        ({"model_type": ["llama"]}, r"model_type: \['llama'\] is not supported"),
        ({"model_type": "t5"}, r"'t5' is not supported, because it is an encoder with a decoder"),
        ({"model_type": "electra"}, r"'electra' is not supported, because it is an encoder that"),
        ({"model_type": "bert", "is_decoder": True}, r"is_decoder: true is not supported, only"),
        ({"model_type": "roberta", "hidden_dropout_prob": "0.1"}, r"hidden_dropout_prob: '0.1' is"),
        ({"model_type": "mamba2"}, r"because it has mixers in place of attention"),
        ({"model_type": "gpt2", "add_cross_attention": True}, r"add_cross_attention: true is not"),
        ({"model_type": "deepseek_v2"}, r"num_experts_per_tok: null is not a whole number"),
        (
            {"model_type": "deepseek_v3", "moe_layer_freq": 2},
            r"moe_layer_freq: 2 is not supported, only 1 is",
        ),
        (
            {"model_type": "qwen3_moe", "mlp_only_layers": [5]},
            r"mlp_only_layers: \[5\]: blocks with and without experts alternate",
        ),
        (
            {"model_type": "llama4_text", "moe_layers": [0, 1]},
            r"moe_layers: \[0, 1\] contradicts interleave_moe_layer_step 1, by which every block",
        ),
        (
            {"model_type": "opt", "word_embed_proj_dim": 512},
            r"word_embed_proj_dim: 512 is unlike hidden_size 768",
        ),
        (
            {"model_type": "gemma2", "layer_types": ["sliding_attention"]},
            r"layer_types: .* is not a list of 26 entries full_attention or sliding_attention",
        ),
        (
            {"model_type": "qwen2", "use_sliding_window": True},
            r"layer_types: has sliding windows of 4096 at uneven distances",
        ),
        (
            {"model_type": "nemotron_h", "hybrid_override_pattern": "MX"},
            r"hybrid_override_pattern: 'MX' is not a pattern of blocks",
        ),
        (
            {"model_type": "qwen3_next", "linear_conv_kernel_dim": 8},
            r"linear_conv_kernel_dim: 8 is not supported: give 4",
        ),
    ],
)
def test_what_no_row_describes_is_refused_by_name(config: dict[str, Any], problem: str) -> None:
    with pytest.raises(InputError, match=problem):
        model_of_config(config, "")


def test_text_of_a_model_with_more_inputs_is_read_where_it_is_asked_for(tmp_path: Path) -> None:
    text = {"model_type": "llama4_text", "num_hidden_layers": 24}
    whole = {"model_type": "llama4", "text_config": text, "vision_config": {}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(InputError, match=r"'llama4' takes more than text, .*#text_config"):
        model_from("config.json", tmp_path)
    model = model_from("config.json#text_config", tmp_path)
    assert model == replace(catalog.model("llama4-scout"), name=model.name, layers=24)
    with pytest.raises(InputError, match=r"vision: the file has no such section"):
        model_from("config.json#vision", tmp_path)


def test_keys_that_cost_nothing_change_nothing() -> None:
    others = {"torch_dtype": "bfloat16", "quantization_config": {"bits": 4}, "eos_token_id": [1, 2]}
    others |= {"architectures": ["X"], "rope_scaling": {"rope_type": "yarn", "factor": 8.0}}
    assert model_of_config({**LLAMA, **others}, "") == model_of_config(LLAMA, "")


@pytest.mark.parametrize(
    ("kind", "change", "size", "full_every"),
    [
        ("mistral", {}, 4096, 0),
        ("mistral", {"sliding_window": 512}, 512, 0),
        ("mistral", {"sliding_window": None}, None, None),
        ("gemma2", {}, 4096, 2),
        ("gemma3_text", {}, 4096, 6),
        ("gemma3_text", {"sliding_window_pattern": 3}, 4096, 3),
        ("cohere2", {}, 4096, 4),
        ("cwm", {}, 8192, 4),
        ("exaone4", {"sliding_window_pattern": "LLLG"}, 4096, 4),
        ("exaone4", {"sliding_window": None}, None, None),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 0}, 4096, 0),
        ("qwen3", {"use_sliding_window": True, "max_window_layers": 32}, None, None),
        ("gpt_oss", {"layer_types": ["full_attention"] * 36}, None, None),
        ("gpt_oss", {"layer_types": ["full_attention", "sliding_attention"] * 18}, 128, 2),
    ],
)
def test_windows(
    kind: str, change: dict[str, Any], size: int | None, full_every: int | None
) -> None:
    model = model_of_config({"model_type": kind, **change}, "")
    seen = (None, None) if model.window is None else (model.window.size, model.window.full_every)
    assert seen == (size, full_every)


def test_remarks_tell_what_is_taken_otherwise() -> None:
    remarks = {
        "gemma2": "activation gelu_pytorch_tanh is taken as silu",
        "stablelm": "LayerNorm is taken as RMSNorm",
        "seed_oss": "biases that attention_bias turns on are left out",
        "deepseek_v3": "blocks for tokens after the next are left out",
        "persimmon": "norms of queries and keys are left out",
        "cwm": "the last of every 4 blocks has full attention, no other one",
    }
    for kind, remark in remarks.items():
        assert remark in model_of_config({"model_type": kind}, "").remarks, kind
    assert model_of_config({"model_type": "llama"}, "").remarks == ()


STRANGE = (
    *(None, "x", [], {}, True, -1, 0, 1, 3, 1.5, 10**12, [1, 2], [None], [{}], ["full_attention"]),
    *("LLLG", float("inf"), float("nan"), {"rope_theta": None}, {"full_attention": 1}, "\ud800"),
)


def refusal_of(config: dict[str, Any]) -> str:
    """What a configuration is refused with; empty if it is read."""
    try:
        model_of_config(config, "")
    except InputError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("kind", model_types())
def test_strange_contents_are_read_or_refused_in_a_line(kind: str) -> None:
    for key in (*model_types()[kind].defaults, "layer_types", "rope_scaling", "rotary_dim"):
        for value in STRANGE:
            config = {"model_type": kind, **COMPLETED.get(kind, {}), key: value}
            refusal = refusal_of(config)
            assert "\n" not in refusal, (key, value)
            assert len(refusal) < 400, (key, value)
