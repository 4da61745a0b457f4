"""Reads axolotl's YAML of full training; adapters and preferences are refused by name.

Keys are turned into the Trainer's. Left-out keys take the defaults of src/axolotl/utils/schemas
(2026): one step of accumulation, no recomputation, no packing.
"""

from collections.abc import Mapping
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import InputError
from mistlab.export.given import Given, Imported
from mistlab.formats.content import settings_of
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments
from mistlab.formats.launched import command_of, named_text
from mistlab.shell.source import Source

_TRAINER = Trainer(
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


def recognises(source: Source) -> bool:
    """Whether a file has axolotl's keys, or a script starts axolotl."""
    command = command_of(source)
    if command is not None:
        words = [command.launch.program, *(word.text for word in command.launch.started)]
        return any(word == "axolotl" or word.startswith("axolotl.cli.train") for word in words)
    settings = settings_of(source)
    if not isinstance(settings.get("base_model"), str):
        return False
    return bool(settings.keys() & {"sequence_len", "datasets", "pretraining_dataset", "adapter"})


def read(source: Source, given: Given) -> Imported:
    """The job of a file, or of the file that a script names."""
    command = command_of(source)
    settings: Mapping[str, Any] = settings_of(source)
    if command is not None:
        words = [word.text for word in command.launch.arguments]
        path = next((word for word in words if word.endswith((".yml", ".yaml"))), None)
        if path is None:
            message = "starts axolotl without a configuration: give its YAML"
            raise InputError(message)
        text = named_text(path, command, source, "configures axolotl's run")
        settings = {**parse_yaml(text, path), **_options(arguments_of(command, source))}
    for key in ("adapter", "rl", "load_in_4bit", "load_in_8bit", "peft"):
        value = settings.get(key)
        if value:
            what = f"{value} ({key})" if isinstance(value, str) else key
            message = f"{key}: this is an axolotl file with {what}: not read here, only the full "
            message += "training of a model by the next token is"
            raise InputError(message)
    for key, choice in _DEGREES.items():
        if settings.get(key) not in (None, 1, "1"):
            message = f"{key}: {choice} of axolotl is not read here: give 1"
            raise InputError(message)
    if isinstance(settings.get("fsdp_config"), Mapping) and not settings.get("fsdp"):
        settings = {**settings, "fsdp": True}
    return read_arguments(settings, _TRAINER, source, given, command)


def _options(arguments: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in arguments.items() if value is not True}
