"""The spaces of what Megatron-LM's users have today, and of what its launch lines say exactly."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab import catalog
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.named_spaces import space_of
from searchers.meshes import divisors, meshes
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, chosen_plan, contains
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

PROBLEM = Problem(
    workload=workload_of("llama3-8b", 16384, 16, "bf16", layers=16),
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


def test_launch_lines_say_every_plan_of_its_part_for_megatron_core() -> None:
    draw = np.random.default_rng(5)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    for _ in range(60):
        plan = chosen_plan(PROBLEM, space_of("megatron-core"), chooser)
        if plan is not None:
            job = Job(workload=PROBLEM.workload, cluster=PROBLEM.cluster, plan=plan)
            found = nearest(job, TARGETS["megatron"])
            assert found.is_exact, found.remarks
            assert found.job.plan.engine == "megatron-core"


def test_a_search_proves_the_plan_for_megatron_core() -> None:
    predictor = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=predictor)
    found = searcher.search(PROBLEM, space_of("megatron-core"), Budget(evaluations=20_000), 1)
    assert found.status == "OPTIMAL"
    assert found.plan is not None
    assert contains(PROBLEM, space_of("megatron-core"), found.plan)


def test_divisors_of_small_and_of_huge_batches_are_found() -> None:
    for number in range(1, 200):
        assert divisors(number) == [one for one in range(1, number + 1) if number % one == 0]
    assert divisors(10**12)[-2:] == [5 * 10**11, 10**12]
