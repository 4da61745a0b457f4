"""What changes if the problem does: batch, depth, sequence, links, memory, interference.

From one problem a single number is changed at a time, and plans are searched again, for this engine
and over Megatron-LM's grid. What the best plan then does, and where the two differ most, shows on
what a result depends.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import PROBLEM, experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Search each problem, print and write the tables."""
    options = _parser().parse_args(arguments)
    from experiments.questions.sensitivity import sensitivity  # noqa: PLC0415 (not for --help)

    return sensitivity(options)


def _parser() -> argparse.ArgumentParser:
    problem = {
        **PROBLEM,
        "model": "gpt3-22b",
        "nodes": 4,
        "gpus_per_node": 8,
        "sequence_length": 2048,
        "global_batch": 512,
    }
    return experiment_parser("sensitivity", __doc__, **problem)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
