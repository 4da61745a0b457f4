"""Trace a model of your own into a file that a plan's `model:` may name.

SOURCE is one of
  package.module:factory   a function that returns a torch.nn.Module; one that takes
                           tensor_parallel gets the degree as a symbol
  PATH/config.json         a Hugging Face configuration, or its folder; nothing is downloaded
  MODEL.yaml               the mapping of a plan file's `model:`, for structures that the
                           catalogue's families do not have

The model runs one training step with symbolic batch and sequence, without memory for its tensors.
Reading the file, and all that is computed from it, needs no torch.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import parser_of, run


def main(arguments: Sequence[str]) -> int:
    """Trace and write; a summary goes to standard output."""
    options = _parser().parse_args(arguments)
    from experiments.running.tracing import trace  # noqa: PLC0415 (not for --help)

    return trace(options)


def _parser() -> argparse.ArgumentParser:
    parser = parser_of("trace", __doc__, json=False)
    parser.add_argument("source", metavar="SOURCE", help="what to trace")
    parser.add_argument(
        "--out", type=Path, required=True, metavar="MODEL.json", help="the file to write"
    )
    parser.add_argument("--name", help="the model's name (default: that of the source)")
    parser.add_argument(
        "--attention",
        choices=("flash", "math"),
        help="trace only one kind of attention of a configuration (default: both)",
    )
    parser.add_argument(
        "--precision",
        choices=("fp16", "bf16", "fp32"),
        help="trace only 16-bit or only 32-bit training (default: both)",
    )
    parser.add_argument(
        "--blocks", metavar="PATH", help="attribute path of the list of blocks, if not found"
    )
    parser.add_argument(
        "--sequence-length",
        type=int,
        default=128,
        help="the number that decides where the model's code branches on the sequence "
        "(default: 128)",
    )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
