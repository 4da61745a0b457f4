"""A problem whose best plan is predicted to take longer than the closed form, since its passes are
played: it is proven by predicting the few plans that the closed form takes to be faster."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.exact import played_plans, programme
from searchers.exact.candidates import Menus
from searchers.exact.groups import groups_of, work_of
from searchers.exact.played_plans import are_all_predicted
from searchers.methods import mist
from searchers.methods.exhaustive import all_plans
from searchers.registry import SEARCHERS
from searchers.savings import Way, ways_alike
from searchers.strategy import Ledger, StrategySearcher
from simulators import symbolic
from tests.searchers.test_every_plan import ENOUGH, Tried, predictor_of, wrong_boxes
from tests.searchers.test_unlike_blocks import tried


@pytest.fixture(scope="module", autouse=True)
def longer() -> Iterator[None]:
    """All plans of three stages and more take 2 % longer as played."""
    played_s = symbolic.played_iterations_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            symbolic, "played_iterations_s", lambda *given: [1.02 * s for s in played_s(*given)]
        )
        yield


@pytest.fixture(scope="module")
def whole(longer: None) -> Tried:
    """Plans of three stages of one block, of which each offloads something."""
    return tried(46)


def faster_by_closed_form(
    problem: Problem, space: SearchSpace, limit_s: float, monkeypatch: pytest.MonkeyPatch
) -> set[Plan]:
    """All plans that take less than this many seconds if no pass is played."""
    plans = [*all_plans(problem, space)]
    with monkeypatch.context() as patch:
        patch.setattr(symbolic, "played_iterations_s", lambda *given: [0.0] * len(given[2]))
        predictions = predictor_of(problem).predict_many(plans)
    timed = zip(plans, predictions, strict=True)
    return {plan for plan, one in timed if one.fits and one.iteration_s < limit_s}


def predicted(
    problem: Problem, space: SearchSpace, limit_s: float, way: Way | None = None
) -> tuple[bool, set[Plan]]:
    """Whether the plans of all groups are predicted, and those that are; given a way, of the plans
    whose stages all save memory in this way."""
    plans: set[Plan] = set()
    ledger = Ledger(
        predictor=predictor_of(problem),
        budget=ENOUGH,
        clock=lambda: 0.0,
        watcher=lambda plan, _: plans.add(plan),
    )
    are_all = True
    for group in groups_of(problem, space):
        work = work_of(problem, space, ledger, group.meshes)
        menus = Menus(problem=problem, space=space, ledger=ledger, group=group, work=work, way=way)
        are_all &= are_all_predicted(menus, limit_s)
    return are_all, plans


@pytest.mark.parametrize("share", [1.0, 1.001, 1.01])
def test_all_plans_that_may_be_faster_are_predicted(
    share: float, whole: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, best_s = whole
    faster = faster_by_closed_form(problem, space, share * best_s, monkeypatch)
    least = faster_by_closed_form(problem, space, best_s, monkeypatch)
    monkeypatch.setattr(played_plans, "MOST_PLANS", len(faster))
    are_all, plans = predicted(problem, space, share * best_s)
    assert are_all
    assert least <= plans <= faster
    monkeypatch.setattr(played_plans, "MOST_PLANS", len(faster) - 1)
    assert predicted(problem, space, share * best_s) == (False, set())


def test_a_way_that_all_stages_share_is_one_candidate(
    whole: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, best_s = whole
    (group,) = groups_of(problem, space)
    ways = [*ways_alike(space, group.meshes[0], 1, in_pipeline=True)]
    every = [predicted(problem, space, 1.01 * best_s, way) for way in ways]
    monkeypatch.setattr(programme, "MOST_LISTED", problem.workload.model.layers)
    assert [predicted(problem, space, 1.01 * best_s, way) for way in ways] == every
    assert {len(plans) for _, plans in every} == {0, 1}
    monkeypatch.setattr(programme, "MOST_LISTED", problem.workload.model.layers - 1)
    for way, (are_all, plans) in zip(ways, every, strict=True):
        assert are_all
        assert predicted(problem, space, 1.01 * best_s, way) == (not plans, set())


def test_searches_of_shared_ways_count_one_candidate_a_stage(
    whole: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, _ = whole
    space = replace(space, unequal_stages=False)
    searcher = StrategySearcher(strategy=SEARCHERS["exact"], predictor=predictor_of(problem))
    for fewer, status in ((0, "OPTIMAL"), (1, "FEASIBLE")):
        monkeypatch.setattr(programme, "MOST_LISTED", problem.workload.model.layers - fewer)
        assert searcher.search(problem, space, ENOUGH, 0).status == status


@pytest.mark.parametrize("more", [0, 1], ids=["ways", "steps"])
def test_no_more_stages_are_listed_than_decide(
    more: int, whole: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, best_s = whole
    (group,) = groups_of(problem, space)
    ways = len([*ways_alike(space, group.meshes[0], 1, in_pipeline=True)])
    listed: list[Any] = []
    steps = programme._Join._steps

    def many(*given: Any) -> Iterator[Any]:
        for step in steps(*given):
            for _ in range(100):
                listed.append(step)
                yield step

    monkeypatch.setattr(programme._Join, "_steps", many)
    monkeypatch.setattr(programme, "MOST_LISTED", ways - 1 + more)
    assert predicted(problem, space, best_s) == (False, set())
    assert len(listed) == (ways + 1 if more else 1)


@pytest.mark.parametrize("few", [mist.FEW, 0], ids=["all ways", "boxes"])
@pytest.mark.parametrize("name", ["mist", "exact"])
def test_the_best_plan_is_proven_only_if_all_are_predicted(
    name: str, few: int, whole: Tried, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, best_s = whole
    monkeypatch.setattr(mist, "FEW", few)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(problem))
    result = searcher.search(problem, space, ENOUGH, 0)
    assert result.prediction is not None
    assert result.prediction.iteration_s == pytest.approx(best_s, rel=1e-9)
    assert (result.status, result.gap) == ("OPTIMAL", 0.0)
    monkeypatch.setattr(played_plans, "MOST_PLANS", 1)
    fewer = searcher.search(problem, space, ENOUGH, 0)
    assert fewer.status == "FEASIBLE"
    assert fewer.gap is not None
    assert 0 < fewer.gap < 0.02


def test_boxes_end_at_the_best_plan(whole: Tried) -> None:
    assert not [*wrong_boxes(*whole)]
