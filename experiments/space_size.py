"""How many plans there are to choose from, dimension by dimension, against the number of blocks.

First data and tensor parallelism alone, then pipelines of stages of any number of blocks and GPUs,
then ZeRO levels, recomputed blocks and the four offload ratios, chosen for each stage.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import PROBLEM, experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Count plans, print and write the table."""
    options = _parser().parse_args(arguments)
    from experiments.questions.space_size import sizes  # noqa: PLC0415 (not for --help)

    return sizes(options)


def _parser() -> argparse.ArgumentParser:
    problem = {
        **PROBLEM,
        "model": "gpt3-22b",
        "hardware": "a100-40gb",
        "nodes": 4,
        "gpus_per_node": 8,
        "global_batch": 512,
    }
    return experiment_parser("space_size", __doc__, **problem)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
