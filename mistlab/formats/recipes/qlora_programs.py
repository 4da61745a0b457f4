"""Imports files of Firefly and launch lines of ``qlora.py``, programs on Hugging Face's Trainer
that train adapters on a base of 4 bits unless they are told otherwise.

Left-out settings have the defaults of Firefly's ``component/argument.py`` and of ``qlora.py``.
"""

from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from mistlab.core.values import reject, shown
from mistlab.export.found import checked_whole, parse_json
from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments
from mistlab.formats.launched import command_of, named_text
from mistlab.shell.session import LaunchFile

_FIREFLY = Trainer(title="Firefly", rank=64, names={"finetuning_type": "train_mode"})
# The option with which Firefly's program is given a file of settings.
_FILE = "train_args_file"
_TASKS = ("pretrain", "sft")
# Settings of Firefly that say how documents become tokens, where they are and what is saved.
_CALM = ("template_name", "task_type", "eval_file", "tokenize_num_workers", "max_prompt_length")


def recognises_firefly(source: LaunchFile) -> bool:
    """Whether a file has Firefly's settings, or is a script that gives such a file to Firefly."""
    command = command_of(source)
    if command is not None:
        return _FILE in command.options
    keys = settings_of(source).keys()
    named = {"model_name_or_path", "train_file"} <= keys
    return named and bool(keys & {"train_mode", "template_name"})


def read_firefly(source: LaunchFile, given: Given) -> Imported:
    """Import Firefly's settings, or those that a script names, as a job."""
    command = command_of(source)
    settings: Mapping[str, Any] = settings_of(source)
    if command is not None:
        path = command.text(_FILE) or ""
        settings = parse_json(named_text(path, command, source, "has the run's settings"))
    task = settings.get("task_type", "sft")
    if task not in _TASKS:
        reject(
            f"task_type: {shown(task)} does not train by next-token prediction, which alone is "
            f"supported: give {' or '.join(_TASKS)}"
        )
    plain = {key: value for key, value in settings.items() if key not in _CALM}
    mode = plain.setdefault("train_mode", "qlora")
    if mode == "full":
        plain.pop("lora_rank", None)
    return read_arguments(plain, _FIREFLY, source, given, command)


# Imports launch lines of ``qlora.py``.


_QLORA = Trainer(title="qlora.py", rank=64, recomputes=True, usual_batch=1, fewest=1)
_PROGRAM = "qlora.py"
# The lengths of a prompt and of an answer, whose sum is a sequence's, each with its default.
_LENGTHS = {"source_max_len": 1024, "target_max_len": 256}
_STEPS = 16


def recognises_qlora(source: LaunchFile) -> bool:
    """Whether a script starts ``qlora.py`` with its own settings of lengths or bits."""
    command = command_of(source)
    if command is None or PurePath(command.launch.program).name != _PROGRAM:
        return False
    return not command.options.keys().isdisjoint({*_LENGTHS, "bits", "full_finetune"})


def read_qlora(source: LaunchFile, given: Given) -> Imported:
    """Import a launch line of ``qlora.py`` as a job."""
    command = command_of(source)
    assert command is not None
    stated = dict(arguments_of(command, source))
    lengths = [checked_whole(key, stated.pop(key, usual)) for key, usual in _LENGTHS.items()]
    is_full = str(stated.pop("full_finetune", False)).lower() == "true"
    stated["max_length"] = sum(lengths)
    stated["finetuning_type"] = "full" if is_full else "lora"
    stated.setdefault("gradient_accumulation_steps", _STEPS)
    stated.setdefault("bits", 4)
    return read_arguments(stated, _QLORA, source, given, command)
