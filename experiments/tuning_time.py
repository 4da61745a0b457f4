"""How long tuning takes: GPT-3 22B on 32 GPUs, with one kind of saving more from step to step.

The order is 3D, +CKPT, +ZeRO, then offloading of optimizer state, activations, gradients and
weights. Aceso searches the same spaces, Alpa its own; times are to the end, to within 1 % of the
end, and to the quality that both of two searches reach. All searchers are this project's.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Search every space by each searcher, print and write the times."""
    options = _parser().parse_args(arguments)
    from experiments.bars.tuning_time import timed  # noqa: PLC0415 (not for --help)

    return timed(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("tuning_time", __doc__, hardware="l4-24gb")
    parser.add_argument(
        "--plans",
        type=int,
        default=3000,
        help="plans after which a search is ended, 1,000 stage candidates as one (default: "
        "%(default)s)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
