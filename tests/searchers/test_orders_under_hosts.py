"""Small problems in orders without a formula, on engines whose hosts issue passes: every plan is
predicted, and no proof is wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.graph.library import graph_of
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Profile
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.stages.stage_batch import StageBatch, StageSeconds
from searchers.methods.exhaustive import count_plans
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.drawn import NAMES, drawn_problem
from tests.searchers.test_every_plan import (
    EXACT,
    Tried,
    all_tried,
    predictor_of,
    wrong_proofs,
)
from tests.searchers.test_orders_proven import bound_of, some_in_orders
from tests.sweep import sweep

MOST = 2000
SPACES = ("megatron-today", "mist", "everything")
# All engines whose hosts issue passes in several orders.
HOSTED = [name for name, row in ENGINES.items() if row.host is not None and row.orders]
SEEDS = range(36)
LATE = Profile(name="late", block_ms=0.5, send_gpus=2, send_ms=1.0, source="drawn")


def with_host(seed: int) -> tuple[Problem, SearchSpace]:
    """A problem whose blocks often take less time than their host, and a space with 1F1B and
    another order or two; some clusters have a profile, by which no host is ahead."""
    draw = np.random.default_rng(seed)
    for other in range(seed, 100_000, len(SEEDS)):
        name = SPACES[seed % len(SPACES)]
        problem, space = drawn_problem(NAMES.index(name) + len(NAMES) * other)
        engine = str(draw.choice(HOSTED))
        some = draw.permutation(ENGINES[engine].orders)[: draw.integers(1, 3)]
        space = replace(space.on(engine), orders=(DEFAULT_ORDER, *some.tolist()))
        problem = replace(
            problem,
            workload=replace(problem.workload, precision="bf16", sequence_length=512),
            cluster=replace(
                problem.cluster,
                hardware=catalog.hardware("h100-80gb"),
                profile=LATE if draw.random() < 0.25 else None,
            ),
        )
        is_small = 8 <= count_plans(problem, space, MOST) <= MOST
        is_joined = len(graph_of(problem.workload).pattern) == 1
        if is_small and is_joined and some_in_orders(problem, space, seed, 20):
            return problem, space
    raise AssertionError


@cache
def tried(seed: int) -> Tried:
    return all_tried(*with_host(seed), seed, is_short=bool(seed // len(SPACES) % 2))


@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_no_proof_under_a_host_is_wrong_and_the_best_plan_is_found(seed: int) -> None:
    problem, space, best_s = tried(seed)
    assert not [*wrong_proofs(problem, space, best_s, ["mist", "exact"])]
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor_of(problem))
    found = searcher.search(problem, space, Budget(evaluations=1_000_000), 0)
    if best_s < float("inf"):
        assert found.prediction is not None
        assert found.prediction.iteration_s == pytest.approx(best_s, rel=EXACT)
        assert found.lower_bound_s is not None


def largest_share(seed: int) -> float:
    """The largest of some plans' bounds in orders without a formula, as a share of its time."""
    problem, space, _ = tried(seed)
    return max(bound_of(problem, plan) for plan in some_in_orders(problem, space, seed, 20))


@pytest.mark.parametrize("seed", sweep((4, 7, *SEEDS), first=2))
def test_no_plan_under_a_host_undercuts_the_bounds_of_its_stages(seed: int) -> None:
    assert largest_share(seed) <= 1 + EXACT


def slower(part_seconds: Callable[..., StageSeconds]) -> Callable[..., StageSeconds]:
    """A method with a planted fault: hosts issue passes for a tenth longer."""

    def found(*arguments: Any, **options: Any) -> StageSeconds:
        seconds = part_seconds(*arguments, **options)
        names = "issued_forward_s", "issued_backward_s"
        return replace(seconds, **{name: 1.1 * getattr(seconds, name) for name in names})

    return found


def never_ahead(_: object) -> Callable[..., StageSeconds]:
    """A method with a planted fault: every pass takes as long as its host."""

    def found(self: SymbolicPredictor, few: StageBatch, *, engine: str, **_: Any) -> StageSeconds:
        seconds = self.stage_costs(few, engine=engine).seconds
        longer = seconds.stable_s / (seconds.forward_s + seconds.backward_s)
        names = [f"{way}{kind}_s" for way in ("", "through_") for kind in ("forward", "backward")]
        return replace(seconds, **{name: longer * getattr(seconds, name) for name in names})

    return found


@pytest.mark.parametrize("fault", [slower, never_ahead])
def test_a_fault_in_the_time_of_a_host_is_noticed(
    fault: Callable[[Any], Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    telling = 4, 7
    assert max(map(largest_share, telling)) > 0.98
    monkeypatch.setattr(SymbolicPredictor, "part_seconds", fault(SymbolicPredictor.part_seconds))
    assert min(map(largest_share, telling)) > 1 + EXACT


@pytest.mark.parametrize("seed", [21, 27])
def test_a_proof_with_a_slower_host_is_wrong(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    problem, space = with_host(seed)
    # Pipelines in 1F1B know their hosts by a formula.
    space = replace(space, orders=space.orders[1:])
    others = all_tried(problem, space, seed, is_short=False)
    assert not [*wrong_proofs(*others, ["mist"])]
    much_slower = slower(slower(slower(slower(SymbolicPredictor.part_seconds))))
    monkeypatch.setattr(SymbolicPredictor, "part_seconds", much_slower)
    assert [*wrong_proofs(*others, ["mist"])]
