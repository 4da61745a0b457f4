"""Space ``tempo``: the best of all plans with lean and recomputed blocks is found and proven."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-350m", 1024, 16, layers=6)
SPACE = replace(space_of("tempo"), micro_batch=(8, 16))


@pytest.mark.parametrize(("memory_gib", "saves"), [(6.4, "both"), (6.6, "lean"), (14.0, "none")])
def test_the_best_plan_is_that_of_trying_all(memory_gib: float, saves: str) -> None:
    """In more and more memory: some blocks recompute beside lean ones, all are lean, none saves."""
    cluster = Cluster(
        hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=1, memory_gib=memory_gib
    )
    problem = Problem(workload=WORK, cluster=cluster)
    predictor = SymbolicPredictor(workload=WORK, cluster=cluster)
    best, every = (
        StrategySearcher(strategy=SEARCHERS[name], predictor=predictor).search(
            problem, SPACE, Budget(evaluations=10_000), 0
        )
        for name in ("mist", "exhaustive")
    )
    assert best.status == every.status == "OPTIMAL"
    assert best.plan is not None
    assert best.plan == every.plan
    (stage,) = best.plan.stages
    saved = {
        "lean": stage.value("lean_layers") > 0,
        "again": stage.value("checkpointed_layers") > 0,
    }
    assert saved == {"lean": saves != "none", "again": saves == "both"}
