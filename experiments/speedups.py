"""Predicted and played speedups over the grids of Megatron-LM and DeepSpeed, beside published ones.

Each workload of the published evaluation is searched by mist in its own space, and all plans of
the two baselines' spaces are predicted in their own engines; the event simulator plays each one's
best. Where the Megatron grid's best plan has a shape that space mist lacks, mist searches space
wide too, and the row says so. Nothing is adjusted.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Search the grid, print and write the table."""
    options = _parser().parse_args(arguments)
    from experiments.comparing.speedups import speedups  # noqa: PLC0415 (not for --help)

    return speedups(options)


def _parser() -> argparse.ArgumentParser:
    return parser_of(
        "speedups",
        __doc__,
        hardware=None,
        seed=0,
        out=Path("runs/speedups"),
        json=False,
        quick=False,
    )


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
