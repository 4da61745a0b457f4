"""A Hugging Face configuration, read as a model: the catalogue's of the same name."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.huggingface.configurations import model_of_config
from mistlab.job.job import dump_job, load_job, model_from
from mistlab.plan.workload import ModelSpec

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "attention_bias": False,
    "mlp_bias": False,
}
QWEN = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "sliding_window": None,
    "use_sliding_window": False,
}
QWEN_EXPERTS = {
    **QWEN,
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 768,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
MIXTRAL = {
    "model_type": "mixtral",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "sliding_window": None,
}
OSS = {
    "model_type": "gpt_oss",
    "hidden_act": "silu",
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_hidden_layers": 36,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "vocab_size": 201088,
    "rope_theta": 150000,
    "attention_bias": True,
    "sliding_window": 128,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "num_hidden_layers": 61,
    "num_nextn_predict_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "moe_layer_freq": 1,
    "vocab_size": 129280,
    "rope_theta": 10000,
}
LITE = {
    "model_type": "deepseek_v2",
    "hidden_size": 2048,
    "num_hidden_layers": 27,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
    "intermediate_size": 10944,
    "vocab_size": 102400,
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "n_routed_experts": 64,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 1408,
    "n_shared_experts": 2,
    "first_k_dense_replace": 1,
    "rope_theta": 10000,
}
GLM = {
    "model_type": "glm4_moe",
    "hidden_size": 5120,
    "num_hidden_layers": 92,
    "num_attention_heads": 96,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151552,
    "attention_bias": True,
    "partial_rotary_factor": 0.5,
    "rope_theta": 1000000,
    "use_qk_norm": True,
    "routed_scaling_factor": 2.5,
    "n_routed_experts": 160,
    "num_experts_per_tok": 8,
    "moe_intermediate_size": 1536,
    "n_shared_experts": 1,
    "first_k_dense_replace": 3,
}
OLMO = {
    "model_type": "olmo2",
    "hidden_size": 5120,
    "num_hidden_layers": 64,
    "num_attention_heads": 40,
    "num_key_value_heads": 8,
    "intermediate_size": 27648,
    "vocab_size": 100352,
    "rope_theta": 500000,
}
CONFIGS = {
    "llama3-70b": LLAMA,
    "qwen3-4b": QWEN,
    "qwen3-30b-a3b": QWEN_EXPERTS,
    "mixtral-8x7b": MIXTRAL,
    "gpt-oss-120b": OSS,
    "deepseek-v3": DEEPSEEK,
    "deepseek-v2-lite": LITE,
    "glm-4.5": GLM,
    "olmo2-32b": OLMO,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_released_configuration_is_the_model_of_the_catalogue(name: str) -> None:
    assert model_of_config(CONFIGS[name], name) == catalog.model(name)
    assert rule_of(model_of_config(CONFIGS[name], name)) == rule_of(catalog.model(name))


def rule_of(model: ModelSpec) -> object:
    """How tokens choose experts, without what training alone knows."""
    if model.experts is None:
        return None
    router = replace(model.experts.router, correction_rate=0.0, balance_loss=0.0)
    return router, model.experts.gate_limit


def test_a_file_or_its_folder_names_a_model_and_comes_back_from_a_plan_file(tmp_path: Path) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**LLAMA, "num_hidden_layers": 32}))
    model = replace(catalog.model("llama3-70b"), name="mine", layers=32)
    assert model_from("mine/config.json", tmp_path) == model
    assert model_from("./mine", tmp_path) == model

    example = load_job(Path(__file__).parents[2] / "examples" / "plans" / "gpt3-2.7b-4xl4.yaml")
    job = replace(example, workload=replace(example.workload, model=model))
    dump_job(job, tmp_path / "plan.yaml")
    assert load_job(tmp_path / "plan.yaml") == job


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"model_type": "gemma3"}, r"model_type: 'gemma3' is not supported, because it .*trace"),
        ({"hidden_act": "tanh"}, r"hidden_act: 'tanh' is unknown"),
        ({"hidden_size": None}, r"hidden_size: null is not a whole number"),
        ({"num_attention_heads": 63}, r"heads: 63 does not divide hidden 8192"),
    ],
)
def test_what_a_model_cannot_say_is_refused_with_the_file(
    change: dict[str, Any], problem: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({**LLAMA, **change}))
    with pytest.raises(InputError, match=rf"config\.json: {problem}"):
        model_from("config.json", tmp_path)
