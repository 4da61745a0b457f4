"""Run every plan of a folder, one after another, and collect speedups from such folders.

Each plan is run as run_plan does: in one process, or under a torchrun of its own where it takes
several GPUs. A plan that fails does not stop the others. What ran is kept, so the same command goes
on after a stop, and with a new plan in the folder runs that one alone. A folder of results is read
instead of run. Plans of one name in several folders are compared with the first folder's.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, experiment_parser, run

EXAMPLES = PLANS / "tiny"


def main(arguments: Sequence[str]) -> int:
    """Run what is left to run, print the table of speedups."""
    options = _parser().parse_args(arguments)
    from experiments.running.plan_folders import run_plans  # noqa: PLC0415 (not for --help)

    return run_plans(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("run_plans", __doc__)
    parser.add_argument("folders", metavar="FOLDER", nargs="*", type=Path, default=[EXAMPLES])
    parser.set_defaults(arguments=["folders"])
    parser.add_argument("--steps", type=int, default=5, help="steps of each plan (default: 5)")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="time limit of each plan (default: 600)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
