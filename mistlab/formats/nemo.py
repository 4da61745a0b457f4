"""Imports the YAML of NeMo 1.x, whose sections trainer, model and exp_manager hold settings of
Megatron-core.

Some fields of Megatron-core have other names there. Left-out keys take Megatron-core's defaults.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from mistlab.core.values import reject, word_set
from mistlab.export.found import checked_whole
from mistlab.export.given import Given, Imported
from mistlab.export.megatron.tokenizer_sizes import has_word_pieces
from mistlab.formats.content import settings_of
from mistlab.formats.flags import Flags
from mistlab.formats.launched import (
    resolved,
)
from mistlab.shell.session import LaunchFile

# Fields of NeMo's section ``model`` that have the same names as Megatron-LM's options.
_MODEL = (
    "micro_batch_size global_batch_size tensor_model_parallel_size pipeline_model_parallel_size "
    "context_parallel_size expert_model_parallel_size expert_tensor_parallel_size "
    "sequence_parallel num_layers hidden_size ffn_hidden_size num_attention_heads "
    "num_query_groups kv_channels max_position_embeddings make_vocab_size_divisible_by "
    "hidden_dropout attention_dropout rotary_percent rotary_base qk_layernorm num_moe_experts "
    "moe_router_topk moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq "
    "moe_grouped_gemm moe_token_dispatcher_type moe_expert_capacity_factor "
    "moe_pad_expert_input_to_capacity multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim "
    "qk_pos_emb_head_dim v_head_dim mtp_num_layers recompute_granularity recompute_method "
    "recompute_num_layers recompute_modules seq_length vocab_size position_embedding_type "
    "apply_query_key_layer_scaling cp_comm_type pipeline_model_parallel_layout "
    "num_layers_in_first_pipeline_stage num_layers_in_last_pipeline_stage "
    "virtual_pipeline_model_parallel_size fp8_recipe"
)
_OTHER_MODELS = word_set(
    """
    retro retrieval bart t5 bert mamba griffin hyena encoder decoder vision mm_cfg
    data.image_token_len unet first_stage_config
    """
)
# Words in a run's name that tell that NeMo trains something other than a text decoder.
_OTHER_TITLES = word_set(
    "bart embedding ner neva retro retrieval t5 ul2 vit clip stable imagen mamba"
)
_TUNING = {
    "peft": "adapters (PEFT) only",
    "lora_tuning": "adapters (LoRA) only",
    "dpo": "by preferences (DPO), beside a reference model",
    "ppo": "by reinforcement learning (PPO), which generates text",
    "rlhf": "by reinforcement learning, which generates text",
    "kto": "by preferences (KTO), beside a reference model",
    "spin": "by self-play, beside a reference model",
    "reward_model_type": "a reward model",
    "reinforce": "by reinforcement learning, which generates text",
    "draft_model": "a draft model",
    "steerlm2": "by attributes (SteerLM), which generates text",
}


def recognises_nemo(source: LaunchFile) -> bool:
    """Whether a file has NeMo's section ``trainer``, and a model with Megatron's parallel
    degrees.
    """
    settings = settings_of(source)
    trainer, model = settings.get("trainer"), settings.get("model")
    if not isinstance(trainer, Mapping):
        return False
    has_model = isinstance(model, Mapping) and bool(
        {"tensor_model_parallel_size", "micro_batch_size", "mcore_gpt"} & model.keys()
    )
    return has_model or ("exp_manager" in settings and "devices" in trainer)


def read_nemo(source: LaunchFile, given: Given) -> Imported:
    """The job that a NeMo 1.x configuration describes."""
    settings = resolved(settings_of(source), source.settings)
    trainer, model = settings["trainer"], settings.get("model")
    if not isinstance(model, Mapping):
        reject("model: is not a mapping: give a file with the model's settings under model:")
    _refuse(model, settings)
    flags = Flags(where="model")
    if any("bert" in words for words in _titles(settings).values()):
        _encoder(model, flags)
    _check_known(model, "model", _MODEL.split())
    for name in _MODEL.split():
        if name in model:
            flags.put(name, model[name], f"model.{name}")
    _kinds(model, flags)
    _nemo_memory(model, flags)
    _nemo_precision(trainer, model, flags)
    data = model.get("data")
    if "seq_length" not in model and isinstance(data, Mapping):
        flags.put("seq_length", data.get("seq_length") or model.get("encoder_seq_length"))
    flags.options.setdefault("--seq-length", _text(model.get("encoder_seq_length")))
    flags.options = {k: v for k, v in flags.options.items() if (k, v) != ("--seq-length", None)}
    _ranks(trainer.get("num_nodes"), trainer.get("devices"), flags)
    return flags.read(given)


def _text(value: object) -> str | None:
    return None if value is None else str(value)


def _refuse(model: Mapping[str, Any], settings: Mapping[str, Any]) -> None:
    for key, what in _TUNING.items():
        value = model.get(key, settings.get(key))
        scheme = value.get("peft_scheme", "") if isinstance(value, Mapping) else value
        if value is not None and scheme not in (None, "none", "null", False):
            reject(
                f"model.{key}: trains {what}, which is not supported: give a file that trains all "
                "weights by next-token prediction"
            )
    for key in sorted(_OTHER_MODELS):
        if isinstance(model.get(key), Mapping):
            reject(
                f"model.{key}: makes the model more than a text decoder, which is not supported: "
                "give the file of a text decoder"
            )
    for title, words in _titles(settings).items():
        if others := _OTHER_TITLES & words:
            reject(
                f"name: {title} trains {min(others)}, which is not supported: give the file of a "
                "text decoder or of BERT"
            )


def _titles(settings: Mapping[str, Any]) -> Mapping[str, set[str]]:
    """Return the names of a run, each with its words."""
    manager = settings.get("exp_manager")
    titles = (settings.get("name"), manager.get("name") if isinstance(manager, Mapping) else None)
    return {
        title: set(re.split(r"[_\W]+", title.lower())) for title in map(str, filter(None, titles))
    }


def _encoder(model: Mapping[str, Any], flags: Flags) -> None:
    """Read what NeMo's BERT has beside the settings of a decoder: its head, and its tokenizer."""
    flags.program = "pretrain_bert.py"
    if model.get("bert_binary_head") is False:
        flags.options["--bert-no-binary-head"] = None
    tokenizer = model.get("tokenizer")
    if isinstance(tokenizer, Mapping) and has_word_pieces(str(tokenizer.get("type"))):
        flags.put("tokenizer_type", tokenizer["type"], "model.tokenizer.type")
        flags.put("vocab_file", tokenizer.get("vocab_file"), "model.tokenizer.vocab_file")


def _check_known(model: Mapping[str, Any], where: str, names: Iterable[str]) -> None:
    """Refuse a value that refers to a setting which the file does not define."""
    for name in names:
        value = model.get(name)
        if isinstance(value, str) and ("${" in value or value == "???"):
            reject(
                f"{where}.{name}: {value} stands for a value that is not in this file: write the "
                f"value there, or give it by --set"
            )


def query_groups(model: Mapping[str, Any], flags: Flags) -> None:
    """Return the number of key and value heads (query groups), or None if every head has its
    own.
    """
    groups = model.get("num_query_groups")
    if groups and groups != model.get("num_attention_heads"):
        flags.put("group_query_attention", True)
    elif groups:
        flags.options.pop("--num-query-groups", None)


def _kinds(model: Mapping[str, Any], flags: Flags) -> None:
    """Read norm, activation, position embedding, biases and tied embeddings of a model from NeMo's
    keys.
    """
    if model.get("num_layers") is None:
        for option in ("--num-attention-heads", "--hidden-size", "--ffn-hidden-size"):
            flags.options.pop(option, None)
        return
    query_groups(model, flags)
    norm = str(model.get("normalization", "layernorm")).lower()
    if norm in ("layernorm1p",):
        flags.remark("model.normalization", "layernorm1p is predicted as LayerNorm")
    flags.put("normalization", "RMSNorm" if "rms" in norm else "LayerNorm")
    _activation(str(model.get("activation", "gelu")).lower(), flags)
    if model.get("bias") is False:
        flags.options["--disable-bias-linear"] = None
    shares = model.get("share_embeddings_and_output_weights", True)
    if shares is False:
        flags.options["--untie-embeddings-and-output-weights"] = None
    percent = model.get("rotary_percentage")
    if percent not in (None, 1, 1.0) and model.get("position_embedding_type") == "rope":
        flags.put("rotary_percent", percent)


def _activation(name: str, flags: Flags) -> None:
    if "swiglu" in name or name == "silu":
        flags.options["--swiglu"] = None
    elif name in ("geglu", "fast-geglu", "reglu", "fast-reglu"):
        flags.options["--swiglu"] = None
        flags.remark("model.activation", f"{name} is predicted as swiglu")
    elif name == "squared-relu":
        flags.options["--squared-relu"] = None
    elif name not in ("gelu", "openai_gelu"):
        flags.remark("model.activation", f"{name} is predicted as gelu")


def _nemo_memory(model: Mapping[str, Any], flags: Flags) -> None:
    for part in ("granularity", "method", "num_layers"):
        value = model.get(f"activations_checkpoint_{part}")
        if value is not None:
            flags.put(f"recompute_{part}", value)
    if flags.options.get("--recompute-granularity") == "selective":
        flags.options.pop("--recompute-method", None)
        flags.options.pop("--recompute-num-layers", None)
    if flags.options.get("--num-virtual-stages-per-pipeline-rank") == "1":
        flags.options.pop("--num-virtual-stages-per-pipeline-rank")
    optimizer = model.get("optim")
    name = str(optimizer.get("name", "")) if isinstance(optimizer, Mapping) else ""
    if "distributed" in name:
        flags.options["--use-distributed-optimizer"] = None
        if isinstance(optimizer, Mapping) and optimizer.get("overlap_grad_sync", True):
            flags.options["--overlap-grad-reduce"] = None
            flags.options["--overlap-param-gather"] = None
    if model.get("use_flash_attention"):
        flags.options["--use-flash-attn"] = None
    for key, text in (
        ("fsdp", "states are predicted as sharded by Megatron-LM's optimizer"),
        ("ub_tp_comm_overlap", "tensor-parallel communication is predicted without it"),
        ("num_moe_experts_per_token", "is not used: moe_router_topk counts"),
    ):
        if model.get(key):
            flags.remark(f"model.{key}", text)


def _nemo_precision(trainer: Mapping[str, Any], model: Mapping[str, Any], flags: Flags) -> None:
    word = str(trainer.get("precision", "32")).lower()
    if "bf16" in word:
        flags.options["--bf16"] = None
    elif word in ("16", "16-mixed", "fp16"):
        flags.options["--fp16"] = None
    if model.get("fp8"):
        kind = "hybrid" if model.get("fp8_hybrid", not model.get("fp8_e4m3")) else "e4m3"
        flags.options["--fp8-format"] = kind


def _ranks(nodes: object, gpus: object, flags: Flags) -> None:
    for name, value in (("nodes", nodes), ("gpus_per_node", gpus)):
        if value is None or re.search(r"[${]|auto|\?", str(value)) or value in (-1, "-1"):
            continue
        option = "num_nodes" if name == "nodes" else "devices"
        setattr(flags, name, checked_whole(f"trainer.{option}", value))
