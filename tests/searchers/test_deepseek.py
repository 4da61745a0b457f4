"""DeepSeek V3 on 2,048 H100: the search's plan, its proof, and a plain grid of whole plans."""

from collections.abc import Iterator
from itertools import product

import pytest

from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import RECOMPUTED
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from searchers.meshes import even_layers
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

PROBLEM = Problem(
    workload=workload_of("deepseek-v3", 4096, 15360, "bf16"),
    cluster=Cluster(hardware=catalog.hardware("h100-80gb"), nodes=256, gpus_per_node=8),
)
GRID = tuple(product(range(1, 9), range(1, 62), (8, 16, 32, 64), (1, 2), (0, 1), ("none", "full")))


def searched(seconds: float) -> SearchResult:
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    return searcher.search(PROBLEM, space_of("moe"), Budget(seconds=seconds), 0)


def grid() -> Iterator[Plan]:
    """Every valid plan of the grid: stages have equal shares of the blocks."""
    for tensor, stages, experts, micro_batch, sequence, recomputation in GRID:
        data, rest = divmod(PROBLEM.cluster.num_gpus, tensor * stages)
        count, left = divmod(PROBLEM.workload.global_batch, max(1, data) * micro_batch)
        if rest or left or data == 0 or (sequence and tensor == 1):
            continue
        shares = even_layers(PROBLEM.workload.model.layers, stages)
        degrees = {
            "data_parallel": data,
            "tensor_parallel": tensor,
            "micro_batch": micro_batch,
            "expert_parallel": experts,
            "sequence_parallel": sequence,
            "zero": 1,
        }
        try:
            yield Plan(
                engine="megatron-core",
                micro_batches=count,
                stages=tuple(
                    StagePlan.of_values(
                        {
                            "layers": own,
                            RECOMPUTED: own if recomputation == "full" else 0,
                            **degrees,
                        }
                    )
                    for own in shares
                ),
            )
        except InputError:
            continue


@pytest.mark.slow
def test_the_plan_is_no_slower_than_the_best_of_a_grid_and_proven_in_a_minute() -> None:
    found = searched(60)
    assert found.prediction is not None
    assert found.gap is not None
    assert found.gap < 0.05
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    plans = [plan for plan in grid() if runs(predictor, plan)]
    fitting_s = [one.iteration_s for one in predictor.predict_many(plans) if one.fits]
    assert len(fitting_s) > 100
    assert found.prediction.iteration_s <= min(fitting_s)
    assert found.lower_bound_s is not None
    assert found.lower_bound_s <= min(fitting_s)


def runs(predictor: SymbolicPredictor, plan: Plan) -> bool:
    """Whether the model's sizes divide as the plan says."""
    try:
        predictor.fits(plan)
    except InputError:
        return False
    return True


@pytest.mark.slow
def test_a_plan_comes_within_seconds() -> None:
    """A budget that proves nothing still has a plan near the best."""
    soon, late = searched(4).prediction, searched(60).prediction
    assert soon is not None
    assert late is not None
    assert soon.iteration_s < 1.2 * late.iteration_s
