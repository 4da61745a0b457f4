"""Reads the model that a Hugging Face ``config.json`` describes, without torch or a download.

Architectures whose blocks a ``ModelSpec`` describes are read; others are refused, and can be
traced. Biases of queries, keys and values alone (Qwen2, GLM) are left out, and so are the blocks of
DeepSeek V3 and GLM for tokens after the next one, as transformers leaves them out. OLMo 2's norms
are taken as Qwen 3's: they lie elsewhere, and are as many.
"""

from collections.abc import Callable, Mapping
from typing import Any

from mistlab.values.errors import refuse
from mistlab.values.field_checks import shown
from mistlab.values.model import ModelSpec

# The key that every config.json has, and no file of tracing.
KIND = "model_type"
TRACE = "trace it (python -m experiments.trace), or write its mapping (docs/reference/plan-file.md)"


def model_of_config(config: Mapping[str, Any], name: str) -> ModelSpec:
    """The model of a configuration's content."""
    kind = config[KIND]
    if kind not in _PARTS:
        known = ", ".join(_PARTS)
        refuse(KIND, f"{shown(kind)} is not read here, only {known} are: {TRACE}")
    _check_plain(config)
    return ModelSpec.from_mapping({"name": name, **_trunk(config), **_PARTS[kind](config)})


def _trunk(config: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that all of these architectures share: gated networks, RMSNorm, rotation."""
    trunk = {
        "family": "llama",
        "hidden": _given(config, "hidden_size"),
        "layers": _given(config, "num_hidden_layers"),
        "heads": _given(config, "num_attention_heads"),
        "kv_heads": config.get("num_key_value_heads"),
        "head_dim": config.get("head_dim"),
        "ffn": _given(config, "intermediate_size"),
        "vocab": _given(config, "vocab_size"),
        "rotary_base": _rotary(config, "rope_theta"),
        "rotary_fraction": _rotary(config, "partial_rotary_factor"),
        "tied_embeddings": bool(config.get("tie_word_embeddings", False)),
        "biases": bool(config.get("attention_bias") and config.get("mlp_bias")),
    }
    return {key: value for key, value in trunk.items() if value is not None}


def _rotary(config: Mapping[str, Any], key: str) -> float | None:
    """A number of the rotary embedding, which later versions of the library put into a mapping."""
    later = config.get("rope_parameters")
    value = config.get(key, later.get(key) if isinstance(later, Mapping) else None)
    return float(value) if isinstance(value, int | float) else value


def _check_plain(config: Mapping[str, Any]) -> None:
    """Refuse what would change the blocks and has no field here."""
    activation = config.get("hidden_act", "silu")
    if activation != "silu":
        refuse("hidden_act", f"{shown(activation)} is not read here, only 'silu' is: {TRACE}")
    windows = config.get("sliding_window") is not None and config.get("use_sliding_window", True)
    if windows and config[KIND] != "gpt_oss":
        problem = f"{config['sliding_window']} in every block is not read here"
        refuse("sliding_window", f"{problem}: give null for full attention, or {TRACE}")
    sparse = config.get("decoder_sparse_step", 1), config.get("moe_layer_freq", 1)
    if sparse != (1, 1) or config.get("mlp_only_layers"):
        problem = "blocks with and without experts take turns, which is not read here"
        refuse("decoder_sparse_step", f"{problem}: {TRACE}")


def _plain(_: Mapping[str, Any]) -> dict[str, Any]:
    return {}


def _qwen3(_: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True}


def _qwen3_moe(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norm": True, "experts": _experts(config, count="num_experts")}


def _glm(config: Mapping[str, Any]) -> dict[str, Any]:
    return {"qk_norm": bool(config.get("use_qk_norm", False)), "experts": _deepseek_experts(config)}


def _mixtral(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = _experts(config, count="num_local_experts", ffn="intermediate_size")
    return {"experts": experts}


def _gpt_oss(config: Mapping[str, Any]) -> dict[str, Any]:
    experts = _experts(config, count="num_local_experts", ffn="intermediate_size")
    window = {"size": _given(config, "sliding_window")}
    return {"biases": True, "sinks": True, "window": window, "experts": experts}


def _deepseek(config: Mapping[str, Any]) -> dict[str, Any]:
    rotated = _given(config, "qk_rope_head_dim")
    channels = rotated + _given(config, "qk_nope_head_dim")
    return {
        "kv_heads": _given(config, "num_attention_heads"),
        "head_dim": channels,
        "rotary_fraction": round(rotated / channels, 12),
        "latent": {
            "query_rank": config.get("q_lora_rank"),
            "key_rank": _given(config, "kv_lora_rank"),
            "value_dim": _given(config, "v_head_dim"),
        },
        "experts": _deepseek_experts(config),
    }


def _deepseek_experts(config: Mapping[str, Any]) -> dict[str, Any]:
    width = _given(config, "moe_intermediate_size")
    return {
        **_experts(config, count="n_routed_experts"),
        "shared_ffn": width * (config.get("n_shared_experts") or 0),
        "dense_blocks": config.get("first_k_dense_replace", 0),
    }


def _experts(
    config: Mapping[str, Any], *, count: str, ffn: str = "moe_intermediate_size"
) -> dict[str, Any]:
    return {
        "count": _given(config, count),
        "active": _given(config, "num_experts_per_tok"),
        "ffn": _given(config, ffn),
    }


def _given(config: Mapping[str, Any], key: str) -> int:
    """A whole number that a configuration must have."""
    value = config.get(key)
    if isinstance(value, bool) or not isinstance(value, int):
        refuse(key, f"{shown(value)} is not a whole number: give the number that the model has")
    return value


_PARTS: Mapping[str, Callable[[Mapping[str, Any]], dict[str, Any]]] = {
    "llama": _plain,
    "mistral": _plain,
    "qwen2": _plain,
    "phi3": _plain,
    "olmo2": _qwen3,
    "qwen3": _qwen3,
    "qwen3_moe": _qwen3_moe,
    "mixtral": _mixtral,
    "gpt_oss": _gpt_oss,
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "kimi_k2": _deepseek,
    "glm4_moe": _glm,
}
