"""Predicted beside measured: the memory of published runs, stage by stage.

The table is DIR/end_to_end.csv (docs/reference/measurement-tables.md). Nothing was fitted to it:
peaks follow from the layer graphs alone. Times come with the calibrated predictor, which is
planned.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments import plots
from experiments.analyse import analysis_of
from experiments.commandline import DONE, parser_of, print_json, run
from experiments.published import PublishedRuns, read_published
from experiments.rundir import RunDirectory
from mistlab.errors import InputError
from mistlab.hardware import GIB_BYTES
from mistlab.symbolic.stage_model import StageModel
from mistlab.workload import Workload

TABLE = "end_to_end.csv"


def main(arguments: Sequence[str]) -> int:
    """Compare, print a table, write rows and a scatter plot."""
    options = _parser().parse_args(arguments)
    published = read_published(options.tables / TABLE)
    if not published.runs:
        message = f"{published.path}: no run of system mist with its memory: nothing to compare"
        raise InputError(message)
    rows = _rows(published)
    summary = {
        "table": TABLE,
        "sha256": published.sha256,
        "rows_without_memory": published.without_memory,
        "mean_error": float(np.mean([abs(row["error"]) for row in rows])),
        "worst_error": max((row["error"] for row in rows), key=abs),
        "stages": rows,
    }
    directory = RunDirectory.make(options.out, "predictor_error", vars(options))
    directory.write_rows(rows)
    plots.predicted_beside_measured(rows, directory.path / "memory.svg")
    if options.json:
        print_json(summary)
    else:
        print(_text(summary, options.out))
    return DONE


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("predictor_error", __doc__, out=Path("runs/predictor_error"), json=False)
    parser.add_argument(
        "--tables", type=Path, required=True, metavar="DIR", help="folder of measurement tables"
    )
    return parser


def _rows(published: PublishedRuns) -> list[dict[str, Any]]:
    models: dict[Workload, StageModel] = {}
    rows = []
    for entry in published.runs:
        peaks = analysis_of(entry.job, models).figures.peak_bytes
        for stage, (predicted, measured) in enumerate(
            zip(peaks.tolist(), entry.peak_allocated_bytes, strict=True)
        ):
            rows.append(
                {
                    "run": entry.name,
                    "stage": stage,
                    "predicted_bytes": predicted,
                    "measured_bytes": measured,
                    "error": predicted / measured - 1,
                }
            )
    return rows


def _text(summary: dict[str, Any], out: Path) -> str:
    lines = [f"{'run':32} stage  predicted  measured   error    (allocated GiB)"]
    lines += [
        f"{row['run']:32} {row['stage']:5}  {row['predicted_bytes'] / GIB_BYTES:9.2f}  "
        f"{row['measured_bytes'] / GIB_BYTES:8.2f}  {row['error']:+6.1%}"
        for row in summary["stages"]
    ]
    lines.append(
        f"mean absolute error {summary['mean_error']:.2%}, worst {summary['worst_error']:+.2%}; "
        f"{summary['rows_without_memory']} rows of the table say nothing of memory or of whole "
        f"blocks; picture and rows: {out}"
    )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
