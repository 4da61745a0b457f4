"""Imports launch lines of ms-swift (``swift sft``), which take arguments of Hugging Face's Trainer
with other names and defaults.

``NPROC_PER_NODE`` and ``NNODES`` start processes, of which there is otherwise one. Without
``gradient_accumulation_steps`` a step has at least 16 sequences.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mistlab.export.given import Given, Imported, Remark
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments
from mistlab.formats.launched import Command, command_of
from mistlab.shell.session import LaunchFile

_SWIFT = Trainer(
    title="ms-swift",
    names={"model_name_or_path": "model", "quantization_bit": "quant_bits"},
    recomputes=True,
    micro_batch=1,
    fewest=16,
)
_PROGRAMS = ("sft", "pt")
_SWITCHES = {"bfloat16": "bf16", "float16": "fp16"}
_PATH = re.compile(r"(^|[/.])swift[/.]cli[/.](sft|pt)(\.py)?$")
# The names that the arguments ``deepspeed`` and ``fsdp`` have for configurations of the package.
_DEEPSPEED = re.compile(r"zero([0-3])(_offload)?")
_FSDP: Mapping[str, Any] = {
    "fsdp": "full_shard auto_wrap",
    "fsdp_config": {
        "fsdp_version": 2,
        "reshard_after_forward": True,
        "activation_checkpointing": True,
    },
}


def recognises(source: LaunchFile) -> bool:
    """Whether a script starts supervised fine-tuning or pre-training by ms-swift."""
    command = command_of(source)
    return command is not None and _starts_swift(command)


def _starts_swift(command: Command) -> bool:
    launch = command.launch
    is_short = launch.launcher == "swift" and launch.program in _PROGRAMS
    return is_short or _PATH.search(launch.program) is not None


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a launch line of ms-swift as a job."""
    command = command_of(source)
    assert command is not None
    # The name that the tuned model gives itself is not the model's.
    settings = {k: v for k, v in arguments_of(command, source).items() if k != "model_name"}
    kind = settings.get("tuner_type", settings.get("train_type"))
    settings |= {"tuner_type": "lora"} if kind is None else {}
    settings |= _sharing(settings)
    remarks = tuple(_tell_of_devices(command))
    dtype = str(settings.get("torch_dtype")).removeprefix("torch.")
    if dtype in _SWITCHES and (kind != "full" or "deepspeed" in settings):
        # The run keeps 32-bit states of what it trains.
        settings[_SWITCHES[dtype]] = True
    if not settings.keys() & {"torch_dtype", "bf16", "fp16"}:
        settings["bf16"] = True
        text = "bf16, as ms-swift takes the checkpoint's data type: torch_dtype is not given"
        remarks = (*remarks, Remark(kind="assumed", choice="precision", text=text))
    imported = read_arguments(settings, _SWIFT, source, given, command)
    return replace(imported, remarks=(*remarks, *imported.remarks))


def _tell_of_devices(command: Command) -> Iterator[Remark]:
    """Yield a remark if the processes are fewer than the GPUs, so that each splits its model."""
    visible = command.launch.environment.get("CUDA_VISIBLE_DEVICES")
    processes = command.launch.environment.get("NPROC_PER_NODE")
    count = "1" if processes is None else processes.text
    if command.launch.launcher == "swift" and visible is not None and count.isdigit():
        gpus = len([device for device in visible.text.split(",") if device.strip()])
        if gpus > int(count):
            text = (
                f"{visible.text} for {count} process{'es' * (count != '1')}, which ms-swift splits "
                "by device_map: each is predicted with its whole model on one GPU"
            )
            yield Remark(kind="ignored", choice="CUDA_VISIBLE_DEVICES", text=text)


def _sharing(settings: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the settings of the configurations that ms-swift has by name."""
    match = _DEEPSPEED.fullmatch(str(settings.get("deepspeed")))
    if match is not None:
        level, parts = int(match[1]), ("offload_optimizer", "offload_param")[: int(match[1]) - 1]
        offload = {part: {"device": "cpu"} for part in parts if match[2]}
        return {"deepspeed": {"zero_optimization": {"stage": level, **offload}}}
    return _FSDP if settings.get("fsdp") == "fsdp2" else {}
