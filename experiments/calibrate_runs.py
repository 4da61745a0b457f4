"""Fit a few constants of a hardware file, an engine and a profile to the times of whole runs.

Tables are those of predict_runs (docs/reference/measured-runs.md). For each group that --leave-out
names, the constants are fitted without it and the errors on its runs are printed; what is written
is fitted on all runs. Constants of the engine are printed alone: they belong into its row, and
those of a cluster's profile into its file.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Fit, print what is left out, write the hardware file."""
    options = _parser().parse_args(arguments)
    from experiments.calibrating.run_fits import calibrate_runs  # noqa: PLC0415 (not for --help)

    return calibrate_runs(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("calibrate_runs", __doc__, hardware="h100-80gb", json=False)
    parser.add_argument("tables", metavar="TABLE.csv", nargs="+", type=Path)
    parser.add_argument(
        "--engine", default="nanotron", help="the engine of the runs (default: nanotron)"
    )
    parser.add_argument(
        "--fit", nargs="+", metavar="NAME", default=[], help="constants to fit (default: none)"
    )
    parser.add_argument(
        "--profile",
        metavar="NAME",
        default="none",
        help="the profile of the cluster of all runs: ultrascale (default: none)",
    )
    parser.add_argument(
        "--set", nargs="+", metavar="NAME=VALUE", default=[], help="constants to give, not fit"
    )
    parser.add_argument(
        "--most-gpus", type=int, default=1 << 20, help="leave out runs on more GPUs"
    )
    parser.add_argument("--most-tp", type=int, default=1 << 20, help="leave out runs of higher tp")
    parser.add_argument("--most-pp", type=int, default=1 << 20, help="leave out runs of higher pp")
    parser.add_argument(
        "--most-tp-in-pipelines",
        type=int,
        default=1 << 20,
        help="leave out runs of higher tp among those with a pipeline",
    )
    parser.add_argument(
        "--leave-out", nargs="+", metavar="COLUMN", default=[], help="groups to leave out: model"
    )
    parser.add_argument("--evaluations", type=int, default=8, help="steps of a fit (default: 8)")
    parser.add_argument("--note", default="", help="more words on the source of the constants")
    parser.add_argument("--out", type=Path, metavar="HARDWARE.yaml", help="the file to write")
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
