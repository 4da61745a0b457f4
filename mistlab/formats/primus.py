"""Imports Primus experiments: YAML whose ``modules`` name a framework, a model's preset, and
settings.

Settings for Megatron-LM are its options, under the names that their values have in its code;
settings for torchtitan are its sections. A preset is a file in Primus's folders, and is read if it
is found beside the experiment. Otherwise the model follows from the preset's name, and the
trainer's defaults are those of primus/configs/modules (2026-07).
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import InputError, reject, word_set
from mistlab.export.found import Found
from mistlab.export.given import Given, Imported, ask_for
from mistlab.export.torchtitan_read import read_mapping
from mistlab.formats.checkpoints import model_named
from mistlab.formats.content import settings_of
from mistlab.formats.flags import Flags
from mistlab.formats.launched import resolved
from mistlab.plan.workload import ModelSpec
from mistlab.shell.session import LaunchFile

GPUS_PER_NODE = 8
TRAINERS = ("pre_trainer", "sft_trainer", "post_trainer", "trainer")
# The defaults of Primus's Megatron trainer that affect cost.
_MEGATRON: Mapping[str, Any] = {
    "micro_batch_size": 2,
    "global_batch_size": 16,
    "seq_length": 1024,
    "bf16": True,
    "use_flash_attn": True,
    "use_distributed_optimizer": True,
}
_TORCHTITAN: Mapping[str, Any] = {
    "compile": {"enable": True},
    "activation_checkpoint": {"mode": "none"},
}
# Sizes of a model that a preset sets; a file that sets only some of them does not define a model
# without its preset.
_SHAPE = word_set(
    """
    hidden_size ffn_hidden_size num_attention_heads num_query_groups num_experts
    kv_channels moe_ffn_hidden_size moe_router_topk moe_shared_expert_intermediate_size
    moe_layer_freq q_lora_rank kv_lora_rank qk_head_dim qk_pos_emb_head_dim v_head_dim
    mtp_num_layers
    """
)
_ALL_SHAPE = _SHAPE | {"num_layers", "activation_func", "position_embedding_type", "rotary_base"}
# Settings of Primus itself that affect cost but that plans cannot express, each with what the
# prediction assumes instead.
_OWN_UNSAID: Mapping[str, str] = {
    "use_turbo_attention": "attention is predicted as Transformer Engine's",
    "use_turbo_gemm": "GEMMs are predicted as the vendor library's",
    "use_turbo_grouped_gemm": "the experts' GEMMs are predicted as the vendor library's",
    "use_turbo_deepep": "tokens of experts are predicted as sent by all-to-all",
    "use_turbo_mega_moe": "experts are predicted as Transformer Engine's",
    "use_turbo_rms_norm": "norms are predicted as Transformer Engine's",
    "enable_turbo_attention_float8": "attention is predicted in 16 bits",
    "moe_use_legacy_grouped_gemm": "the experts' GEMMs are predicted as one grouped GEMM",
    "patch_zero_bubble": "the pipeline schedule is predicted as 1F1B",
    "patch_primus_pipeline": "the pipeline schedule is predicted as 1F1B",
    "use_torch_fsdp2": "states are predicted as sharded by Megatron-LM",
    "overlap_moe_expert_parallel_comm": "the all-to-all of tokens is predicted as exposed",
    "num_distributed_optimizer_instances": "states are predicted as sharded over all replicas",
}
# Prefixes of Primus's own settings that do not affect cost.
_OWN_CALM = word_set(
    """
    turbo_ use_rocm_ stderr_ file_sink_ log_avg_ disable_ mlflow_ auto_continue
    torch_profiler_ trainable sink_ enable_primus_turbo profile wandb_
    use_pytorch_profiler zero_bubble_ pp_ dump_pp disable_last dataset train_data_path hf_
    moe_use_fused_router memory_ train_iters enable_zb enable_zero enable_1f1b
    enable_exactly enable_optimizer_post pre_communication debug_ interleave_group
    offload_ auto_offload allow_padding communication_method num_seq_
    multi_latent_attention_ final_ use_sink window_ no_fp8_weight_transpose is_ env_ exit_
    torch_compile deprecated_ generate_tracelens yaml_cfg model_type spec
    """
)
_KEPT = ("profile_step_start", "memory_budget")


def recognises(source: LaunchFile) -> bool:
    """Whether a file is a Primus experiment."""
    settings = settings_of(source)
    modules = settings.get("modules")
    if isinstance(modules, Mapping):
        return any(
            isinstance(module, Mapping) and "framework" in module for module in modules.values()
        )
    return False


def read(source: LaunchFile, given: Given) -> Imported:
    """Import the trainer of a Primus experiment as a job."""
    settings = resolved(settings_of(source), source.settings)
    modules = settings["modules"]
    name = next((name for name in TRAINERS if name in modules), next(iter(modules)))
    module, where = modules[name], f"modules.{name}"
    framework = str(module.get("framework"))
    overrides = module.get("overrides") or {}
    if not isinstance(overrides, Mapping):
        reject(f"{where}.overrides: {overrides!r} is not a mapping: give a mapping of settings")
    if "sft" in name or "post" in name:
        reject(
            f"{where}: fine-tunes a model, which is not supported: give an experiment that "
            "pre-trains"
        )
    if framework == "megatron":
        return _of_megatron(module, overrides, where, source, given)
    if framework in ("torchtitan", "light-megatron"):
        return _of_torchtitan(module, overrides, where, source, given)
    message = f"{where}.framework: {framework} is not supported: give megatron or torchtitan"
    raise InputError(message)


def _of_torchtitan(
    module: Mapping[str, Any],
    overrides: Mapping[str, Any],
    where: str,
    source: LaunchFile,
    given: Given,
) -> Imported:
    preset = _preset(str(module.get("model", "")), "models/torchtitan", source)
    model = given.model or (None if preset else _named(module, where))
    sections = _merged(_merged(_TORCHTITAN, preset or {}), overrides)
    converters = (sections.get("model") or {}).get("converters") or []
    kept = [word for word in converters if word != "primus_turbo"]
    draft = Found()
    if kept != converters or "primus_turbo" in sections:
        text = "kernels of Primus-Turbo are predicted as the vendor library's"
        draft.remark("ignored", f"{where}.overrides.primus_turbo", text)
        sections.pop("primus_turbo", None)
    sections["model"] = {**(sections.get("model") or {}), "converters": kept}
    _take_ranks(draft, given)
    return read_mapping(sections, replace(given, model=model), draft)


def _of_megatron(
    module: Mapping[str, Any],
    overrides: Mapping[str, Any],
    where: str,
    source: LaunchFile,
    given: Given,
) -> Imported:
    preset = _preset(str(module.get("model", "")), "models/megatron", source)
    trainer = _preset(str(module.get("config", "")), "modules/megatron", source) or _MEGATRON
    flags = Flags(where=f"{where}.overrides")
    model = given.model
    if preset is None and model is None:
        model = _changed(_named(module, where), overrides, where)
        text = (
            f"{model.name or 'chosen by its name'}, because {module.get('model')} is not in this "
            "file's folder: --model gives another"
        )
        flags.assume("model", text)
    if preset is None:
        overrides = {name: value for name, value in overrides.items() if name not in _ALL_SHAPE}
    settings = {**trainer, **(preset or {}), **overrides}
    _put(settings, flags, f"{where}.overrides")
    draft = Found()
    _take_ranks(draft, given)
    flags.nodes, flags.gpus_per_node = draft.nodes, draft.gpus_per_node
    flags.remarks += draft.remarks
    return flags.read(replace(given, model=model))


def _put(settings: Mapping[str, Any], flags: Flags, where: str) -> None:
    count = 0
    for name, value in settings.items():
        if name in _OWN_UNSAID:
            if value is True or value not in (None, False, 0, 1):
                flags.remark(f"{where}.{name}", _OWN_UNSAID[name])
        elif isinstance(value, Mapping) or _is_own(name):
            count += 1
        else:
            flags.put(name, value, f"{where}.{name}")
    if count:
        text = f"{count} settings of Primus: no effect on a step's predicted time or memory"
        flags.note("settings", text)


def _is_own(name: str) -> bool:
    """Whether a setting is one of Primus's own that do not affect cost."""
    return name not in _KEPT and name.startswith(tuple(_OWN_CALM))


def _named(module: Mapping[str, Any], where: str) -> ModelSpec:
    """Return the model that the name of a Primus preset stands for."""
    name = str(module.get("model", ""))
    model = model_named(name)
    if model is None:
        ask_for(
            "model",
            f"{where}.model: {name} is neither a known model nor a preset in primus/configs/models "
            "beside this file: give --model, or put the preset there",
        )
    return model


def _changed(model: ModelSpec, overrides: Mapping[str, Any], where: str) -> ModelSpec:
    """Return a preset's model with the number of blocks that the experiment sets; refuses an
    experiment that changes other sizes, since the preset's file is missing.
    """
    if others := [name for name in sorted(_SHAPE) if overrides.get(name) is not None]:
        reject(
            f"{where}.overrides.{others[0]}: changes the preset's model, but the preset is not "
            "beside this file: put it there, or give --model"
        )
    layers = overrides.get("num_layers")
    return model if not isinstance(layers, int) else replace(model, layers=layers, name="")


def _take_ranks(draft: Found, given: Given) -> None:
    """Read the number of ranks, by default one node of eight GPUs, as Primus's launcher starts."""
    draft.nodes, draft.gpus_per_node = given.nodes or 1, given.gpus_per_node or GPUS_PER_NODE
    if given.gpus_per_node is None:
        text = (
            f"{GPUS_PER_NODE} on {draft.nodes} node{'s' * (draft.nodes != 1)}, Primus's default: "
            "--nodes and --gpus-per-node give others"
        )
        draft.remark("assumed", "gpus_per_node", text)


def _preset(name: str, folder: str, source: LaunchFile, depth: int = 0) -> dict[str, Any] | None:
    """Return the settings of a preset and of the presets that it extends, or None if its file is
    not found.
    """
    text = next(filter(None, map(source.beside, _places(name, folder))), None) if name else None
    if text is None or depth > 10:
        return None
    content = parse_yaml(text, name)
    merged: dict[str, Any] = {}
    for base in content.get("extends") or []:
        merged = _merged(merged, _preset(str(base), folder, source, depth + 1) or {})
    return resolved(_merged(merged, {k: v for k, v in content.items() if k != "extends"}), {})


def _places(name: str, folder: str) -> Iterator[str]:
    """Yield the paths at which a preset's file may be: beside the experiment, or in Primus's
    folders above it.
    """
    yield name
    for ups in range(7):
        yield str(PurePosixPath(*[".."] * ups, "primus", "configs", folder, name))


def _merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two mappings section by section; where both have a value, the second mapping's
    counts.
    """
    merged = dict(below)
    for key, value in above.items():
        old = merged.get(key)
        both = isinstance(old, Mapping) and isinstance(value, Mapping)
        merged[key] = _merged(old, value) if both and old is not None else value
    return merged
