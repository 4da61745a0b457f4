"""The single-stage plans that cannot be told from a proven plan are its rivals, all of them."""

from dataclasses import replace
from functools import cache

import pytest

from mistlab.job.search import MOST_NEAR, Budget, Problem, SearchResult
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers import strategy
from searchers.exact import near_plans
from searchers.methods.exhaustive import all_plans
from searchers.methods.mist import FEW
from searchers.registry import SEARCHERS
from searchers.savings import ways_listed
from searchers.strategy import StrategySearcher
from tests.searchers.problems import SMALL, predictor_of

# Plans of so small a model lie further apart than those of larger ones.
APART = 0.25
ENDS, QUARTERS = (0.0, 1.0), (0.0, 0.25, 0.5, 0.75, 1.0)
MEMORIES = (1.5, 2.0)


def problem_with(memory_gib: float) -> Problem:
    """On one GPU no plan has several stages."""
    return replace(SMALL, cluster=replace(SMALL.cluster, gpus_per_node=1, memory_gib=memory_gib))


def space_with(ratios: tuple[float, ...]) -> SearchSpace:
    offload = OffloadRatios(weights=ENDS, gradients=ratios, optimizer=ratios, activations=ENDS)
    return replace(space_of("mist"), offload=offload)


@cache
def every_s(memory_gib: float, ratios: tuple[float, ...]) -> list[float]:
    """The seconds of all plans that fit, fastest first."""
    problem = problem_with(memory_gib)
    plans = [*all_plans(problem, space_with(ratios))]
    predictions = predictor_of(problem).predict_many(plans)
    return sorted(one.iteration_s for one in predictions if one.fits)


def searched(
    memory_gib: float, ratios: tuple[float, ...], evaluations: int = 10_000
) -> SearchResult:
    problem = problem_with(memory_gib)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor_of(problem))
    return searcher.search(problem, space_with(ratios), Budget(evaluations=evaluations), 0)


def times_of(result: SearchResult) -> list[float]:
    assert result.prediction is not None
    return [result.prediction.iteration_s, *(one.prediction.iteration_s for one in result.rivals)]


@pytest.fixture(autouse=True)
def apart(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (near_plans, strategy):
        monkeypatch.setattr(module, "TOLD_APART", APART)


@pytest.mark.parametrize("ratios", [QUARTERS, ENDS], ids=["many ways", "few ways"])
@pytest.mark.parametrize("memory_gib", MEMORIES)
def test_all_plans_near_a_proven_plan_are_its_rivals(
    memory_gib: float, ratios: tuple[float, ...]
) -> None:
    assert (ways_listed(space_with(ratios)) <= FEW) == (ratios == ENDS)
    result = searched(memory_gib, ratios)
    every = every_s(memory_gib, ratios)
    near = [seconds for seconds in every if seconds <= (1 + APART) * every[0]]
    assert strategy.SHORT_LIST < len(near) <= MOST_NEAR
    assert result.status == "OPTIMAL"
    assert times_of(result) == pytest.approx(near, rel=1e-9)


@pytest.mark.parametrize("memory_gib", MEMORIES)
def test_of_too_many_near_plans_the_nearest_are_rivals(
    memory_gib: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (near_plans, strategy):
        monkeypatch.setattr(module, "MOST_NEAR", 7)
    result = searched(memory_gib, QUARTERS)
    assert times_of(result) == pytest.approx(every_s(memory_gib, QUARTERS)[:8], rel=1e-9)


@pytest.mark.parametrize(("most", "evaluations"), [(0, 10_000), (1 << 17, 8)])
def test_a_list_that_is_cut_short_leaves_the_proof(
    most: int, evaluations: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(near_plans, "MOST_CANDIDATES", most)
    result = searched(1.5, QUARTERS, evaluations)
    assert times_of(result)[0] == pytest.approx(every_s(1.5, QUARTERS)[0], rel=1e-9)
    assert result.status == "OPTIMAL"
    assert result.plan_evaluations <= evaluations
