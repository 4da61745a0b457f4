"""Every candidate of a space at once: what fits, and what it costs to make it fit.

A candidate is a pipeline of equal stages: its depth, data and tensor parallel degrees, micro-batch,
ZeRO level, checkpointed blocks and the four offload ratios. The survey evaluates the first and the
last stage of each and keeps, for every mesh, the least recomputation that fits for a given use of
host memory. It knows bytes and work, not times: those need a calibrated predictor.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import PROBLEM, experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Survey, print a table, write rows and a picture."""
    options = parser().parse_args(arguments)
    from experiments.reports.survey import surveyed  # noqa: PLC0415 (not for --help)

    return surveyed(options)


def parser() -> argparse.ArgumentParser:
    """The command's options."""
    return experiment_parser("survey", __doc__, **PROBLEM)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
