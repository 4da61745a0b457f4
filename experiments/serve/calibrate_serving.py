"""The command ``calibrate_serving``: fits the constants of serving kernels and engines, and writes
them with their sources.
"""

import argparse
from collections.abc import Sequence
from typing import Any

from experiments.cli.commandline import DONE, progress
from experiments.serve.served_rows import ServedRow
from experiments.serve.serving_fit import (
    GROUPS,
    OUTCOMES,
    constants_of_rows,
    left_out,
    rows_to_fit,
)
from mistlab.calibration.serving_kernels import fitted_kernels
from mistlab.core.files import write_yaml
from mistlab.serving.engine_constants import keys_of

KERNELS, CONSTANTS = "serving_kernels.yaml", "serving_constants.yaml"
_SOURCE = (
    "runs and kernel tables of ai-dynamo/aiconfigurator (Apache-2.0), offline tables of "
    "NVIDIA/TensorRT-LLM (Apache-2.0), collected 2026-11-23"
)


def calibrate_serving(options: argparse.Namespace) -> int:
    """Fit the constants of serving engines to tables of measured kernels and of measured runs.

    With --kernels, the rates of single kernels are fitted; the fit of runs then builds on them.
    With --runs, the constants of engines are fitted, one level after another. Bounds come from the
    errors of fits that leave out the runs' configuration, GPU or model.
    """
    if options.kernels is not None:
        rates = list(fitted_kernels(options.kernels))
        write_yaml(
            {
                "about": "GPU, engine, work, kind (precision of weights or caches; GPUs of an "
                "all-reduce), floor in microseconds, reached shares of bandwidth (of the links, of "
                "an all-reduce) and of peak, nanoseconds for each value that an outcome of a "
                "product sums, share of bandwidth for rows of experts, median error, rows",
                "source": f"kernel tables: {_SOURCE}",
                "command": "python -m experiments.calibrate_serving --kernels FOLDER --out FOLDER",
                "rates": rates,
            },
            options.out / KERNELS,
        )
        progress(f"{len(rates)} kinds of kernels fitted")
    if options.runs:
        rows = rows_to_fit(options.runs)
        write_yaml(_fitted(rows), options.out / CONSTANTS)
        progress(f"constants fitted to {len(rows)} runs")
    return DONE


def _fitted(rows: Sequence[ServedRow]) -> dict[str, Any]:
    constants = constants_of_rows(rows)
    sureness = {}
    for by in GROUPS:
        apart = left_out(rows, by)
        sureness[by] = {
            name: [round(factor, 3) for factor in apart.quantiles(name)] for name in OUTCOMES
        }
    keys = [keys_of(row.run) for row in rows]
    return {
        "source": _SOURCE,
        "command": "python -m experiments.calibrate_serving --runs TABLE.csv ... --out FOLDER",
        "runs": len(rows),
        "sureness": sureness,
        "known": {
            "gpu": sorted({key["gpu"] for key in keys}),
            "model": sorted({row.run.model for row in rows}),
        },
        "constants": constants.factors,
    }
