"""How many plans a space has: as many as are listed one by one."""

from dataclasses import replace

import pytest

from experiments.studies.space_size import number_of_plans
from mistlab import catalog
from mistlab.job.search import Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers.methods.exhaustive import all_plans, count_plans
from tests.searchers.small import small_problem
from tests.workloads import workload_of

FREE = SearchSpace(
    name="free",
    data_parallel=(1, 2, 4),
    tensor_parallel=(1, 2),
    unequal_stages=True,
    layers_off_balance=None,
    unequal_meshes=True,
)


def problem(layers: int, nodes: int, gpus_per_node: int, global_batch: int = 4) -> Problem:
    return Problem(
        workload=workload_of("llama-1.3b", 1024, global_batch, name="small", layers=layers),
        cluster=Cluster(
            hardware=catalog.hardware("l4-24gb"), nodes=nodes, gpus_per_node=gpus_per_node
        ),
    )


@pytest.mark.parametrize(("nodes", "gpus_per_node"), [(1, 2), (1, 4), (2, 2)])
@pytest.mark.parametrize("layers", [1, 3, 4])
def test_walks_count_what_is_listed(nodes: int, gpus_per_node: int, layers: int) -> None:
    space = replace(FREE, zero=(0, 2), offload=OffloadRatios(optimizer=(0.0, 1.0)))
    small = problem(layers, nodes, gpus_per_node)
    assert number_of_plans(small, space) == sum(1 for _ in all_plans(small, space)) > 0


def test_two_stages_on_two_gpus_by_hand() -> None:
    # One stage: a mesh of two GPUs for each degree, G = 1, 2, 4 (dp 2 not with 4). Two stages: 3
    # blocks divide in two ways, for each of three G. None or all blocks of each are recomputed.
    small = problem(3, 1, 2)
    alone, joined = (3 + 2) * 2, 3 * 2 * 2**2
    assert number_of_plans(small, FREE) == alone + joined
    assert number_of_plans(small, replace(FREE, pipeline=(1,))) == alone


@pytest.mark.parametrize("seed", range(12))
def test_random_spaces_are_counted_as_before(seed: int) -> None:
    small, space = small_problem(seed)
    space = replace(space, layers_off_balance=None)
    assert number_of_plans(small, space) == count_plans(small, space)
