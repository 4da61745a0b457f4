"""Searchers that put stages together, against every plan of a space predicted whole."""

from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from math import inf

import pytest

from mistlab import catalog
from mistlab.job.prediction import Prediction
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import OffloadRatios, SearchSpace
from mistlab.plan.workload import Workload
from searchers.exact import played_plans
from searchers.methods.exhaustive import all_plans, count_plans
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import Ledger, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.small import short_of_memory, small_problem
from tests.sweep import sweep

# Problems with a thousand plans that fit at least, also with a little less memory than the fastest
# of them needs.
SEEDS = (
    *(2, 12, 15, 29, 53, 55, 64, 65, 66, 85, 104, 116, 118, 121, 133, 142, 157, 162, 172, 177),
    *(196, 199, 228, 252, 261),
)


def predictor_of(problem: Problem) -> SymbolicPredictor:
    return SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)


def searched(
    name: str, problem: Problem, space: SearchSpace, predictor: SymbolicPredictor
) -> SearchResult:
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    return searcher.search(problem, space, Budget(seconds=1000), 0)


@cache
def proven(seed: int) -> SearchResult:
    """What ``exact`` says of a small problem, for several tests."""
    problem, space = small_problem(seed)
    return searched("exact", problem, space, predictor_of(problem))


@cache
def all_predicted(seed: int) -> list[Prediction]:
    """Every plan of a small problem, predicted, for several tests."""
    problem, space = small_problem(seed)
    return every_prediction(problem, space, predictor_of(problem))


def every_prediction(
    problem: Problem, space: SearchSpace, predictor: SymbolicPredictor
) -> list[Prediction]:
    return predictor.predict_many(list(all_plans(problem, space)))


@pytest.mark.parametrize("is_short", [False, True], ids=["roomy", "short of memory"])
@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_the_best_plan_is_that_of_trying_all(seed: int, is_short: bool) -> None:
    problem, space = small_problem(seed)
    predictions = all_predicted(seed)
    if is_short:
        problem = short_of_memory(problem, predictions)
        predictions = every_prediction(problem, space, predictor_of(problem))
    predictor = predictor_of(problem)
    fitting_s = [one.iteration_s for one in predictions if one.fits]
    assert len(predictions) == count_plans(problem, space)
    assert len(fitting_s) >= (200 if is_short else 1000)
    best_s = min(fitting_s)
    if is_short:
        assert min(one.iteration_s for one in predictions) < best_s

    exact = searched("exact", problem, space, predictor) if is_short else proven(seed)
    assert exact.status == "OPTIMAL"
    assert exact.prediction is not None
    assert exact.prediction.iteration_s == pytest.approx(best_s, rel=1e-12)
    mist = searched("mist", problem, space, predictor)
    assert mist.plan is not None
    assert mist.prediction is not None
    assert contains(problem, space, mist.plan)
    if space.unequal_meshes:
        # Proven by bounds over boxes of ratios, where even rounding is known.
        assert mist.prediction.iteration_s == pytest.approx(best_s, rel=1e-9)
    assert mist.status == "OPTIMAL"
    assert mist.prediction.iteration_s == pytest.approx(best_s, rel=1e-6)


# Small spaces, with the stages that each of them has.
SMALL_SPACES = {
    **{name: space_of(name) for name in ("3d", "+zero", "+checkpointing", "megatron", "deepspeed")},
    **{name: space_of(name) for name in ("megatron:published", "deepspeed:published")},
    "all recomputed": replace(space_of("+zero"), recomputation="all"),
    "uneven blocks": replace(space_of("3d"), layers_off_balance=1),
    "uneven blocks, some recomputed alike": replace(
        space_of("+checkpointing"), layers_off_balance=1, unequal_stages=False
    ),
}


@pytest.mark.parametrize("space", SMALL_SPACES.values(), ids=SMALL_SPACES.keys())
def test_small_spaces_are_searched_whole(space: SearchSpace) -> None:
    problem, _ = small_problem(SEEDS[0])
    predictor = predictor_of(problem)
    assert len({*all_plans(problem, space)}) == count_plans(problem, space)
    fitting_s = [p.iteration_s for p in every_prediction(problem, space, predictor) if p.fits]
    for searcher in ("exact", "mist", "exhaustive"):
        result = searched(searcher, problem, space, predictor)
        assert result.status == "OPTIMAL"
        assert result.prediction is not None
        assert result.prediction.iteration_s == pytest.approx(min(fitting_s), rel=1e-12)


@pytest.mark.parametrize(
    "name", sweep(["mist", "aceso", "alpa", "rl", "random", "optuna"], first=5)
)
def test_nobody_finds_a_faster_plan_than_the_best(name: str) -> None:
    problem, space = small_problem(SEEDS[0])
    exact = proven(SEEDS[0])
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor_of(problem))
    result = searcher.search(problem, space, Budget(evaluations=200), 0)
    assert exact.prediction is not None
    assert result.prediction is not None
    assert result.prediction.iteration_s >= exact.prediction.iteration_s * (1 - 1e-12)


def test_a_space_too_large_is_refused_with_its_size() -> None:
    problem, _ = small_problem(SEEDS[0])
    refused = searched("exhaustive", problem, space_of("mist"), predictor_of(problem))
    assert refused.status == "REFUSED"
    assert refused.plan is None
    assert refused.reason == (
        "space mist has more than 200,000 plans, and at most 200,000 may be predicted"
    )


def test_host_memory_that_stages_of_a_node_share_is_followed() -> None:
    """Both stages on one node offload as much as its host holds, or less where it is short."""
    problem, space = small_problem(SEEDS[0])
    roomy = proven(SEEDS[0])
    assert roomy.prediction is not None
    held = max(stage.host_bytes for stage in roomy.prediction.stages)
    cluster = replace(problem.cluster, host_memory_gib=max(held / 2**30 / 2, 0.01))
    problem = replace(problem, cluster=cluster)
    predictor = predictor_of(problem)
    fitting_s = [p.iteration_s for p in every_prediction(problem, space, predictor) if p.fits]
    exact = searched("exact", problem, space, predictor)
    assert (exact.prediction is None) == (not fitting_s)
    if exact.prediction is not None:
        assert exact.prediction.iteration_s == pytest.approx(min(fitting_s), rel=1e-12)


def three_nodes() -> tuple[Problem, SearchSpace]:
    """Six stages on three nodes, whose sends wait for one another in slow networks."""
    model = replace(catalog.model("gpt3-1.3b"), name="small", layers=7)
    workload = Workload(
        model=model, sequence_length=2048, global_batch=32, attention="flash", precision="fp16"
    )
    hardware = catalog.hardware("l4-24gb")
    cluster = Cluster(hardware=hardware, nodes=3, gpus_per_node=8, inter_node_gbytes_per_s=0.5)
    space = replace(
        space_of("mist"),
        name="small",
        zero=(0,),
        tensor_parallel=(1,),
        micro_batch=(1,),
        pipeline=(6,),
        offload=OffloadRatios(),
        recomputation="none_or_all",
        unequal_stages=False,
        layers_off_balance=1,
    )
    return Problem(workload=workload, cluster=cluster), space


@pytest.mark.parametrize("name", ["exact", "mist"])
def test_a_bound_says_no_more_than_it_knows_of_a_network_that_stages_share(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bounds know nothing of sends that wait for one another, so no best plan is proven by them,
    but by predicting all plans."""
    problem, space = three_nodes()
    best_s = min(one.iteration_s for one in every_prediction(problem, space, predictor_of(problem)))
    result = searched(name, problem, space, predictor_of(problem))
    assert result.prediction is not None
    assert result.prediction.iteration_s == pytest.approx(best_s)
    assert result.status == "OPTIMAL"
    monkeypatch.setattr(played_plans, "MOST_PLANS", 0)
    result = searched(name, problem, space, predictor_of(problem))
    assert result.prediction is not None
    assert result.prediction.iteration_s == pytest.approx(best_s)
    assert result.status == "FEASIBLE"
    assert result.lower_bound_s is not None
    assert result.lower_bound_s < 0.9 * best_s


@pytest.mark.parametrize(("most_waiting", "predicted"), [(0, 1), (2, 3), (inf, 12)])
def test_a_few_plans_are_looked_at_that_take_longer_than_their_bounds(
    most_waiting: float, predicted: int
) -> None:
    problem, space = three_nodes()
    plans = list(all_plans(problem, space))[:12]
    predictor = predictor_of(problem)
    seconds = [one.iteration_s for one in predictor.predict_many(plans)]
    in_order = [plan for _, plan in sorted(zip(seconds, plans, strict=True), key=lambda of: of[0])]

    def shown(bounds: Iterable[float]) -> int:
        ledger = Ledger(predictor=predictor, budget=Budget(evaluations=99), clock=lambda: 0.0)
        bounded = zip(bounds, in_order, strict=True)
        ledger.predict_fastest(bounded, most_waiting=most_waiting)
        return ledger.plan_evaluations

    assert shown([min(seconds) / 2] * 12) == predicted
    assert shown(sorted(seconds)) == 1
