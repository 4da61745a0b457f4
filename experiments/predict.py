"""What plans cost: iteration time with its bounds, memory, and whether they fit.

Bounds hold 90 % of measurements: they come from runs that the calibration did not see, and widen
outside of what was measured. Plans that are predicted together are compared; those whose times
differ by less than their bounds cannot be told apart. With --simulator events an iteration is
played task by task; --timeline draws it, and --variability plays many with slow parts and chance.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import OF_CLUSTER, PLANS, parser_of, run
from simulators.registry import PREDICTORS

EXAMPLE = PLANS / "gpt3-2.7b-4xl4.yaml"


def main(arguments: Sequence[str]) -> int:
    """Predict plan files, in order; a bad one does not stop the others."""
    parser = parser_of("predict", __doc__, **dict.fromkeys(OF_CLUSTER), json=False)
    parser.add_argument("plans", metavar="PLAN.yaml", nargs="*", type=Path, default=[EXAMPLE])
    parser.add_argument(
        "--simulator",
        choices=tuple(PREDICTORS),
        default="symbolic",
        help="closed form, or task by task (default: symbolic)",
    )
    parser.add_argument(
        "--breakdown",
        action="store_true",
        help="where the GPUs' time goes: arithmetic at the peak rate, what kernels lose to it, "
        "exposed communication by kind, waiting in the pipeline; parts add up to the iteration",
    )
    parser.add_argument(
        "--timeline",
        type=Path,
        metavar="DIR",
        help="with --simulator events: a trace for Perfetto and a picture of each plan",
    )
    parser.add_argument(
        "--variability",
        metavar="NAME=NUMBER,...",
        help="with --simulator events: what iterations take with jitter, a slow_stage by its "
        "slow_stage_factor, a slow_links_factor or a clock_factor; samples (100; of long "
        "iterations fewer, 20 at least) and seed say how many are played, and which. "
        "Such as jitter=0.1,slow_stage=0,slow_stage_factor=1.2",
    )
    options = parser.parse_args(arguments)
    from experiments.reports.predictions import predict  # noqa: PLC0415 (not for --help)

    return predict(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
