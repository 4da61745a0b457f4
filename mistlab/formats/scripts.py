"""Imports launch scripts of programs other than Megatron-LM that use a DeepSpeed or Accelerate
configuration.

A script may start any program by ``accelerate launch`` or ``deepspeed`` with a configuration. The
configuration is read; the model, its sequences and its batch are asked for by name.
"""

import re
from dataclasses import replace

from mistlab.core.values import reject
from mistlab.export import accelerate as accelerate_read
from mistlab.export import deepspeed as deepspeed_read
from mistlab.export.accelerate import read_choices
from mistlab.export.deepspeed import read_configuration
from mistlab.export.found import Found, Section, listed, parse_json
from mistlab.export.given import Given, Imported
from mistlab.formats.checkpoints import model_named
from mistlab.formats.hf_sharing import accelerate_settings
from mistlab.formats.hf_trainer import refuse_masks, refuse_program
from mistlab.formats.launched import Command, command_of, named_text, take_ranks, with_files
from mistlab.shell.session import LaunchFile

# Options by which programs take the path of DeepSpeed's configuration.
_NAMES = ("deepspeed_config", "deepspeed", "ds_config", "deepspeed_config_file")
# Options that tell that a program is Megatron-LM or a fork of it.
_MEGATRON = {"num_layers", "hidden_size", "tensor_model_parallel_size", "micro_batch_size"}


def starts_deepspeed(source: LaunchFile) -> bool:
    """Whether a script starts a program other than Megatron-LM with a DeepSpeed configuration."""
    command = command_of(source)
    if command is None or len(_MEGATRON & command.options.keys()) > 1:
        return False
    return _path(command) is not None


def _path(command: Command) -> str | None:
    for name in _NAMES:
        word = command.options.get(name)
        if word is not None and word.text.endswith(".json"):
            return word.text
    return None


def starts_accelerate(source: LaunchFile) -> bool:
    """Whether a script starts a program by ``accelerate launch``."""
    command = command_of(source)
    if command is None or len(_MEGATRON & command.options.keys()) > 1:
        return False
    return command.launch.launcher == "accelerate"


def read_deepspeed(source: LaunchFile, given: Given) -> Imported:
    """Import a DeepSpeed configuration, or a script that passes one, as a job."""
    command = command_of(source)
    if command is None:
        return deepspeed_read.read(source.text, given)
    # Before anything is asked for that would not help.
    refuse_program(command)
    draft, path = Found(), command.text(*_NAMES) or ""
    given = _checked(command, path, given)
    take_ranks(command, source, draft, given)
    content = parse_json(named_text(path, command, source, "is DeepSpeed's configuration"))
    top = Section(content, path, draft)
    read_configuration(top, draft, given, given.model)
    _tell_of_options(command, draft)
    top.tell_of_rest(deepspeed_read.HARMLESS)
    return draft.job(given, deepspeed_read.ENGINES)


def read_accelerate(source: LaunchFile, given: Given) -> Imported:
    """Import an Accelerate configuration, or a script that passes one, as a job."""
    command = command_of(source)
    if command is not None:
        refuse_program(command)
    settings = accelerate_settings(command, source)
    near = with_files(source, command)
    if command is None or settings is None:
        return accelerate_read.read_source(near, given)
    draft = Found()
    given = _checked(command, settings[0], given)
    if given.model is None:
        reject(
            f"{command.launch.program or 'the program'}: is an unknown program, whose model, "
            "sequence length and batch cannot be read: give --model, --sequence-length, "
            "--global-batch and --micro-batch"
        )
    top = Section(settings[1], settings[0], draft)
    take_ranks(command, source, draft, given)
    engines = read_choices(top, draft, near, given)
    _tell_of_options(command, draft)
    top.tell_of_rest(accelerate_read.HARMLESS | deepspeed_read.HARMLESS)
    return draft.job(given, engines)


def _checked(command: Command, path: str, given: Given) -> Given:
    """Return the user's options, completed by the model that a script's arguments name; refuses a
    configuration whose name tells that it trains only adapters, and masks of an unknown model.
    """
    if re.search(r"(^|[_\-./])(q?lora|peft)([_\-./]|$)", path.lower()):
        reject(
            f"{path}: its name says that it trains adapters, which is not supported: give a script "
            "that trains all weights"
        )
    given = _with_model(command, given)
    refuse_masks(command, given.model)
    return given


def _tell_of_options(command: Command, draft: Found) -> None:
    """Add a remark that the options of an unknown program are ignored, even if they change degrees
    or batch sizes.
    """
    names = [f"--{name}" for name in command.options if name not in _NAMES]
    if names:
        program = command.launch.program or "the program"
        text = (
            f"options of {program} are unknown: the prediction leaves them out, even if they set "
            "sizes or degrees"
        )
        draft.remark("ignored", listed(names), text)


def _with_model(command: Command, given: Given) -> Given:
    """Return the user's options; if the user gives no model, with the one that a script's arguments
    name.
    """
    if given.model is not None:
        return given
    for name in ("model_name_or_path", "model_name", "pretrained_model_name_or_path", "model"):
        word = command.options.get(name)
        model = None if word is None or "$" in word.text else model_named(word.text)
        if model is not None:
            return replace(given, model=model)
    return given
