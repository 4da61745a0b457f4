"""What every registered searcher keeps to, whatever it does inside."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from functools import cache
from importlib.util import find_spec
from itertools import pairwise

import pytest

from mistlab.core.values import to_mapping
from mistlab.job.job import Job
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.plan.named_spaces import space_of
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import INTERRUPTED, SHORT_LIST, StrategySearcher
from tests.searchers.problems import SMALL, TOO_SMALL, Counting, predictor_of

EVALUATIONS = 60
# The spaces of those that know only one; all others take any.
OWN_SPACES = {
    name: (name,) for name in ("megatron", "deepspeed", "megatron:published", "deepspeed:published")
}
# Whose plans all need more memory than the small problem has.
TOO_LARGE = ("deepspeed:published",)
NAMES = [
    pytest.param(
        name,
        marks=pytest.mark.skipif(
            name == "optuna:cmaes" and find_spec("cmaes") is None, reason="pip install cmaes"
        ),
    )
    for name in SEARCHERS
]
every_searcher = pytest.mark.parametrize("name", NAMES)


def spaces_of(name: str) -> tuple[str, ...]:
    return OWN_SPACES.get(name, ("3d", "mist", "wide"))


def searched(
    name: str,
    space: str,
    *,
    problem: Problem = SMALL,
    budget: Budget | None = None,
    counting: Counting | None = None,
) -> SearchResult:
    searcher = StrategySearcher(
        strategy=SEARCHERS[name], predictor=counting or predictor_of(problem)
    )
    budget = budget or Budget(evaluations=EVALUATIONS)
    return searcher.search(problem, space_of(space), budget, 0)


@dataclass(frozen=True, kw_only=True)
class Run:
    space: str
    result: SearchResult
    counting: Counting


@cache
def run_in(space: str, name: str) -> Run:
    """One search, which several tests look at."""
    counting = Counting(predictor_of(SMALL))
    return Run(space=space, result=searched(name, space, counting=counting), counting=counting)


def runs(name: str) -> list[Run]:
    return [run_in(space, name) for space in spaces_of(name)]


@every_searcher
def test_a_plan_is_found_that_is_inside_the_space_and_fits(name: str) -> None:
    for run in runs(name):
        if run.result.status == "REFUSED":
            continue
        if name in TOO_LARGE:
            assert run.result.status == "INFEASIBLE"
            continue
        plan, prediction = run.result.plan, run.result.prediction
        assert plan is not None
        assert prediction is not None
        assert prediction.fits
        assert contains(SMALL, space_of(run.space), plan)
        Job(workload=SMALL.workload, cluster=SMALL.cluster, plan=plan)
        again = predictor_of(SMALL).predict(plan)
        assert again.iteration_s == pytest.approx(prediction.iteration_s, rel=1e-9)
        assert again.fits


@every_searcher
def test_it_is_the_best_of_what_was_predicted(name: str) -> None:
    for run in runs(name):
        if run.result.prediction is not None:
            assert run.result.prediction.iteration_s == run.counting.fastest_s


@every_searcher
def test_counts_are_those_of_the_predictor_and_within_the_budget(name: str) -> None:
    for run in runs(name):
        assert run.result.plan_evaluations == run.counting.plans <= EVALUATIONS
        assert run.result.stage_evaluations == run.counting.stages


@every_searcher
def test_the_history_ends_at_the_result_and_each_entry_improves(name: str) -> None:
    for run in runs(name):
        times = [entry.iteration_s for entry in run.result.history]
        assert all(later < earlier for earlier, later in pairwise(times))
        if run.result.prediction is not None:
            assert times[-1] == run.result.prediction.iteration_s


@every_searcher
def test_rivals_are_the_next_best_of_what_was_predicted(name: str) -> None:
    for run in runs(name):
        result = run.result
        if result.prediction is None:
            assert result.rivals == ()
            continue
        times = [result.prediction.iteration_s, *(r.prediction.iteration_s for r in result.rivals)]
        assert times == sorted(times)
        assert times == run.counting.fastest_times(len(times))
        plans = [result.plan, *(rival.plan for rival in result.rivals)]
        assert len(set(plans)) == len(plans) == min(SHORT_LIST, len(run.counting.fitting))


@every_searcher
def test_a_budget_of_one_plan_is_kept(name: str) -> None:
    for space in spaces_of(name):
        counting = Counting(predictor_of(SMALL))
        searched(name, space, budget=Budget(evaluations=1), counting=counting)
        assert counting.plans <= 1


@every_searcher
def test_a_budget_of_seconds_is_kept(name: str) -> None:
    counting = Counting(predictor_of(SMALL))
    searcher = StrategySearcher(
        strategy=SEARCHERS[name], predictor=counting, clock=lambda: float(counting.calls)
    )
    result = searcher.search(SMALL, space_of(spaces_of(name)[-1]), Budget(seconds=3), 0)
    # A second a call: the third is the last.
    assert result.wall_s == counting.calls <= 3


@every_searcher
@pytest.mark.parametrize("widest", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_without_a_plan_that_fits_it_ends_without_one(name: str, widest: bool) -> None:
    *narrower, widest_space = spaces_of(name)
    for space in (widest_space,) if widest else narrower:
        result = searched(name, space, problem=TOO_SMALL)
        assert result.plan is None
        assert result.status in {"INFEASIBLE", "BUDGET", "REFUSED"}


@every_searcher
def test_a_batch_that_nothing_divides_is_said_to_be_that(name: str) -> None:
    space = replace(space_of(spaces_of(name)[0]), data_parallel=(2,), tensor_parallel=(1,))
    problem = replace(SMALL, workload=replace(SMALL.workload, global_batch=3))
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(problem))
    result = searcher.search(problem, space, Budget(evaluations=5), 0)
    assert result.status == "INFEASIBLE"
    assert "has no plan on 2 GPUs for a global batch of 3: there is one" in result.reason


@every_searcher
@pytest.mark.parametrize("call", [1, 2, 3])
def test_what_was_found_outlives_an_interruption(name: str, call: int) -> None:
    counting = Counting(predictor_of(SMALL), interrupted_at=call)
    result = searched(name, spaces_of(name)[-1], counting=counting)
    if counting.calls < call:
        return
    assert result.status == "BUDGET"
    assert result.reason == INTERRUPTED
    found_s = float("inf") if result.prediction is None else result.prediction.iteration_s
    assert found_s == counting.fastest_s


def outcome(name: str) -> str:
    """What does not depend on the clock, of a search in a space that most searchers take."""
    space, *_ = spaces_of(name)[-2:]
    plain = to_mapping(run_in(space, name).result)
    del plain["wall_s"]
    for entry in plain["history"]:
        del entry["wall_s"]
    return json.dumps(plain, sort_keys=True)


def outcomes() -> list[str]:
    return [outcome(str(param.values[0])) for param in NAMES if not _is_skipped(param)]


def _is_skipped(param: "pytest.ParameterSet") -> bool:
    return any(mark.name == "skipif" and mark.args[0] for mark in param.marks)


def test_equal_seeds_give_equal_results_in_another_process_too() -> None:
    code = "from tests.searchers.test_contract import outcomes; print(*outcomes(), sep='\\n')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == outcomes()
