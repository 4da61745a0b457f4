"""The space of what Megatron-LM's users have today, searched by searchers of whole plans."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.values.job import Job
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
        model=replace(catalog.model("llama3-8b"), layers=16),
        sequence_length=16384,
        global_batch=16,
        attention="flash",
        precision="bf16",
    ),
    cluster=Cluster(hardware=catalog.hardware("a100-80gb"), nodes=2, gpus_per_node=8),
)
SPACE = space_of("megatron-today")


@pytest.mark.parametrize("name", ["random", "aceso", "rl", "optuna"])
def test_searchers_of_whole_plans_search_it(name: str) -> None:
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
    found = searcher.search(PROBLEM, SPACE, Budget(evaluations=60), 1)
    assert found.plan is not None
    assert found.prediction is not None
    assert found.prediction.fits
    assert contains(PROBLEM, SPACE, found.plan)
    Job(workload=PROBLEM.workload, cluster=PROBLEM.cluster, plan=found.plan)


def test_it_has_the_plans_of_before_and_more() -> None:
    before, now = (
        set(meshes(PROBLEM, space_of(name), 4)) for name in ("megatron", "megatron-today")
    )
    assert before < now
    tokens = replace(PROBLEM.workload, sequence_length=16384 + 8)
    fewer = set(meshes(replace(PROBLEM, workload=tokens), SPACE, 4))
    # Eight ranks take sixteen parts, which do not divide this sequence.
    assert {mesh.value("context_parallel") for mesh in now} == {1, 2, 4, 8, 16}
    assert {mesh.value("context_parallel") for mesh in fewer} == {1, 2, 4}
