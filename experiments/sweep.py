"""Many tuning problems at once: models by clusters by batches, each cell as tune would solve it.

A file lists the problems. They are solved by processes of this machine or of a Ray cluster, and the
answers are the same for any number of them. Each cell is kept as it ends: after a stop the same
command goes on with what is missing. What a killed worker was at is done again.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, experiment_parser, run

EXAMPLE = PLANS.parent / "sweeping" / "small.yaml"


def main(arguments: Sequence[str]) -> int:
    """Solve what is left to solve, print and write the table."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.jobs is not None and options.jobs < 1:
        parser.error(f"--jobs {options.jobs}: give at least 1")
    from experiments.sweeping.sweeping import sweep  # noqa: PLC0415 (not for --help)

    return sweep(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("sweep", __doc__)
    parser.add_argument(
        "sweep",
        metavar="SWEEP.yaml",
        nargs="?",
        type=Path,
        default=EXAMPLE,
        help="the file that lists the problems (default: %(default)s)",
    )
    parser.set_defaults(arguments=["sweep"])
    parser.add_argument(
        "--jobs", type=int, help="cells at once (default: 1; with --cluster, its CPUs)"
    )
    parser.add_argument(
        "--cluster",
        metavar="ray[:ADDRESS]",
        help="solve cells on a Ray cluster: one that is started here, or the one at an address",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
