"""Which way to split a chain of products over tensor-parallel ranks costs the fewest messages.

A weight is split by rows or by columns, and an activation is whole, split, or a sum in parts on the
ranks. So a partition is a path over layouts, and the best is a shortest path: for a chain of three
products, and for a transformer block, with and without sequence parallelism.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """List the partitions, print and write what their messages cost."""
    options = _parser().parse_args(arguments)
    from experiments.questions.partitions import partitions  # noqa: PLC0415 (not for --help)

    return partitions(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser(
        "partitions", __doc__, model="gpt3-13b", hardware="a100-80gb", sequence_length=2048
    )
    parser.add_argument(
        "--tensor-parallel",
        type=int,
        default=8,
        help="ranks that share a layer, in one node (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
