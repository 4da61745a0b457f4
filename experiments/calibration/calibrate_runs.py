"""The command ``calibrate_runs``: fits constants of a hardware file to measured training runs,
reports the errors on groups of runs left out of the fit, and writes a new file.
"""

import argparse
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.commandline import DONE, as_options, print_json, progress, writable
from experiments.runs.configuration import configuration_of
from experiments.runs.run_jobs import job_of
from experiments.runs.runs_table import TableRow, count_of, number_of, rows_of_table
from mistlab import catalog
from mistlab.calibration.run_constants import (
    CONSTANTS,
    ConstantSetting,
    fitted,
    values_of,
    with_values,
)
from mistlab.core.arrays import Floats
from mistlab.core.files import about, write_yaml
from mistlab.core.values import InputError, near_matches, reject, to_mapping
from mistlab.cost.confidence import bounds_of, known_sureness
from mistlab.engines.engine import ENGINES, Engine
from mistlab.job.job import Job
from mistlab.machine.hardware import Hardware, OwnRuns, Source
from simulators.symbolic import SymbolicPredictor

# The MFU (model FLOPs utilisation) at which the fitted error bounds of iteration times are
# reported.
_AT_MFU = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredRun:
    """A measured training run of a table: its row, its job, and its seconds per iteration."""

    row: TableRow
    job: Job
    seconds: float


def calibrate_runs(options: argparse.Namespace) -> int:
    """Fit a few constants of a hardware file, an engine and a machine's profile to the times of
    whole training runs.

    Tables are those of predict_runs (docs/reference/measured-runs.md). For each group of runs that
    --leave-out names, the constants are fitted to the other runs, and the errors on the group are
    printed. The constants that are written are fitted to all runs. The file also gets the common
    error of these runs, which narrows the bounds of further predictions for this engine. Constants
    of an engine or of a cluster's profile are only printed; copy them to the engine's row or to the
    profile's file.
    """
    hardware = catalog.hardware(options.hardware)
    with as_options():
        profile = None if options.profile == "none" else catalog.profile(options.profile)
    setting = ConstantSetting(hardware=hardware, engine=_engine(options.engine), profile=profile)
    given = dict(map(_pair, options.set))
    _known("--set", [*given], setting)
    _known("--fit", options.fit, setting)
    setting = with_values(setting, given)
    every = [one for path in options.tables for one in _runs(path)]
    runs = [one for one in every if _is_wanted(one, options)]
    if not runs:
        tables = ", ".join(map(str, options.tables))
        message = f"{tables}: no runs of --engine {options.engine} on --hardware {hardware.name}"
        raise InputError(message + _others(every))
    rows = list[Mapping[str, Any]]()
    for column in options.leave_out:
        for value, inside, outside in _folds(runs, column):
            fitted_setting = _fit(setting, inside, options)
            rows.append(
                _error_row(f"without {column} {value}", _errors(fitted_setting, outside), options)
            )
    fitted_setting = _fit(setting, runs, options)
    rows.append(_error_row("all runs", _errors(fitted_setting, runs), options))
    constants = {name: values_of(fitted_setting)[name] for name in options.fit}
    own_runs = _own_runs(fitted_setting, runs, constants=len(options.fit))
    if options.json:
        print_json({"errors": rows, "constants": constants, "own_runs": to_mapping(own_runs)})
    else:
        for name, number in constants.items():
            print(f"{name:22} {number:10.4g}  {CONSTANTS[name].words}")
        print(_narrowed(runs[0].job, own_runs))
    if options.out is not None:
        _write(fitted_setting.hardware, runs, own_runs, options)
    return DONE


def _own_runs(setting: ConstantSetting, runs: Sequence[MeasuredRun], *, constants: int) -> OwnRuns:
    """The error that all runs share, and the scatter of single runs around it, from which the
    bounds of times follow. Each fitted constant takes one degree of freedom.
    """
    kind = bounds_of(runs[0].job.workload, runs[0].job.cluster, setting.engine.name).kind
    misses: list[float] = []
    for run in runs:
        cluster = replace(run.job.cluster, hardware=setting.hardware, profile=setting.profile)
        prediction = SymbolicPredictor(workload=run.job.workload, cluster=cluster).predict(
            run.job.plan
        )
        misses.append(
            math.log(run.seconds / prediction.iteration_s) / math.sqrt(kind.way(prediction.mfu))
        )
    return OwnRuns(
        engine=setting.engine.family,
        offset=round(float(np.mean(misses)), 4),
        runs=max(0, len(runs) - constants),
    )


def _narrowed(job: Job, own_runs: OwnRuns) -> str:
    """A text that says how much these runs tighten the bounds of further runs; its example is a run
    whose MFU is one half.
    """
    kind = bounds_of(job.workload, job.cluster, own_runs.engine).kind
    way = kind.way(_AT_MFU)
    before, after = (
        known_sureness().spread(kind, job.plan.num_gpus, source_runs=source_runs).around(way)
        for source_runs in (None, own_runs)
    )
    return (
        f"bounds of further runs at {_AT_MFU:.0%} of the peak: {after[0]:.2f} to {after[1]:.2f} "
        f"times the prediction, {before[0]:.2f} to {before[1]:.2f} without these runs"
    )


def _engine(name: str) -> Engine:
    if name not in ENGINES:
        reject(f"--engine: {name!r} is unknown{near_matches(name, ENGINES)}")
    return ENGINES[name]


def _pair(text: str) -> tuple[str, float]:
    name, _, value = text.partition("=")
    try:
        return name, float(value)
    except ValueError:
        reject(f"--set {text}: is not a constant's name and number: give such as {name}=0.5")


def _known(option: str, names: Sequence[str], setting: ConstantSetting) -> None:
    """Refuse names of constants in an option's value that are unknown, or that cannot be fitted
    with the options given.
    """
    has = values_of(setting)
    for name in names:
        if name not in CONSTANTS:
            reject(f"{option}: constant {name!r} is unknown{near_matches(name, CONSTANTS)}")
        if name not in has:
            reject(
                f"{option}: constant {name!r} belongs to a cluster's profile: give --profile "
                "NAME too, or leave the constant out"
            )


def _runs(path: Path) -> Iterator[MeasuredRun]:
    """The runs of a table, without rows that no plan can express. A measurement that is not a
    number is refused.
    """
    for row in rows_of_table(path):
        with about(row.where):
            seconds = number_of(row.cells, "step_s")
        if seconds is None:
            continue
        try:
            run = configuration_of(row)
            job = job_of(replace(run, engine=run.otherwise or run.engine)).job
        except InputError:
            continue
        yield MeasuredRun(row=row, job=job, seconds=seconds)


def _is_wanted(run: MeasuredRun, options: argparse.Namespace) -> bool:
    """Whether the options select a run for the fit."""
    in_pipeline = run.job.plan.num_stages > 1
    most_tp = options.most_tp_in_pipelines if in_pipeline else options.most_tp
    most = {"gpus": options.most_gpus, "tp": most_tp, "pp": options.most_pp}
    is_small = all((count_of(run.row.cells, name) or 1) <= limit for name, limit in most.items())
    is_own = run.job.plan.engine == options.engine
    return is_small and is_own and run.job.cluster.hardware.name == options.hardware


def _others(runs: Sequence[MeasuredRun]) -> str:
    """The engines and machines whose runs the tables contain; the error message that no run was
    selected lists them.
    """
    kinds = {(run.job.plan.engine, run.job.cluster.hardware.name) for run in runs}
    options_told = [
        f"--engine {engine} --hardware {hardware}" for engine, hardware in sorted(kinds)
    ]
    if not options_told:
        return ", nor any other with a step_s: give tables of measured runs"
    return f": give what they have: {', or '.join(options_told)}"


def _folds(
    runs: Sequence[MeasuredRun], column: str
) -> Iterator[tuple[str, list[MeasuredRun], list[MeasuredRun]]]:
    """Splits runs for cross-validation by the values of a column: for each value, the runs to fit
    (those with other values) and the runs to test (those with this value).
    """
    for value in sorted({run.row.cells.get(column, "") for run in runs}):
        outside = [run for run in runs if run.row.cells.get(column, "") == value]
        inside = [run for run in runs if run.row.cells.get(column, "") != value]
        if inside:
            yield value, inside, outside


def _fit(
    setting: ConstantSetting, runs: Sequence[MeasuredRun], options: argparse.Namespace
) -> ConstantSetting:
    if not options.fit:
        return setting
    progress(f"fitting {len(options.fit)} constants to {len(runs)} runs")
    measured_s = np.array([run.seconds for run in runs])
    values = fitted(
        setting,
        options.fit,
        lambda tried: _predicted(tried, runs),
        measured_s,
        evaluations=options.evaluations,
    )
    return with_values(setting, values)


def _predicted(setting: ConstantSetting, runs: Sequence[MeasuredRun]) -> Floats:
    """The predicted iteration time of each run in seconds."""
    seconds = np.empty(len(runs))
    together: dict[tuple[int, int], list[int]] = defaultdict(list)
    for number, run in enumerate(runs):
        together[id(run.job.workload), id(run.job.cluster)].append(number)
    for places in together.values():
        job = runs[places[0]].job
        cluster = replace(job.cluster, hardware=setting.hardware, profile=setting.profile)
        predictor = SymbolicPredictor(workload=job.workload, cluster=cluster)
        plans = [runs[place].job.plan for place in places]
        seconds[places] = predictor.iterations_of(plans, setting.engine)
    return seconds


def _errors(setting: ConstantSetting, runs: Sequence[MeasuredRun]) -> Floats:
    measured_s = np.array([run.seconds for run in runs])
    errors: Floats = _predicted(setting, runs) / measured_s - 1
    return errors


def _error_row(name: str, errors: Floats, options: argparse.Namespace) -> Mapping[str, Any]:
    """The errors of a group of runs as a result row; unless ``--json`` is given, it is printed at
    once.
    """
    sizes = np.abs(errors)
    row: dict[str, Any] = {
        "group": name,
        "runs": len(errors),
        "mean": float(sizes.mean()),
        "median": float(np.median(sizes)),
        "most_of_90": float(np.quantile(sizes, 0.9)),
        "bias": float(np.median(errors)),
    }
    if not options.json:
        print(
            "{group:28} {runs:5} runs  mean {mean:6.1%}  median {median:6.1%}"
            "  90 % within {most_of_90:6.1%}  bias {bias:+6.1%}".format(**row),
            flush=True,
        )
    return row


def _write(
    hardware: Hardware, runs: Sequence[MeasuredRun], own_runs: OwnRuns, options: argparse.Namespace
) -> None:
    """Write the hardware file with its fitted constants, and with the source of each."""
    gpus = sorted(run.job.plan.num_gpus for run in runs)
    names = ", ".join(sorted({path.stem for path in options.tables}))
    text = (
        f"fitted to {len(runs)} whole runs of engine {options.engine} on {gpus[0]} to {gpus[-1]} "
        f"GPUs (tables {names}) by experiments.calibrate_runs{'; ' * bool(options.note)}"
        f"{options.note}"
    )
    source = Source(kind="measured", source=text)
    provenance = replace(hardware.provenance, compute=source, transfers=source)
    others = (one for one in hardware.own_runs if one.engine != own_runs.engine)
    hardware = replace(hardware, provenance=provenance, own_runs=(*others, own_runs))
    path = writable(options.out, "path of a hardware file")
    write_yaml(to_mapping(hardware, omit_defaults=True), path)
    progress(f"{path} written")
