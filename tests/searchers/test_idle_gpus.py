"""Plans that leave GPUs idle: searched where a cluster divides badly, proven with the rest."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import Workload
from searchers.parts import divides_well, parts_of
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

PLENTY = Budget(evaluations=1_000_000)


def problem_of(gpus: int, nodes: int = 1, batch: int = 8) -> Problem:
    work = Workload(
        model=catalog.model("gpt3-125m"),
        sequence_length=512,
        global_batch=batch,
        attention="flash",
        precision="fp16",
    )
    hardware = catalog.hardware("l4-24gb" if gpus <= 4 else "a100-40gb")
    return Problem(
        workload=work, cluster=Cluster(hardware=hardware, nodes=nodes, gpus_per_node=gpus)
    )


def searched(problem: Problem, name: str = "mist", space: str = "3d") -> SearchResult:
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    return searcher.search(problem, space_of(space), PLENTY, 0)


def sizes(problem: Problem, *, has_plans: bool = True) -> list[tuple[int, int]]:
    parts = parts_of(problem, has_plans=has_plans)
    return [(part.cluster.nodes, part.cluster.gpus_per_node) for part in parts]


def test_numbers_with_small_factors_divide_well() -> None:
    well = [count for count in range(1, 33) if divides_well(count)]
    assert well == [1, 2, 3, 4, 6, 8, 9, 12, 16, 18, 24, 27, 32]


def test_parts_are_the_largest_that_divide_well() -> None:
    assert sizes(problem_of(8)) == []
    assert sizes(problem_of(7)) == [(1, 6), (1, 4)]
    assert sizes(problem_of(5)) == [(1, 4), (1, 3)]
    assert sizes(problem_of(8, nodes=5)) == [(4, 8), (3, 8)]
    assert sizes(problem_of(5, nodes=2)) == [(1, 4), (1, 3)]
    assert sizes(problem_of(8), has_plans=False) == [(1, 6), (1, 4), (1, 3), (1, 2), (1, 1)]


def test_fewer_gpus_win_where_all_divide_badly() -> None:
    """On 7 GPUs, 8 sequences and 12 heads divide by nothing; 4 and 6 GPUs divide them."""
    problem = problem_of(7)
    found = searched(problem)
    assert found.status == "OPTIMAL"
    assert found.gpus == (7, 6, 4)
    assert found.plan is not None
    assert found.prediction is not None
    assert found.plan.num_gpus < 7
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    assert predictor.predict(found.plan) == found.prediction


@pytest.mark.parametrize("gpus", [3, 5, 7])
@pytest.mark.parametrize("batch", [4, 6])
def test_no_plan_of_any_size_beats_a_proof(gpus: int, batch: int) -> None:
    """Every plan of all sizes that a proof covers, one by one."""
    problem = problem_of(gpus, batch=batch)
    proven = searched(problem)
    tried = searched(problem, "exhaustive")
    assert (proven.status, tried.status) == ("OPTIMAL", "OPTIMAL")
    assert proven.gpus == tried.gpus
    assert proven.prediction is not None
    assert tried.prediction is not None
    assert proven.prediction.iteration_s == pytest.approx(tried.prediction.iteration_s, rel=1e-9)


@pytest.mark.parametrize(("nodes", "gpus"), [(1, 7), (2, 5), (2, 7), (5, 2)])
def test_a_plan_that_leaves_gpus_idle_takes_as_long_on_those_that_it_uses(
    nodes: int, gpus: int
) -> None:
    """Over a slow network: no stage lies across nodes as if they were one."""
    whole = problem_of(gpus, nodes=nodes)
    whole = replace(whole, cluster=replace(whole.cluster, inter_node_gbytes_per_s=1.0))
    found = searched(whole)
    assert found.prediction is not None
    assert found.plan is not None
    for part in (whole, *parts_of(whole, has_plans=True)):
        if part.cluster.num_gpus == found.plan.num_gpus:
            predictor = SymbolicPredictor(workload=part.workload, cluster=part.cluster)
            again = predictor.predict(found.plan).iteration_s
            assert again == pytest.approx(found.prediction.iteration_s, rel=1e-6)
            return
    pytest.fail("a plan of a size that was not searched")


def test_a_cluster_that_divides_well_is_searched_alone() -> None:
    found = searched(problem_of(4))
    assert found.gpus == (4,)
    assert found.plan is not None
    assert found.plan.num_gpus == 4


def test_where_all_gpus_have_no_plan_fewer_are_tried_and_it_is_said() -> None:
    """One sequence in stages of one GPU each: 12 blocks make no 16 stages."""
    problem = problem_of(8, nodes=2, batch=1)
    space = replace(space_of("3d"), tensor_parallel=(1,))
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    found = searcher.search(problem, space, PLENTY, 0)
    assert found.plan is not None
    assert found.plan.num_gpus <= 8
    assert found.gpus[0] == 8
    assert "space 3d has no plan on 16 GPUs for a global batch of 1" in found.reason
