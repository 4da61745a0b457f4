"""A plan file from another framework's file, with what was assumed."""

import argparse
from collections.abc import Iterator
from pathlib import Path

from experiments.cli.commandline import DONE, about, as_options, print_json, progress
from mistlab.export.given import Given
from mistlab.export.table import TARGETS
from mistlab.export.target import Target
from mistlab.values.datafile import format_yaml, text_in
from mistlab.values.errors import InputError
from mistlab.values.job import job_to_mapping
from mistlab.values.references import hardware_from, model_from

# Whose file it is, by its ending; any other is a launch script.
ENDINGS = {".json": "deepspeed", ".toml": "torchtitan", ".yaml": "accelerate", ".yml": "accelerate"}
MOST_BYTES = 4_000_000


def import_plan(options: argparse.Namespace) -> int:
    """Import a file."""
    path: Path = options.file
    target = TARGETS[options.format] if options.format else target_of(path)
    given = _given(options)
    with about(path):
        found = target.read(text_of(path), given)
    plan = job_to_mapping(found.job, Path())
    assumed = [
        *_about_hardware(options, target),
        *_about_engine(options, target, found.job.plan.engine),
    ]
    remarks = [*map(str, found.remarks), *assumed]
    if options.json:
        print_json({"plan": plan, "remarks": remarks})
        return DONE
    print(format_yaml(plan), end="")
    for remark in remarks:
        progress(remark)
    return DONE


def target_of(path: Path) -> Target:
    """Whose file it is, by its ending."""
    return TARGETS[ENDINGS.get(path.suffix.lower(), "megatron")]


def _given(options: argparse.Namespace) -> Given:
    with as_options():
        return Given(
            hardware=hardware_from(options.hardware, Path()),
            model=None if options.model is None else model_from(options.model, Path()),
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            sequence_length=options.sequence_length,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            attention=options.attention,
            precision=options.precision,
            engine=options.engine,
        )


def _about_hardware(options: argparse.Namespace, target: Target) -> Iterator[str]:
    if options.hardware == "l4-24gb":
        text = f"no file of {target.title} says it: --hardware, l4-24gb unless it is given"
        yield f"assumed: hardware: {text}"


def _about_engine(options: argparse.Namespace, target: Target, engine: str) -> Iterator[str]:
    others = [name for name in target.own_engines.values() if name not in target.engines]
    if options.engine is None and others and engine == target.engines[0]:
        text = f"{target.engines[0]}, as it was measured on L4 and A100: --engine {others[0]} for"
        yield f"assumed: engine: {text} runs of today on later GPUs"


def text_of(path: Path) -> str:
    """The text of a file; a message says what to do where it cannot be read."""
    if path.is_file() and path.stat().st_size > MOST_BYTES:
        message = f"is larger than {MOST_BYTES:,} bytes: give a launch script or configuration"
        raise InputError(message)
    return text_in(path)
