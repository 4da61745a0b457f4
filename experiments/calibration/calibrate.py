"""The command ``calibrate``: fits a hardware file to the tables of measurements that it is given.
A fit that uses constants of another fit comes after it.
"""

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments.calibration import fit_links, fit_runs, fits
from experiments.calibration.fit_operators import (
    best_products,
    collective_tests,
    kernel_rates,
    launch_time,
    operator_rates,
)
from experiments.calibration.fits import write_fitted
from experiments.cli.commandline import DONE, writable
from mistlab.catalog.completed import restated
from mistlab.core.values import reject
from mistlab.job.job import stated_hardware


def calibrate(options: argparse.Namespace) -> int:
    """Fit a hardware file to tables of measurements: transfers, interference of streams, operators,
    whole runs.

    Tables are CSV files (docs/reference/measurement-tables.md). For each fit the command prints the
    error on rows that were held out: every second size, one shape of group, one width, or one run.
    The figures that it writes are fitted to all rows. If no table is given for a group of figures,
    the group is copied from --hardware, or from --borrow if --hardware lacks it.
    """
    steps = _steps(options)
    if not steps and options.borrow is None:
        reject(
            "nothing to fit: give --interference TABLE.csv, --bandwidth TABLE.csv or another table "
            "(--help lists them)"
        )
    hardware = restated(stated_hardware(options.hardware, Path()))
    if options.borrow is not None:
        hardware = fits.borrowed(stated_hardware(options.borrow, Path()))(hardware)
    hardware, fitted = fits.applied(steps, hardware)
    out = writable(options.out, "file")
    write_fitted(hardware, fitted, out, options.hardware, as_json=options.json)
    return DONE


def _steps(options: argparse.Namespace) -> list[fits.Step]:
    """The fits to make, one for each table that is given; a fit that uses constants of another fit
    comes after it.
    """
    of, campaign = options.table_hardware, options.campaign
    made: dict[str, Callable[[Any], fits.Step]] = {
        "bandwidth": lambda path: fit_links.bandwidth(path, campaign),
        "collectives": lambda path: fit_links.collectives(path, of),
        "point_to_point": lambda path: fit_links.point_to_point(path, of),
        "template": lambda path: fit_links.published_lines(path, options.template_name),
        "interference": lambda path: fit_links.streams(path, campaign, options.seed),
        "operators": lambda path: operator_rates(
            path,
            of,
            without_weight_gradients=options.without_weight_gradients,
            attention=options.attention and (options.attention, options.attention_campaign),
            attention_tflops=options.attention_tflops,
        ),
        "kernels": lambda path: kernel_rates(
            path, of, launch_us=options.launch_us, sustained=options.sustained
        ),
        "collective_tests": lambda path: collective_tests(path, of),
        "best_products": lambda path: best_products(path, of),
        "launches": lambda path: launch_time(path, of),
        "runs": fit_runs.whole_runs,
        "megatron_runs": lambda paths: fit_runs.megatron_runs(paths, options.folds.split(",")),
    }
    given = {name: getattr(options, name) for name in made}
    return [make(given[name]) for name, make in made.items() if given[name] is not None]
