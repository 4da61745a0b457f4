"""The closed form against the event simulator, over random plans that are valid and fit.

Both take the durations of single tasks from one place and share nothing else: the closed form adds
slots up as if each were a barrier and all micro-batches alike, the simulator plays every task. The
difference is symbolic over events, less one.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS


def main(arguments: Sequence[str]) -> int:
    """Compare, print the distribution and the worst plans, write rows, plans and a picture."""
    options = _parser().parse_args(arguments)
    from experiments.comparing.cross_check import cross_check  # noqa: PLC0415 (not for --help)

    return cross_check(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("cross_check", __doc__)
    parser.add_argument("--plans", type=int, help="how many (default: 1,000, and 40 with --quick)")
    help_order = (
        "run the pipelines of engines that take any order in this one (default: all, in 1f1b)"
    )
    parser.add_argument(
        "--space",
        default="mist",
        choices=("mist", "wide-today"),
        help="the dimensions of plans: Mist's and its rivals' (default), or those of today: all "
        "engines and orders, experts, context, sequences, recomputation in part",
    )
    parser.add_argument("--order", default=DEFAULT_ORDER, choices=tuple(ORDERS), help=help_order)
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
