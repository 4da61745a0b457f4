"""The command ``import_plan``: reads another framework's file as a plan file, and lists the
assumptions made.
"""

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from experiments.bench.problem import (
    hardware_named,
    model_named,
    peak_bounds_of,
    predicted,
)
from experiments.cli.commandline import (
    DONE,
    NO_ANSWER,
    as_options,
    print_json,
    progress,
)
from experiments.interchange.source_files import source_of
from experiments.pages.tables import brief_words
from mistlab.core.files import about, format_yaml
from mistlab.core.values import InputError
from mistlab.economy.bill import model_parameters
from mistlab.export.given import Given, Remark
from mistlab.export.targets import TARGETS
from mistlab.formats.file_formats import FORMATS, Format, format_of
from mistlab.job.job import Job, hardware_from, job_to_mapping
from mistlab.plan.plan_words import plan_words


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadFile:
    """A file of another framework as a job, with the format of the file and remarks on what was
    assumed.
    """

    format: str
    job: Job
    remarks: Sequence[Remark]


def import_plan(options: argparse.Namespace) -> int:
    """Make a plan file from a launch script of Megatron-LM, or from the configuration of another
    framework.

    FILE is a launch script, a configuration of another framework, or a folder with one of them.
    Options supply what FILE does not say: --set NAME=VALUE sets a variable of a script, and words
    after -- are the arguments that the script is started with. The plan goes to standard output.
    Standard error says what was read, and what was assumed, ignored or contradictory. Next, use
    predict to see what the plan costs, and tune --from to see what to change.
    """
    imported = read_plan(options)
    job = imported.job
    is_plain = all(remark.kind == "noted" for remark in imported.remarks)
    remarks = [*map(str, imported.remarks), _cost(job)]
    if options.json:
        plan = job_to_mapping(job, Path())
        print_json(
            {"format": imported.format, "read": summary(job), "plan": plan, "remarks": remarks}
        )
    else:
        print(format_yaml(job_to_mapping(job, Path())), end="")
        for line in (*(f"read: {text}" for text in summary(job)), *remarks):
            progress(line)
    return NO_ANSWER if options.strict and not is_plain else DONE


def read_plan(options: argparse.Namespace) -> ReadFile:
    """The plan in the file that the options name, with the assumptions made and the settings
    ignored.
    """
    path: Path = options.file
    given = _given(options)
    with about(path):
        source = source_of(path, options.set, options.arguments, options.line)
        row = FORMATS[options.format] if options.format else format_of(source)
        imported = row.imported(source, given)
    remarks = (
        *imported.remarks,
        *_about_hardware(options, row),
        *_about_engine(options, row, imported.job.plan.engine),
    )
    return ReadFile(format=row.name, job=imported.job, remarks=remarks)


def summary(job: Job) -> Sequence[str]:
    """The parallel degrees and batch sizes of an imported job, as lines of text that can be
    compared with the launch file.
    """
    work, model, cluster = job.workload, job.workload.model, job.cluster
    name = f"{model.name}, " if model.name else ""
    shape = f"{model.layers} layers, hidden {model.hidden}, {model.heads} heads"
    gpus = f"{cluster.nodes} x {cluster.gpus_per_node} GPUs"
    batch = f"batch {work.global_batch} x {work.sequence_length} tokens, {work.precision}"
    return (
        f"model {name}{shape}, vocabulary {model.vocab:,}{_size(job)}",
        f"{gpus}, {batch}",
        *plan_words(job.plan),
    )


def _size(job: Job) -> str:
    try:
        return f": {model_parameters(job.workload) / 1e9:.2f}B parameters"
    except InputError:
        return ""


def _cost(job: Job) -> str:
    """The prediction of an imported job, or the reason why there is none."""
    answer = predicted(job)
    if isinstance(answer, InputError):
        return f"cost: not predicted: {answer}"
    probability = peak_bounds_of(job, answer).fit_probability
    cost = f"cost: on {job.cluster.hardware.name} {brief_words(answer)}"
    return f"{cost} (probability of fitting {probability:.0%})"


def _given(options: argparse.Namespace) -> Given:
    with as_options():
        return Given(
            hardware=hardware_from(hardware_named(options.hardware), Path()),
            model=None if options.model is None else model_named(options.model),
            nodes=options.nodes,
            gpus_per_node=options.gpus_per_node,
            sequence_length=options.sequence_length,
            global_batch=options.global_batch,
            micro_batch=options.micro_batch,
            vocab_size=options.vocab_size,
            attention=options.attention,
            precision=options.precision,
            engine=options.engine,
        )


def _about_hardware(options: argparse.Namespace, row: Format) -> Iterator[Remark]:
    if options.hardware == "l4-24gb":
        text = f"l4-24gb, since no file of {row.title} names it: give --hardware for another"
        yield Remark(kind="assumed", choice="hardware", text=text)


def _about_engine(options: argparse.Namespace, row: Format, engine: str) -> Iterator[Remark]:
    target = TARGETS[row.target]
    others = [name for name in target.own_engines.values() if name not in target.engines]
    if options.engine is None and others and engine == target.engines[0]:
        text = f"{target.engines[0]}, as it was measured on L4 and A100"
        remedy = f"give --engine {others[0]} for current versions and later GPUs"
        yield Remark(kind="assumed", choice="engine", text=f"{text}: {remedy}")
