"""The whole loop on one machine: profile it, search, run a dozen plans and the baselines.

The machine is profiled, unless --hardware names its file. The best plans of a search and plans
drawn at random then run in turn, several times, with as many plans of each baseline as the search
gave. Predictions stand beside measurements. Without a GPU processes stand in for GPUs. A call that
was stopped goes on. Baselines need pip install '.[baselines]'; --systems mistlab leaves them out.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Profile, search, run, print a table."""
    options = _parser().parse_args(arguments)
    from experiments.measuring.whole_loop import whole_loop  # noqa: PLC0415 (not for --help)

    return whole_loop(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser(
        "whole_loop",
        __doc__,
        model=None,
        hardware=None,
        gpus_per_node=None,
        sequence_length=128,
        global_batch=8,
        attention="flash",
        precision=None,
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="default: cpu")
    parser.add_argument(
        "--plans", type=int, default=12, help="number of plans that run (default: 12)"
    )
    parser.add_argument(
        "--systems",
        default="mistlab,megatron,deepspeed",
        help="systems, with commas; mistlab is among them (default: %(default)s)",
    )
    parser.add_argument(
        "--trials",
        type=int,
        default=3,
        help="plans that a system tries, those predicted fastest; the best counts (default: 3)",
    )
    parser.add_argument(
        "--repeats", type=int, default=3, help="how often each plan runs (default: 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of a run (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
