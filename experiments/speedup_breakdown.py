"""What each component brings over Megatron-LM as published, one after another and each left out.

GPT on 8, 16 and 32 L4 and A100. From 3D parallelism with every block recomputed, spaces get ZeRO-2
and 3, flexible checkpointing, offloading and uneven blocks, chosen for each stage. The last step is
no space: the search comes to know what the first and the last micro-batch take beyond the others.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Search every step, print and write the bars."""
    options = _parser().parse_args(arguments)
    from experiments.bars.breakdown import broken_down  # noqa: PLC0415 (not for --help)

    return broken_down(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("speedup_breakdown", __doc__, hardware=None)
    parser.add_argument(
        "--view",
        default="blind",
        help="what searches see until they know about first and last micro-batches: blind or "
        "average (default: %(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
