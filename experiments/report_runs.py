"""Write the page and the picture of predicted beside measured runs.

Tables are those of predict_runs (docs/reference/measured-runs.md). The page has, for every
table: errors, raw and in groups; the share of measurements within the bounds, and within bounds
that were made without the run's group; the spread of repeated runs; the refused rows. With
--profile it also has the errors under that profile.
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
        help="also write the shares of bounds by kind of run, for the catalogue",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
