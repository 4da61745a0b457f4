"""The published search: what its objective and its weighted sums choose, and what that costs."""

from dataclasses import fields, replace
from itertools import product
from typing import Any

import numpy as np
import pytest

from mistlab.cost.chains import ISSUED, ColumnAlgebra, Numbers
from mistlab.cost.pipeline import Published, extra_s, in_front, iteration_s, passes_of, steady_s
from mistlab.job.search import Budget, SearchResult
from mistlab.plan.named_spaces import space_of
from mistlab.stages.stage_batch import StageBatch, StageTimes
from searchers.exact.candidates import Options
from searchers.exact.published_programme import WEIGHTS, best_by_weights
from searchers.methods.exhaustive import all_plans
from searchers.methods.published import published
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import Strategy, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.small import small_problem


def by_formula(steady: list[float], extra: list[float], micro_batches: int) -> float:
    """The objective as it is printed."""
    unhidden = max(0.0, *(extra[i] - sum(steady[:i]) for i in range(len(steady))))
    return (micro_batches - 1) * max(steady) + sum(steady) + unhidden


@pytest.mark.parametrize("stages", [1, 2, 5])
@pytest.mark.parametrize("micro_batches", [1, 4, 16])
def test_the_objective_is_the_printed_formula(stages: int, micro_batches: int) -> None:
    draw = np.random.default_rng(stages)
    steady, extra = draw.exponential(1, (stages, 50)), draw.exponential(3, (stages, 50))
    columns: Published[Any] = Published.of_nothing(np.zeros(50))
    for own, own_extra in zip(steady[::-1], extra[::-1], strict=True):
        columns = in_front(ColumnAlgebra(50), own, own_extra, columns)
    for case in range(50):
        numbers: Published[float] = Published.of_nothing(0.0)
        for own, own_extra in zip(steady[::-1, case], extra[::-1, case], strict=True):
            numbers = in_front(Numbers(), own, own_extra, numbers)
        wanted = by_formula(steady[:, case].tolist(), extra[:, case].tolist(), micro_batches)
        assert numbers.whole(micro_batches) == pytest.approx(wanted)
        assert columns.whole(micro_batches)[case] == pytest.approx(wanted)


def options(times: StageTimes) -> Options:
    count = len(times.forward_s)
    number = np.arange(count, dtype=float)
    return Options(
        savings=number[:, None],
        counts=np.zeros((count, 1)),
        host_bytes=np.zeros(count),
        times=times,
    )


def drawn(count: int) -> StageTimes:
    draw = np.random.default_rng(0)
    times = {entry.name: draw.exponential(1, count) for entry in fields(StageTimes)}
    return StageTimes(**times)


def test_weighted_sums_keep_corners_of_the_frontier_alone() -> None:
    times = drawn(500)
    steady, extra = steady_s(passes_of(times)), extra_s(passes_of(times))
    kept = best_by_weights(options(times)).savings[:, 0].astype(int)
    assert 2 < len(kept) <= WEIGHTS
    for weight in np.linspace(0, 1, WEIGHTS):
        least = (weight * steady + (1 - weight) * extra).min()
        assert (weight * steady[kept] + (1 - weight) * extra[kept]).min() == least
    # Some that no other candidate beats are left out: those inside the convex hull.
    beaten = ((steady[:, None] >= steady) & (extra[:, None] >= extra)).sum(axis=1) > 1
    assert set(kept) < set(np.flatnonzero(~beaten))


def searched(strategy: Strategy, seed: int) -> SearchResult:
    problem, space = small_problem(seed)
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=strategy, predictor=predictor)
    return searcher.search(problem, space, Budget(seconds=1000), 0)


@pytest.mark.parametrize("seed", [2, 12, 53, 104])
def test_the_published_search_is_never_better_than_the_exact_one(seed: int) -> None:
    problem, space = small_problem(seed)
    exact, found = searched(SEARCHERS["exact"], seed), searched(SEARCHERS["mist:published"], seed)
    assert found.plan is not None
    assert found.prediction is not None
    assert exact.prediction is not None
    assert contains(problem, space, found.plan)
    assert found.prediction.fits
    assert found.prediction.iteration_s >= exact.prediction.iteration_s * (1 - 1e-12)
    assert found.plan_evaluations == 1


def test_what_the_published_search_does_not_try_is_not_called_infeasible() -> None:
    """On three GPUs no stages of equally many fit the batch; those of unequal numbers may."""
    problem, _ = small_problem(2)
    problem = replace(problem, cluster=replace(problem.cluster, nodes=1, gpus_per_node=3))
    space = replace(space_of("wide"), tensor_parallel=(1, 2), data_parallel=(1,), pipeline=(2,))
    searcher = StrategySearcher(
        strategy=SEARCHERS["mist:published"],
        predictor=SymbolicPredictor(workload=problem.workload, cluster=problem.cluster),
    )
    result = searcher.search(problem, space, Budget(seconds=1000), 0)
    assert result.status == "REFUSED"
    assert "equally many GPUs" in result.reason


def test_true_frontiers_find_what_is_best_by_the_objective() -> None:
    """On a space small enough to try all plans by the printed formula."""
    problem, _ = small_problem(2)
    space = space_of("+zero")
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=published(weighted=False), predictor=predictor)
    found = searcher.search(problem, space, Budget(seconds=1000), 0)

    def objective_s(plan: Any) -> float:
        costs = predictor.stage_costs(StageBatch.of_plan(plan), engine=plan.engine)
        times = StageTimes.of(costs.seconds, -1)
        steady, extra = steady_s(passes_of(times)).tolist(), extra_s(passes_of(times)).tolist()
        return by_formula(steady, extra, plan.micro_batches)

    plans = list(all_plans(problem, space))
    both = zip(plans, predictor.predict_many(plans), strict=True)
    fitting = [plan for plan, one in both if one.fits]
    assert found.plan is not None
    assert objective_s(found.plan) == pytest.approx(min(map(objective_s, fitting)), rel=1e-9)


def test_each_of_the_two_choices_can_be_taken_alone() -> None:
    found = {
        (weighted, by_chains): searched(published(weighted=weighted, by_chains=by_chains), 104)
        for weighted, by_chains in product((True, False), repeat=2)
    }
    exact = searched(SEARCHERS["exact"], 104)
    assert exact.prediction is not None
    for result in found.values():
        assert result.prediction is not None
        assert result.prediction.iteration_s >= exact.prediction.iteration_s * (1 - 1e-12)


def test_the_objective_is_not_shorter_than_the_longest_chain() -> None:
    """It counts passages and extras that a slow stage hides."""
    draw = np.random.default_rng(1)
    for stages in (2, 4):
        zero = np.zeros((50, stages))
        forward = draw.exponential(1, (50, stages))
        backward = 2 * forward
        times = StageTimes(
            forward_s=forward,
            backward_s=backward,
            through_forward_s=forward,
            through_backward_s=backward,
            delta_forward_s=zero,
            delta_backward_s=zero,
            within_forward_s=zero,
            within_backward_s=zero,
            after_first_s=zero,
            point_to_point_s=zero,
            first_send_late_s=zero,
            received_s=zero,
            within_round_s=zero,
            left_backward_s=zero,
            **dict.fromkeys(ISSUED, zero),
        )
        chain_s = iteration_s(times, np.full(50, 8))
        wanted = [by_formula((3 * row).tolist(), [0.0] * stages, 8) for row in forward]
        assert (chain_s <= np.array(wanted) * (1 + 1e-12)).all()
