"""Imports the YAML of NeMo 1.x and of Megatron-Bridge, which holds settings of Megatron-core.

NeMo has trainer, model and exp_manager; Megatron-Bridge prints model, train, optimizer, ddp and
dataset. Both name Megatron-core's fields, some by other words. Left-out keys take Megatron-core's
defaults.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from mistlab.core.values import reject, word_set
from mistlab.export.found import Found, checked_whole
from mistlab.export.given import Given, Imported, Remark, ask_for
from mistlab.export.megatron.megatron_read import engine_told
from mistlab.export.megatron.tokenizer_sizes import has_word_pieces
from mistlab.formats.checkpoints import model_named
from mistlab.formats.content import settings_of
from mistlab.formats.flags import RENAMED, Flags
from mistlab.formats.launched import (
    Command,
    command_of,
    known_text,
    resolved,
    take_ranks,
    valued,
    with_dotted,
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


def recognises_bridge(source: LaunchFile) -> bool:
    """Whether a file has Megatron-Bridge's sections; it may be a whole configuration, or overrides
    of a recipe.
    """
    if (command := command_of(source)) is not None:
        return PurePath(command.launch.program).name == "run_recipe.py"
    settings = settings_of(source)
    model, train = settings.get("model"), settings.get("train")
    if "megatron.bridge" in source.text:
        return bool(settings)
    is_model = isinstance(model, Mapping) or "recipe" in settings
    is_train = isinstance(train, Mapping) and bool(
        {"train_iters", "global_batch_size", "micro_batch_size"} & train.keys()
    )
    return is_model and is_train


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


def _query_groups(model: Mapping[str, Any], flags: Flags) -> None:
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
    _query_groups(model, flags)
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


# Imports Megatron-Bridge's YAML: a printed configuration, or overrides of a recipe.


# Fields of Megatron-Bridge's sections that have the same names as Megatron-LM's options.
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
    "moe_aux_loss_coeff moe_router_load_balancing_type "
    "multi_latent_attention q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim "
    "mtp_num_layers recompute_granularity recompute_method recompute_num_layers recompute_modules "
    "seq_length vocab_size position_embedding_type make_vocab_size_divisible_by cp_comm_type "
    "virtual_pipeline_model_parallel_size num_layers_in_first_pipeline_stage "
    "num_layers_in_last_pipeline_stage bf16 fp16 fp8 fp8_recipe add_bias_linear "
    "cpu_offloading_num_layers normalization pipeline_model_parallel_layout",
    "mixed_precision": "bf16 fp16 fp8 fp8_recipe fp4 grad_reduce_in_fp32",
}


def _option(name: str) -> str:
    return RENAMED.get(name, f"--{name.replace('_', '-')}")


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


# Megatron-Bridge's name for each precision, by the options of Megatron-LM that select the
# precision.
PRECISION_NAMES: Mapping[frozenset[tuple[str, str | bool]], str] = {
    frozenset((_option(name), value) for name, value in settings.items()): word
    for word, settings in _PRECISIONS.items()
}
# Megatron-core's names for the linear layers of attention, and below for those of feed-forward
# networks.
OF_ATTENTION = ("linear_qkv", "linear_proj")
OF_NETWORKS = ("linear_fc1", "linear_fc2")
_LORA_RANK = 32
# The data types of moments, each with Megatron-LM's word.
_MOMENTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


def read_bridge(source: LaunchFile, given: Given) -> Imported:
    """Import a Megatron-Bridge configuration as a job; refuses a file that only overrides settings
    of a recipe.
    """
    command, noted = command_of(source), Found()
    if command is None:
        settings = resolved(settings_of(source), source.settings)
    else:
        settings = _of_command(command)
        given = _by_recipe(settings["recipe"], noted, given)
        take_ranks(command, source, noted, given)
    peft = _section(settings, "peft")
    _check_lora(settings.get("peft"))
    if (engine := engine_told(source.text)) is not None and given.engine is None:
        given = replace(given, engine=engine)
    nodes, gpus = given.nodes or noted.nodes, given.gpus_per_node or noted.gpus_per_node
    flags = Flags(where="model", nodes=nodes, gpus_per_node=gpus, remarks=[*noted.remarks])
    sections = {name: _section(settings, name) for name in (*_FIELDS, "dataset", "tokenizer")}
    for name, fields in _FIELDS.items():
        for field in fields.split():
            if field in sections[name] and field != "grad_reduce_in_fp32":
                value = sections[name][field]
                if field.startswith("exp_avg"):
                    value = _MOMENTS.get(str(value).removeprefix("torch."), value)
                flags.put(field, value, f"{name}.{field}")
    _precision(settings.get("mixed_precision"), flags)
    _shape(sections["model"], flags)
    if "--seq-length" not in flags.options:
        flags.put("seq_length", sections["dataset"].get("seq_length"))
    if sections["model"].get("num_layers") is None:
        _of_recipe(settings, flags, given)
    imported = flags.read(given)
    return _with_adapters(peft, imported) if peft else imported


# Options of Megatron-Bridge's run_recipe.py, long and short, each with the setting that it changes.
_OF_RUN_RECIPE: Mapping[str, str] = {
    "global_batch_size gb": "train.global_batch_size",
    "micro_batch_size mb": "train.micro_batch_size",
    "seq_length sl": "dataset.seq_length",
    "tensor_model_parallel_size tp": "model.tensor_model_parallel_size",
    "pipeline_model_parallel_size pp": "model.pipeline_model_parallel_size",
    "context_parallel_size cp": "model.context_parallel_size",
    "virtual_pipeline_model_parallel_size vp": "model.virtual_pipeline_model_parallel_size",
    "expert_model_parallel_size ep": "model.expert_model_parallel_size",
    "expert_tensor_parallel_size etp": "model.expert_tensor_parallel_size",
}
_OTHER_RECIPES = word_set("vl vlm audio omni llava flux wan diffusion dora")


def _of_command(command: Command) -> dict[str, Any]:
    """Return the settings of a command that starts Megatron-Bridge's run_recipe.py."""
    recipe = command.text("recipe", "model")
    if recipe is None:
        reject("recipe: is missing: give --recipe NAME to run_recipe.py")
    pairs = {
        path: valued(value)
        for names, path in _OF_RUN_RECIPE.items()
        if (value := command.text(*names.split())) is not None
    }
    for word in command.others:
        path, equals, text = word.text.partition("=")
        if equals and path.partition(".")[0] in (*_FIELDS, "dataset", "peft"):
            known_text(word, path)
            pairs[path] = valued(text)
    settings = with_dotted({"recipe": recipe}, pairs)
    mode = command.text("mode") or ""
    if mode in ("lora", "dora") or re.search(r"_(peft|lora)(_|$)", recipe):
        settings["peft"] = {"_target_": mode or "lora", **_section(settings, "peft")}
    return settings


def _by_recipe(recipe: str, noted: Found, given: Given) -> Given:
    """Return the user's options, completed by the model that a recipe's name tells; refuses a
    recipe of something else than a text decoder.
    """
    if others := _OTHER_RECIPES & set(recipe.lower().split("_")):
        reject(
            f"recipe: {recipe} trains {min(others)}, which is not supported: give the recipe of a "
            "text decoder"
        )
    name = re.sub(r"_(pretrain|sft|peft|lora|finetune)(_|$).*", "", recipe)
    model = model_named(name) if given.model is None else None
    if model is None:
        return given
    noted.remark("assumed", "model", f"{model.name or name}, by the recipe's name")
    return replace(given, model=model)


def _check_lora(peft: object) -> None:
    """Refuse adapters other than LoRA."""
    kind = str(peft.get("_target_", "")) if isinstance(peft, Mapping) else str(peft or "")
    name = kind.rpartition(".")[2]
    if name and name.lower() not in ("lora", "canonicallora"):
        reject(f"peft: trains by {name}, which is not supported: give LoRA, or leave peft out")


def _with_adapters(peft: Mapping[str, Any], imported: Imported) -> Imported:
    """Add low-rank adapters to an imported job: their rank, and the layers that have them."""
    rank, names = peft.get("dim"), peft.get("target_modules")
    modules = names if isinstance(names, list) and names else [*OF_ATTENTION, *OF_NETWORKS]
    is_wide = any("linear_fc" in str(module) for module in modules)
    remarks = imported.remarks
    if rank is None:
        text = f"{_LORA_RANK}, Megatron-Bridge's default"
        remarks = (Remark(kind="assumed", choice="adapter_rank", text=text), *remarks)
    workload = replace(
        imported.job.workload,
        train="adapters",
        adapter_rank=_LORA_RANK if rank is None else checked_whole("peft.dim", rank),
        adapter_targets="all" if is_wide else "attention",
    )
    return Imported(job=replace(imported.job, workload=workload), remarks=remarks)


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def _of_recipe(settings: Mapping[str, Any], flags: Flags, given: Given) -> None:
    """Refuse a file that only overrides settings of a recipe, because the recipe's Python code
    holds model, degrees and batch.
    """
    recipe = settings.get("recipe")
    name = f"the recipe {recipe}" if isinstance(recipe, str) else "a recipe in Python"
    if given.model is None:
        ask_for(
            "model",
            f"model.num_layers: is missing, because the file only changes {name}: print the whole "
            "configuration and import that, or give the model by --model",
        )
    text = f"the file changes {name}, whose other settings the import does not read"
    flags.remark("recipe", text)
    if not {"--bf16", "--fp16"} & flags.options.keys():
        flags.options["--bf16"] = None
        flags.assume("precision", "bf16, as in most recipes: mixed_precision is not given")
    sharing = "use_distributed_optimizer"
    sections = (_section(settings, part) for part in ("ddp", "optimizer"))
    if not any(sharing in section for section in sections):
        for name in (sharing, "overlap_grad_reduce", "overlap_param_gather"):
            flags.put(name, value=True)
        flags.assume(f"ddp.{sharing}", "true, as in most recipes, because it is not given")


def _precision(value: object, flags: Flags) -> None:
    if not isinstance(value, str):
        return
    if value not in _PRECISIONS:
        reject(f"mixed_precision: {value!r} is unknown: give one of {', '.join(_PRECISIONS)}")
    for name, setting in _PRECISIONS[value].items():
        flags.put(name, setting)


def _shape(model: Mapping[str, Any], flags: Flags) -> None:
    if model.get("num_layers") is None:
        return
    _query_groups(model, flags)
    if model.get("share_embeddings_and_output_weights") is False:
        flags.options["--untie-embeddings-and-output-weights"] = None
    activation = str(model.get("activation_func", ""))
    if "squared_relu" in activation:
        flags.options["--squared-relu"] = None
    elif model.get("gated_linear_unit"):
        flags.options["--swiglu"] = None
        if "silu" not in activation and activation:
            flags.remark("model.activation_func", "is predicted as silu with a gate")
