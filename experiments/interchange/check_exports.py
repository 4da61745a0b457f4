"""Exports random plans to all frameworks, and checks that what each export states about itself is
true.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.interchange.fidelity import Export, costs_as, exported, fits
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table
from mistlab import catalog
from mistlab.core.values import InputError, reject
from mistlab.engines.engine import ENGINES
from mistlab.export.target import read_back
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job, job_to_mapping
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from mistlab.schedule.placement import even_shares

# Draws random plans to export, of models of all families; the same seed gives the same plans.


# The names of the models of each family; families are equally likely.
MODELS: Mapping[str, tuple[str, ...]] = {
    "dense": ("gpt3-2.7b", "llama-7b", "llama3-8b", "qwen3-8b", "llama3.2-1b", "falcon-7b"),
    "experts": ("mixtral-8x7b", "qwen3-30b-a3b", "gpt-oss-20b"),
    "latent": ("deepseek-v2-lite", "deepseek-v2", "deepseek-v3"),
    "hybrid": ("nemotron-h-8b", "nemotron-3-nano", "nemotron-h-56b"),
}
_HARDWARE = ("a100-80gb", "h100-80gb", "b200-180gb", "l4-24gb")
_ENGINES = ("mistlab", "mistlab", "megatron", "megatron-core", "deepspeed", "fsdp")
_RATIOS = (0.0, 0.0, 0.0, 0.5, 1.0)


def drawn_exports(count: int, seed: int) -> Iterator[tuple[str, Job]]:
    """Random jobs, ``count`` in number, each with the name of its model's family; families take
    turns.
    """
    draw = np.random.default_rng(seed)
    for number in range(count):
        family = [*MODELS][number % len(MODELS)]
        while (job := _drawn(draw, family)) is None:
            pass
        yield family, job


def _drawn(draw: np.random.Generator, family: str) -> Job | None:
    """A random job with a model of a family; None if the drawn choices are incompatible."""

    def pick(*options: Any) -> Any:
        return options[draw.integers(len(options))]

    model = catalog.model(pick(*MODELS[family]))
    num_stages, batches = pick(1, 2, 3, 4), pick(2, 4, 6, 8)
    sequences = pick(1, 2, 4, 8, 12)
    layers = [*even_shares(model.layers, num_stages)]
    if num_stages > 1 and draw.random() < 0.3:
        layers[0], layers[-1] = layers[0] - 1, layers[-1] + 1
    alike = draw.random() < 0.75
    engine, shape = pick(*_ENGINES), _shape(draw, sequences)
    stages = []
    try:
        for count in layers:
            shape = shape if alike else _shape(draw, sequences)
            savings = _savings(draw, count, offloads=ENGINES[engine].offloads)
            stages.append(StagePlan.of_values({"layers": count, **shape, **savings}))
        gpus = sum(stage.num_gpus for stage in stages)
        in_node = min(gpus, 8)
        return Job(
            workload=Workload(
                model=model,
                sequence_length=pick(2048, 4096),
                global_batch=sequences * batches,
                attention=pick("flash", "flash", "math"),
                precision=pick("bf16", "bf16", "fp16", "fp32", "fp8", "fp4"),
                optimizer=pick("adamw", "adamw", "adamw-bf16"),
            ),
            cluster=Cluster(
                hardware=catalog.hardware(pick(*_HARDWARE)),
                nodes=-(-gpus // in_node),
                gpus_per_node=in_node,
            ),
            plan=Plan(engine=engine, micro_batches=batches, stages=tuple(stages)),
        )
    except InputError:
        return None


def _shape(draw: np.random.Generator, sequences: int) -> dict[str, Any]:
    data = int(draw.choice([each for each in (1, 2, 3, 4, 8) if sequences % each == 0]))
    tensor = int(draw.choice([1, 1, 2, 4, 8]))
    return {
        "data_parallel": data,
        "micro_batch": sequences // data,
        "tensor_parallel": tensor,
        "context_parallel": int(draw.choice([1, 1, 1, 2])),
        "sequence_parallel": int(tensor > 1 and draw.random() < 0.5),
        "expert_parallel": int(draw.choice([1, 1, 2, 4])),
    }


def _savings(draw: np.random.Generator, layers: int, *, offloads: bool) -> dict[str, Any]:
    names = ("weights", "gradients", "optimizer", "activations") if offloads else ()
    return {
        "zero": int(draw.choice([0, 1, 1, 2, 3])),
        "checkpointed_layers": int(draw.choice([0, 0, layers // 2, layers])),
        **{f"offload_{name}": float(draw.choice(_RATIOS)) for name in names},
    }


# Exports random plans to all frameworks, and checks that what each export states about itself is
# true.


_QUICK, _ALL = 8, 60
_COLUMNS = (
    *("plans", "written", "refused", "batch", "world", "exact", "exact, same", "fitted"),
    *("fit still", "told", "not predicted", "taken", "not asked"),
)
_LEGEND = (
    "`batch` and `world`: exports whose batch and processes come out. `exact`: said exactly; "
    "`exact, same`: of these, the text's prediction equals the plan's in every figure to 1e-9 "
    "(a plan that no engine predicts has to come back as it was). "
    "`fitted`: plans that fit; `fit still`: of these, exports that fit; `told`: exports with exit "
    "status 3; `not predicted`: of these, exports that no engine predicts. `taken`: texts that the "
    "framework's own code takes; `not asked`: it is not installed."
)
# A function that asks a framework to check exported texts, given with their jobs. For each text it
# returns the framework's objection, or an empty text.
Accept = Callable[[str, Sequence[tuple[str, Job]]], Sequence[str]]


def check_exports(options: argparse.Namespace) -> int:
    """Export random plans of all model families to all frameworks, and check that what each export
    says about itself is true.

    The file must give the same batch and number of processes as the plan. If an export claims to be
    exact, the exported plan must have the same prediction in every figure. If the plan fits but the
    exported plan does not, the export must say so. Where a framework is installed, its own code
    must accept the file; --python names the Python in which a target's framework is installed.
    """
    pythons = dict(map(_named_python, options.python or ()))
    study = Study.begin("check_exports", options)
    jobs = [*drawn_exports(_QUICK if options.quick else _ALL, options.seed)]
    accept = accepting(pythons, options.megatron_lm)
    for name in study.counted([*TARGETS], "targets"):
        study.add_all(rows_of(name, jobs, accept))
    return study.end(_report(study.rows, len(jobs)))


def _named_python(text: str) -> tuple[str, str]:
    target, separator, python = text.partition("=")
    if not separator or not Path(python).is_file():
        reject(
            f"--python {text}: is not an export target and a Python that has its framework: "
            "give TARGET=PATH, such as megatron=venv/bin/python"
        )
    return target, python


def rows_of(name: str, jobs: Sequence[tuple[str, Job]], accept: Accept) -> Iterator[Row]:
    """A result row for the export of each job to a framework."""
    made: list[tuple[Row, Export | None]] = []
    for number, (family, job) in enumerate(jobs):
        row: Row = {
            "target": name,
            "plan": number,
            "family": family,
            "model": job.workload.model.name,
            "engine": job.plan.engine,
        }
        try:
            export = exported(job, TARGETS[name])
        except InputError as error:
            made.append(({**row, "refused": str(error)}, None))
            continue
        made.append(({**row, "refused": "", **_claims(job, export)}, export))
    texts = [(written.text, written.found.job) for _, written in made if written is not None]
    problems = iter(accept(name, texts))
    for row, written in made:
        yield row if written is None else {**row, "problem": next(problems)}


def _claims(job: Job, made: Export) -> Row:
    """The claims of an export about itself (that it is exact, that it fits), beside the facts about
    the exported job.
    """
    exported_job = made.found.job
    stage, plan = exported_job.plan.stages[0], exported_job.plan
    sequences = stage.micro_batch * stage.data_parallel * plan.micro_batches
    return {
        "batch": sequences == job.workload.global_batch == exported_job.workload.global_batch,
        "world": exported_job.cluster.num_gpus == plan.num_gpus,
        "gpus": plan.num_gpus,
        "idle": job.plan.num_gpus - plan.num_gpus,
        "exact": made.is_exact,
        "same": _is_same(made),
        "fitted": fits(made.given),
        "fits": fits(made.near),
        "told": made.no_longer_fits,
        "read": not any(remark.choice == "text" for remark in made.found.remarks),
    }


def _is_same(made: Export) -> bool:
    """Whether the exported text, imported again, has the same prediction as the plan. If neither
    can be predicted, whether the two are equal.
    """
    try:
        back = read_back(made.target, made.text, made.found.job)
    except InputError:
        return False
    return costs_as(made.wanted, back, made.given)


def accepting(pythons: Mapping[str, str], checkout: object) -> Accept:
    """A function that asks frameworks to check texts, in separate processes that use the Python
    given for each framework (by default this one).
    """

    def accept(name: str, texts: Sequence[tuple[str, Job]]) -> Sequence[str]:
        entries = [
            {
                "target": name,
                "text": text,
                "job": job_to_mapping(job),
                "checkout": "" if checkout is None else str(checkout),
            }
            for text, job in texts
        ]
        python = pythons.get(name, sys.executable)
        run = subprocess.run(
            [python, "-m", "experiments.interchange.accept_exports"],
            input=json.dumps(entries),
            capture_output=True,
            text=True,
            check=False,
        )
        try:
            answer: dict[str, Any] = json.loads(run.stdout)
        except json.JSONDecodeError:
            answer = {"missing": f"{python} ended: {run.stderr.strip().splitlines()[-1:]}"}
        problems: Sequence[str] = answer.get("problems", ())
        return problems or [f"not asked: {answer.get('missing')}"] * len(texts)

    return accept


def _report(rows: Sequence[Row], plans: int) -> Report:
    names = [name for name in TARGETS if any(row["target"] == name for row in rows)]
    counts = {name: _counts([row for row in rows if row["target"] == name]) for name in names}
    paragraphs = [
        table(["target", *_COLUMNS], [[name, *counts[name].values()] for name in names]),
        _LEGEND,
        *_problems(rows),
    ]
    title = f"{plans} random plans exported to all targets"
    outcomes: dict[str, list[float | None]] = {
        "written": [counts[name]["written"] for name in names],
        "refused": [counts[name]["refused"] for name in names],
    }
    picture = Bars(
        name="exports",
        caption="Plans that each target has a form for, and plans refused by name.",
        groups=names,
        series=outcomes,
        y="plans",
        stacked=True,
    )
    return Report(title=title, words=paragraphs, summary=counts, pictures=[picture])


def _counts(rows: Sequence[Row]) -> dict[str, int]:
    written = [row for row in rows if not row["refused"]]
    exact, fitted = ([row for row in written if row[name]] for name in ("exact", "fitted"))
    asked = [row for row in written if not row["problem"].startswith("not asked")]
    values = (
        *(len(rows), len(written), len(rows) - len(written)),
        *(sum(row[name] for row in written) for name in ("batch", "world")),
        *(len(exact), sum(row["same"] for row in exact)),
        *(len(fitted), sum(bool(row["fits"]) for row in fitted)),
        sum(row["told"] for row in written),
        sum(row["fits"] is None for row in fitted),
        *(sum(not row["problem"] for row in asked), len(written) - len(asked)),
    )
    return dict(zip(_COLUMNS, values, strict=True))


def _problems(rows: Sequence[Row]) -> Iterator[str]:
    """The reasons for which frameworks refused exports, each with the number of times."""
    seen: dict[tuple[str, str], int] = {}
    for row in rows:
        text = row["refused"] or row.get("problem", "")
        if text:
            key = (row["target"], text.split(": ", 1)[-1][:140])
            seen[key] = seen.get(key, 0) + 1
    if seen:
        yield "Refused, by the export itself or by the framework:"
        lines = [[name, count, text] for (name, text), count in sorted(seen.items())]
        yield table(["target", "plans", "why"], lines)
