"""Check without a GPU that a plan would run right on GPUs.

There are three checks. Collectives: all ranks of a group must make its calls in one order, and no
ranks may wait in a circle. Hidden waits: the code of run_plan --device cuda runs on a device
without memory, which notices copies that block, values that are read, and tensors in the wrong
place. Races: the code runs on CPU tensors, and notes streams and events in a graph. Uses of the
same memory on two streams must be ordered, and no memory may be handed out again while a stream
uses it. One rank of each kind runs, with small sizes and the plan's structure. Exit status 0:
clean; 1: findings.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, parser_of
from experiments.running.run_process import run_as_process

EXAMPLE = PLANS / "tiny-gpt.yaml"


def main(arguments: Sequence[str]) -> int:
    """Check the plans one after another."""
    options = _parser().parse_args(arguments)
    from experiments.running.sanitizing import sanitize  # noqa: PLC0415 (not for --help)

    return sanitize(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("sanitize", __doc__, json=False)
    parser.add_argument("plan", metavar="PLAN.yaml", nargs="*", type=Path, default=[EXAMPLE])
    parser.add_argument("--clip-norm", type=float, help="as for run_plan")
    parser.add_argument("--loss-scale", type=float, help="as for run_plan")
    parser.add_argument("--step-on-cpu", action="store_true", help="as for run_plan")
    parser.add_argument("--serialise", action="store_true", help="as for run_plan")
    return parser


if __name__ == "__main__":
    run_as_process(main, sys.argv[1:], at_once=True)
