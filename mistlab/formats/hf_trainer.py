"""Imports arguments of Hugging Face's Trainer and of TRL, from YAML recipes and from launch
scripts.

How ranks share the work is read from the script's launcher, an Accelerate configuration, a
DeepSpeed JSON, and the arguments ``fsdp`` and ``parallelism_config``. A missing argument has the
default of transformers' ``TrainingArguments``; if it has no default there, the user is asked for it
by name.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath
from typing import Any, NoReturn

from mistlab.core.files import parse_yaml
from mistlab.core.values import reject, shown
from mistlab.export import accelerate as accelerate_read
from mistlab.export import deepspeed as deepspeed_read
from mistlab.export.accelerate import offload_inputs
from mistlab.export.found import Found, Section
from mistlab.export.given import Given, Imported, ask_for, ask_for_variable
from mistlab.export.megatron.launched_ranks import refusal_of, trains_bert
from mistlab.formats.checkpoints import needed_model
from mistlab.formats.content import settings_of
from mistlab.formats.hf_adapters import KEYS as ADAPTERS
from mistlab.formats.hf_adapters import (
    read_adapters,
    take_stored_bits,
    tell_of_saved_modules,
)
from mistlab.formats.hf_names import CALM, HARMLESS, OTHERS, PROGRAMS, UNSAID
from mistlab.formats.hf_sharing import read_sharing
from mistlab.formats.launched import (
    Command,
    command_of,
    known_text,
    named_text,
    take_ranks,
    valued,
    with_files,
)
from mistlab.plan.workload import ModelSpec
from mistlab.schedule.context_ways import HEADS
from mistlab.shell.session import LaunchFile
from mistlab.shell.shell_text import Unknown, Word

_BATCHES = ("per_device_train_batch_size", "per_gpu_train_batch_size", "per_device_batch_size")
_LENGTHS = (
    *("max_seq_length", "max_length", "model_max_length", "cutoff_len", "block_size"),
    *("max_seq_len", "sequence_length", "seq_length", "max_len"),
)
_SEQUENCE_RANKS = ("sequence_parallel_size", "sp_ulysses_degree")
_MODELS = (
    *("model_name_or_path", "model_name", "model_id", "model_path"),
    *("pretrained_model_name_or_path", "model"),
)
_KEYS = {*_BATCHES, "gradient_accumulation_steps"}
# A file that has two of these arguments is a recipe for the Trainer, even if it states no batch
# sizes.
_OTHER_KEYS = {
    *("num_train_epochs", "per_device_eval_batch_size", "lr_scheduler_type", "warmup_ratio"),
    *("gradient_checkpointing", "gradient_checkpointing_kwargs", "save_strategy", "ddp_timeout"),
    *("save_total_limit", "eval_strategy", "evaluation_strategy", "logging_strategy", "max_steps"),
    *("logging_steps", "save_steps", "eval_steps", "warmup_steps", "remove_unused_columns"),
    *("overwrite_output_dir", "report_to", "push_to_hub", "max_grad_norm", "learning_rate"),
    *("dataloader_num_workers", "optim", "bf16", "fp16"),
}
# Arguments that affect cost: a run is refused if their values are unknown.
_COSTING = {
    *_KEYS,
    *_LENGTHS,
    *_MODELS,
    *("deepspeed", "deepspeed_config", "fsdp", "fsdp_config", "bf16", "fp16", "packing"),
    *("gradient_checkpointing", "optim", "torch_dtype", "dtype", *ADAPTERS),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """A tool built on Hugging Face's Trainer: its title, its names for arguments, and its own
    defaults.

    ``names`` are its own names for arguments. The other fields are its defaults. ``recomputes``
    tells whether blocks are recomputed. ``length`` is the sequence length, None if the tool has no
    default. ``pads`` tells whether sequences are padded rather than packed. ``adapts`` tells
    whether adapters are trained rather than the model; ``rank`` is their rank. ``usual_batch`` is
    the number of sequences of a micro-batch, ``fewest`` that of a step whose accumulation is not
    given.
    """

    title: str
    names: Mapping[str, str] = field(default_factory=dict)
    recomputes: bool = False
    length: int | None = None
    pads: bool = True
    adapts: bool = False
    rank: int = 8
    usual_batch: int = 8
    fewest: int = 1


TRAINER = Trainer(title="Hugging Face's Trainer", rank=16)


def recognises(source: LaunchFile) -> bool:
    """Whether a file is a recipe for the Trainer, or a script that passes the Trainer's
    arguments.
    """
    command = command_of(source)
    if command is not None:
        return _is_trainer(command)
    keys = settings_of(source).keys()
    if keys & _KEYS and keys & {*_MODELS, "learning_rate", "output_dir"}:
        return True
    return bool(keys & {"model_name_or_path", "output_dir"}) and len(keys & _OTHER_KEYS) > 1


def _is_trainer(command: Command) -> bool:
    names = command.options.keys()
    if names & {*_BATCHES, "model_name_or_path"} and "num_layers" not in names:
        return True
    # TRL takes a recipe as the first word behind the program, or after --config.
    return recipe_of(command) is not None and command.launch.launcher == "accelerate"


def recipe_of(command: Command) -> str | None:
    """Return the YAML file that a command gives to its training program, or None."""
    recipes = [word for word in command.others if word.text.endswith((".yaml", ".yml"))]
    named = command.options.get("config")
    if named is not None and named.text.endswith((".yaml", ".yml")):
        recipes.append(named)
    return known_text(recipes[0], "config") if recipes else None


def read(source: LaunchFile, given: Given) -> Imported:
    """Import a recipe for the Trainer, or a script that passes the Trainer's arguments, as a
    job.
    """
    command = command_of(source)
    if command is None:
        return read_arguments(settings_of(source), TRAINER, source, given)
    return read_arguments(arguments_of(command, source), TRAINER, source, given, command)


def arguments_of(command: Command, source: LaunchFile) -> Mapping[str, Any]:
    """Return the Trainer's arguments in a script's command, completed by those of the recipe that
    the command names.
    """
    recipe = recipe_of(command)
    settings: dict[str, Any] = {}
    if recipe is not None:
        text = named_text(recipe, command, source, "is the run's recipe")
        # If a key occurs twice in the recipe, PyYAML takes the last value, and so does this import.
        settings |= parse_yaml(text, recipe, [])
    for name, word in command.options.items():
        if name != "config" or recipe is None:
            settings[name] = True if word is None else _argument(word)
    return settings


@dataclass(frozen=True, slots=True)
class _Unsettled:
    """A value that is known only when the script runs, and what is unknown of it."""

    text: str
    unknown: Unknown


def _argument(word: Word) -> Any:
    """Return the value of a word on a command line; if it is known only when the script runs,
    return that fact instead.
    """
    if word.unknown is not None:
        return _Unsettled(word.text, word.unknown)
    return valued(word.text)


def read_arguments(
    settings: Mapping[str, Any],
    trainer: Trainer,
    source: LaunchFile,
    given: Given,
    command: Command | None = None,
) -> Imported:
    """Import the Trainer's arguments, the launcher and the configuration files of a run as a
    job.
    """
    lengths = trainer.names.get("max_seq_length", "max_length")
    draft = Found(keys={"sequence_length": lengths})
    top = Section(_known(settings, trainer, given), "", draft)
    _refuse_others(top, trainer, command)
    adapts = trainer.adapts or (command is not None and bool(_words(command) & _ADAPTING))
    read_adapters(top, draft, rank=trainer.rank, usual=adapts)
    key = next((name for name in _MODELS if top.has(name)), _MODELS[0])
    where = trainer.names.get(key, key)
    path, files = top.text(key), with_files(source, command)
    model = draft.settled_model(given, lambda: needed_model(path, where, files))
    take_stored_bits(draft, path)
    _tell_of_masks(top, command, model)
    tell_of_saved_modules(top, draft, model)
    given = replace(given, model=model)
    if command is not None:
        take_ranks(command, source, draft, given)
    _lengths(top, trainer, draft)
    _precision(top, draft)
    engines = read_sharing(top, trainer.title, with_files(source, command), given, command)
    for key in _SEQUENCE_RANKS:
        if (ranks := top.whole(key) or 1) > 1:
            draft.values |= {"context_parallel": ranks, "context_exchange": HEADS}
    _batch(top, trainer, draft, given)
    _recomputed(top, trainer, draft, model)
    taken = _offloaded_inputs(top, draft)
    _kernels(top, draft)
    _fused_loss(top, trainer, draft)
    if top.switch("use_unsloth"):
        engines = ("trainer-fused", *engines)
    if top.switch("torch_compile"):
        engines = ("fsdp-compiled", *engines)
    top.unsaid({key: text for key, text in UNSAID.items() if text and key not in taken})
    calm = {name for name in map(str, top.content) if name.startswith(tuple(CALM))}
    top.tell_of_rest(
        HARMLESS | calm | accelerate_read.HARMLESS | deepspeed_read.HARMLESS | UNSAID.keys()
    )
    return draft.job(given, engines)


def _known(settings: Mapping[str, Any], trainer: Trainer, given: Given) -> dict[str, Any]:
    """Translate a tool's arguments to the Trainer's names; refuses an unknown value of an argument
    that affects cost, unless it is a model that the user gives.
    """
    ours = {theirs: name for name, theirs in trainer.names.items()}
    known: dict[str, Any] = {}
    for key, value in settings.items():
        word = str(key).replace("-", "_")
        name = ours.get(word, word)
        if isinstance(value, _Unsettled):
            if name in _MODELS and given.model is None:
                ask_for("model", f"{word}: {value.unknown}, or --model NAME")
            if name in _COSTING and name not in _MODELS:
                ask_for_variable(word, value.unknown)
            value = value.text  # noqa: PLW2901 (what a calm setting says does not matter)
        known[name] = value
    return known


def _refuse_others(top: Section, trainer: Trainer, command: Command | None) -> None:
    for key, what in OTHERS.items():
        value = top.get(key)
        if value not in (None, False, "", 0, "none", "None", "false", "False"):
            reject(
                f"{trainer.names.get(key, key)}: {shown(value)}, so this run of {trainer.title} "
                f"trains {what}, which is not supported: give a run that trains a decoder by "
                "next-token prediction"
            )
    if str(top.get("do_train", default=True)).lower() in ("false", "0"):
        reject(f"do_train: false trains nothing: give a run of {trainer.title} that trains")
    if command is not None:
        _refuse_coded(command)
        refuse_program(command, is_told=any(top.has(key) for key in ADAPTERS))


def _tell_of_masks(top: Section, command: Command | None, model: ModelSpec) -> None:
    """Refuse training on masked tokens of a model other than an encoder; add a remark if an encoder
    is not known to train so.
    """
    mask, share = (str(top.get(name, "")).lower() for name in ("mlm", "mlm_probability"))
    by_name = None if command is None else refuse_masks(command, model)
    by_setting = (mask or share) not in ("", "none", "false", "0", "0.0")
    if by_setting and not model.is_encoder:
        _refuse_masks("mlm")
    if model.is_encoder and not (by_name or by_setting):
        text = "an encoder: predicted as trained on masked tokens, with logits of all tokens"
        top.found.remark("assumed", "model.family", text)


def refuse_masks(command: Command, model: ModelSpec | None) -> str | None:
    """Return the program of a command that trains on masked tokens, or None; refuses it for a model
    other than an encoder, and asks for one that is not known.
    """
    for program in _programs(command):
        if "mlm" in _parts(program) or trains_bert(program):
            if model is None:
                ask_for("model", f"{program}: trains on masked tokens: give an encoder by --model")
            return program if model.is_encoder else _refuse_masks(program)
    return None


def _refuse_masks(where: str) -> NoReturn:
    reject(
        f"{where}: trains on masked tokens, which is not supported for a decoder: give the model "
        "of an encoder (bert-base), or a run that trains by next-token prediction"
    )


def refuse_program(command: Command, *, is_told: bool = False) -> None:
    """Refuse a script whose program trains in an unsupported way; ``is_told`` if the run's settings
    tell of adapters.
    """
    for program in _programs(command):
        parts = [part for part in _parts(program) if part not in _ADAPTED or not is_told]
        reason = next((PROGRAMS[word] for word in parts if word in PROGRAMS), None)
        if reason is not None:
            reject(
                f"{program}: trains {reason}, which is not supported: give a run that trains a "
                "decoder by next-token prediction"
            )
        if (reason := refusal_of(program)) is not None:
            reject(
                f"{program}: {reason}, which is not supported: give a run that trains a decoder by "
                "next-token prediction"
            )


def _refuse_coded(command: Command) -> None:
    """Refuse a run whose sharding and precision are in the code of another library, though it has
    arguments of the Trainer's names.
    """
    for program in _programs(command):
        library = "ColossalAI" if command.launch.launcher == "colossalai" else ""
        library = "OLMo-core" if "olmo_core" in program else library
        if not library:
            continue
        reject(
            f"{program}: trains by {library}, whose sharding and precision are in its code: "
            "describe the run by mistlab tune --space fsdp --model NAME --sequence-length N "
            "--global-batch N, or as a configuration of Accelerate"
        )


# Words in the names of training programs that train adapters, and of those whose base has fewer
# bits than their names tell.
_ADAPTING = frozenset(("lora", "peft"))
_ADAPTED = frozenset(("qlora",))


def _words(command: Command) -> set[str]:
    return {word for program in _programs(command) for word in _parts(program)}


def _programs(command: Command) -> list[str]:
    """Return the program of a command and those that it starts, without values of its options."""
    words = (*command.launch.started, *command.others)
    programs = [word.text for word in words if word.text.endswith(".py")]
    return [command.launch.program, *programs]


def _parts(program: str) -> list[str]:
    """Split a program's name into words."""
    return re.split(r"[_\-.]", PurePosixPath(program.replace(".py", "")).name.lower())


def _lengths(top: Section, trainer: Trainer, draft: Found) -> None:
    numbers = [top.whole(name) for name in _LENGTHS if top.has(name)]
    draft.sequence_length = next((n for n in numbers if n), trainer.length)
    if not any(top.has(name) for name in _LENGTHS) and trainer.length:
        text = f"{trainer.length}, {trainer.title}'s default"
        draft.remark("assumed", "sequence_length", text)
    packs = top.get("packing")
    full = trainer.pads is False if packs is None else str(packs).lower() in ("true", "1")
    if not full and not top.has("block_size"):
        text = "all are predicted at full length, though without packing shorter ones are padded"
        draft.remark("assumed", "sequences", text)


def _precision(top: Section, draft: Found) -> None:
    """Read the precision; without any it is 32 bits, which ``read_sharing`` decides."""
    for name in ("bf16", "fp16"):
        word = str(top.content.get(name)).lower()
        top.get(name)
        if word in ("true", "auto", "full", "1"):
            draft.precision = draft.precision or ("bf16" if name == "bf16" else "fp16")
    dtype = top.text("torch_dtype") or top.text("dtype")
    is_pure = top.switch("pure_bf16") or top.switch("bfloat16")
    if dtype == "bfloat16" and top.content.get("bf16") is False:
        is_pure = True
    if draft.precision is None and is_pure:
        draft.precision, draft.trained["states"] = "bf16", "16bit"
    elif draft.precision is None and dtype.removeprefix("torch.") in ("bfloat16", "float16"):
        draft.precision = "bf16" if "b" in dtype.removeprefix("torch.")[:1] else "fp16"
        text = f"{dtype} keeps states in 16 bits: predicted with 32-bit states"
        draft.remark("assumed", "precision", text)


def _batch(top: Section, trainer: Trainer, draft: Found, given: Given) -> None:
    key = next((name for name in _BATCHES if top.has(name)), _BATCHES[0])
    usual = trainer.usual_batch
    draft.micro_batch = top.whole(key) or given.micro_batch or usual
    if not top.has(key) and given.micro_batch is None:
        if top.has("batch_size"):
            text = f"{top.get('batch_size')} may be the sequences of a process or of a step"
            ask_for("micro_batch", f"batch_size: {text}: give --micro-batch")
        title = "the Trainer" if trainer is TRAINER else trainer.title
        draft.remark("assumed", "micro_batch", f"{usual}, {title}'s default")
    draft.micro_batches = top.whole("gradient_accumulation_steps") or draft.micro_batches
    if draft.micro_batches is None:
        ranks = (given.nodes or draft.nodes or 1) * (
            given.gpus_per_node or draft.gpus_per_node or 1
        )
        draft.micro_batches = -(-trainer.fewest // (draft.micro_batch * ranks))
        if draft.micro_batches > 1:
            text = (
                f"{draft.micro_batches}: {trainer.title} divides {trainer.fewest} sequences by "
                "micro-batch and processes"
            )
            draft.remark("assumed", "gradient_accumulation_steps", text)
    draft.data_parallel = draft.global_batch = None


def _recomputed(top: Section, trainer: Trainer, draft: Found, model: ModelSpec) -> None:
    value = top.get("gradient_checkpointing")
    disabled = top.switch("disable_gradient_checkpointing")
    default = trainer.recomputes and not disabled
    word = str(value).lower()
    if value is None and not trainer.recomputes and "checkpointed_layers" not in draft.values:
        text = (
            "0, because gradient_checkpointing is not given; if the run uses TRL 0.20 or later, "
            "which turns it on, write gradient_checkpointing: true"
        )
        draft.remark("assumed", "checkpointed_layers", text)
    recomputes = default if value is None else word not in ("false", "0", "no")
    if recomputes:
        draft.values["checkpointed_layers"] = model.layers


# Settings that offload the saved inputs of recomputed blocks, each with the values by which it
# does.
_INPUTS_OFFLOADED: Mapping[str, tuple[str, ...]] = {
    "gradient_checkpointing": ("offload", "offload_disk", "unsloth"),
    "activation_offloading": ("true", "legacy", "hidden_states", "disk"),
    "use_unsloth_gc": ("true",),
}


def _offloaded_inputs(top: Section, draft: Found) -> tuple[str, ...]:
    """Read whether the saved inputs of recomputed blocks are offloaded; returns the settings that
    enable this.
    """
    names = tuple(
        name for name, words in _INPUTS_OFFLOADED.items() if str(top.get(name)).lower() in words
    )
    return names if names and offload_inputs(draft) else ()


# Switches that fuse the head's GEMM with the loss, so that the logits of all tokens are never in
# memory at once.
_FUSED_LOSSES = (
    *("use_liger_kernel", "use_liger", "enable_liger_kernel"),
    *("liger_fused_linear_cross_entropy", "cut_cross_entropy"),
)


# Settings that TRL has and the Trainer does not.
_OF_TRL = ("packing", "max_length", "use_peft")


def _fused_loss(top: Section, trainer: Trainer, draft: Found) -> None:
    is_fused = any(str(top.get(name)).lower() in ("true", "1") for name in _FUSED_LOSSES)
    if is_fused or top.text("loss_type") == "chunked_nll":
        draft.trained["loss"] = "chunked"
    elif trainer is TRAINER and not top.has("loss_type") and any(map(top.has, _OF_TRL)):
        text = (
            "whole, because loss_type is not given; if the run uses TRL 1.7 or later, which "
            "computes the loss in chunks, write loss_type: chunked_nll"
        )
        draft.remark("assumed", "loss", text)


_FLASH = ("use_flash_attention_2", "flash_attention", "use_flash_attention", "use_flash_attn")


def _kernels(top: Section, draft: Found) -> None:
    kind = top.text("attn_implementation") or top.text("attn_impl") or top.text("flash_attn")
    if kind in ("eager", "disabled"):
        draft.attention = "math"
    elif kind or any(str(top.get(name)).lower() in ("true", "1") for name in _FLASH):
        draft.attention = "flash"
    name = top.text("optim", "adamw_torch").lower()
    if re.search(r"[48]-?bit", name) and "adam" in name:
        draft.optimizer = "adamw-8bit"
        if "4" in name:
            draft.remark("ignored", "optim", f"{name} is predicted with moments of 8 bits")
    elif not name.startswith(("adamw", "paged_adamw", "ademamix")) or "adam" not in name:
        draft.remark("ignored", "optim", f"{name} is predicted as AdamW")
