"""Imports supervised fine-tuning by OpenRLHF, whose program takes options with sections, such as
``--train.batch_size``, or without in older versions.

Left-out options have the defaults of openrlhf/cli/train_sft.py (2026).
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mistlab.core.values import reject
from mistlab.export.found import checked_whole
from mistlab.export.given import Given, Imported
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments
from mistlab.formats.launched import command_of
from mistlab.shell.session import LaunchFile

_PROGRAM = re.compile(r"(.*[./])?train_sft(\.py)?")
_TRAINER = Trainer(title="OpenRLHF", length=2048, usual_batch=8)
_BATCH = 128
# The Trainer's arguments, each with OpenRLHF's names for them, the newest first.
_NAMES: Mapping[str, tuple[str, ...]] = {
    "model_name_or_path": ("model.model_name_or_path", "pretrain"),
    "per_device_train_batch_size": ("train.micro_batch_size", "micro_train_batch_size"),
    "max_length": ("data.max_len", "max_len"),
    "packing": ("ds.packing_samples", "packing_samples"),
    "gradient_checkpointing": ("model.gradient_checkpointing_enable", "gradient_checkpointing"),
    "zero_stage": ("ds.zero_stage", "zero_stage"),
    "offload": ("ds.adam_offload", "adam_offload"),
    "attn_implementation": ("ds.attn_implementation", "attn_implementation"),
    "use_liger_kernel": ("ds.use_liger_kernel", "use_liger_kernel"),
    "load_in_4bit": ("ds.load_in_4bit", "load_in_4bit"),
    "lora_rank": ("ds.lora.rank", "lora_rank"),
    "lora_target": ("ds.lora.target_modules", "target_modules"),
}
_OTHERS: Mapping[str, tuple[str, ...]] = {
    "train_batch_size": ("train.batch_size", "train_batch_size"),
    "param_dtype": ("ds.param_dtype", "param_dtype"),
    "ring_attn_size": ("ds.ring_attn_size", "ring_attn_size"),
    "tensor_parallel_size": ("ds.tensor_parallel_size", "ds_tensor_parallel_size"),
}
# Sections and options without effect on the time or memory of a step.
_CALM = re.compile(
    r"(data|ckpt|logger|eval|adam|muon|train)\..*|(dataset|input_\w+|output_\w+|apply_chat_template"
    r"|max_samples|max_epochs|l2|adam_betas|aux_loss_coef|use_wandb|wandb_\w+|load_checkpoint|bf16"
    r"|flash_attn|ckpt_path|train_split|eval_split|lora_alpha|pretrain_mode|disable_fast_tokenizer)"
    r"|(model\.(aux_loss_coef|pretrain_mode_enable)|ds\.(lora\.(alpha|dropout)|overlap_comm))"
)


def recognises(source: LaunchFile) -> bool:
    """Whether a script starts OpenRLHF's supervised fine-tuning."""
    command = command_of(source)
    if command is None or _PROGRAM.fullmatch(command.launch.program) is None:
        return False
    names = {name for key in ("model_name_or_path", "max_length") for name in _NAMES[key]}
    return "openrlhf" in command.launch.program and bool(names & command.options.keys())


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a script that fine-tunes by OpenRLHF as a job."""
    command = command_of(source)
    assert command is not None
    stated = dict(arguments_of(command, source))
    settings: dict[str, Any] = {"zero_stage": 2, "deepspeed": True, "lora_target": "all"}
    settings |= _taken(stated, _NAMES)
    others = _taken(stated, _OTHERS)
    for name in ("ring_attn_size", "tensor_parallel_size"):
        if (ranks := others.get(name, 1)) != 1:
            reject(f"{name}: {ranks} is not supported here: give 1, or leave it out")
    if settings.get("lora_rank", 0) == 0:
        settings = {key: v for key, v in settings.items() if not key.startswith("lora_")}
    settings[str(others.get("param_dtype", "bf16"))] = True
    if given.global_batch is None:
        batch = checked_whole("train.batch_size", others.get("train_batch_size", _BATCH))
        given = replace(given, global_batch=batch)
    settings |= {name: value for name, value in stated.items() if not _CALM.fullmatch(name)}
    return read_arguments(settings, _TRAINER, source, given, command)


def _taken(stated: dict[str, Any], names: Mapping[str, tuple[str, ...]]) -> dict[str, Any]:
    """Take the options of these names out of those that a command states."""
    return {
        key: stated.pop(theirs)
        for key, both in names.items()
        for theirs in both
        if theirs in stated
    }
