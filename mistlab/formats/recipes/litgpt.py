"""Imports LitGPT's configurations and launch lines of fine-tuning, in full and by LoRA.

Left-out settings have the defaults of ``litgpt/finetune/lora.py`` and ``full.py`` (0.5). A single
GPU keeps activations; several shard all states and recompute all blocks.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import one_of, reject, shown
from mistlab.export.found import checked_whole
from mistlab.export.given import Given, Imported, ask_for
from mistlab.formats.content import settings_of
from mistlab.formats.hf_trainer import Trainer, read_arguments, recipe_of
from mistlab.formats.launched import (
    Command,
    command_of,
    known_text,
    named_text,
    valued,
    with_dotted,
)
from mistlab.shell.session import LaunchFile

_TRAINER = Trainer(
    title="LitGPT",
    names={
        "model_name_or_path": "checkpoint_dir",
        "per_device_train_batch_size": "train.micro_batch_size",
        "max_length": "train.max_seq_length",
    },
    usual_batch=1,
)
_BATCH, _RANK = 16, 8
_ENGINE = "trainer-loop"
_COMMANDS = ("finetune", "finetune_lora", "finetune_full")
# The layers that each switch adapts, and whether it is on unless a file says otherwise.
_LAYERS: Mapping[str, tuple[bool, tuple[str, ...]]] = {
    "lora_query": (True, ("q_proj",)),
    "lora_key": (False, ("k_proj",)),
    "lora_value": (True, ("v_proj",)),
    "lora_projection": (False, ("o_proj",)),
    "lora_mlp": (False, ("gate_proj", "up_proj", "down_proj")),
}
_PRECISIONS: Mapping[str, Mapping[str, Any]] = {
    "bf16-true": {"pure_bf16": True},
    "bf16-mixed": {"bf16": True},
    "16-true": {"torch_dtype": "float16"},
    "16-mixed": {"fp16": True},
    "32-true": {},
}
_SHARDED: Mapping[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "gradient_checkpointing": True,
}
# Settings of the steps of a run, of what it saves and of its data.
_CALM = ("data", "eval", "log", "logger_name", "out_dir", "resume", "access_token", "config")


def recognises(source: LaunchFile) -> bool:
    """Whether a file has the settings of LitGPT's fine-tuning, or is a script that starts it."""
    command = command_of(source)
    if command is not None:
        return command.launch.launcher == "litgpt" and command.launch.program in _COMMANDS
    settings = settings_of(source)
    return "checkpoint_dir" in settings and isinstance(settings.get("train"), Mapping)


def read(source: LaunchFile, given: Given) -> Imported:
    """Import LitGPT's settings, or those that a script starts with, as a job."""
    command = command_of(source)
    settings = dict(settings_of(source)) if command is None else _started(command, source)
    is_full = command is not None and command.launch.program == "finetune_full"
    if not is_full and (command is not None or any(map(_is_of_adapters, settings))):
        settings |= dict(_adapters(settings))
    settings = {key: value for key, value in settings.items() if key not in (*_CALM, *_LAYERS)}
    train = settings.pop("train", None) or {}
    given = _with_ranks(settings, given)
    is_sharded = (given.gpus_per_node or 1) * (given.nodes or 1) > 1
    if is_sharded and settings.get("quantization_bit"):
        reject("quantize: LitGPT quantises on one GPU alone: give devices 1, or leave it out")
    batch = checked_whole("train.global_batch_size", train.get("global_batch_size") or _BATCH)
    given = replace(given, global_batch=given.global_batch or batch)
    if not train.get("max_seq_length") and given.sequence_length is None:
        text = "train.max_seq_length: is not given, and the longest document of the data counts"
        ask_for("sequence_length", f"{text}: give --sequence-length")
    plain = {
        "model_name_or_path": settings.pop("checkpoint_dir", None),
        "per_device_train_batch_size": train.get("micro_batch_size"),
        "max_length": train.get("max_seq_length"),
        "gradient_checkpointing": False,
        "optim": _optimizer(settings.pop("optimizer", None)),
        **_precision(settings.pop("precision", None)),
        **(_SHARDED if is_sharded else {}),
        **settings,
    }
    given = replace(given, engine=given.engine or _ENGINE)
    imported = read_arguments(plain, _TRAINER, source, given)
    # What shards follows from the number of GPUs, so nothing is assumed about a launcher.
    remarks = [remark for remark in imported.remarks if "names no sharding" not in remark.text]
    return replace(imported, remarks=tuple(remarks))


def _started(command: Command, source: LaunchFile) -> dict[str, Any]:
    """Return the settings of a launch line, completed by those of the file that it names."""
    recipe = recipe_of(command)
    settings: dict[str, Any] = {}
    if recipe is not None:
        settings |= parse_yaml(named_text(recipe, command, source, "is the run's recipe"), recipe)
    stated = {
        name: True if word is None else valued(known_text(word, name))
        for name, word in command.options.items()
        if name != "config"
    }
    names = [word.text for word in command.others if not word.text.endswith((".yaml", ".yml"))]
    settings |= {"checkpoint_dir": names[0]} if names else {}
    return with_dotted(settings, stated)


def _is_of_adapters(key: str) -> bool:
    return key.startswith("lora_") or key == "quantize"


def _adapters(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Yield the Trainer's arguments of the adapters of a run."""
    names = [
        name
        for key, (usual, layers) in _LAYERS.items()
        if settings.get(key, usual)
        for name in layers
    ]
    yield from {"finetuning_type": "lora", "lora_rank": settings.get("lora_r", _RANK)}.items()
    yield "lora_r", None
    yield "lora_target", names
    kind = str(settings.get("quantize") or "")
    if kind and not kind.startswith("bnb."):
        reject(f"quantize: {kind} is not supported: give bnb.nf4 or bnb.int8-training")
    yield "quantize", None
    if kind:
        yield "quantization_bit", 8 if "int8" in kind else 4


def _with_ranks(settings: dict[str, Any], given: Given) -> Given:
    """Take nodes and GPUs from the settings, unless the user gives them."""
    devices, nodes = settings.pop("devices", 1), settings.pop("num_nodes", 1)
    if given.gpus_per_node is None and devices == "auto":
        ask_for("gpus_per_node", "devices: auto takes all GPUs of a node: give --gpus-per-node")
    gpus = given.gpus_per_node or checked_whole("devices", devices)
    nodes = given.nodes or checked_whole("num_nodes", nodes)
    return replace(given, gpus_per_node=gpus, nodes=nodes)


def _precision(word: Any) -> Mapping[str, Any]:
    if word is None:
        return _PRECISIONS["bf16-true"]
    if str(word) not in _PRECISIONS:
        reject(f"precision: {shown(word)} is unknown: give {one_of(tuple(_PRECISIONS))}")
    return _PRECISIONS[str(word)]


def _optimizer(content: Any) -> str:
    """Return the name of an optimizer, which is a word or the path of a class, in lower case."""
    path = content.get("class_path") if isinstance(content, Mapping) else content
    name = str(path or "AdamW").rpartition(".")[2].lower()
    return {"adamw8bit": "adamw_8bit", "pagedadamw8bit": "adamw_8bit", "adam": "adamw"}.get(
        name, name
    )
