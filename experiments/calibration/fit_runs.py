"""Fits constants of a hardware file to measured training runs."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from experiments.calibration.fits import DIGEST_CHARACTERS, Fitted, Residual, Step, sourced
from experiments.calibration.published import Table, read_end_to_end, read_megatron
from experiments.calibration.whole_runs import (
    FittedRuns,
    fit_allocator,
    fit_launch_and_sustained,
    fit_sustained,
    widths_left_out,
)
from experiments.cli.commandline import progress
from mistlab.calibration.table_rows import Origin
from mistlab.core.values import reject
from mistlab.machine.hardware import Hardware, Source

FEWEST_RUNS = 2


def whole_runs(path: Path) -> Step:
    """Fit constants to whole training runs: the share of its measured rates that a GPU sustains,
    the error bounds of each engine's times, and the constants of the memory allocator.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        table = read_end_to_end(path, hardware)
        runs = table.runs
        if len(runs) < FEWEST_RUNS:
            reject(
                f"{path}: {len(runs)} runs on {hardware.name}: give a table with at least "
                f"{FEWEST_RUNS}, so that each can be left out of a fit once"
            )
        progress(f"fitting {len(runs)} runs, each left out in turn")
        fits = fit_sustained(runs, hardware)
        residuals = [*_engine_residuals(fits)]
        hardware = fits.hardware
        if any(run.reserved_bytes and run.plan is not None for run in runs):
            allocator, errors = fit_allocator(runs)
            residuals.append(
                Residual(
                    what="reserved bytes of stages, run left out",
                    rows=len(errors),
                    held_out=float(np.abs(errors).mean()),
                )
            )
            hardware = replace(
                hardware,
                allocator=allocator,
                provenance=replace(
                    hardware.provenance,
                    allocator=Source(
                        kind="measured",
                        source=(
                            f"peaks of runs in {path.name} "
                            f"(sha256 {table.sha256[:DIGEST_CHARACTERS]}); bytes outside torch's "
                            "allocator assumed"
                        ),
                    ),
                ),
            )
        return _with_runs(hardware, table, residuals)

    return step


def megatron_runs(paths: Sequence[Path], folds: Sequence[str]) -> Step:
    """Fit the launch time and the sustained share of rates to some of Megatron's published runs,
    and report the errors on the others.
    """

    def step(hardware: Hardware) -> tuple[Hardware, Fitted]:
        tables = [read_megatron(path, hardware) for path in paths]
        runs = [run for table in tables for run in table.runs]
        known = sorted({run.fold for run in runs})
        for fold in folds:
            if fold not in known:
                reject(
                    f"--folds: the tables have no runs of {fold} (nodes x GPUs): give some of "
                    f"{', '.join(known)}"
                )
        progress(f"fitting {sum(run.fold in folds for run in runs)} of {len(runs)} runs")
        fits = fit_launch_and_sustained(runs, hardware, folds)
        merged = replace(tables[0], sha256=" ".join(table.sha256 for table in tables))
        return _with_runs(fits.hardware, merged, [*_engine_residuals(fits)])

    return step


def _with_runs(
    hardware: Hardware, table: Table, residuals: Sequence[Residual]
) -> tuple[Hardware, Fitted]:
    fitted = Fitted(
        group="engines",
        origin=Origin(path=table.path, sha256=table.sha256),
        note="runs left out in turn",
        residuals=tuple(residuals),
    )
    assert hardware.compute is not None
    sustained = Source(
        kind="measured",
        source=f"{hardware.compute.sustained:.1%} of operations a second sustained in its runs",
    )
    hardware = replace(hardware, provenance=sourced(hardware, "compute", sustained, more=True))
    source = Source(kind="measured", source=fitted.source)
    return replace(hardware, provenance=sourced(hardware, "engines", source)), fitted


def _engine_residuals(fits: FittedRuns) -> Iterator[Residual]:
    """The errors of runs that were left out of the fit, for each table of runs. Also, for each
    engine, the errors on the runs of each model width when no run of that width was fitted.
    """
    sets = np.array([run.set for run in fits.runs])
    for name in dict.fromkeys(sets.tolist()):
        errors = fits.left_out[(sets == name) & ~np.isnan(fits.left_out)]
        if len(errors):
            held_out = float(np.abs(errors).mean())
            yield Residual(what=name, rows=len(errors), held_out=held_out)
    for engine in dict.fromkeys(run.engine for run in fits.runs):
        for width, inside in widths_left_out(fits, engine):
            yield Residual(
                what=f"{engine}, width {width.hidden} left out ({inside:.0%} inside bounds)",
                rows=len(width.errors),
                held_out=float(np.abs(width.errors).mean()),
            )
