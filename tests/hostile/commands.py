"""Each command with arguments that make its honest work small, and the options that it has."""

import argparse
import importlib
from collections.abc import Mapping, Sequence
from functools import cache
from unittest.mock import patch

from experiments import commands

COMMANDS: Sequence[str] = tuple(commands.COMMANDS)

PROBLEM = (
    *("--model", "gpt3-125m", "--gpus-per-node", "2"),
    *("--sequence-length", "512", "--global-batch", "8"),
)
OUT = ("--out", "out")
_TUNE = (*PROBLEM, "--space", "3d", "--budget-evaluations", "50")

# Arguments of an honest call whose work takes few seconds. Options that a case gives come after
# them, and count instead.
SMALL: Mapping[str, Sequence[str]] = {
    "predict": ("plan.yaml", "--json"),
    "analyse": ("plan.yaml", "--json"),
    "survey": (*PROBLEM, "--quick", "--json", *OUT),
    "export": ("plan.yaml", "--to", "megatron"),
    "import_plan": ("script.sh", "--json"),
    "tune": (*_TUNE, "--json", "--out", "tuned.yaml"),
    "sweep": ("sweep.yaml", "--json", *OUT),
    "compare_searchers": (*_TUNE, "--searchers", "random", "--json", *OUT),
    "ladder": (*PROBLEM, "--quick", "--json", *OUT),
    "motivation": ("--quick", "--json", *OUT),
    "partitions": ("--quick", "--json", *OUT),
    "space_size": (*PROBLEM, "--quick", "--json", *OUT),
    "will_it_fit": (*PROBLEM, "--json", *OUT),
    "estimate": (*PROBLEM, "--nodes", "1", "--quick", "--json", *OUT),
    "reliability": ("--runs", "2", "--quick", "--json", *OUT),
    "run_plan": ("single.yaml", "--steps", "1", "--json"),
    "run_plans": ("runs", "--steps", "1", "--json", *OUT),
    "sanitize": ("single.yaml", "--json"),
    "calibrate_runs": ("runs.csv", "--fit", "launch_us", "--evaluations", "3", "--json"),
    "predict_runs": ("runs.csv", "--json"),
    "report_runs": ("runs.csv", *OUT),
    "trace": ("model.yaml", "--out", "traced.json"),
    "gpu_report": ("--dry-run", "--json", *OUT),
}
# What these options ask for is work: as much as they say.
OF_WORK = frozenset(
    (
        *("--budget-evaluations", "--budget-seconds", "--evaluations", "--runs", "--steps"),
        *("--plans", "--trials", "--repeats", "--seconds", "--minutes", "--restarts", "--jobs"),
    )
)
# The honest work of all others takes longer than a case may: they get what must be refused.
LONG = tuple(name for name in COMMANDS if name not in SMALL)


@cache
def options_of(command: str) -> tuple[argparse.Action, ...]:
    """The options of a command, as its parser has them."""
    module = importlib.import_module(f"experiments.{command}")
    with patch.object(argparse.ArgumentParser, "parse_args", _stop):
        try:
            module.main([])
        except _ParserMade as made:
            actions: Sequence[argparse.Action] = made.parser._actions
    return tuple(action for action in actions if "--help" not in action.option_strings)


class _ParserMade(BaseException):
    """A command has made its parser."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__(parser)
        self.parser = parser


def _stop(parser: argparse.ArgumentParser, *_: object, **__: object) -> None:
    raise _ParserMade(parser)
