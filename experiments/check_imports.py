"""Real launch files imported, and held against facts that readers wrote down.

FOLDER holds files of public repositories as OWNER__NAME/PATH, as the list that comes with this
package names them; the files themselves are not part of the package. Each file is imported as a
user would: with no options first, then with those options that the refusal asks for. Facts of some
files were written by readers who had not seen the import's answer.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Import each listed file, print and write the table."""
    parser = experiment_parser("check_imports", __doc__, hardware="a100-80gb")
    parser.add_argument("folder", metavar="FOLDER", type=Path)
    parser.add_argument(
        "--list", type=Path, metavar="CSV", help="files to import (default: the package's own list)"
    )
    parser.add_argument(
        "--facts", type=Path, metavar="YAML", help="facts of files (default: the package's own)"
    )
    parser.add_argument(
        "--answers", type=Path, metavar="YAML", help="arguments of scripts (default: the package's)"
    )
    parser.set_defaults(arguments=["folder"])
    options = parser.parse_args(arguments)
    from experiments.exporting.check_imports import check_imports  # noqa: PLC0415 (not for --help)

    return check_imports(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
