"""Predicted beside measured: iteration times and peaks of memory of published runs.

Without tables, the published figures that the project carries. With --tables DIR, the runs of
DIR/end_to_end.csv, DIR/megatron_a100_one_node.csv and DIR/megatron_a100_many_nodes.csv too, as far
as they are there (docs/reference/measurement-tables.md). Where a calibration was fitted to runs,
their errors when they are left out of the fit stand beside.
"""

import argparse
import math
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import spearmanr

from experiments.calibrate import FOLDS
from experiments.calibrating.published import (
    PublishedRun,
    Table,
    carried,
    read_end_to_end,
    read_megatron,
)
from experiments.calibrating.whole_runs import (
    figures_of,
    fit_allocator,
    fit_sustained,
    is_said_to_fit,
    misses,
    predicted_s,
)
from experiments.cli.commandline import DONE, parser_of, print_json, progress, run
from experiments.cli.rundir import RunDirectory
from experiments.reports import plots
from mistlab import catalog
from mistlab.cost.bounds import bounds_of
from mistlab.cost.memory import reserved_bytes
from mistlab.engines.table import ENGINES
from mistlab.values.plan import Plan
from mistlab.values.units import GIB_BYTES
from simulators.events import EventSimulator

END_TO_END = "end_to_end.csv"
MEGATRON = ("megatron_a100_one_node.csv", "megatron_a100_many_nodes.csv")
# Machines whose whole runs all went into their calibration.
FITTED_TO_ALL = ("l4-24gb", "a100-40gb", "a10g-24gb")
# Two runs that differ by less than this can be in either order.
TELLING = 0.03


def main(arguments: Sequence[str]) -> int:
    """Compare, print a table, write rows and scatter plots."""
    options = _parser().parse_args(arguments)
    runs, tables = _runs(options.tables)
    progress(f"predicting {len(runs)} runs")
    left_out = _left_out(runs) if options.tables is not None else {}
    times = _fastest([_time(one, left_out.get(one.name), events=options.events) for one in runs])
    memory = [row for one in runs for row in _memory(one)]
    summary = {
        "tables": {table.path.name: table.sha256 for table in tables},
        "times": [_summary(name, rows) for name, rows in _by_set(times).items()],
        "memory": _memory_summary(memory, runs),
    }
    directory = RunDirectory.make(options.out, "predictor_error", vars(options))
    directory.write_rows([*times, *memory])
    plots.times(times, directory.path / "times.svg")
    if memory:
        plots.predicted_beside_measured(memory, directory.path / "memory.svg")
    if options.json:
        print_json({**summary, "runs": times, "stages": memory})
    else:
        print(_text(summary, times, memory, options.out))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("predictor_error", __doc__, out=Path("runs/predictor_error"), json=False)
    parser.add_argument("--tables", type=Path, metavar="DIR", help="folder of measurement tables")
    parser.add_argument(
        "--events", action="store_true", help="play runs of whole layers task by task too"
    )
    return parser


def _runs(folder: Path | None) -> tuple[list[PublishedRun], list[Table]]:
    megatron = catalog.hardware("a100-80gb")
    content = (
        files("experiments.calibrating").joinpath("published.yaml").read_text(encoding="utf-8")
    )
    base, weak_scaling = carried(content, megatron)
    if folder is None:
        return [*base, *weak_scaling], []
    tables = [read_end_to_end(folder / END_TO_END)]
    tables += [
        read_megatron(folder / name, megatron) for name in MEGATRON if (folder / name).exists()
    ]
    # The base case is among the runs of the table.
    return [*(one for table in tables for one in table.runs), *weak_scaling], tables


def _left_out(runs: Sequence[PublishedRun]) -> Mapping[str, float]:
    """Errors of runs that their machine was fitted to, each left out of the fit in turn."""
    by_machine: dict[str, list[PublishedRun]] = defaultdict(list)
    for one in runs:
        if one.cluster.hardware.name in FITTED_TO_ALL:
            by_machine[one.cluster.hardware.name].append(one)
    found = [
        fit_sustained(alike, alike[0].cluster.hardware)
        for alike in by_machine.values()
        if len(alike) > 1
    ]
    return {
        one.name: error
        for fitted in found
        for one, error in zip(fitted.runs, fitted.left_out.tolist(), strict=True)
    }


def _time(one: PublishedRun, left_out: float | None, *, events: bool) -> dict[str, Any]:
    seconds = predicted_s(one, one.cluster.hardware)
    gpus = int((one.stages.data_parallel * one.stages.tensor_parallel).sum())
    width = bounds_of(one.workload, one.cluster, one.engine).half_width(gpus)
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
        "half_width": width,
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


def _by_set(rows: Sequence[dict[str, Any]]) -> Mapping[str, list[dict[str, Any]]]:
    sets: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        sets[row["set"]].append(row)
    return sets


def _summary(name: str, rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
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
    """Of each workload with several runs: rank correlation, how much the run that is predicted
    fastest takes beyond the fastest, and pairs that differ tellingly and are in the wrong order."""
    by_workload: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        by_workload[row["workload"]].append(row)
    ranks, best, disordered = [], [], 0
    for alike in by_workload.values():
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


def _memory_summary(
    rows: Sequence[dict[str, Any]], runs: Sequence[PublishedRun]
) -> dict[str, Any] | None:
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


def _text(
    summary: Mapping[str, Any],
    times: Sequence[Mapping[str, Any]],
    memory: Sequence[Mapping[str, Any]],
    out: Path,
) -> str:
    few = [row for row in times if "node" not in row["set"]]
    lines = [f"{'run':36} predicted s  measured s   error"]
    lines += [
        f"{row['run']:36} {row['predicted_s']:11.3f} {row['measured_s']:11.3f}  "
        f"{row['error']:+6.1%}"
        + (" (approximated)" if row["approximated"] else "")
        + (f" (micro-batch {row['micro_batch']})" if "weak" in row["set"] else "")
        for row in few
    ]
    lines += [
        "",
        "mean absolute errors: raw, median, after removing the mean (as the literature does)",
    ]
    for one in summary["times"]:
        lines.append(
            f"  {one['set']}: {one['mean_error']:.2%}, {one['median_error']:.2%}, "
            f"{one['mean_error_after_removing_the_mean']:.2%} of {one['runs']} runs, bias "
            f"{one['bias']:+.2%}{_unseen(one)}{_ranks(one)}{_played(one)}; "
            f"{one['runs_said_not_to_fit']} are said not to fit"
        )
    if memory:
        found = summary["memory"]
        lines += [
            "",
            (
                f"allocated memory of {found['stages']} stages: mean error "
                f"{found['mean_error']:.2%}, worst {found['worst_error']:+.2%}; reserved "
                f"{found['mean_reserved_error']:.2%}, worst {found['worst_reserved_error']:+.2%}"
                f"{_reserved_left_out(found)}"
            ),
        ]
        lines += [
            f"  {row['run']:32} stage {row['stage']}  {row['predicted_bytes'] / GIB_BYTES:6.2f} of "
            f"{row['measured_bytes'] / GIB_BYTES:6.2f} GiB  {row['error']:+6.1%}"
            for row in memory
        ]
    return "\n".join([*lines, f"pictures and rows: {out}"])


def _reserved_left_out(found: Mapping[str, Any]) -> str:
    error = found["mean_reserved_error_left_out"]
    return "" if error is None else f"; {error:.2%} with each run left out of the fit"


def _played(one: Mapping[str, Any]) -> str:
    if "mean_events_error" not in one:
        return ""
    return (
        f"; played task by task {one['mean_events_error']:.2%} of {one['runs_played']} runs, "
        f"{one['events_inside_bounds']:.0%} inside bounds"
    )


def _unseen(one: Mapping[str, Any]) -> str:
    if not one["runs_not_fitted"]:
        return ""
    bounds = f"{one['inside_bounds']:.0%} inside bounds of {one['median_half_width']:.1%}"
    return (
        f"; {one['runs_not_fitted']} left out of the fit: "
        f"{one['mean_error_of_runs_not_fitted']:.2%} and "
        f"{one['median_error_of_runs_not_fitted']:.2%}, {bounds}"
    )


def _ranks(one: Mapping[str, Any]) -> str:
    parts = []
    if one["median_rank_correlation"] is not None:
        parts.append(
            f"median rank correlation {one['median_rank_correlation']:.3f} over "
            f"{one['workloads']} workloads"
        )
    if one["median_predicted_best_over_measured_best"] is not None:
        parts.append(
            f"the predicted best takes {one['median_predicted_best_over_measured_best']:.1%} more "
            f"than the measured one (median; worst "
            f"{one['worst_predicted_best_over_measured_best']:.1%}, within 5 % in "
            f"{one['predicted_best_within_5_percent']:.0%} of workloads), "
            f"{one['telling_pairs_in_wrong_order']} pairs in the wrong order"
        )
    return "".join(f"; {part}" for part in parts)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
