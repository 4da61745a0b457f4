"""Predictors that do not know something: how they are ordered, and what searches find with them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.cost.side_by_side import factors_of, overlapped
from mistlab.job.prediction import Predictor
from mistlab.job.search import Budget, Problem, SearchResult, StageCostModel
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import STREAMS
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from simulators.views import VIEWS, view_of
from tests.searchers.small import small_problem

SPACES = ("mist", "wide", "megatron", "deepspeed", "aceso")


def problem_on(hardware: str) -> Problem:
    """A few blocks on two nodes, so that streams of all kinds meet."""
    problem, _ = small_problem(2)
    cluster = Cluster(hardware=catalog.hardware(hardware), nodes=2, gpus_per_node=4)
    return replace(problem, cluster=cluster)


def drawn(problem: Problem, count: int) -> list[Plan]:
    draw = np.random.default_rng(0)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    found: list[Plan] = []
    while len(found) < count:
        plan = chosen_plan(problem, space_of(SPACES[len(found) % len(SPACES)]), chooser)
        found += [] if plan is None else [plan]
    return found


def seen(problem: Problem, view: str, maker: type = SymbolicPredictor) -> Predictor:
    return VIEWS[view].predictor(maker, workload=problem.workload, cluster=problem.cluster)


def times(problem: Problem, view: str, plans: Sequence[Plan]) -> np.ndarray:
    predictions = seen(problem, view).predict_many(plans)
    return np.array([one.iteration_s for one in predictions])


@pytest.mark.parametrize("hardware", ["l4-24gb", "a100-40gb"])
def test_taking_turns_is_never_faster_nor_undisturbed_streams_slower(hardware: str) -> None:
    problem = problem_on(hardware)
    plans = drawn(problem, 200)
    serial_s, full_s, ideal_s = (
        times(problem, view, plans) for view in ("serial", "full", "ideal")
    )
    assert (serial_s >= full_s * (1 - 1e-12)).all()
    assert (full_s >= ideal_s * (1 - 1e-12)).all()
    # They differ, and not by a little.
    assert (serial_s > 1.05 * full_s).sum() > 20
    assert (full_s > 1.01 * ideal_s).sum() > 20


def test_a_slot_takes_the_sum_of_its_streams_or_the_longest() -> None:
    cluster = problem_on("l4-24gb").cluster
    alone = np.random.default_rng(0).exponential(1.0, (100, len(STREAMS)))
    slots = {}
    for name in ("serial", "ideal"):
        interference = VIEWS[name].of_cluster(cluster).hardware.interference
        assert interference is not None
        slots[name] = overlapped(alone, factors_of(interference.groups[0]))
    assert slots["serial"] == pytest.approx(alone.sum(axis=1))
    assert slots["ideal"] == pytest.approx(alone.max(axis=1))


def test_extras_are_spread_over_micro_batches_or_dropped() -> None:
    """A stage that is a whole pipeline has nobody who waits: its time is a sum."""
    problem = problem_on("l4-24gb")
    plans = [plan for plan in drawn(problem, 200) if plan.num_stages == 1]
    assert len(plans) > 5
    full_s, average_s, blind_s = (
        times(problem, view, plans) for view in ("full", "average", "blind")
    )
    stages = [one.stages[0] for one in seen(problem, "full").predict_many(plans)]
    extras_s = np.array([one.delta_forward_s + one.delta_backward_s for one in stages])
    assert average_s == pytest.approx(full_s, rel=1e-9)
    assert blind_s == pytest.approx(full_s - np.maximum(extras_s, 0.0), rel=2e-3)
    assert (extras_s > 0.01 * full_s).any()


@cache
def found_by(view: str) -> SearchResult:
    problem, space = small_problem(2)
    searcher = StrategySearcher(strategy=SEARCHERS["exact"], predictor=seen(problem, view))
    return searcher.search(problem, space, Budget(seconds=1000), 0)


@pytest.mark.parametrize("view", VIEWS)
def test_costs_of_stages_and_predictions_of_plans_agree(view: str) -> None:
    """A search that joins stages finds a plan whose prediction is what its stages said."""
    problem, space = small_problem(2)
    predictor = seen(problem, view)
    assert isinstance(predictor, StageCostModel)
    found = found_by(view)
    others = StrategySearcher(strategy=SEARCHERS["random"], predictor=predictor).search(
        problem, space, Budget(evaluations=200), 0
    )
    assert found.prediction is not None
    assert others.prediction is not None
    assert found.prediction.iteration_s <= others.prediction.iteration_s * (1 + 1e-9)
    # By the full predictor, nobody beats who asked it.
    best = found_by("full")
    assert best.prediction is not None
    assert found.plan is not None
    rescored_s = seen(problem, "full").predict(found.plan).iteration_s
    assert rescored_s >= best.prediction.iteration_s * (1 - 1e-12)


def test_views_wrap_the_event_simulator_too() -> None:
    problem = problem_on("l4-24gb")
    plans = [plan for plan in drawn(problem, 40) if plan.micro_batches <= 4][:6]
    played = {
        name: [one.iteration_s for one in seen(problem, name, EventSimulator).predict_many(plans)]
        for name in VIEWS
    }
    for serial_s, full_s, ideal_s, blind_s in zip(
        *(played[name] for name in ("serial", "full", "ideal", "blind")), strict=True
    ):
        assert serial_s >= full_s * 0.999
        assert full_s * 1.001 >= ideal_s
        assert blind_s <= full_s
    assert played["serial"] != played["ideal"]


def test_an_unknown_view_gets_near_names() -> None:
    with pytest.raises(InputError, match="did you mean 'serial'"):
        view_of("seriel")
