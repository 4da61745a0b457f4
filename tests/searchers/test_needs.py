"""Who may ask whom: strategies that need plans alone, predictors that give no costs of stages."""

from dataclasses import replace

import pytest

from mistlab.core.units import GIB_BYTES
from mistlab.cost.memory import room_bytes
from mistlab.job.search import Budget, StageCostModel
from mistlab.plan.named_spaces import space_of
from searchers.registry import SEARCHERS
from searchers.strategy import NO_STAGE_COSTS, NeedsStageCosts, StrategySearcher
from simulators.events import EventSimulator
from simulators.views import View, viewed
from tests.searchers.problems import SMALL, predictor_of

PLANS_ALONE = ("exhaustive", "optuna", "aceso", "rl", "random", "megatron", "deepspeed")


def simulator() -> EventSimulator:
    return EventSimulator(workload=SMALL.workload, cluster=SMALL.cluster)


@pytest.mark.parametrize("name", [name for name in SEARCHERS if ":" not in name])
def test_strategies_say_what_they_need(name: str) -> None:
    assert isinstance(SEARCHERS[name], NeedsStageCosts) == (name not in PLANS_ALONE)


@pytest.mark.parametrize("name", ["aceso", "optuna", "random", "rl"])
def test_the_event_simulator_drives_strategies_that_need_plans_alone(name: str) -> None:
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=simulator())
    result = searcher.search(SMALL, space_of("mist"), Budget(evaluations=24), 0)
    assert result.prediction is not None
    assert result.prediction.predictor == "events"
    assert result.prediction == simulator().predict(result.plan)


def test_a_strategy_that_needs_costs_of_stages_is_refused() -> None:
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=simulator())
    result = searcher.search(SMALL, space_of("mist"), Budget(evaluations=24), 0)
    assert (result.status, result.reason) == ("REFUSED", NO_STAGE_COSTS)


def test_a_view_gives_what_its_predictor_gives() -> None:
    assert isinstance(viewed(predictor_of(SMALL), View()), StageCostModel)
    assert not isinstance(viewed(simulator(), View()), StageCostModel)


@pytest.mark.parametrize(("name", "status"), [("mist", "OPTIMAL"), ("random", "BUDGET")])
def test_plans_keep_memory_free_where_the_cluster_says_so(name: str, status: str) -> None:
    """Whether a search asks for costs of stages, for bounds or for plans; its proof holds."""
    free_gib = round(0.25 * room_bytes(SMALL.cluster) / GIB_BYTES, 3)

    def held(keep_free_gib: float | None) -> float:
        problem = replace(SMALL, cluster=replace(SMALL.cluster, keep_free_gib=keep_free_gib))
        searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(problem))
        result = searcher.search(problem, space_of("mist"), Budget(evaluations=300), 0)
        assert result.plan is not None
        assert result.status == status
        return predictor_of(SMALL).predict(result.plan).peak_reserved_bytes

    within = room_bytes(SMALL.cluster) - free_gib * GIB_BYTES
    assert held(free_gib) <= within < held(None)
