"""Predicted beside measured on one GPU: profile it, calibrate, run plans that were never fitted.

Works in calls of a few minutes that go on where the last one ended, in the same folder. First come
short strict runs, whose losses must not depend on what is offloaded, then timed plans that offload
activations, the profile (tables/), and the other plans (runs.jsonl). README.md and the pictures
show what there is, report.zip holds everything. Exit status 1: not done yet, run the same command
again.

--dry-run tells the order and how long it takes by estimate, and runs nothing. --draw makes page and
pictures of what there is, on any machine: it needs no GPU and no torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run

MINUTES = 9.0


def main(arguments: Sequence[str]) -> int:
    """Work for some minutes; print the summary once all is there."""
    options = _parser().parse_args(arguments)
    from experiments.reports.work import work  # noqa: PLC0415 (not for --help)

    return work(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("gpu_report", __doc__, quick=False, json=False)
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("runs/gpu_report"),
        metavar="DIR",
        help="the folder of the report (default: %(default)s)",
    )
    parser.add_argument(
        "--minutes",
        type=float,
        default=MINUTES,
        help=f"time limit of this call (default: {MINUTES:g})",
    )
    parser.add_argument(
        "--device", choices=("cpu", "cuda"), default="cuda", help="the device that runs plans"
    )
    parser.add_argument(
        "--from",
        dest="packed",
        type=Path,
        metavar="REPORT.zip",
        help="let a folder that has not begun go on from a packed one (default: the one in it)",
    )
    parser.add_argument(
        "--dry-run", action="store_true", help="tell the order and the estimate; run nothing"
    )
    parser.add_argument(
        "--draw", action="store_true", help="page and pictures of what there is; run nothing"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
