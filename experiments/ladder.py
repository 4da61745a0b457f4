"""What each way to save memory costs, and what the memory buys: from a bare plan to the best one.

The ladder begins at the best plan that saves nothing: no ZeRO, no recomputation, no offloading.
Each rung takes one choice over from the best plan of equal stages that saves memory as it likes.
What rungs cost and gain, term by term, adds up to the difference of the two predictions.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import PROBLEM, experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Climb, print and write the rungs."""
    options = _parser().parse_args(arguments)
    from experiments.questions.ladder import climbed  # noqa: PLC0415 (not for --help)

    return climbed(options)


def _parser() -> argparse.ArgumentParser:
    return experiment_parser("ladder", __doc__, **PROBLEM)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
