"""How the time of a search that proves its plan grows, and what each of its ideas is worth.

One thing of a problem grows at a time: blocks, GPUs, batch, the space, the fineness of its ratios.
Then each idea of the search is removed alone, on GPT-3 22B on 32 GPUs. Times are of the processor,
of one core.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import PROBLEM, experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Search each problem, print and write the times."""
    options = _parser().parse_args(arguments)
    from experiments.questions.search_growth import grown  # noqa: PLC0415 (not for --help)

    return grown(options)


def _parser() -> argparse.ArgumentParser:
    problem = {**PROBLEM, "global_batch": 32, "space": "mist"}
    parser = experiment_parser("search_growth", __doc__, **problem)
    parser.add_argument(
        "--seconds",
        type=float,
        help="time limit of a search, which then leaves a gap (default: 8, --quick 1)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
