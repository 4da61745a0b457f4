"""One searcher, one plan: find the fastest plan that fits, say why, and write its file.

The file runs unchanged with experiments.predict and every other command that takes plans. After
the search the event simulator plays the best plan, and the plans that predictions cannot tell from
it. The file has the plan that is played fastest.

With --from PLAN.yaml nothing is searched. The command tells which changes of that plan gain most by
prediction, each alone and one after another. The file has the plan with all of them.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import run
from experiments.cli.search_parser import check_alone, search_parser


def main(arguments: Sequence[str]) -> int:
    """Search, write the plan, print one page about it."""
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.start is not None:
        check_alone(parser, options)
        from experiments.exporting.improving import improve  # noqa: PLC0415 (not for --help)

        return improve(options)
    from experiments.comparing.tuning import tune  # noqa: PLC0415 (not for --help)

    return tune(options)


def _parser() -> argparse.ArgumentParser:
    parser = search_parser("tune", __doc__, json=False, quick=False)
    parser.add_argument(
        "--searcher",
        help="by name (default: mist, or aceso for models that mist refuses, such as deepseek-v3)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="PLAN.yaml",
        default=Path("runs/tune/plan.yaml"),
        help="the plan file (default: %(default)s)",
    )
    parser.add_argument(
        "--from",
        dest="start",
        type=Path,
        metavar="PLAN.yaml",
        help="tell the few changes of this plan that gain most, instead of searching; model, "
        "cluster and batch are the plan's own",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
