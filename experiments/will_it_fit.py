"""Whether a plan fits its GPUs, what fills them, and the cheapest change that makes it fit.

The plan is a file, or is described by options: replicas over all GPUs, as far as tensor and
pipeline parallelism leave them. Where it does not fit, changes of one kind are tried, then of
several together: more blocks recomputed, states sharded or swapped, smaller micro-batches, other
meshes. The cheapest is the one with the shortest predicted iteration. Where none of them fits, more
GPUs and other hardware are tried, and the boards that draw least power are the cheapest.
"""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PROBLEM, experiment_parser, run

LAYOUT = {
    "tensor_parallel": (1, "GPUs that share each layer"),
    "stages": (1, "pipeline stages"),
    "micro_batch": (1, "sequences of a replica at a time"),
    "zero": (0, "states sharded over replicas: 0, 1, 2 or 3"),
    "checkpointed_layers": (0, "blocks of a stage that are recomputed"),
}


def main(arguments: Sequence[str]) -> int:
    """Answer, print the table of changes, draw what fills the memory."""
    options = _parser().parse_args(arguments)
    from experiments.costing.fitting import will_it_fit  # noqa: PLC0415 (not for --help)

    return will_it_fit(options)


def _parser() -> argparse.ArgumentParser:
    parser = experiment_parser("will_it_fit", __doc__, **PROBLEM, keep_free_gib=None, engine=None)
    parser.add_argument("plan", metavar="PLAN.yaml", nargs="?", type=Path)
    parser.set_defaults(arguments=["plan"])
    for name, (value, what) in LAYOUT.items():
        parser.add_argument(
            f"--{name.replace('_', '-')}",
            type=int,
            default=value,
            metavar="N",
            help=f"{what} (default: {value})",
        )
    return parser


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
