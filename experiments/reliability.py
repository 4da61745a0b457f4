"""Time lost to failing GPUs: the best interval between checkpoints, and the work that is left.

Every GPU fails at random, all with one rate. A failure undoes the work since the last checkpoint;
it must be noticed, the run started again and the checkpoint read. Goodput, the share of time that
is work that stays, is given in closed form and played over days, failure by failure. The defaults
are like OPT-175B's: 992 GPUs, of which one fails every 8.2 hours.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run

SECONDS = {
    "checkpoint": (60.0, "that writing a checkpoint keeps the GPUs waiting"),
    "detection": (300.0, "until a failure is noticed"),
    "restart": (300.0, "to start all processes again"),
    "reload": (60.0, "to read the checkpoint"),
}


def main(arguments: Sequence[str]) -> int:
    """Work out and play, print the shares of time, draw them over intervals."""
    options = _parser().parse_args(arguments)
    from experiments.costing.failures import reliability  # noqa: PLC0415 (not for --help)

    return reliability(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("reliability", __doc__)
    parser.add_argument("--gpus", type=int, default=992, help="default: %(default)s")
    parser.add_argument(
        "--gpu-hours-between-failures",
        type=float,
        default=8163.0,
        metavar="HOURS",
        help="of one GPU, on average (default: %(default)s)",
    )
    for name, (seconds, what) in SECONDS.items():
        parser.add_argument(
            f"--{name}-s",
            type=float,
            default=seconds,
            metavar="SECONDS",
            help=f"seconds {what} (default: %(default)s)",
        )
    parser.add_argument(
        "--interval-s",
        type=float,
        metavar="SECONDS",
        help="seconds of work between checkpoints (default: the best)",
    )
    parser.add_argument("--days", type=float, default=60.0, help="default: %(default)s")
    parser.add_argument(
        "--runs", type=int, default=200, help="runs that are played (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
