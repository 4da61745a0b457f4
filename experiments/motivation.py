"""The motivating case: a pipeline that recomputes everything, beside ZeRO-2 and 28 of 32 blocks.

GPT-3 2.7B on four L4, sequence 4096, batch 8. Both plans are predicted, played and drawn one below
the other, and the spaces are searched one after another: does a search find the second plan?
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Predict, play and draw both plans, and search the spaces."""
    options = _parser().parse_args(arguments)
    from experiments.bars.motivation import motivated  # noqa: PLC0415 (not for --help)

    return motivated(options)


def _parser() -> argparse.ArgumentParser:
    return experiment_parser("motivation", __doc__, hardware="l4-24gb")


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
