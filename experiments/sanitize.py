"""Check without a GPU that a plan would run right on GPUs.

Three checks. Collectives: all ranks of a group enter its calls in one order, nobody waits in a
circle. Hidden waits: the code of run_plan --device cuda runs on a device without memory, where a
copy that blocks, a value that is read and a tensor in the wrong place show. Races: it runs again on
CPU tensors, streams and events being notes in a graph; uses of the same memory on two streams must
be ordered, and no memory may be handed out again while somebody uses it. Ranks that differ run one
after another; sizes are made small, the structure is kept. Exit status 0: clean; 1: findings.
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
