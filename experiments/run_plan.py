"""Train by a plan: alone, or under torchrun with as many processes as the plan has ranks.

On CUDA devices tasks overlap on streams; on CPUs the same program runs on simulated ones. Weights,
synthetic data and losses depend on the seed and the workload alone, never on the plan. With --stage
a stage runs by itself, as in its pipeline; what its neighbours would send is drawn at random.
"""

import sys
from collections.abc import Sequence

from experiments.cli.commandline import PLANS
from experiments.running.run_options import checked, run_parser
from experiments.running.run_process import run_as_process

EXAMPLE = PLANS / "tiny-gpt.yaml"


def main(arguments: Sequence[str]) -> int:
    """Run the plan; results go to standard output on the first rank alone."""
    options = checked(run_parser(__doc__, EXAMPLE).parse_args(arguments))
    from experiments.running.training import run_plan  # noqa: PLC0415 (not for --help)

    return run_plan(options, arguments)


if __name__ == "__main__":
    run_as_process(main, sys.argv[1:])
