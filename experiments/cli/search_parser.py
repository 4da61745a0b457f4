"""The options of commands that search for plans."""

import argparse
from typing import Any

from experiments.cli.commandline import OF_CLUSTER, PROBLEM, parser_of
from mistlab.engines.table import names_for_plans
from mistlab.values.errors import InputError
from simulators.registry import PREDICTORS

# Options that go with a plan to start from; all others are the plan's own.
BESIDE_A_PLAN = ("start", "out", "json", "quick", "seed")


def check_alone(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Refuse options that say what a plan to start from says itself."""
    given = [
        f"--{name.replace('_', '-')}"
        for name, value in vars(options).items()
        if name not in BESIDE_A_PLAN and value != parser.get_default(name)
    ]
    if given:
        message = f"--from: the plan says itself what {', '.join(given)} would: leave that out"
        raise InputError(message)


def search_parser(
    command: str, description: str | None, **defaults: Any
) -> argparse.ArgumentParser:
    """The options that say what to find a plan for, where, and with what budget."""
    parser = parser_of(
        command,
        description,
        **PROBLEM,
        **dict.fromkeys(OF_CLUSTER),
        seed=0,
        **defaults,
    )
    parser.add_argument(
        "--space",
        help="which plans may be chosen: 3d, mist, wide, ..., or a file (default: mist, or moe for "
        "models with experts)",
    )
    parser.add_argument(
        "--engine",
        metavar="ENGINE[,ENGINE...]",
        help="engines that may run the plans, in place of the space's own: each has the choices of "
        f"the space that it can run; of {', '.join(names_for_plans())}",
    )
    parser.add_argument(
        "--predictor",
        choices=tuple(PREDICTORS),
        default="symbolic",
        help="the predictor that searchers ask; events plays whole plans, and cannot be asked "
        "for costs of single stages (default: %(default)s)",
    )
    parser.add_argument(
        "--view",
        default="full",
        help="what searchers' predictor knows: all (full), no overlap of streams (serial), no "
        "slowdown of streams (ideal), first and last micro-batches spread (average) or not at all "
        "(blind) (default: %(default)s)",
    )
    parser.add_argument("--budget-seconds", type=float, help="seconds that a searcher may take")
    parser.add_argument(
        "--budget-evaluations",
        type=int,
        help="plans that a searcher may ask about, 1,000 stage candidates as one",
    )
    return parser
