"""Imports Megatron-Bridge's YAML, a printed configuration or overrides of a recipe, and lines that
start its run_recipe.py.

The sections model, train, optimizer, ddp and dataset name Megatron-core's fields, some by other
words. Left-out keys take Megatron-core's defaults, or what most recipes have.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from mistlab.core.values import reject, shown, word_set
from mistlab.export.found import Found
from mistlab.export.given import Given, Imported, Remark, ask_for
from mistlab.export.megatron.megatron_read import engine_told
from mistlab.formats.checkpoints import model_named
from mistlab.formats.content import settings_of
from mistlab.formats.flags import RENAMED, Flags
from mistlab.formats.hf_adapters import trained_by_adapters
from mistlab.formats.launched import (
    Command,
    command_of,
    known_text,
    parted,
    resolved,
    take_ranks,
    valued,
    with_dotted,
)
from mistlab.formats.nemo import query_groups
from mistlab.shell.session import LaunchFile

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
    "mixed_precision": "bf16 fp16 fp8 fp8_recipe fp4 fp4_recipe grad_reduce_in_fp32",
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
_OVERLAPS = ("overlap_grad_reduce", "overlap_param_gather")
# The data types of moments, each with Megatron-LM's word.
_MOMENTS = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "uint8": "fp8"}


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


def read_bridge(source: LaunchFile, given: Given) -> Imported:
    """Import a Megatron-Bridge configuration, or a line that starts run_recipe.py, as a job; asks
    for the model where only a recipe's settings are changed and its name tells none.
    """
    command, noted = command_of(source), Found()
    if command is None:
        settings = resolved(settings_of(source), source.settings)
    else:
        settings = _of_command(command, noted)
        given = _by_recipe(settings, noted, given)
        take_ranks(command, source, noted, given)
    peft = _section(settings, "peft")
    _check_lora(settings.get("peft"))
    engine = engine_told(source.text) or (None if command is None else "megatron-bridge")
    if engine is not None and given.engine is None:
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
    if overlapped := _overlapped(sections["ddp"], flags, imported):
        imported = replace(imported, remarks=(*imported.remarks, overlapped))
    return _with_adapters(peft, imported) if peft else imported


def _overlapped(ddp: Mapping[str, Any], flags: Flags, imported: Imported) -> Remark | None:
    """Return a remark where a file turns off an overlap that the prediction has."""
    # Weights are gathered only where states are sharded.
    overlaps = _OVERLAPS if "--use-distributed-optimizer" in flags.options else _OVERLAPS[:1]
    names = [name for name in overlaps if ddp.get(name) is False]
    if not names or not imported.job.plan.overlap_communication:
        return None
    choice = " ".join(f"ddp.{name}" for name in names)
    return Remark(kind="ignored", choice=choice, text="false, but predicted with overlap")


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
_NAMES = ("recipe", "model", "mode", "peft_scheme")
_SWITCHES = word_set("dry_run dryrun deterministic dump_env")
# A change of the recipe, such as ``model.sequence_parallel=true``, which may add a setting, or
# Hydra's deletion of one, such as ``~model.masks``.
_CHANGE = re.compile(
    r"\+*(?P<path>[A-Za-z_][\w.]*)=(?P<value>.*)|~(?P<deleted>[A-Za-z_][\w.]*)(=.*)?$", re.DOTALL
)
# Settings that are read beside the fields of sections.
_ALSO_READ = word_set(
    """
    dataset.seq_length mixed_precision peft.dim peft.target_modules peft._target_
    model.share_embeddings_and_output_weights model.activation_func model.gated_linear_unit
    """
)
_READ = _ALSO_READ | {f"{name}.{field}" for name in _FIELDS for field in _FIELDS[name].split()}
# Options and settings without effect on the time or memory of a step.
_CALM_OPTIONS = word_set(
    """
    dataset lr min_lr warmup_iters max_steps ms pretrained_checkpoint save_dir load_dir
    save_interval dry_run dryrun dump_env step_func hf_path
    """
)
_CALM = re.compile(
    r"(checkpoint|logger|scheduler|rng|validation|tokenizer|straggler)\..*"
    r"|dist\.\w*timeout\w*|peft\.(alpha|dropout)"
    r"|train\.(train_iters|eval_\w+|exit_\w+|manual_gc\w*)|dataset\.(?!pack)\w+"
    r"|optimizer\.(lr|min_lr|weight_decay|adam_\w+|clip_grad)|ddp\.(check_for_nan|average)\w*"
)
# Recipes whose adapters train without the distributed optimizer.
_WHOLE = re.compile(r"(llama|gemma2)")
_OTHER_RECIPES = word_set("vl vlm 45v audio omni llava flux wan diffusion dora")


def _of_command(started: Command, noted: Found) -> dict[str, Any]:
    """Return the settings of a command that starts Megatron-Bridge's run_recipe.py; adds remarks on
    those that the import does not read.
    """
    command, changes = parted(started, _CHANGE, _SWITCHES)
    recipe = command.text("recipe", "model")
    if recipe is None:
        reject("recipe: is missing: give --recipe NAME to run_recipe.py")
    pairs = {
        path: valued(value)
        for names, path in _OF_RUN_RECIPE.items()
        if (value := command.text(*names.split())) is not None
    }
    known = {*_NAMES, *" ".join(_OF_RUN_RECIPE).split(), *_CALM_OPTIONS}
    unread = [f"--{name}" for name in command.options if name not in known]
    for word in changes:
        match = _CHANGE.fullmatch(word.text)
        assert match is not None
        path, deleted = match["path"], match["deleted"]
        if path in _READ:
            known_text(word, path)
            pairs[path] = valued(match["value"])
        elif not _CALM.fullmatch(path or deleted):
            unread.append(path or f"~{deleted}")
    precision = pairs.get("mixed_precision")
    if precision == "null":
        pairs["mixed_precision"] = None
    elif isinstance(precision, str) and precision in _PRECISIONS:
        # Further words may change fields of this precision.
        del pairs["mixed_precision"]
        pairs = {"mixed_precision": _PRECISIONS[precision], **pairs}
    if unread:
        text = "the import does not read this: the prediction leaves it out"
        noted.remark("ignored", " ".join(unread), text)
    settings = with_dotted({"recipe": recipe}, pairs)
    mode = command.text("mode", "peft_scheme") or ""
    if mode in ("lora", "dora") or re.search(r"_(peft|lora)(_|$)", recipe):
        settings["peft"] = {"_target_": mode or "lora", **_section(settings, "peft")}
    return settings


# Words of recipes' names for a precision, each with Megatron-Bridge's name for it.
_BY_WORD: Mapping[str, str] = {
    "bf16": "bf16_mixed",
    "fp8ds": "bf16_with_fp8_delayed_scaling_mixed",
    "fp8cs": "bf16_with_fp8_current_scaling_mixed",
    "fp8sc": "bf16_with_fp8_subchannel_scaling_mixed",
    "fp8mx": "bf16_with_mxfp8_mixed",
    "mxfp8": "bf16_with_mxfp8_mixed",
    "nvfp4": "bf16_with_nvfp4_mixed",
}


def _by_recipe(settings: dict[str, Any], noted: Found, given: Given) -> Given:
    """Return the user's options, completed by the model that a recipe's name tells, and add the
    precision that the name tells to the settings; refuses a recipe of something else than a text
    decoder.
    """
    recipe = settings["recipe"]
    parts = recipe.lower().split("_")
    if others := _OTHER_RECIPES & {*parts}:
        reject(
            f"recipe: {recipe} trains {min(others)}, which is not supported: give the recipe of a "
            "text decoder"
        )
    words = [word for word in parts if word in _BY_WORD]
    if words and not _states(settings, "bf16 fp16 fp8 fp4"):
        usual, changes = _PRECISIONS[_BY_WORD[words[-1]]], _section(settings, "mixed_precision")
        settings["mixed_precision"] = {**usual, **changes}
        noted.remark("assumed", "precision", f"{_BY_WORD[words[-1]]}, by the recipe's name")
    name = _model_s_name(recipe)
    model = model_named(name) if given.model is None else None
    if model is None:
        return given
    noted.remark("assumed", "model", f"{model.name or name}, by the recipe's name")
    return replace(given, model=model)


def _model_s_name(recipe: str) -> str:
    """Return the name of the model that a recipe trains, with the points that recipes leave out.

    >>> _model_s_name("qwen25_500m_pretrain_1gpu_h100_bf16_config")
    'qwen2.5_0.5b'
    """
    name = re.sub(r"_(pretrain|sft|peft|lora|finetune)(_|$).*", "", recipe.lower())
    name = re.sub(r"_\d+k$", "", name)
    name = re.sub(r"^(llama|qwen)(\d)(\d)(?=_)", r"\1\2.\3", name)
    name = re.sub(r"^gemma(?=\d)", "gemma-", name)
    name = re.sub(r"_(\d+)p(\d+b)", r"_\1.\2", name)
    return re.sub(r"_(\d)00m(?=_|$)", r"_0.\1b", name)


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
    return trained_by_adapters(
        imported,
        rank=rank,
        where="peft.dim",
        usual=_LORA_RANK,
        title="Megatron-Bridge's default; recipes of its own have 8 to 32: give peft.dim",
        are_wide=any("linear_fc" in str(module) for module in modules),
    )


def _section(settings: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = settings.get(name)
    return value if isinstance(value, Mapping) else {}


def _states(settings: Mapping[str, Any], fields: str) -> bool:
    """Whether settings state a mixed precision as a whole, or null, or by some of its fields; a
    mapping without these only changes the precision that the recipe has.
    """
    value = settings.get("mixed_precision")
    if isinstance(value, Mapping):
        return not value.keys().isdisjoint(fields.split())
    return "mixed_precision" in settings


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
            "configuration and import that, or give the model by --model of this command",
        )
    text = f"the file changes {name}, whose other settings the import does not read"
    flags.remark("recipe", text)
    if not {"--bf16", "--fp16"} & flags.options.keys():
        if not _states(settings, "bf16 fp16"):
            flags.options["--bf16"] = None
            flags.assume("precision", "bf16, as in most recipes: mixed_precision names none")
        elif settings["mixed_precision"] is None:
            flags.options["--bf16"] = None
            flags.assume(
                "precision",
                "bf16, as recipes' models and optimizers have it: mixed_precision null leaves both",
            )
    if given.model.experts is not None:
        _of_experts(settings, flags)
    _shared_states(settings, flags)


# How all recipes of models with experts treat them, unless they are changed.
_OF_EXPERTS: Mapping[str, int | str | bool] = {
    "expert_tensor_parallel_size": 1,
    "moe_token_dispatcher_type": "alltoall",
    "moe_grouped_gemm": True,
}


def _of_experts(settings: Mapping[str, Any], flags: Flags) -> None:
    """Complete changes of a recipe by what recipes have in common for experts."""
    model = _section(settings, "model")
    for name, value in _OF_EXPERTS.items():
        if model.get(name) is None:
            flags.put(name, value)
            flags.assume(f"model.{name}", f"{shown(value)}, as in most recipes")


def _shared_states(settings: Mapping[str, Any], flags: Flags) -> None:
    """Complete how changes of a recipe shard and overlap by what recipes have: the distributed
    optimizer, which is on if the section ``ddp`` or ``optimizer`` has it on, and overlaps.
    """
    ddp, recipe = _section(settings, "ddp"), settings.get("recipe")
    strategy = "data_parallel_sharding_strategy"
    if ddp.get("use_megatron_fsdp") and ddp.get(strategy) is None:
        flags.put(strategy, "optim_grads_params")
        flags.assume(f"ddp.{strategy}", "optim_grads_params, as in most recipes")
    sharing = "use_distributed_optimizer"
    given = {
        f"{part}.{sharing}": value
        for part in ("ddp", "optimizer")
        if (value := _section(settings, part).get(sharing)) is not None
    }
    is_whole = settings.get("peft") and isinstance(recipe, str) and _WHOLE.match(recipe)
    is_sharded = any(given.values()) or (not is_whole and len(given) < len(("ddp", "optimizer")))
    if not given:
        text = "false, as in this model's recipes for adapters"
        if is_sharded:
            text = "true, as in most recipes, because it is not given"
        flags.assume(f"ddp.{sharing}", text)
    elif is_sharded and not any(given.values()):
        (path,) = given
        other = f"{'optimizer' if path.startswith('ddp') else 'ddp'}.{sharing}"
        flags.remark(
            path,
            f"false alone has no effect, as most recipes have {other}: true: give false for both",
        )
    flags.put(sharing, value=is_sharded)
    if is_whole:
        return
    for name in _OVERLAPS if is_sharded else _OVERLAPS[:1]:
        if name not in ddp:
            flags.put(name, value=True)


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
    query_groups(model, flags)
    if model.get("share_embeddings_and_output_weights") is False:
        flags.options["--untie-embeddings-and-output-weights"] = None
    activation = str(model.get("activation_func", ""))
    if "squared_relu" in activation:
        flags.options["--squared-relu"] = None
    elif model.get("gated_linear_unit"):
        flags.options["--swiglu"] = None
        if "silu" not in activation and activation:
            flags.remark("model.activation_func", "is predicted as silu with a gate")
