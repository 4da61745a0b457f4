"""Spaces side by side: whether a search of a larger space ever ends with a worse plan.

Each problem of the published evaluation is searched in spaces that contain one another, by the
default searcher within equal budgets of evaluations. A larger space has every plan of a smaller
one, so a worse answer is the search's fault, and is named. Problems are searched in processes side
by side.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run

EVALUATIONS = (1000,)
FAMILIES = ("gpt3", "llama", "falcon")


def main(arguments: Sequence[str]) -> int:
    """Search each problem in each space, print and write the tables."""
    options = _parser().parse_args(arguments)
    if options.families is None:
        options.families = FAMILIES[:1] if options.quick else FAMILIES
    from experiments.questions.spaces import spaces  # noqa: PLC0415 (not for --help)

    return spaces(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("spaces", __doc__, hardware=None)
    parser.add_argument(
        "--evaluations",
        type=int,
        nargs="+",
        default=EVALUATIONS,
        metavar="N",
        help="budgets, each as plans or thousands of stage candidates (default: 1000)",
    )
    parser.add_argument(
        "--families",
        nargs="+",
        choices=FAMILIES,
        help=f"models of the evaluation (default: all; with --quick {FAMILIES[0]})",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
