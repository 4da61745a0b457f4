"""How training scales from 8 to 12,288 GPUs: published weak scaling, and searched plans.

Megatron-LM's published table of weak scaling, 1.7 billion to a trillion parameters, stands beside
predictions of its plans. Then plans are searched: the batch grows with the GPUs (weak), or stays as
it is (strong), and networks are slower by a factor. A trained 405-billion-parameter model, and the
latency of all-reduces, end the page.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Predict and search, print and write the tables."""
    options = _parser().parse_args(arguments)
    from experiments.questions.scaling import scaling  # noqa: PLC0415 (not for --help)

    return scaling(options)


def _parser() -> argparse.ArgumentParser:
    return experiment_parser(
        "scaling", __doc__, model="gpt3-13b", hardware="a100-80gb", sequence_length=2048
    )


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
