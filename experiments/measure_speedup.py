"""Measured speedups: this package's plan against Megatron-core, DeepSpeed and FSDP2, side by side.

For each model, memory cap and batch every system tries as many plans of its own, those predicted
fastest that fit. The best one of each then runs in turn with the others, several times. Running out
of memory is a result. A call ends after some minutes; the same call again goes on. A run that the
end of a call cuts begins again. Needs pip install '.[baselines]'.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli.commandline import experiment_parser, run


def main(arguments: Sequence[str]) -> int:
    """Measure, print and write a table."""
    options = _parser().parse_args(arguments)
    from experiments.measuring.measuring import measure  # noqa: PLC0415 (not for --help)

    return measure(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser(
        "measure_speedup",
        __doc__,
        hardware="h100-80gb",
        gpus_per_node=1,
        sequence_length=2048,
        attention="flash",
        precision="bf16",
    )
    parser.add_argument(
        "--models", default="gpt3-1.3b", help="models, with commas (default: %(default)s)"
    )
    parser.add_argument(
        "--cap-gib",
        default="24,40,80",
        help="limits of a GPU's memory, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--batches",
        default="8,16,32,64",
        help="sequences of a step, with commas (default: %(default)s)",
    )
    parser.add_argument(
        "--systems",
        default="mistlab,megatron,deepspeed,deepcompile,fsdp",
        help="systems, with commas; the first is held against the others (default: %(default)s)",
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cuda")
    parser.add_argument("--trials", type=int, default=4, help="plans of each system (default: 4)")
    parser.add_argument(
        "--repeats", type=int, default=3, help="runs of each best plan (default: 3)"
    )
    parser.add_argument(
        "--steps", type=int, default=6, help="steps of a run (default: %(default)s)"
    )
    parser.add_argument(
        "--seconds", type=float, default=540, help="time limit of this call (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
