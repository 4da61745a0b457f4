"""A budget of seconds: searchers look at the clock often enough, and solvers are told what is left.

No test here looks at a real clock. One counts what Python does, so that it runs equally fast on
every machine; the others stand still until a test moves them.
"""

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Any, cast

import numpy as np
import pulp
import pytest

from mistlab import catalog
from mistlab.job.prediction import Prediction, Predictor
from mistlab.job.search import Budget, Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.stages.stage_batch import StageBatch, StageCosts
from searchers.exact import milp
from searchers.exact.candidates import Menus
from searchers.exact.groups import groups_of, work_of
from searchers.exact.milp import join_by
from searchers.exact.programme import join, places_by_stage
from searchers.methods.aceso import initial_plans
from searchers.registry import SEARCHERS
from searchers.strategy import (
    FEWEST_STAGES,
    PLANS_AT_ONCE,
    BudgetSpentError,
    Ledger,
    StrategySearcher,
)
from tests.searchers.problems import SMALL, predictor_of
from tests.searchers.test_contract import OWN_SPACES, every_searcher
from tests.sweep import sweep

# A model that takes long to divide, on many GPUs.
LARGE = Problem(
    workload=replace(SMALL.workload, model=catalog.model("gpt3-22b"), global_batch=64),
    cluster=replace(SMALL.cluster, nodes=4, gpus_per_node=8, memory_gib=None),
)
# A third of a second on a fast machine.
BUDGET_CALLS = 1_000_000
# How many calls beyond it a search may go on for.
LONGER = 0.1 * BUDGET_CALLS
# Calls of the exact searcher do more each. It may go on for one batch of stage costs, in which
# passes are computed layer by layer and first passes of first stages played: 0.25 s.
FEWER_CALLS = 60_000
LONGER_BY_EXACT = 36_000
# Optuna learns from a round of trials, and draws the next, without a look at the clock: calls for
# about a third of a second. Shorter budgets than three seconds may take that much longer.
CALLS_OF_OPTUNA = 350_000


@dataclass(slots=True)
class CountedCalls:
    """A clock that goes on by what Python calls."""

    calls: int = 0

    def __call__(self) -> float:
        return float(self.calls)

    @contextmanager
    def running(self) -> Iterator[None]:
        def count(_frame: FrameType, event: str, _argument: Any) -> None:
            if event in ("call", "c_call"):
                self.calls += 1

        sys.setprofile(count)
        try:
            yield
        finally:
            sys.setprofile(None)


@every_searcher
@pytest.mark.parametrize("share", sweep([0.3, 1.0], first=1))
def test_no_searcher_goes_on_for_long_without_a_look_at_the_clock(name: str, share: float) -> None:
    most, longer = (FEWER_CALLS, LONGER_BY_EXACT) if name == "exact" else (BUDGET_CALLS, LONGER)
    calls = share * most
    space, predictor = space_of(OWN_SPACES.get(name, ("mist",))[0]), predictor_of(LARGE)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    # What is imported or compiled once is no part of it.
    predictor.predict(next(initial_plans(LARGE, space)))
    searcher.search(LARGE, space, Budget(evaluations=60), 0)
    clock = CountedCalls()
    with clock.running():
        result = replace(searcher, clock=clock).search(LARGE, space, Budget(seconds=calls), 0)
    assert result.wall_s <= calls + (CALLS_OF_OPTUNA if name.startswith("optuna") else longer)


@dataclass(slots=True)
class CountedLooks:
    """A clock that stands still and counts who looks."""

    looks: int = 0

    def __call__(self) -> float:
        self.looks += 1
        return 0.0


@pytest.mark.parametrize("question", ["stage_costs", "stage_bounds", "stage_fits"])
def test_the_clock_is_looked_at_while_many_stages_are_predicted(question: str) -> None:
    rows, clock = 200_000, CountedLooks()
    ledger = Ledger(predictor=predictor_of(SMALL), budget=Budget(seconds=8), clock=clock)
    one = {"layers": 2, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 1}
    batch = StageBatch(**one, checkpointed_layers=np.zeros(rows, dtype=int))
    before = clock.looks
    ends = (batch, batch) if question == "stage_bounds" else (batch,)
    getattr(ledger, question)(*ends, engine="mistlab")
    assert clock.looks - before >= rows / 20_000


@dataclass(slots=True)
class StoppedClock:
    """A clock that a test sets."""

    now_s: float = 0.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> StoppedClock:
    return StoppedClock()


@dataclass(slots=True)
class SlowPredictor:
    """Takes a second a plan by a clock that it sets, and notes how many plans it is asked for."""

    clock: StoppedClock
    sizes: list[int] = field(default_factory=list)

    def predict(self, plan: Plan) -> Prediction:
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        self.sizes.append(len(plans))
        self.clock.now_s += len(plans)
        return predictor_of(SMALL).predict_many(plans)


@pytest.mark.parametrize("seconds", [50.0, 400.0, None])
def test_fewer_plans_are_predicted_at_once_when_seconds_run_out(
    clock: StoppedClock, seconds: float | None
) -> None:
    predictor = SlowPredictor(clock=clock)
    budget = Budget(seconds=seconds, evaluations=1_000)
    ledger = Ledger(predictor=predictor, budget=budget, clock=clock)
    plans = [next(initial_plans(SMALL, space_of("mist")))] * 1_000
    with pytest.raises(BudgetSpentError):
        ledger.predict(plans)
    assert predictor.sizes == sorted(predictor.sizes, reverse=True)
    assert predictor.sizes[0] == PLANS_AT_ONCE
    if seconds is None:
        assert set(predictor.sizes[:-1]) == {PLANS_AT_ONCE}
    else:
        assert predictor.sizes[-1] == 1
        assert clock.now_s == seconds


@dataclass(slots=True)
class SlowStageCosts:
    """Takes a millisecond a candidate by a clock that it sets; notes how many it is asked for."""

    clock: StoppedClock
    sizes: list[int] = field(default_factory=list)

    def stage_costs(self, batch: StageBatch, *, engine: str) -> StageCosts:
        self.sizes.append(len(batch))
        self.clock.now_s += len(batch) / 1000
        return predictor_of(SMALL).stage_costs(batch, engine=engine)


@pytest.mark.parametrize("seconds", [4.0, 12.0, None])
def test_fewer_stages_are_predicted_at_once_when_seconds_run_out(
    clock: StoppedClock, seconds: float | None
) -> None:
    predictor = SlowStageCosts(clock=clock)
    budget = Budget(seconds=seconds, evaluations=1_000)
    ledger = Ledger(predictor=cast("Predictor", predictor), budget=budget, clock=clock)
    one = {"layers": 2, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 1}
    batch = StageBatch(**one, checkpointed_layers=np.zeros(10_000, dtype=int))
    ledger.stage_costs(batch.chosen(np.arange(1_000)), engine="mistlab")
    if seconds is None:
        ledger.stage_costs(batch, engine="mistlab")
        assert predictor.sizes == [1_000, 10_000]
        return
    with pytest.raises(BudgetSpentError):
        ledger.stage_costs(StageBatch.joined([batch, batch]), engine="mistlab")
    _, *sizes = predictor.sizes
    assert sizes[0] == (seconds - 1) / 2 * 1000
    assert min(sizes) == FEWEST_STAGES
    assert seconds <= clock.now_s <= seconds + FEWEST_STAGES / 1000


@pytest.fixture
def menus(clock: StoppedClock) -> Menus:
    """Those of a group of two stages, in a search of eight seconds."""
    space = space_of("mist")
    problem = replace(SMALL, cluster=replace(SMALL.cluster, memory_gib=None))
    ledger = Ledger(predictor=predictor_of(problem), budget=Budget(seconds=8), clock=clock)
    group = next(one for one in groups_of(problem, space) if one.num_stages == 2)
    work = work_of(problem, space, ledger, group.meshes)
    return Menus(
        problem=problem, space=space, ledger=ledger, group=group, work=work, coarse_to_fine=True
    )


@pytest.mark.parametrize("solver", milp.SOLVERS)
@pytest.mark.parametrize(("spent_s", "limit_s"), [(0.0, 6.0), (5.0, 3.0)])
def test_a_solver_is_given_its_patience_or_what_is_left(
    menus: Menus,
    clock: StoppedClock,
    monkeypatch: pytest.MonkeyPatch,
    solver: str,
    spent_s: float,
    limit_s: float,
) -> None:
    made, asked_s = milp.SOLVERS[solver], []

    def asked(seconds: float) -> pulp.LpSolver:
        asked_s.append(seconds)
        return made(60)

    monkeypatch.setitem(milp.SOLVERS, solver, asked)
    clock.now_s = spent_s
    assert join_by(solver, 6.0)(menus, np.inf) is not None
    assert asked_s == [limit_s]


def test_joining_ends_when_the_budget_is_spent(menus: Menus, clock: StoppedClock) -> None:
    assert join(menus, np.inf) is not None
    clock.now_s = 8.0
    for joining in (join, places_by_stage, join_by("highs", 60)):
        with pytest.raises(BudgetSpentError):
            joining(menus, np.inf)


def test_a_quick_answer_is_kept_when_the_budget_ends_with_the_solver(
    menus: Menus, clock: StoppedClock, monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow(_seconds: float) -> pulp.LpSolver:
        clock.now_s = 8.0
        return pulp.HiGHS(msg=False, timeLimit=1e-9)

    monkeypatch.setitem(milp.SOLVERS, "highs", too_slow)
    with pytest.raises(BudgetSpentError):
        join_by("highs", 60)(menus, np.inf)
    assert menus.ledger.best is not None
