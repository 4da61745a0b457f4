"""How many configurations a second are analysed, beside one concrete trace and evaluation.

Layer graphs are traced once with symbols, and their sums compiled; then whole columns of stage
candidates are evaluated at a time. The other way is to run the model's code, without its tensors,
for every configuration: this is timed with torch, and left out where torch is not installed.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import PROBLEM, experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Time both ways, print and write the table."""
    options = _parser().parse_args(arguments)
    from experiments.questions.analysis_speed import speeds  # noqa: PLC0415 (not for --help)

    return speeds(options)


def _parser() -> argparse.ArgumentParser:
    problem = {
        **PROBLEM,
        "model": "gpt3-22b",
        "nodes": 4,
        "gpus_per_node": 8,
        "global_batch": 512,
    }
    return experiment_parser("analysis_speed", __doc__, **problem)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
