"""Imports launch lines of ms-swift: ``swift sft`` takes arguments of Hugging Face's Trainer,
``megatron sft`` those of Megatron-LM, both with other names and defaults.

``NPROC_PER_NODE`` and ``NNODES`` start processes, of which there is otherwise one. Without
``gradient_accumulation_steps`` a step has at least 16 sequences.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from mistlab.core.values import reject
from mistlab.export.found import checked_whole
from mistlab.export.given import Given, Imported, Remark
from mistlab.export.megatron.megatron_read import read_launch
from mistlab.formats.checkpoints import needed_model
from mistlab.formats.hf_trainer import Trainer, arguments_of, read_arguments
from mistlab.formats.launched import Command, command_of, known_text, with_files
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Word

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


# Imports Megatron-SWIFT, which trains a checkpoint by Megatron-core.


# Options of Megatron-LM that Megatron-SWIFT has by default, each with the options that replace it.
_DEFAULTS: Mapping[str, tuple[str, ...]] = {
    "--bf16": ("bf16", "fp16", "torch_dtype"),
    "--use-distributed-optimizer": ("use_distributed_optimizer",),
    "--attention-backend flash": ("attention_backend",),
    "--recompute-granularity selective": ("recompute_granularity",),
    "--micro-batch-size 1": ("micro_batch_size",),
    "--global-batch-size 16": ("global_batch_size",),
    "--expert-tensor-parallel-size 1": ("expert_tensor_parallel_size",),
    "--moe-token-dispatcher-type alltoall": ("moe_token_dispatcher_type",),
    "--moe-grouped-gemm": ("moe_grouped_gemm",),
}
# Options of Megatron-SWIFT that this module reads, or that have no effect on cost.
_OWN = re.compile(
    r"--(model(_name|_author|_type)?|hf_model|tuner_type|train_type|target_modules|torch_dtype"
    r"|lora_(rank|alpha|dropout|bias|dtype)|merge_lora|save_safetensors|system|output_dir"
    r"|num_train_epochs|load_from_cache_file|(dataset|dataloader)_num_(proc|workers)|split_dataset_ratio)"
)
_TYPES = {"bfloat16": "--bf16", "float16": "--fp16"}
_NETWORKS = ("all", "mlp", "gate", "up_proj", "down_proj", "linear_fc")


def recognises_megatron(source: LaunchFile) -> bool:
    """Whether a script starts supervised fine-tuning or pre-training by Megatron-SWIFT."""
    command = command_of(source)
    launch = None if command is None else command.launch
    return launch is not None and launch.launcher == "megatron" and launch.program in _PROGRAMS


def read_megatron(source: LaunchFile, given: Given) -> Imported:
    """Import a launch line of Megatron-SWIFT as a job."""
    command = command_of(source)
    assert command is not None
    if given.model is None:
        path = command.text("model", "hf_model") or ""
        given = replace(given, model=needed_model(path, "model", with_files(source, command)))
    arguments = tuple(_of_megatron(command))
    launch = replace(command.launch, program="", arguments=arguments)
    return _with_adapters(command, read_launch(launch, source, given))


def _of_megatron(command: Command) -> Iterator[Word]:
    """Yield the options of Megatron-LM that a launch line of Megatron-SWIFT stands for."""
    is_own, recomputes = False, command.text("recompute_granularity") != "none"
    for word in command.launch.arguments:
        if word.text.startswith("--"):
            name = word.text.partition("=")[0].replace("-", "_").replace("__", "--", 1)
            is_own = _OWN.fullmatch(name) is not None
            is_own |= name == "--recompute_granularity" and not recomputes
        if not is_own:
            text = re.sub("^--max[-_]length", "--seq-length", word.text)
            yield replace(word, text=text)
    for option, names in _DEFAULTS.items():
        if not any(name in command.options for name in names):
            yield from (Word(text=text) for text in option.split())
    dtype = (command.text("torch_dtype") or "").removeprefix("torch.")
    if dtype in _TYPES:
        yield Word(text=_TYPES[dtype])


def _with_adapters(command: Command, imported: Imported) -> Imported:
    """Add low-rank adapters to an imported job, where the run trains these."""
    kind = command.text("tuner_type", "train_type") or "full"
    if kind == "full":
        return imported
    if kind != "lora":
        reject(f"tuner_type: {kind} is not supported: give lora or full")
    words = iter(command.launch.arguments)
    targets = list[str]()
    for word in words:
        if word.text.replace("-", "_") == "__target_modules":
            for below in words:
                if below.text.startswith("--"):
                    break
                targets.append(known_text(below, "target_modules"))
    are_all = not targets or any(part in name for name in targets for part in _NETWORKS)
    workload = replace(
        imported.job.workload,
        train="adapters",
        adapter_rank=checked_whole("lora_rank", command.text("lora_rank") or 8),
        adapter_targets="all" if are_all else "attention",
    )
    return replace(imported, job=replace(imported.job, workload=workload))
