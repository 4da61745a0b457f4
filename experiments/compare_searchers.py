"""All searchers on one problem: which finds the best plan, how fast, how far from optimal.

All ask one predictor with one budget and seed; the Megatron and DeepSpeed grids search spaces of
their own, the others the one given. Every winner is played by the event simulator. The folder of
--out gets rows, plan files, the best plan's timeline and one HTML page; a run of the same options
goes on where an earlier one was stopped.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import run
from experiments.cli.search_parser import search_parser

COMMAND = "compare_searchers"


def main(arguments: Sequence[str]) -> int:
    """Compare, print a table and the reasons, fill the run directory."""
    options = _parser().parse_args(arguments)
    from experiments.comparing.conclusion import compare  # noqa: PLC0415 (not for --help)

    return compare(options)


def _parser() -> argparse.ArgumentParser:
    parser = search_parser(
        COMMAND, __doc__, out=Path(f"runs/{COMMAND}"), page=None, json=False, quick=False
    )
    parser.add_argument(
        "--searchers",
        metavar="A,B,...",
        help="the searchers to compare (default: all that can ask the predictor, once each)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
