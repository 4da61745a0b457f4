"""Random plans of all families exported to all targets, and held against what is claimed.

Batches and processes have to come out, what is said exactly has to be predicted equally in every
figure, what fitted has to fit or be told. A framework's own code takes its texts where it is
installed: here, or in the Python that --python names for a target.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import experiment_parser, run
from mistlab.values.errors import InputError


def _named(text: str) -> tuple[str, str]:
    target, found, python = text.partition("=")
    if not found or not Path(python).is_file():
        message = f"--python {text}: names no Python: give TARGET=PATH"
        raise InputError(message)
    return target, python


def main(arguments: Sequence[str]) -> int:
    """Export plans to all targets, print and write the table."""
    parser = experiment_parser("check_exports", __doc__)
    parser.add_argument(
        "--python",
        metavar="TARGET=PATH",
        nargs="+",
        help="the Python in which a target's framework is installed (default: this one)",
    )
    parser.add_argument(
        "--megatron-lm",
        metavar="DIR",
        type=Path,
        help="a checkout of Megatron-LM at core 0.16.1, whose parser takes launch lines, too",
    )
    options = parser.parse_args(arguments)
    pythons = dict(map(_named, options.python or ()))
    from experiments.exporting.export_check import check_exports  # noqa: PLC0415 (not for --help)

    return check_exports(options, pythons)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
