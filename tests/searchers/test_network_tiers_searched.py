"""Searches on networks of several tiers, against every plan predicted whole."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mistlab import catalog
from mistlab.core.values import from_mapping
from mistlab.job.job import model_from
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.network.tiers import Network
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

NODE = {"name": "node", "gpus": 8}
# Two nodes below a leaf, behind links so slow that a stage should not lie on two leaves.
APART = {"name": "spine", "gpus": 32, "gbytes_per_s": 0.05}
NETWORKS: dict[str, list[dict[str, Any]]] = {
    "leaves": [NODE, {"name": "leaf", "gpus": 16}, APART],
    "scattered": [NODE, {"name": "leaf", "gpus": 16}, {**APART, "scattered": True}],
    "a site that nothing leaves": [
        NODE,
        {"name": "leaf", "gpus": 16},
        {"name": "spine", "gpus": 32, "oversubscription": 1},
        {"name": "site", "gpus": 64, "gbytes_per_s": 0.02},
    ],
}


@pytest.mark.parametrize(("sequences", "tokens", "order"), [(2, 512, 1), (64, 8192, 0)])
def test_searches_choose_the_order_of_axes(sequences: int, tokens: int, order: int) -> None:
    """Tensor ranks lie side by side, but where gradients are more than what layers exchange and
    the network is slow: in short steps."""
    work = Workload(
        model=replace(model_from("gpt3-7b", Path()), layers=1),
        sequence_length=tokens,
        global_batch=sequences,
        attention="flash",
        precision="fp16",
    )
    cluster = Cluster(
        hardware=catalog.hardware("h100-80gb"),
        nodes=2,
        gpus_per_node=2,
        inter_node_gbytes_per_s=10,
    )
    space = replace(space_of("3d"), name="orders", axis_order=(0, 1))
    problem, found = Problem(workload=work, cluster=cluster), {}
    for searcher in ("exhaustive", "exact"):
        predictor = SymbolicPredictor(workload=work, cluster=cluster)
        strategy = StrategySearcher(strategy=SEARCHERS[searcher], predictor=predictor)
        result = strategy.search(problem, space, Budget(seconds=1000), 0)
        assert result.plan is not None
        assert result.prediction is not None
        found[searcher] = result.prediction.iteration_s
    assert found["exact"] == pytest.approx(found["exhaustive"], rel=1e-12)
    one = stage_with(2, 2)
    asked = [
        Plan(micro_batches=sequences // 2, stages=(replace(one, axis_order=o),)) for o in (0, 1)
    ]
    seconds = [one.iteration_s for one in predictor.predict_many(asked)]
    assert seconds[order] < seconds[1 - order]
    assert min(seconds) >= found["exact"] * (1 - 1e-12)


def stage_with(tensor: int, data: int) -> StagePlan:
    return StagePlan(layers=1, data_parallel=data, tensor_parallel=tensor, micro_batch=1)


@pytest.mark.parametrize("name", [*NETWORKS])
def test_searches_find_the_best_plan_wherever_stages_lie(name: str) -> None:
    work = Workload(
        model=model_from("gpt3-2.7b", Path()),
        sequence_length=4096,
        global_batch=64,
        attention="flash",
        precision="fp16",
    )
    cluster = Cluster(
        hardware=catalog.hardware("l4-24gb"),
        nodes=4,
        gpus_per_node=4,
        network=from_mapping(Network, {"tiers": NETWORKS[name]}),
    )
    problem = Problem(workload=work, cluster=cluster)
    found = {}
    for searcher in ("exhaustive", "exact", "alpa"):
        predictor = SymbolicPredictor(workload=work, cluster=cluster)
        strategy = StrategySearcher(strategy=SEARCHERS[searcher], predictor=predictor)
        result = strategy.search(problem, space_of("3d"), Budget(seconds=1000), 0)
        assert result.prediction is not None
        found[searcher] = result.prediction.iteration_s
    assert found["exact"] == pytest.approx(found["exhaustive"], rel=1e-12)
    assert found["alpa"] == pytest.approx(found["exhaustive"], rel=1e-9)
