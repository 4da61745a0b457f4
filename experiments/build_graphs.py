"""Trace the catalogue's models and write the layer graphs that are shipped."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Write every variant's graph; progress goes to standard error."""
    options = _parser().parse_args(arguments)
    from experiments.running.shipped_graphs import build_graphs  # noqa: PLC0415 (not for --help)

    return build_graphs(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("build_graphs", __doc__)
    parser.add_argument("--out", type=Path, metavar="DIR", help="folder (default: the package's)")
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
