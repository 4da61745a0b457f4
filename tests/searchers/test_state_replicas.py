"""Searches choose between one replica of the shards and one in each node."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.values.search import Budget, Problem
from mistlab.values.space import space_of
from mistlab.values.workload import Workload
from searchers.membership import contains
from searchers.meshes import meshes
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

PROBLEM = Problem(
    workload=Workload(
        model=replace(catalog.model("llama3-8b"), name="", layers=8),
        sequence_length=2048,
        global_batch=64,
        attention="flash",
        precision="bf16",
    ),
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
