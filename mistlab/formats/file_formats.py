"""Lists all formats of files that can be imported, and finds the format of a given file."""

import ast
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import PurePath
from typing import Any

from mistlab.core.values import InputError, reject
from mistlab.export.found import listed
from mistlab.export.given import Given, Imported, MissingError, Remark, stand_in
from mistlab.export.megatron import megatron_read
from mistlab.export.megatron.launched_ranks import is_decoder, refusal_of, trains_bert
from mistlab.export.megatron.megatron_flags import Options
from mistlab.export.megatron.option_tables import TELLING
from mistlab.formats import (
    component_recipes,
    gpt_neox,
    hf_trainer,
    hf_tuners,
    llm_foundry,
    megatron_files,
    nanotron,
    nemo,
    primus,
    scripts,
    torchtitan_files,
)
from mistlab.formats.checkpoints import quantised
from mistlab.formats.content import content_of, settings_of
from mistlab.formats.launched import command_of
from mistlab.formats.recipes import bridge_imports, litgpt, openrlhf, qlora_programs, verl
from mistlab.huggingface.configurations import KIND
from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile


@dataclass(frozen=True, slots=True, kw_only=True)
class Format:
    """A format of files that launch or configure training, with the functions that recognise and
    import such files.

    ``name`` is the word for ``--format``, ``title`` the framework's name. ``recognises`` tells
    whether a text is of this format by the format's own keys. ``read`` gives the job of a text.
    ``target`` is the export target (``mistlab.export.targets.TARGETS``) whose engines stand for the
    framework.
    """

    name: str
    title: str
    recognises: Callable[[LaunchFile], bool]
    read: Callable[[LaunchFile, Given], Imported]
    target: str

    def imported(self, source: LaunchFile, given: Given) -> Imported:
        """The job of a text; refuses a text that lacks facts, and names all of them at once."""
        try:
            return self.read(source, given)
        except MissingError as error:
            reject("; ".join(self._missing(source, given, error)))

    def _missing(self, source: LaunchFile, given: Given, error: MissingError) -> Iterator[str]:
        """What a text lacks: the first missing fact, and those missed once it is given. Another
        error may be due to the values that stand in for the missing ones, and ends the list.
        """
        asked = set()
        while (fact := (error.choice, error.variable)) not in asked:
            yield str(error)
            asked.add(fact)
            if error.choice:
                given = stand_in(error.choice, given)
            elif error.variable:
                settings = {**source.settings, error.variable: "1"}
                source = replace(source, settings=settings)
            try:
                self.read(source, given)
            except MissingError as further:
                error = further
            except InputError:
                return


# Formats of other tools that cannot be imported, recognised by their keys, each with the reason.


def _below(settings: Any, path: str) -> Any:
    for part in path.split("."):
        if not isinstance(settings, Mapping) or part not in settings:
            return None
        settings = settings[part]
    return settings


def _has(settings: Mapping[str, Any], keys: str) -> bool:
    """Whether settings have all keys of at least one list; bars separate the lists in ``keys``."""
    return any(
        all(_below(settings, key) is not None for key in names.split()) for names in keys.split("|")
    )


# For each format: name, title, keys, and why it cannot be imported. Bars separate alternative lists
# of keys. The first format that matches counts.
_REFUSED_ROWS: tuple[tuple[str, str, str, str], ...] = (
    (
        "huggingface-model",
        "a model's configuration (Hugging Face)",
        f"{KIND} hidden_size",
        "it describes a model, not a run: give it by --model beside the file of a run",
    ),
    (
        "plan",
        "a plan file of this package",
        "workload cluster plan",
        "it needs no import: give it to predict, will_it_fit, tune --from or export as it is",
    ),
    (
        "prices",
        "a table of prices",
        "gpus date source",
        "it describes no run: give it to estimate by --prices",
    ),
    (
        "olmo",
        "OLMo",
        (
            "device_train_microbatch_size model.d_model fsdp.wrapping_strategy | "
            "device_train_microbatch_size model.d_model save_folder evaluators | "
            "global_train_batch_size model.mlp_ratio"
        ),
        "give the model by --model and the rest as a configuration of Accelerate",
    ),
    (
        "olmo-core",
        "OLMo-core",
        "train_module data_loader | trainer dataset model.block",
        "its recipes are Python: give the model by --model and the rest as one of the formats read",
    ),
    (
        "nemo-rl",
        "a run of reinforcement learning",
        "actor_rollout_ref | policy grpo | actor rollout | algorithm.adv_estimator",
        "it trains several models in turn: give a run that trains one by next-token prediction",
    ),
    (
        "maxtext",
        "MaxText",
        "ici_fsdp_parallelism | base_config per_device_batch_size",
        "it trains by JAX, which no engine stands for",
    ),
    (
        "levanter",
        "Levanter",
        "trainer.mp model.type",
        "it trains by JAX, which no engine stands for",
    ),
    (
        "beaker",
        "an experiment of Beaker",
        "tasks budget | tasks version",
        "give the command that it starts as a script",
    ),
    (
        "kubernetes",
        "a manifest of Kubernetes",
        "apiVersion kind",
        "give the command that it starts as a script",
    ),
    (
        "flagscale-experiment",
        "an experiment of FlagScale",
        "experiment defaults | experiment.task experiment.runner",
        "import the file with the run's settings, which it names",
    ),
    (
        "test-recipe",
        "a recipe of Megatron-LM's tests",
        "spec products",
        "import the model_config.yaml of one of the tests that it names",
    ),
    (
        "model-card",
        "a card of a model",
        "base_model license",
        "it describes a model, not a run: give the launch script or configuration of a run",
    ),
    (
        "mindspeed",
        "MindSpeed's training by FSDP2",
        "parallel.fsdp_plan | model.model_id parallel training",
        "its sharding cannot be read: describe the run as a configuration of Accelerate",
    ),
)


def _refused_row(name: str, title: str, keys: str, why: str) -> Format:
    def read(source: LaunchFile, given: Given) -> Imported:
        del source, given
        reject(f"this looks like {title}, which cannot be imported: {why}")

    def recognises(source: LaunchFile) -> bool:
        return command_of(source) is None and _has(settings_of(source), keys)

    return Format(name=name, title=title, recognises=recognises, read=read, target="megatron")


REFUSED: tuple[Format, ...] = tuple(_refused_row(*row) for row in _REFUSED_ROWS)


# Lists all formats of files that can be imported, and finds the format of a given file.
#
# A format recognises a file by its keys, or by the program that a script starts. The first format
# that does is used. If none does, the error says what the file seems to be.


_Recognises = Callable[[LaunchFile], bool]
_Read = Callable[[LaunchFile, Given], Imported]
# Remarks about "settings" or "options" as a whole only list what does not affect cost.
_CALM = ("settings", "options")
_ORDER = ("noted", "contradicting", "ignored", "assumed")
_SHOWN = 8
# A program with at least this many of Megatron-LM's options is imported as a fork of Megatron-LM.
_FEWEST = 3


def _is_deepspeed(source: LaunchFile) -> bool:
    keys = settings_of(source).keys()
    batches = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    parts = {"zero_optimization", "fp16", "bf16", "optimizer", "gradient_accumulation_steps"}
    return "zero_optimization" in keys or bool(batches & keys and parts & keys)


def _is_accelerate(source: LaunchFile) -> bool:
    keys = settings_of(source).keys()
    named = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"} & keys
    return "distributed_type" in keys or len(named) > 1


def _is_script(source: LaunchFile) -> bool:
    return content_of(source).kind == "shell"


def _read_megatron(source: LaunchFile, given: Given) -> Imported:
    launch = launch_of(source)
    options = Options.of(launch.arguments)
    known = TELLING & options.given.keys()
    stem = PurePath(launch.program).stem
    is_trainer = is_decoder(stem) or trains_bert(stem)
    _refuse_tool(launch)
    is_known = is_trainer and (given.model is not None or stem.startswith("pretrain"))
    if launch.program and len(known) < _FEWEST and not is_known:
        refused = refusal_of(launch.program)
        reason = refused or "is not a supported program and has no options of Megatron-LM"
        line = f"line {launch.line}: " if launch.line else ""
        command = None if refused else command_of(source)
        stated = {} if command is None else {k: w and w.text for k, w in command.options.items()}
        reject(
            f"{line}{launch.program} {reason}: give a script that starts one of {_titles()}"
            f"{_described(stated)}"
        )
    return megatron_read.read_launch(launch, source, given)


def _refuse_tool(launch: Launch) -> None:
    """Refuse a command of ms-swift that starts no training, such as ``swift deploy`` or ``megatron
    export``.
    """
    names = [PurePath(word.text).name for word in launch.started]
    tool = next((name for name in names[:-1] if name in ("swift", "megatron")), "")
    if launch.program or not tool:
        return
    command = names[names.index(tool) + 1]
    reason = refusal_of(command) or "is not known to train"
    reject(f"line {launch.line}: {tool} {command} {reason}: give a script with {tool} sft or pt")


def _titles() -> str:
    return ", ".join(row.title for row in _ROWS if row not in REFUSED)


def _row(name: str, title: str, target: str, read: _Read, *tests: _Recognises) -> Format:
    return Format(
        name=name,
        title=title,
        recognises=lambda source: any(test(source) for test in tests),
        read=lambda source, given: _in_order(read(source, given), content_of(source).repeated),
        target=target,
    )


def _in_order(imported: Imported, repeated: Sequence[str]) -> Imported:
    """Sort the remarks of an imported job by their effect on cost, and merge those with equal text;
    ``repeated`` keys, which occur twice in the file, get a remark each.
    """
    joint: dict[tuple[str, str], list[Remark]] = {}
    text = "is given twice in one mapping: the last value is used"
    twice = (Remark(kind="contradicting", choice=key, text=text) for key in repeated)
    for remark in (*twice, *imported.remarks):
        joint.setdefault((remark.kind, remark.text), []).append(remark)
    remarks = [
        replace(same[0], choice=listed(list(dict.fromkeys(each.choice for each in same)), ", "))
        for same in joint.values()
    ]
    return Imported(job=imported.job, remarks=tuple(sorted(remarks, key=_rank)))


def _rank(remark: Remark) -> tuple[bool, int]:
    position = _ORDER.index(remark.kind) if remark.kind in _ORDER else len(_ORDER)
    return remark.choice in _CALM, position


_ROWS = (
    _row(
        "megatron-test",
        "Megatron-LM's tests",
        "megatron",
        megatron_files.read_test,
        megatron_files.recognises_test,
    ),
    _row("primus", "Primus", "megatron", primus.read, primus.recognises),
    _row(
        "llama-factory",
        "LLaMA-Factory",
        "accelerate",
        hf_tuners.read_llama_factory,
        hf_tuners.recognises_llama_factory,
    ),
    _row("axolotl", "axolotl", "accelerate", hf_tuners.read_axolotl, hf_tuners.recognises_axolotl),
    _row(
        "torchtune",
        "torchtune",
        "accelerate",
        component_recipes.read_torchtune,
        component_recipes.recognises_torchtune,
    ),
    _row(
        "nemo-automodel",
        "NeMo AutoModel",
        "accelerate",
        component_recipes.read_automodel,
        component_recipes.recognises_automodel,
    ),
    _row("nemo", "NeMo", "megatron", nemo.read_nemo, nemo.recognises_nemo),
    _row(
        "megatron-bridge",
        "Megatron-Bridge",
        "megatron",
        bridge_imports.read_bridge,
        bridge_imports.recognises_bridge,
    ),
    _row(
        "flagscale",
        "FlagScale",
        "megatron",
        megatron_files.read_flagscale,
        megatron_files.recognises_flagscale,
    ),
    _row(
        "megatron-yaml",
        "Megatron-LM's YAML",
        "megatron",
        megatron_files.read_yaml,
        megatron_files.recognises_yaml,
    ),
    _row(
        "torchtitan", "torchtitan", "torchtitan", torchtitan_files.read, torchtitan_files.recognises
    ),
    _row("nanotron", "nanotron", "megatron", nanotron.read, nanotron.recognises),
    _row("gpt-neox", "gpt-neox", "deepspeed", gpt_neox.read, gpt_neox.recognises),
    _row("openrlhf", "OpenRLHF", "accelerate", openrlhf.read, openrlhf.recognises),
    _row("litgpt", "LitGPT", "accelerate", litgpt.read, litgpt.recognises),
    _row("verl", "verl", "accelerate", verl.read, verl.recognises),
    *(row for row in REFUSED if row.name == "olmo"),
    _row("llm-foundry", "llm-foundry", "accelerate", llm_foundry.read, llm_foundry.recognises),
    *(row for row in REFUSED if row.name != "olmo"),
    _row(
        "swift-megatron",
        "Megatron-SWIFT",
        "megatron",
        hf_tuners.read_megatron,
        hf_tuners.recognises_megatron,
    ),
    _row("ms-swift", "ms-swift", "accelerate", hf_tuners.read_swift, hf_tuners.recognises_swift),
    _row(
        "firefly",
        "Firefly",
        "accelerate",
        qlora_programs.read_firefly,
        qlora_programs.recognises_firefly,
    ),
    _row(
        "qlora",
        "qlora.py",
        "accelerate",
        qlora_programs.read_qlora,
        qlora_programs.recognises_qlora,
    ),
    _row(
        "hf-trainer", "Hugging Face's Trainer", "accelerate", hf_trainer.read, hf_trainer.recognises
    ),
    _row(
        "accelerate",
        "Accelerate",
        "accelerate",
        scripts.read_accelerate,
        _is_accelerate,
        scripts.starts_accelerate,
    ),
    _row(
        "deepspeed",
        "DeepSpeed",
        "deepspeed",
        scripts.read_deepspeed,
        _is_deepspeed,
        scripts.starts_deepspeed,
    ),
    _row("megatron", "Megatron-LM", "megatron", _read_megatron, _is_script),
)
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}


# Words in the texts of Python programs that tell how they train: what users give instead.
_TRAINER_CLASSES = re.compile(
    r"^[^#\n]*\b((?:DPO|ORPO|KTO|CPO|GRPO|RLOO|PPO|Reward|GKD|PRM|XPO|BCO)Trainer)\s*\(",
    re.MULTILINE,
)
_TUNERS = {
    "unsloth": "--engine trainer-fused",
    "trl": "--engine trainer",
    "transformers": "--engine trainer",
    "accelerate": "--engine trainer",
    "peft": "--engine trainer",
}


def _about_program(text: str) -> str:
    """Tell a user who gives a Python program as a training run why it is not imported, and what to
    give instead: an import runs no programs.
    """
    if (named := _TRAINER_CLASSES.search(text)) is not None:
        return (
            f"is a Python program with {named[1]}, which trains by preferences, rewards or from a "
            "teacher, and that is not supported: give a run that trains by next-token prediction"
        )
    for package, engine in _TUNERS.items():
        if re.search(rf"^\s*(?:import|from) {package}\b", text, re.MULTILINE):
            adapts = re.search(r"\b(LoraConfig|get_peft_model)\b", text) is not None
            is_small = re.search(r"load_in_4bit\s*=\s*True", text) is not None
            stated = _constants(text)
            rank = f" --rank {stated['r']}" if adapts and "r" in stated else ""
            options = " --train lora" * adapts + rank + " --base 4bit" * (adapts and is_small)
            return (
                f"is a Python program with {package}, which is not run: describe its training by "
                f"mistlab tune{options} {engine} {_sizes(stated)}, or give its arguments as a YAML "
                "file"
            )
    return (
        "is a Python program that builds no configuration of torchtitan: give the script that "
        "starts the program, or its configuration"
    )


# Names in programs for the model, the length, the micro-batch and the steps of accumulation.
_MODEL_NAMES = (
    *("model_name", "pretrained_model_name_or_path", "model_name_or_path", "model_id"),
    *("model_id_or_path", "llm_backbone", "base_model_name_or_path", "base_model"),
)
_LENGTHS = ("max_seq_length", "max_length", "max_seq_len", "seq_len", "cutoff_len")
# Names in other files that tell of adapters, for their rank, and that tell of a training.
_ADAPTING = ("lora", "use_lora", "lora_alpha", "lora_r", "lora_rank")
_RANKS = ("lora_r", "lora_rank", "rank", "r")
_TRAINING = ("learning_rate", "lr", "batch_size", *_ADAPTING, *_LENGTHS)
_SMALL = re.compile(r"int4|nf4|bnb\.nf4|4bit", re.IGNORECASE)
_BATCHES = ("per_device_train_batch_size", "gradient_accumulation_steps")


def _sizes(stated: Mapping[str, Any]) -> str:
    """Write the options for model, length and batch with the values that a program states."""
    name = next((stated[key] for key in _MODEL_NAMES if stated.get(key)), "NAME")
    length = next((stated[key] for key in _LENGTHS if stated.get(key)), "N")
    numbers = [stated.get(key, 1) for key in _BATCHES]
    is_known = _BATCHES[0] in stated and all(isinstance(number, int) for number in numbers)
    batch = math.prod(numbers) if is_known else "N"
    name = quantised(str(name)) or name
    return f"--model {name} --sequence-length {length} --global-batch {batch}"


def _scalars(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return the words and numbers of settings and their sections by key, the first of each."""
    values, left = dict[str, Any](), [settings]
    for section in left:
        for key, value in section.items():
            if isinstance(value, Mapping):
                values.setdefault(str(key), True)
                left.append(value)
            elif isinstance(value, str | int | float):
                values.setdefault(str(key), value)
    return values


def _described(stated: Mapping[str, Any]) -> str:
    """Write the command that describes a training of which a file of no known format tells, as a
    further remedy; an empty text for a file that tells of none.
    """
    if stated.keys().isdisjoint(_TRAINING):
        return ""
    options = ""
    if not stated.keys().isdisjoint(_ADAPTING):
        rank = next((stated[key] for key in _RANKS if str(stated.get(key)).isdigit()), None)
        is_small = any(_SMALL.fullmatch(str(value)) for value in stated.values())
        options = " --train lora" + (f" --rank {rank}" if rank is not None else "")
        options += " --base 4bit" * (is_small or str(stated.get("load_in_4bit")) == "True")
    return f"; or describe its training by mistlab tune{options} {_sizes(stated)}"


def _constants(text: str) -> dict[str, Any]:
    """Return the constants that a program gives to variables and arguments by name, the first of
    each name.
    """
    values = dict[str, Any]()
    try:
        nodes = list(ast.walk(ast.parse(text)))
    except (SyntaxError, ValueError, RecursionError):
        return values
    for node in nodes:
        match node:
            case ast.keyword(arg=str(name), value=ast.Constant(value=value)):
                values.setdefault(name, value)
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant(value=value)):
                values.setdefault(name, value)
            case _:
                pass
    return values


def format_of(source: LaunchFile) -> Format:
    """Return the format of a file; refuses a file whose format is unknown."""
    content = content_of(source)
    if content.kind == "strange":
        raise InputError(content.problem)
    for row in FORMATS.values():
        if row.recognises(source):
            return row
    if content.kind == "python":
        reject(_about_program(source.text))
    keys = [str(key) for key in content.settings]
    shown = ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
    message = (
        f"is in no supported format: its keys are {shown or 'none'}: give a complete file of one "
        f"of {_titles()}{_described(_scalars(content.settings))}"
    )
    raise InputError(message)
