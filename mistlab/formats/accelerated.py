"""What ``accelerate launch`` is told: a configuration file, and options that win over it."""

from collections.abc import Mapping
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.formats.launched import Command, known_text, named_text, valued, with_dotted
from mistlab.shell.source import Source

# The section of the configuration that has an option of the launcher.
_SECTIONS = (("fsdp_", "fsdp_config"), ("megatron_lm_", "megatron_lm_config"))
_DEEPSPEED = (
    "zero_stage",
    "offload_optimizer_device",
    "offload_param_device",
    "deepspeed_config_file",
    "zero3_init_flag",
    "zero3_save_16bit_model",
    "gradient_clipping",
    "gradient_accumulation_steps",
    "deepspeed_multinode_launcher",
    "deepspeed_hostfile",
)
_KINDS = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
_TOP = (
    "mixed_precision",
    "num_processes",
    "num_machines",
    "use_cpu",
)


def accelerate_settings(
    command: Command | None, source: Source
) -> tuple[str, Mapping[str, Any]] | None:
    """The configuration's path and content for a command of ``accelerate launch``; None for any
    other."""
    if command is None or command.launch.launcher != "accelerate":
        return None
    word = command.started.get("config_file")
    path = "accelerate launch" if word is None else known_text(word, "--config_file")
    content: Mapping[str, Any] = {}
    if word is not None:
        text = named_text(path, command, source, "is Accelerate's configuration")
        content = parse_yaml(text, path)
    options: dict[str, Any] = {}
    for name, value in command.started.items():
        place = _place(name)
        if place:
            options[place] = True if value is None else valued(known_text(value, f"--{name}"))
    kinds = [kind for name, kind in _KINDS.items() if name in command.started]
    if kinds:
        options["distributed_type"] = kinds[0]
    elif "distributed_type" not in content:
        options["distributed_type"] = "MULTI_GPU"
    return path, with_dotted(content, options)


def _place(name: str) -> str:
    """Where the configuration has an option; empty for an option that it has not."""
    if name in _TOP:
        return name
    if name in _DEEPSPEED:
        return f"deepspeed_config.{name}"
    if name.startswith("parallelism_config_"):
        return f"parallelism_config.{name}"
    return next((f"{section}.{name}" for start, section in _SECTIONS if name.startswith(start)), "")
