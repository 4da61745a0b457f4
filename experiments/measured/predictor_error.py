"""Measured runs beside their predictions: a row for each run's time and each stage's memory."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

from experiments.calibration.published import (
    PublishedRun,
    Table,
    carried,
    read_end_to_end,
    read_megatron,
)
from experiments.calibration.whole_runs import (
    figures_of,
    fit_sustained,
    is_said_to_fit,
    predicted_s,
)
from experiments.cli.command import FOLDS
from experiments.interchange.launched_runs import launched_runs
from experiments.measured.error_summary import memory_summary, summary_of
from experiments.measured.error_words import words_of
from experiments.pages.charts import Drawn
from experiments.pages.groups import grouped
from experiments.pages.study import Report, Study, beside
from experiments.prediction import plots
from mistlab import catalog
from mistlab.cost.confidence import bounds_of
from mistlab.cost.kernels import model_flop
from mistlab.cost.memory import reserved_bytes
from mistlab.engines.engine import ENGINES
from mistlab.plan.dimensions import num_gpus
from mistlab.plan.plan import Plan
from simulators.events import EventSimulator

END_TO_END = "end_to_end.csv"
MEGATRON = ("megatron_a100_one_node.csv", "megatron_a100_many_nodes.csv")
# Machines whose whole runs all went into their calibration.
FITTED_TO_ALL = ("l4-24gb", "a100-40gb", "a10g-24gb")


def errors(options: argparse.Namespace) -> int:
    """Predicted beside measured: iteration times and peaks of memory of published runs.

    Without tables, the published figures that the project carries. With --tables DIR, the runs
    of DIR/end_to_end.csv, DIR/megatron_a100_one_node.csv and DIR/megatron_a100_many_nodes.csv
    too, as far as they are there (docs/reference/measurement-tables.md). Where a calibration
    was fitted to runs, their errors when they are left out of the fit stand beside.
    """
    runs, tables = _runs(options.tables, quick=options.quick)
    if options.launch is not None:
        runs = launched_runs(runs, options.launch)
    study = Study.begin("predictor_error", options)
    # Runs of launch lines are a part of those that a machine was fitted to.
    left_out = {} if options.tables is None or options.launch else _left_out(runs)
    times = _fastest(
        [
            _time(one, left_out.get(one.name), events=options.events)
            for one in study.counted(runs, "runs")
        ]
    )
    memory = [row for one in runs for row in _memory(one)]
    study.add_all((*times, *memory))
    summary = {
        "tables": {table.path.name: table.sha256 for table in tables},
        "times": [
            summary_of(name, rows)
            for name, rows in grouped(times, lambda row: str(row["set"])).items()
        ],
        "memory": memory_summary(memory, runs),
    }
    # What is said of the largest errors is of the runs of all tables.
    whole = {END_TO_END, *MEGATRON} <= {one.path.name for one in tables} and not options.launch
    return study.end(_report(summary, times, memory, whole=whole))


def _report(
    summary: Mapping[str, Any],
    times: Sequence[Mapping[str, Any]],
    memory: Sequence[Any],
    *,
    whole: bool,
) -> Report:
    pictures = [
        Drawn(
            name="times",
            caption="Predicted over measured times of an iteration.",
            draw=partial(plots.times_figure, times),
        )
    ]
    if memory:
        pictures.append(
            Drawn(
                name="memory",
                caption="Predicted over measured peaks of allocated memory.",
                draw=partial(plots.memory_figure, memory),
            )
        )
    return Report(
        title="Times: predicted beside measured",
        words=words_of(summary, times, memory),
        summary=summary,
        pictures=pictures,
        beside=beside("experiments.measured", "predictor_error") if whole else [BESIDE],
    )


BESIDE = """## Published, and why this differs

What was measured was published by others, each run with its source: `experiments/calibration` has
the figures that the project carries. Where predictions of these and many more runs differ most, and
why as far as it is known, is in docs/results/predictor-error.md, made from tables of runs that
`--tables` names."""


def _runs(folder: Path | None, *, quick: bool = False) -> tuple[list[PublishedRun], list[Table]]:
    """The runs, and the tables that they came from; in haste without the longest two."""
    megatron = catalog.hardware("a100-80gb")
    content = (
        files("experiments.calibration").joinpath("published.yaml").read_text(encoding="utf-8")
    )
    base, weak_scaling = carried(content, megatron)
    if folder is None:
        return [*base, *weak_scaling], []
    tables = [read_end_to_end(folder / END_TO_END)]
    tables += [
        read_megatron(folder / name, megatron)
        for name in MEGATRON
        if not quick and (folder / name).exists()
    ]
    # The base case is among the runs of the table.
    return [*(one for table in tables for one in table.runs), *weak_scaling], tables


def _left_out(runs: Sequence[PublishedRun]) -> Mapping[str, float]:
    """Errors of runs that their machine was fitted to, each left out of the fit in turn."""
    by_machine = grouped(runs, lambda one: one.cluster.hardware.name)
    found = [
        fit_sustained(alike, alike[0].cluster.hardware)
        for name, alike in by_machine.items()
        if name in FITTED_TO_ALL and len(alike) > 1
    ]
    return {
        one.name: error
        for fitted in found
        for one, error in zip(fitted.runs, fitted.left_out.tolist(), strict=True)
    }


def _time(one: PublishedRun, left_out: float | None, *, events: bool) -> dict[str, Any]:
    seconds = predicted_s(one, one.cluster.hardware)
    gpus = int(num_gpus(one.stages.value).sum())
    peak = one.cluster.peak_flop_per_s(one.workload.precision)
    mfu = model_flop(one.workload) / (seconds * gpus * peak)
    _, above = bounds_of(one.workload, one.cluster, one.engine).around(gpus, mfu)
    # Of whole layers alone.
    played_s = _played_s(one, one.plan) if events and one.plan is not None else None
    return {
        "set": one.set,
        "run": one.name,
        "workload": f"{gpus} x {one.workload.model.hidden} x {one.workload.model.layers} x "
        f"{one.workload.global_batch} {one.workload.attention}",
        "micro_batch": int(one.stages.micro_batch[0]),
        "fitted": one.cluster.hardware.name in FITTED_TO_ALL
        or ("node" in one.set and one.fold in FOLDS.split(",")),
        "error_left_out": left_out,
        "approximated": one.plan is None,
        "fits": is_said_to_fit(one),
        "predicted_s": seconds,
        "measured_s": one.iteration_s,
        "half_width": above - 1,
        "error": seconds / one.iteration_s - 1,
        **({"events_error": played_s / one.iteration_s - 1} if played_s else {}),
    }


def _played_s(one: PublishedRun, plan: Plan) -> float:
    """Seconds of an iteration by the event simulator."""
    simulator = EventSimulator(workload=one.workload, cluster=one.cluster)
    return simulator.simulate(plan, engine=one.ran_by).iteration_s


def _fastest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of weak scaling, whose table omits the micro-batch, the fastest one of each run."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["set"], row["run"]
        if key not in found or row["predicted_s"] < found[key]["predicted_s"]:
            found[key] = row
    return list(found.values())


def _memory(one: PublishedRun) -> Iterator[dict[str, Any]]:
    if not one.allocated_bytes or one.plan is None:
        return
    figures = figures_of(one)
    reserved = reserved_bytes(figures, one.stages, one.cluster, ENGINES[one.engine])
    for stage, (allocated, held) in enumerate(
        zip(one.allocated_bytes, one.reserved_bytes, strict=True)
    ):
        yield {
            "run": one.name,
            "stage": stage,
            "predicted_bytes": float(figures.peak_bytes[stage]),
            "measured_bytes": allocated,
            "error": float(figures.peak_bytes[stage]) / allocated - 1,
            "predicted_reserved_bytes": float(reserved[stage]),
            "measured_reserved_bytes": held,
            "reserved_error": float(reserved[stage]) / held - 1,
        }
