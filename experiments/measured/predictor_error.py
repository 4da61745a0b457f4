"""The command ``predictor_error``: compares measured training runs with predictions: the time of
each run, and the memory of each stage.
"""

import argparse
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.calibration.published import (
    PublishedRun,
    Table,
    carried,
    read_end_to_end,
    read_megatron,
)
from experiments.calibration.whole_runs import (
    figures_of,
    fit_allocator,
    fit_sustained,
    is_said_to_fit,
    predicted_s,
)
from experiments.cli.command import FOLDS
from experiments.interchange.launched_runs import launched_runs
from experiments.pages.charts import Drawn
from experiments.pages.groups import grouped
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import gib, number, table, table_of
from experiments.prediction import plots
from mistlab import catalog
from mistlab.calibration.fitted_sureness import misses
from mistlab.cost.confidence import bounds_of
from mistlab.cost.kernels import model_flop
from mistlab.cost.memory import reserved_bytes
from mistlab.engines.engine import ENGINES
from mistlab.plan.dimensions import num_gpus
from mistlab.plan.plan import Plan
from simulators.events import EventSimulator

END_TO_END = "end_to_end.csv"
MEGATRON = ("megatron_a100_one_node.csv", "megatron_a100_many_nodes.csv")
# Machines whose constants were fitted to all whole runs that were measured on them.
FITTED_TO_ALL = ("l4-24gb", "a100-40gb", "a10g-24gb")


def errors(options: argparse.Namespace) -> int:
    """Report the errors of predicted iteration times and memory peaks over published training runs.

    By default these are the published runs that come with the project. With --tables DIR, the runs
    in DIR/end_to_end.csv, DIR/megatron_a100_one_node.csv and DIR/megatron_a100_many_nodes.csv are
    added, if these files exist (docs/reference/measurement-tables.md). For runs to which a
    calibration was fitted, the report also has the errors of fits that leave them out.
    """
    runs, tables = _runs(options.tables, quick=options.quick)
    if options.launch is not None:
        runs = launched_runs(runs, options.launch)
    study = Study.begin("predictor_error", options)
    # Launch files exist for only some of the runs to which a machine's constants were fitted, so
    # with launch files no fit can be made that leaves a run out.
    left_out = {} if options.tables is None or options.launch else _left_out(runs)
    times = _fastest(
        [
            _time(run, left_out.get(run.name), events=options.events)
            for run in study.counted(runs, "runs")
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
    # The sentences on the largest errors hold only if the runs of all tables were read.
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
        words=paragraphs_of(summary, times, memory),
        summary=summary,
        pictures=pictures,
        beside=() if whole else beside("predictor_error-in-part"),
    )


def _runs(folder: Path | None, *, quick: bool = False) -> tuple[list[PublishedRun], list[Table]]:
    """The measured runs and the tables that they are from; a quick call skips the two slowest
    runs.
    """
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
    # The base case of weak scaling is left out, since it is also in the table of runs.
    return [*(one for table in tables for one in table.runs), *weak_scaling], tables


def _left_out(runs: Sequence[PublishedRun]) -> Mapping[str, float]:
    """The prediction error of each run that was used to fit constants, with constants from a fit
    that leaves it out.
    """
    by_machine = grouped(runs, lambda one: one.cluster.hardware.name)
    fits = [
        fit_sustained(alike, alike[0].cluster.hardware)
        for name, alike in by_machine.items()
        if name in FITTED_TO_ALL and len(alike) > 1
    ]
    return {
        run.name: error
        for fitted in fits
        for run, error in zip(fitted.runs, fitted.left_out.tolist(), strict=True)
    }


def _time(run: PublishedRun, left_out: float | None, *, events: bool) -> dict[str, Any]:
    seconds = predicted_s(run, run.cluster.hardware)
    gpus = int(num_gpus(run.stages.value).sum())
    peak = run.cluster.peak_flop_per_s(run.workload.precision)
    mfu = model_flop(run.workload) / (seconds * gpus * peak)
    _, above = bounds_of(run.workload, run.cluster, run.engine).around(gpus, mfu)
    # The event simulator can only run plans whose numbers of recomputed blocks are whole.
    played_s = _played_s(run, run.plan) if events and run.plan is not None else None
    return {
        "set": run.set,
        "run": run.name,
        "workload": f"{gpus} x {run.workload.model.hidden} x {run.workload.model.layers} x "
        f"{run.workload.global_batch} {run.workload.attention}",
        "micro_batch": int(run.stages.micro_batch[0]),
        "fitted": run.cluster.hardware.name in FITTED_TO_ALL
        or ("node" in run.set and run.fold in FOLDS.split(",")),
        "error_left_out": left_out,
        "approximated": run.plan is None,
        "fits": is_said_to_fit(run),
        "predicted_s": seconds,
        "measured_s": run.iteration_s,
        "half_width": above - 1,
        "error": seconds / run.iteration_s - 1,
        **({"events_error": played_s / run.iteration_s - 1} if played_s else {}),
    }


def _played_s(run: PublishedRun, plan: Plan) -> float:
    """The seconds of an iteration of the plan by the event simulator."""
    simulator = EventSimulator(workload=run.workload, cluster=run.cluster)
    return simulator.simulate(plan, engine=run.ran_by).iteration_s


def _fastest(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Runs of weak scaling whose rows do not state a micro-batch size, each with the size that is
    predicted to be fastest.
    """
    fastest: dict[tuple[str, str], dict[str, Any]] = {}
    for row in rows:
        key = row["set"], row["run"]
        if key not in fastest or row["predicted_s"] < fastest[key]["predicted_s"]:
            fastest[key] = row
    return list(fastest.values())


def _memory(run: PublishedRun) -> Iterator[dict[str, Any]]:
    if not run.allocated_bytes or run.plan is None:
        return
    figures = figures_of(run)
    reserved = reserved_bytes(figures, run.stages, run.cluster, ENGINES[run.engine])
    for stage, (allocated, held) in enumerate(
        zip(run.allocated_bytes, run.reserved_bytes, strict=True)
    ):
        yield {
            "run": run.name,
            "stage": stage,
            "predicted_bytes": float(figures.peak_bytes[stage]),
            "measured_bytes": allocated,
            "error": float(figures.peak_bytes[stage]) / allocated - 1,
            "predicted_reserved_bytes": float(reserved[stage]),
            "measured_reserved_bytes": held,
            "reserved_error": float(reserved[stage]) / held - 1,
        }


# Summarises the prediction errors of each set of measured runs.


# The least share by which the times of two runs must differ for their order to count.
TELLING = 0.03


def summary_of(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The summary of the prediction errors of one set of runs."""
    errors = np.array([row["error"] for row in rows])
    unseen = [row for row in rows if not row["fitted"] or row["error_left_out"] is not None]
    of_unseen = np.array(
        [row["error"] if row["error_left_out"] is None else row["error_left_out"] for row in unseen]
    )
    inside = misses(of_unseen) <= np.array([row["half_width"] for row in unseen])
    ranks, best, disordered = _order(rows)
    return {
        "set": name,
        "runs": len(rows),
        "runs_said_not_to_fit": sum(not row["fits"] for row in rows),
        "mean_error": float(np.abs(errors).mean()),
        "median_error": float(np.median(np.abs(errors))),
        "bias": float(errors.mean()),
        "mean_error_after_removing_the_mean": float(np.abs(errors - errors.mean()).mean()),
        "runs_not_fitted": len(unseen),
        "mean_error_of_runs_not_fitted": float(np.abs(of_unseen).mean()) if unseen else None,
        "median_error_of_runs_not_fitted": float(np.median(np.abs(of_unseen))) if unseen else None,
        "inside_bounds": float(np.mean(inside)) if unseen else None,
        "median_half_width": float(np.median([r["half_width"] for r in unseen]))
        if unseen
        else None,
        "workloads": len(ranks),
        "median_rank_correlation": float(np.median(ranks)) if ranks else None,
        "median_predicted_best_over_measured_best": float(np.median(best)) if best else None,
        "worst_predicted_best_over_measured_best": max(best) if best else None,
        "predicted_best_within_5_percent": float(np.mean(np.array(best) <= 0.05)) if best else None,
        "telling_pairs_in_wrong_order": disordered,
        **_events_summary(rows),
    }


def _events_summary(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    played = [row for row in rows if "events_error" in row]
    if not played:
        return {}
    errors = np.array([row["events_error"] for row in played])
    inside = misses(errors) <= np.array([row["half_width"] for row in played])
    return {
        "runs_played": len(played),
        "mean_events_error": float(np.abs(errors).mean()),
        "events_inside_bounds": float(np.mean(inside)),
    }


def _order(rows: Sequence[dict[str, Any]]) -> tuple[list[float], list[float], int]:
    """How well predictions rank the runs of one workload: the rank correlation, the regret (the
    loss from choosing the run that is predicted to be fastest), and the number of pairs in the
    wrong order.
    """
    ranks, best, disordered = [], [], 0
    for alike in grouped(rows, lambda row: row["workload"]).values():
        predicted, measured = (
            np.array([row[key] for row in alike]) for key in ("predicted_s", "measured_s")
        )
        if len(alike) > 1:
            best.append(float(measured[np.argmin(predicted)] / measured.min() - 1))
            longer = np.log(measured[:, None] / measured[None, :])
            predicted_longer = np.log(predicted[:, None] / predicted[None, :])
            telling = longer > math.log(1 + TELLING)
            disordered += int((telling & (predicted_longer <= 0)).sum())
        if len(alike) > 3:
            ranks.append(float(spearmanr(predicted, measured).statistic))
    return ranks, best, disordered


def memory_summary(
    rows: Sequence[dict[str, Any]], runs: Sequence[PublishedRun]
) -> dict[str, Any] | None:
    """The summary of the errors of memory peaks over all stages; None if no peaks were measured."""
    if not rows:
        return None
    with_peaks = [one for one in runs if one.reserved_bytes and one.plan is not None]
    left_out = fit_allocator(with_peaks)[1] if len(with_peaks) > 1 else None
    allocated = np.array([row["error"] for row in rows])
    reserved = np.array([row["reserved_error"] for row in rows])
    return {
        "stages": len(rows),
        "mean_error": float(np.abs(allocated).mean()),
        "worst_error": float(allocated[np.argmax(np.abs(allocated))]),
        "mean_reserved_error": float(np.abs(reserved).mean()),
        "worst_reserved_error": float(reserved[np.argmax(np.abs(reserved))]),
        "mean_reserved_error_left_out": None
        if left_out is None
        else float(np.abs(left_out).mean()),
    }


# Tables and sentences about the errors of predictions.


INTRODUCTION = (
    "An error is predicted over measured, less one. Mean and median are of absolute errors; *mean "
    "removed* is the mean absolute error once the mean error of the set is subtracted, as some of "
    "the literature reports. *Left out* are errors of runs that the calibration did not see, or "
    "that were left out of its fit, one at a time or in whole groups; then the share of these runs "
    "inside the predicted bounds, and half the width of the bounds."
)
PLAYED = (
    " *Played* is the event simulator, which plays runs with whole numbers of layers: how many, "
    "the mean of absolute errors, and the share inside the same bounds."
)


def paragraphs_of(
    summary: Mapping[str, Any],
    times: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
) -> list[str]:
    """The paragraphs of the page: tables of sets of runs, of rankings, of single runs, and of the
    memory of stages.
    """
    sets = summary["times"]
    paragraphs = [
        INTRODUCTION + (PLAYED if any(map(_is_played, sets)) else ""),
        _sets_table(sets),
        *(["\n".join(orders)] if (orders := [*filter(None, map(_order_words, sets))]) else []),
        table_of(
            [row for row in times if "node" not in row["set"]],
            ("run", _name),
            ("predicted s", "{predicted_s:.3f}"),
            ("measured s", "{measured_s:.3f}"),
            ("error", "{error:+.1%}"),
        ),
    ]
    if memory:
        paragraphs += _memory_words(summary["memory"], memory)
    if summary["tables"]:
        paragraphs += [_tables(summary["tables"])]
    return paragraphs


def _tables(tables: Mapping[str, str]) -> str:
    lines = [f"- `{name}`, sha256 `{sha256}`" for name, sha256 in tables.items()]
    return "\n".join(["The tables, which the project does not carry:", "", *lines])


def _sets_table(sets: Sequence[Mapping[str, Any]]) -> str:
    head = ["set", "runs", "said not to fit", "mean", "median", "bias", "mean removed"]
    head += ["left out", "their mean", "their median", "inside bounds", "half-width"]
    with_played = any(map(_is_played, sets))
    head += ["played", "played: mean", "inside bounds"] if with_played else []
    return table(
        head,
        [
            (
                figures["set"],
                figures["runs"],
                figures["runs_said_not_to_fit"],
                *(number(figures[name], ".2%") for name in ("mean_error", "median_error")),
                f"{figures['bias']:+.2%}",
                number(figures["mean_error_after_removing_the_mean"], ".2%"),
                figures["runs_not_fitted"],
                number(figures["mean_error_of_runs_not_fitted"], ".2%"),
                number(figures["median_error_of_runs_not_fitted"], ".2%"),
                number(figures["inside_bounds"], ".0%"),
                number(figures["median_half_width"], ".1%"),
                *(_played(figures) if with_played else ()),
            )
            for figures in sets
        ],
    )


def _is_played(figures: Mapping[str, Any]) -> bool:
    return "mean_events_error" in figures


def _played(figures: Mapping[str, Any]) -> tuple[object, ...]:
    if not _is_played(figures):
        return 0, "-", "-"
    return (
        figures["runs_played"],
        number(figures["mean_events_error"], ".2%"),
        number(figures["events_inside_bounds"], ".0%"),
    )


def _memory_words(figures: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [
        (
            f"Allocated memory of {figures['stages']} stages: mean error "
            f"{figures['mean_error']:.2%}, worst {figures['worst_error']:+.2%}; "
            f"reserved {figures['mean_reserved_error']:.2%}, "
            f"worst {figures['worst_reserved_error']:+.2%}{_reserved_left_out(figures)}."
        ),
        IN_A_FILE,
        table_of(
            rows,
            ("run", "{run}"),
            ("stage", "{stage}"),
            ("predicted GiB", lambda row: gib(row["predicted_bytes"])),
            ("measured GiB", lambda row: gib(row["measured_bytes"])),
            ("error", "{error:+.1%}"),
        ),
    ]


def _name(row: Mapping[str, Any]) -> str:
    name = f"{row['run']} (approximated)" if row["approximated"] else row["run"]
    return f"{name} (micro-batch {row['micro_batch']})" if "weak" in row["set"] else name


def _reserved_left_out(figures: Mapping[str, Any]) -> str:
    error = figures["mean_reserved_error_left_out"]
    return "" if error is None else f"; {error:.2%} with each run left out of the fit"


def _order_words(figures: Mapping[str, Any]) -> str:
    """A sentence on how well the runs of one workload are ranked; empty if no workload has several
    runs.
    """
    parts = []
    if figures["median_rank_correlation"] is not None:
        parts.append(
            f"median rank correlation {figures['median_rank_correlation']:.3f} over "
            f"{figures['workloads']} workloads"
        )
    if figures["median_predicted_best_over_measured_best"] is not None:
        parts.append(
            f"the predicted best takes "
            f"{figures['median_predicted_best_over_measured_best']:.1%} more "
            f"than the measured one (median; worst "
            f"{figures['worst_predicted_best_over_measured_best']:.1%}, within 5 % in "
            f"{figures['predicted_best_within_5_percent']:.0%} of workloads), "
            f"{figures['telling_pairs_in_wrong_order']} pairs that differ by over 3 % in the wrong "
            "order"
        )
    return f"- {figures['set']}: {'; '.join(parts)}." if parts else ""
