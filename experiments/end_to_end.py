"""The published evaluation, predicted: speedups over two kinds of baselines, case by case.

Three families in five sizes on L4 and A100, with fused attention, and GPT's written out too.
Megatron-LM and DeepSpeed are searched twice: as published, with every block recomputed, and as a
user would tune them. Aceso is searched on its own engine. Every winner is predicted and played.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Search the grid, print and write the tables."""
    options = _parser().parse_args(arguments)
    from experiments.bars.end_to_end import evaluated  # noqa: PLC0415 (not for --help)

    return evaluated(options)


def _parser() -> argparse.ArgumentParser:
    return experiment_parser("end_to_end", __doc__, hardware=None)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
