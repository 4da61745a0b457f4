"""The least work of stages, by which searches leave groups of pipelines and candidates out."""

from itertools import product
from math import inf
from time import perf_counter

import numpy as np
import pytest

from mistlab import catalog
from mistlab.job.search import Budget, Problem
from mistlab.machine.cluster import Cluster
from mistlab.plan.dimensions import names_of
from mistlab.plan.named_spaces import space_of
from mistlab.stages.stage_batch import StageBatch
from searchers.exact.candidates import Menus, hopeful_s
from searchers.exact.groups import Group, LeastWork, groups_of, work_of
from searchers.exact.played_plans import every
from searchers.exact.programme import all_within
from searchers.meshes import Mesh
from searchers.registry import SEARCHERS
from searchers.strategy import Ledger, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.drawn import drawn_problem
from tests.sweep import sweep
from tests.workloads import workload_of

# Two nodes: a stage of eight GPUs sends over the network, and its tensor-parallel ranks reduce
# beside the send. Stages of few blocks end before their sends do.
PROBLEM = Problem(
    workload=workload_of("gpt3-13b", 4096, 256),
    cluster=Cluster(hardware=catalog.hardware("a100-40gb"), nodes=2, gpus_per_node=8),
)
PREDICTOR = SymbolicPredictor(workload=PROBLEM.workload, cluster=PROBLEM.cluster)
MESHES = [
    Mesh(data_parallel=data, tensor_parallel=tensor, micro_batch=size)
    for data, tensor, size in product((1, 2, 4), (1, 2, 4), (1, 2))
    if data * tensor <= 8
]


def test_no_stage_takes_less_than_its_least_work() -> None:
    """Nor do its first forward and its last backward pass."""
    space = space_of("+zero")
    ledger = Ledger(predictor=PREDICTOR, budget=Budget(evaluations=1000), clock=perf_counter)
    work = work_of(PROBLEM, space, ledger, MESHES)
    rows = [*product(MESHES, (1, 2, 3, 10, 20, 40), ((0, 0), (0, 1), (1, 0), (1, 1)), (1, 3))]
    batch = StageBatch(
        layers=np.array([layers for _, layers, _, _ in rows]),
        **{name: np.array([mesh.value(name) for mesh, *_ in rows]) for name in names_of("mesh")},
        has_embedding=np.array([first for _, _, (first, _), _ in rows]),
        has_head=np.array([last for _, _, (_, last), _ in rows]),
        zero=np.array([zero for *_, zero in rows]),
    )
    times = PREDICTOR.stage_costs(batch).seconds
    first_s = times.through_forward_s + times.within_forward_s
    last_s = times.through_backward_s + times.within_backward_s
    least_s = [
        layers * work[mesh].block_s + (first and last) * work[mesh].ends_s
        for mesh, layers, (first, last), _ in rows
    ]
    for taken_s in (times.stable_s, first_s + last_s):
        assert (taken_s >= np.array(least_s) * (1 - 1e-9)).all()


@pytest.mark.parametrize("seed", sweep((22, 23, *range(22), *range(24, 100)), first=2))
def test_no_pipeline_is_faster_than_the_bound_of_a_stage_in_it(seed: int) -> None:
    """Passes go on after they have sent their outputs, beside the passes of other stages."""
    problem, space = drawn_problem(seed)
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    ledger = Ledger(predictor=predictor, budget=Budget(evaluations=10**6), clock=perf_counter)
    for of_engine in space.of_engines:
        groups = [one for one in groups_of(problem, of_engine) if one.has_formula]
        meshes = sorted({mesh for group in groups for mesh in group.meshes})
        work = work_of(problem, of_engine, ledger, meshes) if meshes else {}
        for group in groups:
            menus = Menus(
                problem=problem,
                space=of_engine,
                ledger=ledger,
                group=group,
                work=work,
                pick=every,
            )
            for seconds, stages in all_within(menus, inf, 20_000) or ():
                least_s = [
                    np.atleast_1d(hopeful_s(problem, group, work, position, menus[position]))[row]
                    for position, row in stages
                ]
                assert max(least_s) <= seconds * (1 + 1e-9)


def test_a_space_has_no_worse_plan_than_a_part_of_it() -> None:
    """The best plan of 3d has two stages that fill a node each."""
    searcher = StrategySearcher(strategy=SEARCHERS["mist"], predictor=PREDICTOR)
    times = []
    for name in ("3d", "+zero"):
        found = searcher.search(PROBLEM, space_of(name), Budget(evaluations=1000), 0)
        assert found.prediction is not None
        assert found.status == "OPTIMAL"
        times.append(found.prediction.iteration_s)
    assert times[1] <= times[0]


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("turns_s", [(), (1.0, np.inf, 1.0)])
def test_no_blocks_take_no_time_even_where_a_block_has_no_room(turns_s: tuple[float, ...]) -> None:
    """Else a pipeline with all blocks would be left out by a bound that is not a number."""
    group = Group(micro_batches=4, meshes=(MESHES[0],), num_stages=2)
    work = {MESHES[0]: LeastWork(block_s=np.inf, ends_s=0.5, turns_s=turns_s)}
    front_s = group.front_gpu_s(work, 3)
    assert front_s[0] == 0.0
    assert front_s[-1] == np.inf
    assert group.least_gpu_s(work, 0) == 0.0
    others_s = group.other_stages_s(work, np.array([0, 0]), np.array([1, 2]), 3)
    assert (others_s == np.inf).all()
    if not turns_s:
        assert group.other_stages_s(work, 0, 3, 3) == 0.0
