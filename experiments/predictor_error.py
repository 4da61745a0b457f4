"""Predicted beside measured: iteration times and peaks of memory of published runs.

Without tables, the published figures that the project carries. With --tables DIR, the runs of
DIR/end_to_end.csv, DIR/megatron_a100_one_node.csv and DIR/megatron_a100_many_nodes.csv too, as far
as they are there (docs/reference/measurement-tables.md). Where a calibration was fitted to runs,
their errors when they are left out of the fit stand beside.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Compare, print a table, write rows and scatter plots."""
    options = _parser().parse_args(arguments)
    from experiments.reports.error_rows import errors  # noqa: PLC0415 (not for --help)

    return errors(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("predictor_error", __doc__)
    parser.add_argument("--tables", type=Path, metavar="DIR", help="folder of measurement tables")
    parser.add_argument(
        "--launch",
        type=Path,
        metavar="DIR",
        help="only runs that a launch script or DeepSpeed JSON of this folder is named for, by the "
        "plans imported from these files",
    )
    parser.add_argument(
        "--events", action="store_true", help="play runs of whole layers task by task too"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
