"""A small problem and strategies that end at once, for tests of commands that search."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from experiments.bench.problem import predicted
from experiments.training.run_results import prediction_of
from mistlab import catalog
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.space import SearchSpace
from searchers.methods.random_search import random_search
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import BudgetSpentError, Ending, Ledger
from tests.workloads import workload_of


@pytest.fixture(scope="session")
def small_problem() -> Problem:
    """Quickly searched."""
    return Problem(
        workload=workload_of("llama-350m", 1024, 4),
        cluster=Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=2),
    )


@pytest.fixture(scope="session")
def small_options() -> tuple[str, ...]:
    """The same problem on a command line, with a small budget."""
    return (
        *("--model", "llama-350m", "--gpus-per-node", "2", "--sequence-length", "1024"),
        *("--global-batch", "4", "--seed", "3", "--budget-evaluations", "128"),
    )


@pytest.fixture(scope="session")
def strategies() -> dict[str, Any]:
    """Strategies that end at once."""
    return {"megatron": first, "proven": proven, "refusing": refusing, "interrupted": interrupted}


@pytest.fixture(scope="module")
def predicted_once() -> Iterator[None]:
    """Reports, exports and inverse questions predict each plan once for all tests of a file: most
    tests of reports ask for estimates, a plan is exported to several frameworks and read back from
    each, and what a command tells of a question is asked for beside it."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("interchange.fidelity", "prediction.solve"):
            patch.setattr(f"experiments.{module}.predicted", cache(predicted))
        patch.setattr("experiments.gpu_reports.gpu_report.prediction_of", cache(prediction_of))
        yield


def proven(problem: Problem, space: SearchSpace, ledger: Ledger, draw: Any) -> Ending:
    """Draws, and says that all plans take at least half as long as the best."""
    try:
        return random_search(problem, space, ledger, draw)
    except BudgetSpentError:
        return Ending(status="FEASIBLE", lower_bound_s=ledger.best_s / 2)


def first(problem: Problem, space: SearchSpace, ledger: Ledger, draw: Any) -> Ending:
    """Takes whatever comes first."""
    plan = chosen_plan(problem, space, Chooser(lambda _, options: 0))
    assert plan is not None
    ledger.predict([plan])
    return Ending()


def refusing(problem: Problem, space: SearchSpace, ledger: Ledger, draw: Any) -> Ending:
    """Takes no problem."""
    return Ending(status="REFUSED", reason="too many plans")


def interrupted(problem: Problem, space: SearchSpace, ledger: Ledger, draw: Any) -> Ending:
    """Shows one plan, and is interrupted."""
    plan = chosen_plan(problem, space, Chooser(lambda _, options: options - 1))
    assert plan is not None
    ledger.predict([plan])
    raise KeyboardInterrupt
