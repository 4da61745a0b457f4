"""A plan file from a launch script of Megatron-LM, or from another framework's configuration.

FILE is a launch line or shell script of Megatron-LM, a DeepSpeed JSON, a torchtitan TOML or an
Accelerate YAML; options give what it does not say. The plan goes to standard output. Standard error
tells what was assumed, ignored or found to contradict itself. Ask experiments.predict what the plan
costs, and experiments.tune --from what to change.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, parser_of, run
from mistlab.engines.table import names_for_plans

EXAMPLE = PLANS / "pretrain-gpt3-2.7b.sh"
FORMATS = ("megatron", "deepspeed", "torchtitan", "accelerate")


def main(arguments: Sequence[str]) -> int:
    """Import a file."""
    parser = parser_of(
        "import_plan",
        __doc__,
        model=None,
        hardware="l4-24gb",
        nodes=None,
        gpus_per_node=None,
        sequence_length=None,
        global_batch=None,
        attention=None,
        precision=None,
        json=False,
    )
    parser.add_argument("file", metavar="FILE", nargs="?", type=Path, default=EXAMPLE)
    parser.add_argument("--micro-batch", type=int, help="sequences of a replica in a micro-batch")
    parser.add_argument(
        "--engine",
        choices=names_for_plans(),
        metavar="ENGINE",
        help="engine that stands for the framework in predictions, such as megatron-core (default: "
        "megatron, deepspeed or fsdp)",
    )
    parser.add_argument(
        "--format", choices=FORMATS, help="whose file it is (default: by its ending)"
    )
    options = parser.parse_args(arguments)
    from experiments.exporting.importing import import_plan  # noqa: PLC0415 (not for --help)

    return import_plan(options)


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
