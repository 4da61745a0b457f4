"""Searches on unlike nodes."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster, NodeGroup
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from searchers.meshes import pipelines
from searchers.methods.exhaustive import all_plans
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.small import small_problem
from tests.sweep import sweep

L4, A100 = catalog.hardware("l4-24gb"), catalog.hardware("a100-40gb")
# Problems of at most 4,000 plans; in 28 a slow last stage hides its first work behind the others.
SEEDS = (28, 1, 2, 11, 14, 18, 19, 20, 22, 24, 25, 29, 32, 34, 36, 39)


def unlike(seed: int) -> tuple[Problem, SearchSpace]:
    """A small problem on nodes of which the last is slower or faster than the others."""
    problem, space = small_problem(seed)
    first, last = (L4, A100) if seed % 2 else (A100, L4)
    gpus = min(4, problem.cluster.gpus_per_node)
    cluster = Cluster(
        hardware=first,
        nodes=3 if gpus == 2 else 2,
        gpus_per_node=gpus,
        host_memory_gib=problem.cluster.host_memory_gib,
        others=(NodeGroup(hardware=last, nodes=1),),
    )
    return replace(problem, cluster=cluster), space


def searched(name: str, problem: Problem, space: SearchSpace) -> SearchResult:
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    return searcher.search(problem, space, Budget(seconds=1000), 0)


@pytest.mark.parametrize("seed", sweep(SEEDS, first=3))
def test_the_best_plan_is_that_of_trying_all(seed: int) -> None:
    problem, space = unlike(seed)
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    predictions = predictor.predict_many(list(all_plans(problem, space)))
    best_s = min(one.iteration_s for one in predictions if one.fits)
    for name in ("exact", "mist"):
        found = searched(name, problem, space)
        assert found.status == "OPTIMAL"
        assert found.plan is not None
        assert found.prediction is not None
        assert contains(problem, space, found.plan)
        assert found.prediction.iteration_s == pytest.approx(best_s, rel=1e-6)


def two_nodes(*, uneven: bool) -> tuple[Problem, SearchSpace]:
    """A model of 12 blocks on a node of L4 and a node of A100, one stage on each."""
    problem, _ = small_problem(0)
    model = replace(problem.workload.model, layers=12)
    workload = replace(problem.workload, model=model, global_batch=16)
    cluster = Cluster(
        hardware=L4, nodes=2, gpus_per_node=2, others=(NodeGroup(hardware=A100, nodes=1),)
    )
    space = replace(space_of("3d"), pipeline=(2,), layers_off_balance=None if uneven else 0)
    return Problem(workload=workload, cluster=cluster), space


@pytest.mark.parametrize("name", ["mist", "exact", "aceso"])
def test_slower_nodes_get_fewer_blocks(name: str) -> None:
    found = searched(name, *two_nodes(uneven=True))
    assert found.plan is not None
    slow, fast = (stage.layers for stage in found.plan.stages)
    assert slow <= fast // 2


@pytest.mark.parametrize("name", ["random", "optuna", "rl", "mist:published"])
def test_others_find_plans_of_stages_on_equal_nodes(name: str) -> None:
    problem, space = two_nodes(uneven=False)
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    found = searcher.search(problem, space, Budget(evaluations=30), 0)
    assert found.plan is not None
    assert contains(problem, space, found.plan)


def test_no_stage_lies_over_unlike_nodes() -> None:
    problem, _ = two_nodes(uneven=False)
    for name in ("3d", "wide"):
        for pipeline in pipelines(problem, replace(space_of(name), micro_batches=(2,))):
            for rank, mesh in zip(pipeline.first_ranks(), pipeline.meshes, strict=True):
                assert problem.cluster.in_one_group(rank, mesh.num_gpus)
            assert pipeline.num_stages > 1


def test_alpa_says_that_it_takes_nodes_as_equal() -> None:
    found = searched("alpa", *two_nodes(uneven=False))
    assert found.status == "REFUSED"
    assert "unlike" in found.reason
