"""Write the page and the picture of predicted beside measured runs.

Tables are those of predict_runs (docs/reference/measured-runs.md). The page has the errors of every
table, raw and in groups, how many measurements lie within the bounds, how far repeated runs lie
apart, which measurements lie within bounds that were made without their groups, and what was
refused. With --profile the errors under that profile stand beside.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Predict all rows, write runs.md and runs.svg."""
    options = _parser().parse_args(arguments)
    from experiments.measured.page import report  # noqa: PLC0415 (not for --help)

    return report(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("report_runs", __doc__, out=Path("runs/measured_runs"))
    parser.add_argument("tables", metavar="TABLE.csv", nargs="+", type=Path)
    parser.add_argument("--profile", metavar="NAME", default="none", help="a cluster's profile")
    parser.add_argument(
        "--sureness",
        type=Path,
        metavar="FILE.yaml",
        help="also write the factors of bounds by kind of run, for the catalogue",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
