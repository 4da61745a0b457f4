"""Searches choose between one replica of the shards and one in each node."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from searchers.meshes import meshes
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

PROBLEM = Problem(
    workload=workload_of("llama3-8b", 2048, 64, "bf16", name="", layers=8),
    cluster=Cluster(
        hardware=catalog.hardware("a100-80gb"),
        nodes=4,
        gpus_per_node=8,
        inter_node_gbytes_per_s=10.0,
    ),
)


@pytest.mark.parametrize(("space", "found"), [("fsdp", {1, 2, 4}), ("mist", {1})])
def test_a_stage_has_as_many_replicas_as_nodes(space: str, found: set[int]) -> None:
    chosen = meshes(PROBLEM, space_of(space), 1)
    assert {mesh.value("state_replicas") for mesh in chosen} == found
    assert {mesh.num_gpus for mesh in chosen if mesh.value("state_replicas") == 2} <= {16}


@pytest.mark.parametrize("name", ["mist", "aceso"])
def test_a_slow_network_makes_replicas_of_nodes(name: str) -> None:
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    space = replace(space_of("fsdp"), zero=(3,), tensor_parallel=(1,))
    found = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor).search(
        PROBLEM, space, Budget(evaluations=400), 0
    )
    assert found.plan is not None
    assert found.plan.stages[0].state_replicas == 4
    assert contains(PROBLEM, space, found.plan)
