"""The table of all formats of launch files, and the format of a given file.

Each format recognises its files by their own keys, or by the program that a script starts; rows are
asked in order. What none recognises is refused as what it looks like.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import PurePath

from mistlab.core.values import InputError
from mistlab.export import megatron_read
from mistlab.export.given import Given, Imported
from mistlab.export.megatron_flags import Options
from mistlab.export.megatron_tables.programs import is_decoder, refusal_of
from mistlab.export.megatron_tables.telling import TELLING
from mistlab.export.remarks import Remark
from mistlab.export.sections import listed
from mistlab.formats import (
    axolotl,
    bridge,
    flagscale,
    gpt_neox,
    hf_trainer,
    llama_factory,
    llm_foundry,
    megatron_tests,
    megatron_yaml,
    nanotron,
    nemo,
    primus,
    scripts,
    torchtitan,
)
from mistlab.formats.content import content_of, settings_of
from mistlab.formats.format import Format
from mistlab.formats.refused import REFUSED
from mistlab.shell.launch import launch_of
from mistlab.shell.source import Source

_Recognises = Callable[[Source], bool]
_Read = Callable[[Source, Given], Imported]
# Choices of remarks that tell of settings without cost.
_CALM = ("settings", "options")
_ORDER = ("noted", "contradicting", "ignored", "assumed")
_SHOWN = 8
# A program with fewer of Megatron-LM's options is none of its relatives.
_FEWEST = 3


def _is_deepspeed(source: Source) -> bool:
    keys = settings_of(source).keys()
    batches = {"train_batch_size", "train_micro_batch_size_per_gpu"}
    parts = {"zero_optimization", "fp16", "bf16", "optimizer", "gradient_accumulation_steps"}
    return "zero_optimization" in keys or bool(batches & keys and parts & keys)


def _is_accelerate(source: Source) -> bool:
    keys = settings_of(source).keys()
    named = {"distributed_type", "compute_environment", "fsdp_config", "deepspeed_config"} & keys
    return "distributed_type" in keys or len(named) > 1


def _is_script(source: Source) -> bool:
    return content_of(source).kind == "shell"


def _read_megatron(source: Source, given: Given) -> Imported:
    launch = launch_of(source)
    options = Options.of(launch.arguments)
    known = TELLING & options.given.keys()
    stem = PurePath(launch.program).stem
    is_known = is_decoder(stem) and (given.model is not None or stem.startswith("pretrain"))
    if launch.program and len(known) < _FEWEST and not is_known:
        refused = refusal_of(launch.program)
        reason = refused or "is no program that is known here, nor are its options Megatron-LM's"
        line = f"line {launch.line}: " if launch.line else ""
        message = f"{line}{launch.program} {reason}: known are the programs of {_titles()}"
        raise InputError(message)
    return megatron_read.read_launch(launch, source, given)


def _titles() -> str:
    return ", ".join(row.title for row in _ROWS if row not in REFUSED)


def _row(name: str, title: str, tests: Sequence[_Recognises], read: _Read, target: str) -> Format:
    return Format(
        name=name,
        title=title,
        recognises=lambda source: any(test(source) for test in tests),
        read=lambda source, given: _in_order(read(source, given), content_of(source).repeated),
        target=target,
    )


def _in_order(imported: Imported, repeated: Sequence[str]) -> Imported:
    """Remarks on what costs before those on what does not, and equal texts in one remark;
    ``repeated`` are keys that a file has twice."""
    joint: dict[tuple[str, str], list[Remark]] = {}
    text = "stands twice in one mapping: took the last"
    twice = (Remark(kind="contradicting", choice=key, text=text) for key in repeated)
    for remark in (*twice, *imported.remarks):
        joint.setdefault((remark.kind, remark.text), []).append(remark)
    remarks = [
        replace(same[0], choice=listed(list(dict.fromkeys(each.choice for each in same)), ", "))
        for same in joint.values()
    ]
    return Imported(job=imported.job, remarks=tuple(sorted(remarks, key=_rank)))


def _rank(remark: Remark) -> tuple[bool, int]:
    place = _ORDER.index(remark.kind) if remark.kind in _ORDER else len(_ORDER)
    return remark.choice in _CALM, place


_ROWS = (
    _row(
        "megatron-test",
        "Megatron-LM's tests",
        (megatron_tests.recognises,),
        megatron_tests.read,
        "megatron",
    ),
    _row("primus", "Primus", (primus.recognises,), primus.read, "megatron"),
    _row(
        "llama-factory",
        "LLaMA-Factory",
        (llama_factory.recognises,),
        llama_factory.read,
        "accelerate",
    ),
    _row("axolotl", "axolotl", (axolotl.recognises,), axolotl.read, "accelerate"),
    _row("nemo", "NeMo", (nemo.recognises,), nemo.read, "megatron"),
    _row("megatron-bridge", "Megatron-Bridge", (bridge.recognises,), bridge.read, "megatron"),
    _row("flagscale", "FlagScale", (flagscale.recognises,), flagscale.read, "megatron"),
    _row(
        "megatron-yaml",
        "Megatron-LM's YAML",
        (megatron_yaml.recognises,),
        megatron_yaml.read,
        "megatron",
    ),
    _row("torchtitan", "torchtitan", (torchtitan.recognises,), torchtitan.read, "torchtitan"),
    _row("nanotron", "nanotron", (nanotron.recognises,), nanotron.read, "megatron"),
    _row("gpt-neox", "gpt-neox", (gpt_neox.recognises,), gpt_neox.read, "deepspeed"),
    *(row for row in REFUSED if row.name == "olmo"),
    _row("llm-foundry", "llm-foundry", (llm_foundry.recognises,), llm_foundry.read, "accelerate"),
    *(row for row in REFUSED if row.name != "olmo"),
    _row(
        "hf-trainer",
        "Hugging Face's Trainer",
        (hf_trainer.recognises,),
        hf_trainer.read,
        "accelerate",
    ),
    _row(
        "accelerate",
        "Accelerate",
        (_is_accelerate, scripts.starts_accelerate),
        scripts.read_accelerate,
        "accelerate",
    ),
    _row(
        "deepspeed",
        "DeepSpeed",
        (_is_deepspeed, scripts.starts_deepspeed),
        scripts.read_deepspeed,
        "deepspeed",
    ),
    _row(
        "megatron",
        "Megatron-LM",
        (_is_script,),
        _read_megatron,
        "megatron",
    ),
)
FORMATS: dict[str, Format] = {row.name: row for row in _ROWS}


def format_of(source: Source) -> Format:
    """The format of a file, by what the file holds; refuses a file that has none."""
    content = content_of(source)
    if content.kind == "strange":
        raise InputError(content.problem)
    for row in FORMATS.values():
        if row.recognises(source):
            return row
    if content.kind == "python":
        message = (
            "is a Python program, and no registry of torchtitan's configurations: give the script "
            "that starts it, or its configuration"
        )
        raise InputError(message)
    keys = [str(key) for key in content.settings]
    shown = ", ".join(keys[:_SHOWN]) + (", ..." if len(keys) > _SHOWN else "")
    message = (
        f"is of no format that is known here: its keys are {shown or 'none'}; known are those of "
        f"{_titles()}"
    )
    raise InputError(message)
