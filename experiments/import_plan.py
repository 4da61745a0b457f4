"""A plan file from a launch script of Megatron-LM, or from another framework's configuration.

FILE is a launch script, a configuration of another framework, or a folder with one of them.
Options give what FILE does not say: --set NAME=VALUE a variable of a script, arguments after --
those that the script is started with. The plan goes to standard output. Standard error tells what
was read, and what was assumed, ignored or found to contradict itself. Ask experiments.predict what
the plan costs, and experiments.tune --from what to change.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cli.commandline import PLANS, parser_of, run
from mistlab.engines.table import names_for_plans

EXAMPLE = PLANS / "pretrain-gpt3-2.7b.sh"
# As in mistlab.formats.table, which is imported once it is needed.
FORMATS = (
    *("megatron", "megatron-test", "megatron-yaml", "megatron-bridge", "nemo", "primus"),
    *("flagscale", "deepspeed", "accelerate", "hf-trainer", "torchtitan", "nanotron"),
    *("gpt-neox", "llm-foundry", "llama-factory", "axolotl"),
)


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
    parser.add_argument(
        "--set",
        metavar="NAME=VALUE",
        action="append",
        default=[],
        help="a variable of a launch script, in place of the script's own value; may be repeated",
    )
    parser.add_argument(
        "--line", type=int, help="line of the command to read, where a script starts several"
    )
    parser.add_argument(
        "--strict", action="store_true", help="exit status 1 if anything was assumed or ignored"
    )
    parser.add_argument("--micro-batch", type=int, help="sequences of a replica in a micro-batch")
    parser.add_argument("--vocab-size", type=int, help="tokens of a tokenizer that is not known")
    parser.add_argument(
        "--engine",
        choices=names_for_plans(),
        metavar="ENGINE",
        help="engine that stands for the framework in predictions, such as megatron-core (default: "
        "megatron, deepspeed or fsdp)",
    )
    parser.add_argument(
        "--format",
        choices=FORMATS,
        metavar="FORMAT",
        help="whose file it is (default: by its keys)",
    )
    arguments, options_of_script = _split(arguments)
    options = parser.parse_args(arguments)
    options.arguments = options_of_script
    from experiments.exporting.importing import import_plan  # noqa: PLC0415 (not for --help)

    return import_plan(options)


def _split(arguments: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """The command's own arguments, and those of the launch script after ``--``; None without it."""
    if "--" not in arguments:
        return arguments, None
    end = list(arguments).index("--")
    return arguments[:end], arguments[end + 1 :]


if __name__ == "__main__":
    sys.exit(run(main, sys.argv[1:]))
