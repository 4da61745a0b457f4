"""A plan in the words of Megatron-LM, DeepSpeed, torchtitan or Accelerate.

The nearest form that the framework can say goes to standard output. Standard error tells what is
lost or approximated, and what that costs by prediction. Exit status 3: the plan fits, but does not
fit any more as it was written. With --strict whatever is not said exactly, to the last figure of
its prediction, is exit status 1; with --check the framework's own classes must take the text.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, parser_of, run

EXAMPLE = PLANS / "gpt3-2.7b-4xl4.yaml"
# As in mistlab.export.table, which is imported once it is needed.
TARGETS = ("megatron", "deepspeed", "torchtitan", "torchtitan-toml", "accelerate")


def main(arguments: Sequence[str]) -> int:
    """Export a plan file."""
    parser = parser_of("export", __doc__, json=False)
    parser.add_argument("plan", metavar="PLAN.yaml", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument(
        "--to", choices=TARGETS, help="(default: that of the plan's engine, or megatron)"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 if the plan is not said exactly"
    )
    parser.add_argument(
        "--check", action="store_true", help="build the framework's own configuration from the text"
    )
    options = parser.parse_args(arguments)
    from experiments.exporting.exporting import export  # noqa: PLC0415 (not for --help)

    return export(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
