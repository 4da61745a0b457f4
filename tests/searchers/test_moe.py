"""Space ``moe``: pipelines of models with experts."""

from dataclasses import replace

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from searchers.registry import SEARCHERS
from searchers.savings import contains
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of


def test_the_stage_with_the_head_has_fewer_blocks() -> None:
    """The head of 152,000 tokens takes as long as blocks do."""
    work = workload_of("qwen3-30b-a3b", 4096, 32, "bf16", layers=16)
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=4)
    problem = Problem(workload=work, cluster=cluster)
    predictor = SymbolicPredictor(workload=work, cluster=cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    space = replace(space_of("moe"), pipeline=(4,))
    found, even = (
        searcher.search(problem, one, Budget(evaluations=200), 0)
        for one in (space, replace(space, layers_off_balance=0))
    )
    assert found.plan is not None
    assert found.prediction is not None
    assert even.prediction is not None
    *others, last = (stage.layers for stage in found.plan.stages)
    assert last < min(others)
    assert found.prediction.iteration_s < 0.95 * even.prediction.iteration_s
    assert contains(problem, space, found.plan)
