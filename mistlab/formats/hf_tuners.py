"""Imports the YAML files of axolotl and of LLaMA-Factory; files that train by preferences or
rewards are refused.

Keys are turned into the Trainer's. Left-out keys take the defaults of src/axolotl/utils/schemas
(2026): one step of accumulation, no recomputation, no packing.
"""

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import InputError, reject
from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments, recipe_of
from mistlab.formats.launched import Command, command_of, named_text, with_files
from mistlab.shell.session import LaunchFile

_AXOLOTL = Trainer(
    title="axolotl",
    names={
        "model_name_or_path": "base_model",
        "per_device_train_batch_size": "micro_batch_size",
        "max_seq_length": "sequence_len",
        "packing": "sample_packing",
        "optim": "optimizer",
    },
)
_DEGREES = {
    "tensor_parallel_size": "tensor_parallel",
    "context_parallel_size": "context_parallel",
    "sequence_parallel_degree": "context_parallel",
    "dp_replicate_size": "replicas of states",
}


def recognises_axolotl(source: LaunchFile) -> bool:
    """Whether a file has axolotl's keys, or is a script that starts axolotl."""
    command = command_of(source)
    if command is not None:
        words = [command.launch.program, *(word.text for word in command.launch.started)]
        return any(word == "axolotl" or word.startswith("axolotl.cli.train") for word in words)
    settings = settings_of(source)
    if not isinstance(settings.get("base_model"), str):
        return False
    return bool(settings.keys() & {"sequence_len", "datasets", "pretraining_dataset", "adapter"})


def read_axolotl(source: LaunchFile, given: Given) -> Imported:
    """Import an axolotl configuration, or the one that a script names, as a job."""
    command = command_of(source)
    settings: Mapping[str, Any] = settings_of(source)
    if command is not None:
        words = [word.text for word in command.launch.arguments]
        path = next((word for word in words if word.endswith((".yml", ".yaml"))), None)
        if path is None:
            reject("starts axolotl without a configuration: give its YAML")
        text = named_text(path, command, source, "configures axolotl's run")
        settings = {**parse_yaml(text, path), **_options(arguments_of(command, source))}
    if value := settings.get("rl"):
        reject(
            f"rl: {value} trains by preferences or rewards, which is not supported: give an "
            "axolotl file that trains by next-token prediction"
        )
    for key, choice in _DEGREES.items():
        if settings.get(key) not in (None, 1, "1"):
            reject(
                f"{key}: {settings[key]}, but axolotl's {choice} is not supported here: give 1, or "
                "leave it out"
            )
    settings = _without_plugins(settings)
    if isinstance(settings.get("fsdp_config"), Mapping) and not settings.get("fsdp"):
        settings = {**settings, "fsdp": True}
    return read_arguments(settings, _AXOLOTL, source, given, command)


def _without_plugins(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return axolotl's settings without two plugins. Liger's kernels have settings of their own;
    the plugin for the cut cross-entropy loss becomes a setting that is on unless the file turns it
    off.
    """
    plugins = settings.get("plugins")
    if not isinstance(plugins, list):
        return settings
    cuts = any("cut_cross_entropy" in str(name) for name in plugins)
    fused = {"cut_cross_entropy": True} if cuts else {}
    others = [name for name in plugins if not re.search("liger|cut_cross_entropy", str(name))]
    return {**fused, **settings, "plugins": others or None}


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not True}


# Imports LLaMA-Factory's YAML; tuning methods other than LoRA and full training are refused.
#
# A key that the file lacks has LLaMA-Factory's default (src/llamafactory/hparams, 2026): LoRA,
# 2,048 tokens, and recomputation unless it is disabled.


_LLAMA_FACTORY = Trainer(title="LLaMA-Factory", recomputes=True, length=2048, adapts=True)
_STAGES = {
    "rm": "a reward model",
    "ppo": "by reinforcement learning (PPO), which generates text",
    "dpo": "by preferences (DPO), beside a reference model",
    "kto": "by preferences (KTO), beside a reference model",
}


def recognises_llama_factory(source: LaunchFile) -> bool:
    """Whether a file names a tuning method as LLaMA-Factory does, or is a script that starts
    LLaMA-Factory.
    """
    command = command_of(source)
    if command is not None:
        return _is_started(command, source)
    return _has_keys(settings_of(source))


def _has_keys(settings: Mapping[str, Any]) -> bool:
    keys = settings.keys()
    return {"stage", "model_name_or_path"} <= keys and bool(keys & {"finetuning_type", "template"})


def _is_started(command: Command, source: LaunchFile) -> bool:
    """Whether a command starts LLaMA-Factory by its name, by its module, or by a program of any
    name with LLaMA-Factory's keys as options or in a file.
    """
    words = [command.launch.program, *(word.text for word in command.launch.started)]
    names = [PurePath(word).name for word in words]
    if any(re.fullmatch(r"llamafactory(-cli|[.].*)?", name) for name in names):
        return True
    if {"stage", "finetuning_type"} <= command.options.keys():
        return True
    path = recipe_of(command)
    text = with_files(source, command).beside(path) if path is not None else None
    try:
        settings = parse_yaml(text, path or "", []) if text is not None else {}
    except InputError:
        return False
    return isinstance(settings, Mapping) and _has_keys(settings)


def read_llama_factory(source: LaunchFile, given: Given) -> Imported:
    """Import a LLaMA-Factory configuration, or the arguments in a script, as a job."""
    command = command_of(source)
    settings = settings_of(source) if command is None else arguments_of(command, source)
    stage = str(settings.get("stage", "sft"))
    if stage in _STAGES:
        reject(
            f"stage: {stage} trains {_STAGES[stage]}, which is not supported: give a LLaMA-Factory "
            "file with pt or sft"
        )
    settings = {"finetuning_type": "lora", **settings}
    trainer = _LLAMA_FACTORY
    if stage == "pt" and settings.get("packing") is None:
        trainer = replace(trainer, pads=False)
    return read_arguments(settings, trainer, source, given, command)
