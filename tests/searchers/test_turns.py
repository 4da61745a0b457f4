"""Models whose kinds of blocks take turns: searches of alike stages against every plan."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import SearchSpace
from searchers.exact import divisions
from searchers.exact.groups import groups_of, work_of
from searchers.methods.exhaustive import all_plans
from searchers.registry import SEARCHERS
from searchers.strategy import Ledger, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.sweep import sweep
from tests.workloads import workload_of

MODELS = ("gpt-oss-20b", "deepseek-v3", "deepseek-v2-lite")


def drawn(seed: int) -> tuple[Problem, SearchSpace]:
    """A few blocks of unlike kinds on a few GPUs, and a space of alike stages."""
    draw = np.random.default_rng(seed)
    layers = int(draw.integers(4, 8))
    work = workload_of(str(draw.choice(MODELS)), 2048, 8, "bf16", layers=layers)
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=4)
    space = replace(
        space_of("moe"),
        micro_batch=(1, 2),
        expert_parallel=(1, 4),
        recomputation=("none_or_all", "any")[draw.integers(2)],
        layers_off_balance=int(draw.integers(3)),
    )
    return Problem(workload=work, cluster=cluster), space


@pytest.mark.parametrize("seed", sweep(range(200), first=2))
def test_no_plan_beats_a_proven_plan_or_a_bound(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Divisions are tried one by one, or joined where they are too many; here either at random."""
    problem, space = drawn(seed)
    if seed % 2:
        monkeypatch.setattr(divisions, "MOST_DIVISIONS", 0)
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    result = searcher.search(problem, space, Budget(seconds=1000), 0)
    plans = list(all_plans(problem, space))
    every = predictor.predict_many(plans)
    fitting_s = [one.iteration_s for one in every if one.fits]
    if not fitting_s:
        assert result.status == "INFEASIBLE"
        return
    assert result.status == "OPTIMAL"
    assert result.prediction is not None
    assert result.prediction.iteration_s == pytest.approx(min(fitting_s), rel=1e-9)

    ledger = Ledger(predictor=predictor, budget=Budget(seconds=1000), clock=lambda: 0.0)
    groups = list(groups_of(problem, space))
    work = work_of(problem, space, ledger, sorted({one for each in groups for one in each.meshes}))
    for group in groups:
        meshes = {pipeline.meshes[0] for pipeline in group.equal_pipelines(problem)}
        least_s = group.least_s(problem, work)
        for plan, prediction in zip(plans, every, strict=True):
            if plan.micro_batches == group.micro_batches and any(
                all(plan.stages[0].degree(name) == value for name, value in mesh.values().items())
                for mesh in meshes
            ):
                assert prediction.iteration_s >= least_s * (1 - 1e-9)
