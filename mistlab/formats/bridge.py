"""Reads Megatron-Bridge's YAML: a configuration that it printed, or changes of a recipe."""

from collections.abc import Mapping
from typing import Any

from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.flags import Flags
from mistlab.formats.interpolation import resolved
from mistlab.formats.nemo import recognises_bridge
from mistlab.shell.source import Source

recognises = recognises_bridge
# Fields of sections that are options of Megatron-LM by their own names.
_FIELDS: Mapping[str, str] = {
    "train": "micro_batch_size global_batch_size rampup_batch_size",
    "ddp": "use_distributed_optimizer overlap_grad_reduce overlap_param_gather grad_reduce_in_fp32 "
    "use_megatron_fsdp data_parallel_sharding_strategy",
    "optimizer": "optimizer_cpu_offload optimizer_offload_fraction bf16 fp16 "
    "use_precision_aware_optimizer exp_avg_dtype exp_avg_sq_dtype use_distributed_optimizer",
    "model": "tensor_model_parallel_size pipeline_model_parallel_size context_parallel_size "
    "expert_model_parallel_size expert_tensor_parallel_size sequence_parallel num_layers "
    "hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels hidden_dropout "
    "attention_dropout rotary_percent rotary_base qk_layernorm num_moe_experts moe_router_topk "
    "moe_ffn_hidden_size moe_shared_expert_intermediate_size moe_layer_freq moe_grouped_gemm "
    "moe_token_dispatcher_type moe_expert_capacity_factor moe_pad_expert_input_to_capacity "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "mtp_num_layers recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "seq_length vocab_size position_embedding_type make_vocab_size_divisible_by cp_comm_type "
    "virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage bf16 fp16 fp8 fp8_recipe add_bias_linear "
    "cpu_offloading_num_layers normalization pipeline_model_parallel_layout",
    "mixed_precision": "bf16 fp16 fp8 fp8_recipe fp4 grad_reduce_in_fp32",
}
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16_mixed": {"bf16": True},
    "fp16_mixed": {"fp16": True},
    "bf16_with_fp8_delayed_scaling_mixed": {"bf16": True, "fp8": "hybrid"},
    "bf16_with_fp8_current_scaling_mixed": {
        "bf16": True,
        "fp8": "hybrid",
        "fp8_recipe": "tensorwise",
    },
    "bf16_with_fp8_subchannel_scaling_mixed": {
        "bf16": True,
        "fp8": "hybrid",
        "fp8_recipe": "blockwise",
    },
    "bf16_with_mxfp8_mixed": {"bf16": True, "fp8": "hybrid", "fp8_recipe": "mxfp8"},
    "bf16_with_nvfp4_mixed": {"bf16": True, "fp4": "e2m1", "fp4_recipe": "nvfp4"},
}


def read(source: Source, given: Given) -> Imported:
    """The job of a configuration; changes of a recipe alone need more than they say."""
    settings = resolved(settings_of(source), source.settings)
    if settings.get("peft") is not None:
        message = "peft: trains adapters alone, which is not read here"
        raise InputError(message)
    flags = Flags(where="model")
    sections = {name: _section(settings, name) for name in (*_FIELDS, "dataset", "tokenizer")}
    for name, fields in _FIELDS.items():
        for field in fields.split():
            if field in sections[name] and field != "grad_reduce_in_fp32":
                flags.put(field, sections[name][field], f"{name}.{field}")
    _precision(settings.get("mixed_precision"), flags)
    _shape(sections["model"], flags)
    if "--seq-length" not in flags.options:
        flags.put("seq_length", sections["dataset"].get("seq_length"))
    if sections["model"].get("num_layers") is None:
        _of_recipe(settings, flags, given)
    return flags.read(given)


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def _of_recipe(settings: Mapping[str, Any], flags: Flags, given: Given) -> None:
    """Changes alone: the recipe's model, degrees and batch are Python's, and not in the file."""
    recipe = settings.get("recipe")
    name = f"the recipe {recipe}" if isinstance(recipe, str) else "a recipe in Python"
    if given.model is None:
        message = (
            f"model.num_layers: is missing: the file changes {name}, which has the rest: print the "
            "whole configuration and import that, or give --model"
        )
        raise InputError(message)
    text = f"the file changes {name}: what the recipe says and the file does not is not read"
    flags.remark("recipe", text)


def _precision(value: object, flags: Flags) -> None:
    if not isinstance(value, str):
        return
    if value not in _PRECISIONS:
        message = f"mixed_precision: {value!r} is unknown: give {', '.join(_PRECISIONS)}"
        raise InputError(message)
    for name, said in _PRECISIONS[value].items():
        flags.put(name, said)


def _shape(model: Mapping[str, Any], flags: Flags) -> None:
    if model.get("num_layers") is None:
        return
    groups = model.get("num_query_groups")
    if groups and groups != model.get("num_attention_heads"):
        flags.put("group_query_attention", True)
    elif groups:
        flags.options.pop("--num-query-groups", None)
    if model.get("share_embeddings_and_output_weights") is False:
        flags.options["--untie-embeddings-and-output-weights"] = None
    activation = str(model.get("activation_func", ""))
    if "squared_relu" in activation:
        flags.options["--squared-relu"] = None
    elif model.get("gated_linear_unit"):
        flags.options["--swiglu"] = None
        if "silu" not in activation and activation:
            flags.remark("model.activation_func", "taken as silu with a gate")
