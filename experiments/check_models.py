"""How many Hugging Face model types are read, and whether they count as transformers counts them.

Of every causal language model of transformers the default configuration is read and its parameters
are counted, beside those that the library itself builds on torch's meta device. Types that are
refused are listed with the reason. Each file is read twice: as the library writes it, and with all
keys left out.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Read and count, print and write the table."""
    options = _parser().parse_args(arguments)
    from experiments.questions.model_types import check, write_types  # noqa: PLC0415 (not for --help)

    return check(options) if options.types is None else write_types(options.types)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("check_models", __doc__)
    parser.add_argument(
        "--types",
        type=Path,
        metavar="PAGE.md",
        help="write the table of types from the package's data, and count nothing",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
