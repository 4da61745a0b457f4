"""Measured runs, predicted: each row of tables of runs as a plan of its own, beside what it took.

A row tells of one run: model, GPUs, degrees, batch (docs/reference/measured-runs.md lists the
columns). Cells may be empty; what is assumed instead is a note of the answer. A row that cannot be
predicted is refused with the reason. Nothing that was measured is read but to hold it against the
prediction: without --json the errors by table, model, GPUs and degrees are printed, and of a few
runs each beside its prediction.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Predict the rows of tables, in order; a bad row does not stop the others."""
    options = _parser().parse_args(arguments)
    from experiments.measured.rows import predict_rows  # noqa: PLC0415 (not for --help)

    return predict_rows(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("predict_runs", __doc__, json=False)
    parser.add_argument("tables", metavar="TABLE.csv", nargs="+", type=Path)
    parser.add_argument(
        "--profile",
        metavar="NAME",
        default="none",
        help="the cluster whose own slowness is added: ultrascale (default: none)",
    )
    parser.add_argument(
        "--hardware",
        metavar="NAME|FILE",
        help="a hardware file, such as calibrate_runs writes: it stands for the GPUs of its name, "
        "and where a row says no hardware; for all rows if the catalogue has no such name "
        "(default: the catalogue's files)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
