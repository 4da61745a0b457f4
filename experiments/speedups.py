"""Predicted and played speedups over the grids of Megatron-LM and DeepSpeed, beside published ones.

Each workload of the published evaluation is searched by mist in its own space, and all plans of
the two baselines' spaces are predicted in their own engines; the event simulator plays each one's
best. Where the Megatron grid's best plan has a shape that space mist lacks, mist searches space
wide too, and the row says so. Nothing is adjusted.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Search the grid, print and write the table."""
    options = _parser().parse_args(arguments)
    from experiments.comparing.speedups import speedups  # noqa: PLC0415 (not for --help)

    return speedups(options)


def _parser() -> argparse.ArgumentParser:
    return experiment_parser("speedups", __doc__, hardware=None)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
