"""A command as a row of a table: the import path of its function, and its options.

``--help`` prints the docstring of the command's function. Neither the row nor its parser imports
the function's module: it is imported when the options have been parsed.
"""

import argparse
import inspect
import os
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, NoReturn, get_args

from experiments.cli.commandline import (
    DONE,
    NO_ANSWER,
    OF_CLUSTER,
    PLANS,
    PROBLEM_OF_ENGINES,
    TRAINED,
    parser_of,
    run,
)
from mistlab.core.values import imported
from mistlab.engines.engine import Precision, names_for_plans
from simulators.registry import PREDICTORS

ROOT = Path(__file__).parents[2]
EXAMPLE = PLANS / "gpt3-2.7b-4xl4.yaml"
TINY = PLANS / "tiny-gpt.yaml"
DEVICES = ("cpu", "cuda")
# The names of fused attention kernels that a command's option accepts.
KERNELS = ("flash", "cudnn", "flash-attn")
UNLIMITED = 1 << 20
# The path of the glossary page in a checkout of the repository.
GLOSSARY = "docs/glossary.md"
# The exit status of a command that runs a plan and fails unexpectedly, usually because of a device;
# the command prints a traceback.
CRASHED = 3
# Megatron-LM's published runs to which a calibration is fitted: each a number of GPUs times a
# number of layers.
FOLDS = "2x16,4x24,8x12,512x48"

Option = tuple[str, Mapping[str, Any]]
# The three ways to end a command's process: the usual way; at once if it failed, without waiting
# for its threads; or at once in every case.
Ending = Literal["usual", "at once after a failure", "at once"]


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the import path of its function, the shared options that it takes, with their
    defaults, and its further options.

    With ``searches`` it also has the options of searches. ``arguments`` are the names of positional
    arguments, for the command line that a run's page shows. The function gets the parsed options;
    with ``takes_line`` also the command line. With ``takes_rest``, the words after ``--`` become
    ``arguments`` of the parsed options. ``examples`` end the ``--help`` text: each is a purpose,
    with the words that follow the command's name to serve it.
    """

    function: str
    common: Mapping[str, Any]
    options: Sequence[Option] = ()
    searches: bool = False
    arguments: Sequence[str] = ()
    takes_line: bool = False
    takes_rest: bool = False
    ends: Ending = "usual"
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def description(self) -> str:
        """The docstring of the command's function, read without importing its module."""
        module, _, name = self.function.partition(":")
        text = (ROOT / f"{module.replace('.', '/')}.py").read_text(encoding="utf-8")
        _, _, after = text.partition(f"\ndef {name}(")
        return inspect.cleandoc(after.split('"""')[1])

    @property
    def summary(self) -> str:
        """The first sentence of the description."""
        return " ".join(self.description.partition("\n\n")[0].split())


Group = Mapping[str, Command]


def command(function: str, common: Mapping[str, Any], *options: Option, **settings: Any) -> Command:
    """A ``Command`` with these fields."""
    return Command(function, common, options, **settings)


def option(name: str, about: str = "", default: Any = None, **settings: Any) -> Option:
    """An option of a command; its type is that of its default value, which the help shows."""
    if default is not None:
        settings["default"] = default
        if isinstance(default, int | float | Path):
            settings.setdefault("type", type(default))
        if "default" not in about and name.startswith("--") and default not in ("", []):
            about = f"{about} (default: %(default)s)" if about else "default: %(default)s"
    return name, {**settings, "help": about or None}


def flag(name: str, about: str) -> Option:
    """An option of a command that takes no value."""
    return name, {"action": "store_true", "help": about}


def path(metavar: str) -> dict[str, Any]:
    """The settings of an option whose value is the path of a file or folder."""
    return {"type": Path, "metavar": metavar}


def experiment(name: str) -> dict[str, Any]:
    """The options of all experiments, which keep their results in a folder."""
    return {"seed": 0, "out": Path("runs") / name, "page": None, "json": False, "quick": False}


# The option for the precision, in commands whose options name the engines that train.
PRECISION = option(
    "--precision",
    "precision of the training (default: fp16, or bf16 with engines of FSDP, of trainers or "
    "without fp16; of these one that the GPUs have)",
    choices=get_args(Precision),
)
_SEARCH = (
    PRECISION,
    option(
        "--space",
        "search space, which says which plans may be chosen: 3d, mist, wide, ...,"
        " or a file (default: mist; moe for models with experts; trainer for engines trainer...)",
    ),
    option(
        "--engine",
        "engines that may run the plans, in place of the space's own: each has the choices of the "
        f"space that it can run; of {', '.join(names_for_plans())}",
        metavar="ENGINE[,ENGINE...]",
    ),
    option(
        "--predictor",
        "the predictor that searchers ask; events plays whole plans, and cannot be asked for costs "
        "of single stages",
        "symbolic",
        choices=tuple(PREDICTORS),
    ),
    option(
        "--view",
        "what the predictor of searches takes into account: everything (full), no"
        " overlap of streams (serial), no slowdown of overlapping streams "
        "(ideal), the extra time of first and last micro-batches spread over all "
        "(average), or not at all (blind)",
        "full",
    ),
    option("--budget-seconds", "seconds that a searcher may take", type=float),
    option(
        "--budget-cpu-seconds",
        "CPU seconds that a searcher may take: unlike elapsed seconds, they give "
        "the same plans on a busy machine",
        type=float,
    ),
    option(
        "--budget-evaluations",
        "plans that a searcher may have predicted; 1,000 stage candidates count as one",
        type=int,
    ),
)


def parser_for(command: Command, program: str) -> argparse.ArgumentParser:
    """The argument parser of a command, for a program of this name."""
    common = dict(command.common)
    if command.searches:
        common = {**PROBLEM_OF_ENGINES, **TRAINED, **dict.fromkeys(OF_CLUSTER), "seed": 0, **common}
    parser = parser_of(program, command.description, **common)
    parser.epilog = _examples(command, program)
    for flags, settings in (*(_SEARCH if command.searches else ()), *command.options):
        parser.add_argument(flags, **settings)
    if command.arguments:
        parser.set_defaults(arguments=[*command.arguments])
    return parser


def _examples(command: Command, program: str) -> str | None:
    """The example calls of a command, and the path of the glossary, as the end of its help; None
    without examples.
    """
    lines = [f"  # {purpose}\n  {program} {words}" for purpose, words in command.examples.items()]
    return "\n".join(["examples:", *lines, "", f"Words: {GLOSSARY}"]) if lines else None


def main_of(name: str, command: Command, *, program: str = "") -> Callable[[Sequence[str]], int]:
    """A function that runs a command with the arguments of a command line, and returns its exit
    status.
    """

    def main(line: Sequence[str]) -> int:
        arguments, rest = _split(line) if command.takes_rest else (line, None)
        parser = parser_for(command, program or f"python -m experiments.{name}")
        options = parser.parse_args(arguments)
        if command.takes_rest:
            options.arguments = rest
        status: int = imported(command.function)()(options, *([line] if command.takes_line else []))
        return status

    return main


def execute(name: str, command: Command, line: Sequence[str], *, program: str = "") -> NoReturn:
    """Run a command, and end the process with its exit status."""
    main = main_of(name, command, program=program)
    if command.ends == "usual":
        sys.exit(run(main, line))
    run_as_process(main, line, at_once=command.ends == "at once")


def run_as_process(
    main: Callable[[Sequence[str]], int], arguments: Sequence[str], *, at_once: bool = False
) -> NoReturn:
    """Run a command, and end the process with its exit status: at once if ``at_once`` is true,
    after a failure, or if the command started other ranks.

    Other ranks learn of a failure when this process's connections close, so threads that wait for a
    device or for these ranks must not keep the process alive. In a usual end, a thread of gloo
    would abort the process when the interpreter ends, and so would autograd's thread for a device
    without a driver.
    """
    try:
        status = run(main, arguments)
    except Exception as error:
        traceback.print_exc()
        status = CRASHED if isinstance(error, RuntimeError) else NO_ANSWER
    alone = os.environ.get("WORLD_SIZE", "1") == "1"
    if status == DONE and alone and not at_once:
        sys.exit(status)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)


def _split(line: Sequence[str]) -> tuple[Sequence[str], Sequence[str] | None]:
    """The two parts of a command line split at ``--``: the command's arguments, and those that
    follow; the second is None without ``--``.
    """
    if "--" not in line:
        return line, None
    end = list(line).index("--")
    return line[:end], line[end + 1 :]
