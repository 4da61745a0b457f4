"""What it costs not to know: searches with views that ignore overlap or first and last passes.

Searches see streams that take turns (serial), that do not disturb one another (ideal), extras of
first and last micro-batches spread (average) or dropped (blind), or everything (full). The whole
predictor and the event simulator score each winner. On random plans serial >= full >= ideal. A
last table has what true frontiers and the longest chain gain over the published search.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Compare views, print and write the tables."""
    options = _parser().parse_args(arguments)
    from experiments.bars.overlap import overlapped  # noqa: PLC0415 (not for --help)

    return overlapped(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("overlap", __doc__, hardware=None)
    parser.add_argument(
        "--plans", type=int, default=1000, help="random plans to order (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
