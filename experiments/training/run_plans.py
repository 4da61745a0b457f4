"""Runs all plans in folders, one after another; keeps earlier results, and reports speedups."""

import argparse
import hashlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import TracebackType
from typing import Any, Self

from experiments.cli.commandline import DONE, NO_ANSWER, missing, progress
from experiments.cli.rundir import read_rows
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import TIMING, Row, gib, table_of
from experiments.training.plan_runs import ERROR, NodeRunner, PlanRun
from experiments.training.run_options import check_node
from experiments.training.run_results import WARM_UP
from mistlab.core.values import InputError, near_matches, reject
from mistlab.job.job import Job, load_job


@dataclass(slots=True, kw_only=True)
class Launcher:
    """Runs plans one after another: those for one GPU in a process that they share, each other plan
    under torchrun.

    It is used in a ``with`` block; the processes that it has started end with the block.
    """

    steps: int
    device: str
    seed: int
    seconds: float
    _runner: NodeRunner = field(init=False)

    def __enter__(self) -> Self:
        if self.device == "cpu":
            # One thread per process, as under torchrun, however the process is started.
            os.environ.setdefault("OMP_NUM_THREADS", "1")
        self._runner = NodeRunner(self.device)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._runner.close()

    def run(self, plan: Path, gpus: int) -> Mapping[str, Any]:
        """What ``run_plan --json`` prints for a plan, or a mapping with ``error``."""
        if gpus > 1 and find_spec("torch") is None:
            return {"error": str(missing("torch"))}
        run = PlanRun(plan=plan, steps=self.steps, gpus=gpus, seed=self.seed)
        try:
            outcome = self._runner(run, self.seconds)
        except InputError as error:
            return {"error": str(error).removeprefix(f"{plan}: ").removeprefix(ERROR)}
        if outcome is None:
            return {"error": f"it took more than {self.seconds:g} s: give more --seconds"}
        return outcome


# For a quick run, the number of steps of a plan, and the number of plan files of a folder.
QUICK_STEPS, QUICK_PLANS = 3, 2
Key = tuple[str, str]


def run_plans(options: argparse.Namespace) -> int:
    """Run every plan in a folder, one after another, and report speedups between the plans of such
    folders.

    Each plan runs as by run_plan: in one process, or under a torchrun of its own if it takes
    several GPUs. A plan that fails does not stop the others. Results are kept, so the same command
    continues after an interruption, and runs only the new plans if the folder has got some. A
    folder of results is read instead of run. If several folders have a plan of the same name, it is
    compared with that of the first folder.
    """
    ready = _launcher(options)
    plans = [one for folder in options.folders for one in _found(folder, quick=options.quick)]
    study = Study.begin("run_plans", options, goes_on=True)
    earlier = {_key(row): row for row in study.earlier if "error" not in row}
    with ready as launcher:
        for plan in study.counted(plans, "plans"):
            if not isinstance(plan, Path):
                study.add(plan)
                continue
            row = earlier.get(_key_of(plan)) or _row(plan, launcher)
            study.add(row)
            progress(f"{plan}: {_outcome(row)}")
    failed = [row for row in study.rows if "error" in row]
    return study.end(_report(study), NO_ANSWER if failed else DONE)


def _launcher(options: argparse.Namespace) -> Launcher:
    for name in ("steps", "seconds"):
        value = getattr(options, name)
        if not 0 < value < math.inf:
            reject(f"--{name}: {value:g} is not above 0: give a number above 0")
    # Here only the device is checked; each run checks the precision of its own plan.
    check_node(options.device, None, "fp32", "precision")
    steps = min(options.steps, QUICK_STEPS) if options.quick else options.steps
    return Launcher(steps=steps, device=options.device, seed=options.seed, seconds=options.seconds)


def _found(folder: Path, *, quick: bool) -> list[Path | Row]:
    """The plan files in a folder (in a quick run only the first ones); for a results folder, the
    plans named in its rows.
    """
    if not folder.is_dir():
        reject(
            f"{folder}: {'is a file' if folder.exists() else f'does not exist{_near(folder)}'}: "
            "give a folder of plan files, or a result folder of run_plans"
        )
    if (folder / "rows.jsonl").is_file():
        return [*read_rows(folder / "rows.jsonl")]
    plans = sorted(folder.glob("*.yaml"))
    if not plans:
        reject(f"{folder}: has no plan files: give a folder with some *.yaml files")
    if quick and len(plans) > QUICK_PLANS:
        left_out = ", ".join(plan.name for plan in plans[QUICK_PLANS:])
        progress(f"--quick leaves out {left_out}")
        plans = plans[:QUICK_PLANS]
    return [*plans]


def _near(folder: Path) -> str:
    """The names of folders similar to one that is missing, as text for a message; empty if there
    are none.
    """
    beside = folder.resolve().parent
    names = [one.name for one in beside.iterdir() if one.is_dir()] if beside.is_dir() else []
    near = near_matches(folder.name, names)
    return near if "did you mean" in near else ""


def _key_of(plan: Path) -> Key:
    """The key under which the result of a plan file is stored; it contains a hash of the file, so
    that a changed plan runs again.
    """
    return str(plan), hashlib.sha256(plan.read_bytes()).hexdigest()[:16]


def _key(row: Row) -> Key:
    return row.get("file", ""), row.get("sha256", "")


def _row(plan: Path, launcher: Launcher) -> Row:
    """Run a plan; returns its result row, or a row with the error."""
    file, sha256 = _key_of(plan)
    row = {"folder": plan.parent.name, "plan": plan.stem, "file": file, "sha256": sha256}
    try:
        job = load_job(plan)
    except InputError as error:
        return {**row, "error": str(error)}
    row |= _of_job(job)
    outcome = launcher.run(plan, job.plan.num_gpus)
    if "error" in outcome:
        return {**row, "error": outcome["error"]}
    samples = outcome["iteration_s"]
    seconds = median(samples[min(WARM_UP, len(samples) - 1) :])
    return {
        **row,
        "losses": outcome["losses"],
        "predicted_iteration_s": outcome["predicted_iteration_s"],
        "peak_allocated_bytes": max(outcome["peak_allocated_bytes"]),
        TIMING: {
            "iteration_s": seconds,
            "tokens_per_s": job.workload.tokens / seconds,
            "samples_s": samples,
            "peak_reserved_bytes": max(outcome["peak_reserved_bytes"]),
        },
    }


def _of_job(job: Job) -> dict[str, Any]:
    work = job.workload
    model = work.model
    return {
        "model": model.name or f"{model.family} {model.layers} x {model.hidden}",
        "sequence_length": work.sequence_length,
        "global_batch": work.global_batch,
        "engine": job.plan.engine,
        "gpus": job.plan.num_gpus,
    }


def _outcome(row: Row) -> str:
    return row["error"] if "error" in row else f"{row[TIMING]['iteration_s']:.4f} s an iteration"


def _report(study: Study) -> Report:
    rows = [row for row in study.rows if "error" not in row]
    failed = [row for row in study.rows if "error" in row]
    speedups = [*_speedups(rows)]
    paragraphs = [_table(speedups)] if speedups else []
    paragraphs += [f"{row['file']}: failed: {row['error']}" for row in failed]
    folders = ", ".join(dict.fromkeys(row["folder"] for row in study.rows))
    over = [row for row in speedups if row["over"] is not None]
    pictures = []
    if over:
        pictures = [
            Bars(
                name="run_plans",
                caption="Measured speedups over the first plan of each workload.",
                groups=[f"{row['folder']} {row['plan']}" for row in over],
                series={"speedup": [row["speedup"] for row in over]},
                y="times as fast",
                number=".2f",
                marks={"equally fast": 1.0},
            )
        ]
    return Report(
        title=f"Plans that were run: {folders}",
        words=paragraphs,
        summary={"ran": len(rows), "failed": len(failed), TIMING: {"speedups": speedups}},
        pictures=pictures,
        beside=beside("run_plans-cpu") if study.options.device == "cpu" else (),
    )


def _speedups(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The speedup of each run over a reference: the plan of the same name in the first folder that
    has one, otherwise the first plan of the same workload.
    """
    for row in rows:
        base = _base(row, rows)
        own_s, base_s = row[TIMING]["iteration_s"], base[TIMING]["iteration_s"]
        yield {
            "folder": row["folder"],
            "plan": row["plan"],
            "model": row["model"],
            "gpus": row["gpus"],
            "iteration_s": own_s,
            "predicted_iteration_s": row["predicted_iteration_s"],
            "peak_allocated_bytes": row["peak_allocated_bytes"],
            "over": None if base is row else f"{base['folder']}/{base['plan']}",
            "speedup": base_s / own_s,
        }


def _base(row: Row, rows: Sequence[Row]) -> Row:
    named = [one for one in rows if one["plan"] == row["plan"]]
    if named[0]["folder"] != named[-1]["folder"]:
        return named[0]
    workload = ("model", "sequence_length", "global_batch")
    return next(one for one in rows if all(one[name] == row[name] for name in workload))


def _table(speedups: Sequence[Row]) -> str:
    return table_of(
        speedups,
        ("folder", "{folder}"),
        ("plan", "{plan}"),
        ("model", "{model}"),
        ("GPUs", "{gpus}"),
        ("s", "{iteration_s:.4f}"),
        ("peak (GiB)", lambda row: gib(row["peak_allocated_bytes"], ".3f")),
        ("times as fast", "{speedup:.2f}"),
        ("over", lambda row: row["over"]),
    )
