"""The published search: what its objective and its weighted sums choose, and what that costs."""

import time
from dataclasses import dataclass, fields, replace
from functools import cached_property
from itertools import product
from math import inf
from typing import Any

import numpy as np
import pytest

from mistlab.core.arrays import Floats
from mistlab.cost.chains import ISSUED, ColumnAlgebra, Numbers
from mistlab.cost.pipeline import Published, extra_s, in_front, iteration_s, passes_of, steady_s
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.stages.stage_batch import StageBatch, StageTimes
from searchers.exact.candidates import Menus, Options, StagePosition
from searchers.exact.groups import groups_of, work_of
from searchers.exact.programme import places_by_stage
from searchers.exact.published_programme import WEIGHTS, best_by_weights
from searchers.methods.exhaustive import all_plans
from searchers.methods.published import published
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import Ledger, Strategy, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.small import short_of_memory, small_problem
from tests.sweep import sweep


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
    for weight in np.arange(1, WEIGHTS + 1) / (WEIGHTS + 1):
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


# Twenty problems of 100 to 5,000 plans, all of which are looked at.
PROBLEMS = (1, 2, 3, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 18, 19, 20, 22, 24, 25, 28)


@dataclass(frozen=True, kw_only=True)
class Enumerated:
    """A small problem, with hosts that have room for all, and a space of stages of equal sizes;
    every other problem is a little too large for its fastest plan."""

    problem: Problem
    space: SearchSpace

    @classmethod
    def of(cls, seed: int) -> "Enumerated":
        problem, space = small_problem(seed)
        problem = replace(problem, cluster=replace(problem.cluster, host_memory_gib=None))
        case = cls(problem=problem, space=replace(space, unequal_meshes=False))
        if seed % 2:
            predictions = case.predictor.predict_many(list(all_plans(problem, case.space)))
            fitting = [one for one in predictions if one.fits]
            case = replace(case, problem=short_of_memory(problem, fitting))
        return case

    @cached_property
    def predictor(self) -> SymbolicPredictor:
        return SymbolicPredictor(workload=self.problem.workload, cluster=self.problem.cluster)

    def found(self, strategy: Strategy) -> SearchResult:
        searcher = StrategySearcher(strategy=strategy, predictor=self.predictor)
        return searcher.search(self.problem, self.space, Budget(seconds=1000), 0)

    def objectives_s(self, plans: list[Plan]) -> list[float]:
        """The objective as it is printed, of each plan."""
        batch = StageBatch.joined([StageBatch.of_plan(plan) for plan in plans])
        costs = self.predictor.stage_costs(batch, engine=self.space.engine)
        passes = passes_of(StageTimes.of(costs.seconds, -1))
        steady, extra = steady_s(passes).tolist(), extra_s(passes).tolist()
        found, first = [], 0
        for plan in plans:
            own = slice(first, first + len(plan.stages))
            found.append(by_formula(steady[own], extra[own], plan.micro_batches))
            first += len(plan.stages)
        return found

    def least_s(self) -> float:
        """The least objective of all plans of the space that fit; infinite where none does."""
        plans = list(all_plans(self.problem, self.space))
        both = zip(plans, self.predictor.predict_many(plans), strict=True)
        fitting = [plan for plan, one in both if one.fits]
        return min(self.objectives_s(fitting)) if fitting else inf

    def least_of_samples_s(self) -> float:
        """The least objective of all pipelines of samples, of which every one is looked at."""
        ledger = Ledger(
            predictor=self.predictor, budget=Budget(seconds=1000), clock=time.perf_counter
        )
        groups = list(groups_of(self.problem, self.space))
        meshes = sorted({mesh for group in groups for mesh in group.meshes})
        work = work_of(self.problem, self.space, ledger, meshes)
        least = inf
        for group in groups:
            menus = Menus(
                problem=self.problem,
                space=self.space,
                ledger=ledger,
                group=group,
                work=work,
                pick=lambda options: options,
            )
            stages = [
                [sample for place in places for sample in sampled(menus, place)]
                for places in reversed(places_by_stage(menus, inf))
            ]
            layers = self.problem.workload.model.layers
            least = min(least, least_of_pipelines(stages, layers, group.micro_batches))
        return least


# The blocks, the steady and the extra time of a candidate.
Sample = tuple[int, float, float]


def sampled(menus: Menus, place: StagePosition) -> list[Sample]:
    """The blocks, steady and extra times of the samples of a place, drawn as the paper does: with
    each number of treated blocks by t and d / G, and of all of these by t and d."""
    options = menus[place]
    passes = passes_of(options.times)
    steady, extra = steady_s(passes), np.maximum(extra_s(passes), 0.0)
    cells = [tuple(counts) for counts in options.counts.tolist()]
    first = []
    for cell in dict.fromkeys(cells):
        rows = [row for row, own in enumerate(cells) if own == cell]
        first += best_rows(rows, steady, extra / menus.group.micro_batches)
    return [
        (place.layers, steady[row], extra[row])
        for row in (best_rows(sorted(first), steady, extra) if first else ())
    ]


def least_of_pipelines(stages: list[list[Sample]], layers: int, micro_batches: int) -> float:
    """The least objective of all pipelines of a sample for each stage, with all blocks together.

    Of pipelines alike in their blocks only those go on that are not beaten both in the slowest
    stage and in the rest r of the objective, which is t + max(r, d) with one more stage.
    """
    ways: dict[int, list[tuple[float, float]]] = {0: [(0.0, 0.0)]}
    for samples in stages:
        longer: dict[int, set[tuple[float, float]]] = {}
        for taken, pairs in ways.items():
            for blocks, t, d in samples:
                new = {(max(slowest, t), t + max(rest, d)) for slowest, rest in pairs}
                longer.setdefault(taken + blocks, set()).update(new)
        ways = {taken: unbeaten(pairs) for taken, pairs in longer.items() if taken <= layers}
    return min(
        ((micro_batches - 1) * slowest + rest for slowest, rest in ways.get(layers, [])),
        default=inf,
    )


def unbeaten(pairs: set[tuple[float, float]]) -> list[tuple[float, float]]:
    kept: list[tuple[float, float]] = []
    for pair in sorted(pairs):
        if not kept or pair[1] < kept[-1][1]:
            kept.append(pair)
    return kept


def best_rows(rows: list[int], steady: Floats, extra: Floats) -> list[int]:
    shares = [place / 31 for place in range(1, 31)]
    return sorted(
        {min(rows, key=lambda row: a * steady[row] + (1 - a) * extra[row]) for a in shares}
    )


@pytest.mark.parametrize("seed", sweep(PROBLEMS, first=8))
def test_the_published_search_is_never_better_than_what_is_enumerated(seed: int) -> None:
    """It is equal to all pipelines of its samples, and with whole frontiers to all plans."""
    case = Enumerated.of(seed)
    found, whole = case.found(SEARCHERS["mist:published"]), case.found(published(weighted=False))
    exact, least_s = case.found(SEARCHERS["exact"]), case.least_s()
    if least_s == inf:
        assert found.plan is whole.plan is exact.plan is None
        return
    assert found.plan is not None
    assert found.prediction is not None
    assert found.prediction.fits
    assert contains(case.problem, case.space, found.plan)
    assert found.plan_evaluations == 1
    assert exact.prediction is not None
    assert found.prediction.iteration_s >= exact.prediction.iteration_s * (1 - 1e-12)
    objective_s = case.objectives_s([found.plan])[0]
    assert objective_s >= least_s * (1 - 1e-9)
    assert objective_s == pytest.approx(case.least_of_samples_s(), rel=1e-6)
    assert whole.plan is not None
    assert case.objectives_s([whole.plan])[0] == pytest.approx(least_s, rel=1e-6)


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
            end_send_late_s=zero,
            end_return_late_s=zero,
            received_s=zero,
            within_round_s=zero,
            round_late_s=zero,
            queued_late_s=zero,
            held_forward_s=zero,
            held_backward_s=zero,
            left_backward_s=zero,
            **dict.fromkeys(ISSUED, zero),
        )
        chain_s = iteration_s(times, np.full(50, 8))
        wanted = [by_formula((3 * row).tolist(), [0.0] * stages, 8) for row in forward]
        assert (chain_s <= np.array(wanted) * (1 + 1e-12)).all()
