"""Reads how a run of Hugging Face's Trainer shards its model: by Accelerate, DeepSpeed or FSDP."""

import re
from collections.abc import Mapping
from typing import Any

from mistlab.core.files import parse_yaml
from mistlab.core.values import reject
from mistlab.export import accelerate as accelerate_read
from mistlab.export import deepspeed as deepspeed_read
from mistlab.export.accelerate import STRATEGIES, read_choices, strategy_of, with_precision
from mistlab.export.deepspeed import read_configuration
from mistlab.export.found import Section, parse_json
from mistlab.export.given import Given
from mistlab.export.nearest import ENGINES, STATES, of_tuners
from mistlab.formats.launched import Command, known_text, named_text, valued, with_dotted
from mistlab.shell.session import LaunchFile

# The section of Accelerate's configuration that an option of ``accelerate launch`` belongs to, by
# the option's prefix.
_SECTIONS = (("fsdp_", "fsdp_config"), ("megatron_lm_", "megatron_lm_config"))
_DEEPSPEED = (
    *("zero_stage", "offload_optimizer_device", "offload_param_device"),
    *("deepspeed_config_file", "zero3_init_flag", "zero3_save_16bit_model"),
    *("gradient_clipping", "gradient_accumulation_steps", "deepspeed_multinode_launcher"),
    *("deepspeed_hostfile",),
)
_KINDS = {
    "use_deepspeed": "DEEPSPEED",
    "use_fsdp": "FSDP",
    "use_megatron_lm": "MEGATRON_LM",
    "multi_gpu": "MULTI_GPU",
}
# The configurations that TRL has inside itself, by their names for ``--accelerate_config``.
_IN_BF16 = {"mixed_precision": "bf16", "num_machines": 1, "num_processes": 8}
_OF_TRL: Mapping[str, Mapping[str, Any]] = {
    "single_gpu": {**_IN_BF16, "distributed_type": "NO", "num_processes": 1},
    "multi_gpu": {**_IN_BF16, "distributed_type": "MULTI_GPU"},
    **{
        f"zero{level}": {
            **_IN_BF16,
            "distributed_type": "DEEPSPEED",
            "deepspeed_config": {"zero_stage": level},
        }
        for level in (1, 2, 3)
    },
    **{
        f"fsdp{version}": {
            **_IN_BF16,
            "distributed_type": "FSDP",
            "fsdp_config": {"fsdp_version": version},
        }
        for version in (1, 2)
    },
}
_TOP = ("mixed_precision", "num_processes", "num_machines", "use_cpu")
# The same configurations as files of TRL's examples and the alignment handbook.
_IN_EXAMPLES = re.compile(r"(.*/)?accelerate_configs/(deepspeed_)?(\w+)\.yaml")


def _shipped(path: str, source: LaunchFile) -> str:
    """Return the name of TRL's own configuration for a path that names it, by its name or as a file
    of its examples that is not there; an empty text for any other path.
    """
    match = _IN_EXAMPLES.fullmatch(path)
    name = path if match is None else match[3]
    return name if name in _OF_TRL and source.beside(path) is None else ""


def accelerate_settings(
    command: Command | None, source: LaunchFile, named: str = ""
) -> tuple[str, Mapping[str, Any]] | None:
    """Return path and content of the configuration that an ``accelerate launch`` command uses, or
    that a recipe of TRL has ``named``; None for another command.
    """
    by_accelerate = command is not None and command.launch.launcher == "accelerate"
    if not named and not by_accelerate:
        return None
    started = command.started if command is not None and by_accelerate else {}
    word = started.get("config_file")
    path = named if word is None else known_text(word, "--config_file")
    content: Mapping[str, Any] = {}
    if name := _shipped(path, source):
        content = _OF_TRL[name]
    elif path:
        text = named_text(path, command, source, "is Accelerate's configuration")
        content = parse_yaml(text, path)
    options: dict[str, Any] = {}
    for name, value in started.items():
        setting = _place(name)
        if setting:
            options[setting] = True if value is None else valued(known_text(value, f"--{name}"))
    kinds = [kind for name, kind in _KINDS.items() if name in started]
    if kinds:
        options["distributed_type"] = kinds[0]
    elif "distributed_type" not in content:
        options["distributed_type"] = "MULTI_GPU"
    return path or "accelerate launch", with_dotted(content, options)


def _place(name: str) -> str:
    """Return the path in Accelerate's configuration of an option of ``accelerate launch``, or an
    empty text if it has none there.
    """
    if name in _TOP:
        return name
    if name in _DEEPSPEED:
        return f"deepspeed_config.{name}"
    if name.startswith("parallelism_config_"):
        return f"parallelism_config.{name}"
    return next((f"{section}.{name}" for start, section in _SECTIONS if name.startswith(start)), "")


# Reads how a run of Hugging Face's Trainer shards its model: by DeepSpeed, FSDP or Accelerate.
#
# If DeepSpeed's configuration leaves a value to the Trainer ("auto"), the Trainer's argument is
# used.


# Values of the argument ``deepspeed`` or ``fsdp_config`` that mean that there is no configuration.
_OFF = (None, False, "", "none", "None", "false", "False")


def read_sharing(
    top: Section, title: str, source: LaunchFile, given: Given, command: Command | None
) -> tuple[str, ...]:
    """Read how the ranks of a Trainer run shard the model; returns the engines that can predict the
    run.
    """
    draft, precision = top.found, top.found.precision
    engines: tuple[str, ...] = ENGINES
    settings = accelerate_settings(command, source, top.text("accelerate_config"))
    if settings is not None:
        path, content = settings
        if path not in _OF_TRL and (name := _shipped(path, source)):
            text = f"{path} is not there: predicted with TRL's {name}, on its processes"
            draft.remark("assumed", "config_file", text)
        if (processes := top.whole("num_processes")) is not None:
            content = {**content, "num_processes": processes}
        inner = Section(content, path, draft)
        ranks = draft.nodes, draft.gpus_per_node
        engines = read_choices(inner, draft, source, given)
        inner.tell_of_rest(accelerate_read.HARMLESS | deepspeed_read.HARMLESS)
        draft.nodes = ranks[0] or draft.nodes
        draft.gpus_per_node = ranks[1] or draft.gpus_per_node
        draft.precision = precision or draft.precision
    if top.get("deepspeed") not in _OFF:
        _deepspeed(top, source, given, command)
        _tensor_cores(top)
        return of_tuners(deepspeed_read.ENGINES)
    if top.get("fsdp") not in _OFF:
        _fsdp(top, source, given, command)
    elif settings is None and command is None:
        text = (
            f"0, because this file of {title} names no sharding: if its launcher does, import the "
            "script that starts it, with the launcher's configuration"
        )
        draft.remark("assumed", "zero", text)
    if draft.precision is None and given.precision is None:
        draft.precision = "fp32"
        text = f"fp32, because the run of {title} gives no other"
        if command is None:
            text += ": if its launcher does, give --precision"
        draft.remark("assumed", "precision", text)
    _tensor_cores(top)
    return of_tuners(engines)


def _tensor_cores(top: Section) -> None:
    """Let 32-bit GEMMs run in TF32 if the Trainer's argument ``tf32`` says so; it has no effect on
    other precisions.
    """
    if str(top.get("tf32")).lower() in ("true", "1") and top.found.precision == "fp32":
        top.found.precision = "tf32"


def _deepspeed(top: Section, source: LaunchFile, given: Given, command: Command | None) -> None:
    """Read DeepSpeed's configuration, taking "auto" values from the Trainer's arguments."""
    draft, value, name = top.found, top.get("deepspeed"), "deepspeed"
    if value is True:
        value, name = top.text("deepspeed_config"), "deepspeed_config"
        if not value:
            _made_by_program(top)
            return
    if isinstance(value, Mapping):
        content: Mapping[str, Any] = value
    else:
        path = name = str(value)
        kept = None if source.beside(path) is not None else _of_examples(path)
        if kept is not None:
            content, what = kept
            text = f"{path} is not there: predicted with {what}"
            draft.remark("assumed", "deepspeed", text)
        else:
            content = parse_json(named_text(path, command, source, "is DeepSpeed's configuration"))
    _tell_of_batches(top, content, name)
    inner = Section(_without_batches(with_precision(content, draft.precision)), name, draft)
    precision = draft.precision
    read_configuration(inner, draft, given, given.model)
    draft.precision = precision or draft.precision
    inner.tell_of_rest(deepspeed_read.HARMLESS)


# DeepSpeed's configurations that LLaMA-Factory (examples/deepspeed) and axolotl (deepspeed_configs)
# have in their repositories, in July 2026. Axolotl's for ZeRO-2 offloads the optimizer's states.
_OF_LLAMA_FACTORY = re.compile(r"(?:.*/)?ds_z([023])(_offload)?_config\.json")
_OF_AXOLOTL = re.compile(
    r"(?:.*/)?deepspeed_configs/zero(1|2|3|3_bf16|3_bf16_cpuoffload_(?:all|params))\.json"
)


def _of_examples(path: str) -> tuple[Mapping[str, Any], str] | None:
    """Return the content of a configuration that a tool has in its repository, by its path, with
    words that say what it is; None for any other path.
    """
    if match := _OF_LLAMA_FACTORY.fullmatch(path):
        tool, level, overlaps, is_bf16 = "LLaMA-Factory", int(match[1]), False, False
        parts = ("optimizer", "param")[: max(0, level - 1)] if match[2] else ()
    elif match := _OF_AXOLOTL.fullmatch(path):
        word = match[1]
        tool, level, overlaps, is_bf16 = "axolotl", int(word[0]), True, "bf16" in word
        offloads = {"2": ("optimizer",), "3_bf16_cpuoffload_all": ("optimizer", "param")}
        parts = offloads.get(word, ("param",) if word.endswith("params") else ())
    else:
        return None
    places = {f"offload_{part}": {"device": "cpu"} for part in parts}
    content: dict[str, Any] = {
        "zero_optimization": {"stage": level, "overlap_comm": overlaps, **places}
    }
    if is_bf16:
        content["bf16"] = {"enabled": True}
    names = {"optimizer": "optimizer states", "param": "weights"}
    offloaded = " and ".join(names[part] for part in parts)
    what = f"{tool}'s file of this name: ZeRO-{level}"
    return content, f"{what}, {offloaded} on the host" if offloaded else what


def _made_by_program(top: Section) -> None:
    """Read the ZeRO level from the arguments of a program that builds DeepSpeed's configuration in
    its own code.
    """
    draft, level = top.found, top.whole("zero_stage", minimum=0)
    if level is None or level > 3:
        reject(
            "deepspeed: the program makes DeepSpeed's configuration itself, but no --zero_stage "
            "from 0 to 3 is given: give --deepspeed_config FILE, or import DeepSpeed's JSON file"
        )
    draft.values["zero"] = level
    if top.switch("offload"):
        draft.values |= {"offload_optimizer": 1.0, "offload_gradients": 1.0}
    text = (
        f"the program makes DeepSpeed's configuration itself: predicted with zero_stage {level} "
        "and DeepSpeed's defaults"
    )
    draft.remark("assumed", "deepspeed", text)
    if draft.precision is None:
        draft.precision = "fp16"
        draft.remark("assumed", "precision", "fp16, because the script gives no other")


def _tell_of_batches(top: Section, content: Mapping[str, Any], name: str) -> None:
    """Add a remark for each batch size that differs between DeepSpeed's configuration and the
    Trainer's arguments.
    """
    pairs = {
        "train_micro_batch_size_per_gpu": "per_device_train_batch_size",
        "gradient_accumulation_steps": "",
    }
    for key, argument in pairs.items():
        of_file, of_line = content.get(key), top.get(argument or key)
        if isinstance(of_file, int) and of_line is not None and str(of_file) != str(of_line):
            text = f"{of_file}, but {argument or key} is {of_line}: {of_line} is used"
            top.found.remark("contradicting", f"{name}.{key}", text)


def _without_batches(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return DeepSpeed's configuration without batch sizes, which the Trainer's arguments set."""
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    return {key: value for key, value in content.items() if key not in names and value != "auto"}


def _fsdp(top: Section, source: LaunchFile, given: Given, command: Command | None) -> None:
    """Read the Trainer's arguments ``fsdp``, a list of words such as full_shard and offload, and
    ``fsdp_config``.
    """
    draft, value = top.found, top.get("fsdp")
    flags = value if isinstance(value, list) else str(value).replace(",", " ").split()
    known = [str(word).lower() for word in flags if str(word).lower() not in ("auto_wrap", "")]
    config = top.get("fsdp_config")
    if isinstance(config, str):
        config = parse_json(named_text(config, command, source, "configures FSDP"))
    section = Section(config if isinstance(config, Mapping) else {}, "fsdp_config", draft)
    level = [word for word in known if word not in ("offload", "true", "false")]
    inner = section.get("sharding_strategy") or section.get("fsdp_sharding_strategy")
    if not level and inner is not None:
        level = [str(inner)]
    for word in level:
        name = strategy_of(word, "fsdp")
        draft.values["zero"] = STRATEGIES[name]
        if name.startswith("HYBRID") and (given.nodes or draft.nodes or 1) > 1:
            draft.values["state_replicas"] = given.nodes or draft.nodes
    if not level and "false" not in known:
        reshards = _either(section, "reshard_after_forward", default=True)
        draft.values["zero"] = 3 if reshards else 2
    if "offload" in known or _either(section, "offload_params", default=False):
        draft.values |= dict.fromkeys(STATES, 1.0)
    if _either(section, "activation_checkpointing", default=False):
        draft.values["checkpointed_layers"] = given.model.layers if given.model else 0
    harmless = {str(key) for key in section.content if "checkpointing" not in str(key)}
    section.tell_of_rest(harmless | accelerate_read.HARMLESS)


def _either(section: Section, key: str, *, default: bool) -> bool:
    """Return an FSDP setting whose key may have Accelerate's prefix ``fsdp_``."""
    name = key if key in section.content else f"fsdp_{key}"
    value = section.get(name, default)
    return section.switch(name, default=default) if isinstance(value, bool | str) else default
