"""Exports random plans to all targets, and holds each export against what is claimed of it."""

import argparse
import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.exporting.drawn_exports import drawn_exports
from experiments.exporting.fidelity import Export, costs_as, exported, fits
from experiments.frame.charts import Bars
from experiments.frame.study import Report, Study
from experiments.frame.tables import Row, table
from mistlab.export.back import read_back
from mistlab.export.table import TARGETS
from mistlab.values.errors import InputError
from mistlab.values.job import Job, job_to_mapping

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
# Texts of one target, and each with its job, to what its framework says: empty where it takes them.
Accept = Callable[[str, Sequence[tuple[str, Job]]], Sequence[str]]


def check_exports(options: argparse.Namespace) -> int:
    """Random plans of all families exported to all targets, and held against what is claimed.

    Batches and processes have to come out, what is said exactly has to be predicted equally in
    every figure, what fitted has to fit or be told. A framework's own code takes its texts
    where it is installed: here, or in the Python that --python names for a target.
    """
    pythons = dict(map(_named_python, options.python or ()))
    study = Study.begin("check_exports", options)
    jobs = [*drawn_exports(_QUICK if options.quick else _ALL, options.seed)]
    accept = accepting(pythons, options.megatron_lm)
    for name in study.counted([*TARGETS], "targets"):
        for row in rows_of(name, jobs, accept):
            study.add(row)
    return study.end(_report(study.rows, len(jobs)))


def _named_python(text: str) -> tuple[str, str]:
    target, found, python = text.partition("=")
    if not found or not Path(python).is_file():
        message = f"--python {text}: names no Python: give TARGET=PATH"
        raise InputError(message)
    return target, python


def rows_of(name: str, jobs: Sequence[tuple[str, Job]], accept: Accept) -> Iterator[Row]:
    """A row for each job's export to a target."""
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
    """What an export says of itself, and what is so."""
    found = made.found.job
    stage, plan = found.plan.stages[0], found.plan
    sequences = stage.micro_batch * stage.data_parallel * plan.micro_batches
    return {
        "batch": sequences == job.workload.global_batch == found.workload.global_batch,
        "world": found.cluster.num_gpus == plan.num_gpus,
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
    """Whether the text, read again, is predicted as the plan is; the same plan if none can be."""
    try:
        back = read_back(made.target, made.text, made.found.job)
    except InputError:
        return False
    return costs_as(made.wanted, back, made.given)


def accepting(pythons: Mapping[str, str], checkout: object) -> Accept:
    """Asks frameworks in processes of their own, each in the Python that is named for its target,
    or in this one."""

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
            [python, "-m", "experiments.exporting.accept_exports"],
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
    words = [
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
    return Report(title=title, words=words, summary=counts, pictures=[picture])


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
    """Why exports were refused, by whom, and how often."""
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
