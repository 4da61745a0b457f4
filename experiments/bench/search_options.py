"""Turns the options of search commands into a problem, a search space, searchers and a budget."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import cast

from experiments.bench.problem import problem_of
from experiments.cli.commandline import as_options, progress
from experiments.cli.other_programs import value_here
from mistlab.core.files import about
from mistlab.core.values import near_matches, one_of, reject
from mistlab.engines.engine import ENGINES, names_for_plans
from mistlab.job.search import Budget, Problem, StageCostModel
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from mistlab.plan.space_files import space_from
from mistlab.plan.workload import ModelSpec
from searchers.registry import SEARCHERS
from searchers.savings import why_empty
from searchers.strategy import NeedsStageCosts
from simulators.registry import PREDICTORS

# Searchers that predict every plan of a fixed space of their own, and ignore the search space that
# the other searchers get.
OWN_SPACES = ("megatron", "deepspeed", "megatron:published", "deepspeed:published")


def searched(options: argparse.Namespace) -> tuple[Problem, SearchSpace]:
    """The problem and the search space that the options describe; refuses a problem for which no
    plan divides evenly.
    """
    named = options.space or options.engine
    usual = _space_of_tuners(options.engine) or "mist"
    engines = space_called(options.space or usual, options.engine).engines if named else ()
    workload, cluster = problem_of(options, takes_groups=True, engines=engines)
    called = options.space or usual_space(workload.model, options.engine)
    space = space_called(called, options.engine)
    asked = space.engines
    with as_options():
        space = space.beside(workload.reduction).holding(workload.base)
    if gone := [name for name in asked if name not in space.engines]:
        progress(
            f"note: no plan of space {space.name} is left for engine {one_of(gone)}, which does "
            f"not divide weights of {workload.base}: it is left out"
        )
    problem = Problem(workload=workload, cluster=cluster)
    for engine in space.engines:
        if (precision := workload.precision) not in ENGINES[engine].memory:
            able = [name for name in names_for_plans() if precision in ENGINES[name].memory]
            gpus = [group.hardware.gpu for group in cluster.of_groups]
            usable = [name for name in ENGINES[engine].memory if all(gpu.has(name) for gpu in gpus)]
            reject(
                f"--precision {precision}, but engine {engine} does not train in it: give "
                f"{f'{one_of(usable)}, or ' if usable else ''}--engine {able[0]}"
            )
    if reason := why_empty(problem, space):
        reject(f"--global-batch {workload.global_batch} on {cluster.num_gpus} GPUs: {reason}")
    return problem, space


def usual_space(model: ModelSpec, engines: str | None = None) -> str:
    """The default search space for a model and the engines that were asked for. Programs for
    fine-tuning get the space of what their recipes can express. Any other model with experts gets a
    space with expert parallelism, which space ``mist`` lacks and without which DeepSeek-V3 would
    fit on no cluster.
    """
    return _space_of_tuners(engines) or ("mist" if model.experts is None else "moe")


def _space_of_tuners(engines: str | None) -> str:
    """The search space of programs for fine-tuning if all engines are theirs; empty otherwise."""
    rows = [ENGINES[name] for name in (engines or "").split(",") if name in ENGINES]
    return "trainer" if rows and not any(row.recomputes_some for row in rows) else ""


def space_called(called: str, engines: str | None) -> SearchSpace:
    """The search space of this name or file; if engines are given, only its plans for these
    engines.
    """
    with about("--space"):
        space = space_from(called, Path())
    if engines is None:
        return space
    names = list(dict.fromkeys(engines.split(",")))
    for name in names:
        if ours := value_here("--engine", name):
            reject(f"--engine: {name!r} is unknown: {ours}")
        if name not in names_for_plans():
            reject(f"--engine: {name!r} is unknown{near_matches(name, names_for_plans())}")
    return space.on(*names)


def space_for(searcher: str, space: SearchSpace) -> SearchSpace:
    """The search space of a searcher if the option ``--space`` is ``space``; grid searches have a
    space of their own instead.
    """
    return space_of(searcher) if searcher in OWN_SPACES else space


def searchers_called(
    names: Sequence[str], predictor: str = "symbolic", option: str = "--searchers"
) -> list[str]:
    """The searchers with the names that an option gives, without repetitions; refuses unknown
    names, and searchers that need more than the predictor offers.
    """
    for name in names:
        if name not in SEARCHERS:
            reject(f"{option}: {name!r} is unknown{near_matches(name, SEARCHERS)}")
        if not can_ask(name, predictor):
            others = ", ".join(other for other in SEARCHERS if can_ask(other, predictor))
            reject(
                f"--predictor {predictor}: predicts whole plans only, but searcher {name} needs "
                f"costs of single stages: give --predictor symbolic, or a searcher among {others}"
            )
    return list(dict.fromkeys(names))


def can_ask(searcher: str, predictor: str) -> bool:
    """Whether a predictor offers all methods that a searcher calls."""
    if not isinstance(SEARCHERS[searcher], NeedsStageCosts):
        return True
    return issubclass(cast("type", PREDICTORS[predictor]), StageCostModel)


def budget_of(options: argparse.Namespace, default: Budget) -> Budget:
    """The search budget that the options ask for, or the default."""
    evaluations, seconds = options.budget_evaluations, options.budget_seconds
    cpu_seconds = options.budget_cpu_seconds
    if evaluations is None and seconds is None and cpu_seconds is None:
        return default
    if seconds is not None and cpu_seconds is not None:
        reject(
            f"--budget-seconds {seconds:g} and --budget-cpu-seconds {cpu_seconds:g}: only one of "
            "them can limit a search: leave the other out"
        )
    if cpu_seconds is None:
        with as_options("budget-"):
            return Budget(evaluations=evaluations, seconds=seconds)
    with as_options("budget-cpu-"):
        return Budget(evaluations=evaluations, seconds=cpu_seconds, clock="cpu")
