"""One searcher, one plan: find the fastest plan that fits, say why, and write its file.

The file runs unchanged with experiments.predict and every other command that takes plans. The best
plans are played by the event simulator after the search: the file has the one predicted fastest,
unless another is clearly faster when played.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import run
from experiments.cli.search_parser import search_parser


def main(arguments: Sequence[str]) -> int:
    """Search, write the plan, print one page about it."""
    options = _parser().parse_args(arguments)
    from experiments.comparing.tuning import tune  # noqa: PLC0415 (not for --help)

    return tune(options)


def _parser() -> argparse.ArgumentParser:
    parser = search_parser("tune", __doc__, json=False, quick=False)
    parser.add_argument("--searcher", default="mist", help="by name (default: mist)")
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PLAN.yaml",
        default=Path("runs/tune/plan.yaml"),
        help="the plan file (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
