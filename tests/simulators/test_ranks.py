"""One rank stands for all of a stage: every rank played, with collectives together, is the same."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.stages.plan_orders import passes_of_plan
from simulators.build import build_graph
from simulators.events import tasks_of_parts
from simulators.graph import LANES, TaskGraph
from simulators.play import Factors, play
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 16)
CLUSTER = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=8)
STAGE = StagePlan(
    layers=12,
    data_parallel=4,
    tensor_parallel=1,
    micro_batch=1,
    zero=3,
    offload=Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=0.5),
)
PLANS = {
    "all features": Plan(micro_batches=4, stages=(STAGE, STAGE)),
    "uneven": Plan(
        micro_batches=4,
        stages=(
            replace(STAGE, layers=7, zero=1, offload=Offload(optimizer=0.5)),
            replace(STAGE, layers=17, zero=2, checkpointed_layers=9, offload=Offload()),
        ),
    ),
    "Megatron": Plan(
        engine="megatron", micro_batches=4, stages=(replace(STAGE, zero=1, offload=Offload()),) * 2
    ),
}
RANKS = STAGE.data_parallel
COLLECTIVES = "UR"


def unfolded(graph: TaskGraph) -> TaskGraph:
    """Every rank's tasks; a collective begins on no rank before all of its group can begin.

    Collectives themselves end on all ranks at once: each waits for its own part of those before.
    """
    every = TaskGraph(stages=graph.stages * RANKS)
    for rank in range(RANKS):
        for task in range(len(graph)):
            action = graph.action(task)
            action = replace(action, stage=action.stage * RANKS + rank)
            every.add(action, graph.lane(task), graph.seconds[task])
    for source, task, ended in graph.edges():
        together, after = (graph.labels[one][0] in COLLECTIVES for one in (task, source))
        wait = every.wait if ended else every.wait_for_start
        for rank in range(RANKS):
            for other in range(RANKS) if together and not after else [rank]:
                keyword = "end_of" if ended else "start_of"
                here, there = task + rank * len(graph), source + other * len(graph)
                wait(here, **{keyword: there})
    return every


def folded(plan: Plan) -> tuple[TaskGraph, list[Factors]]:
    model = TaskModel.of(
        WORK,
        CLUSTER,
        ENGINES[plan.engine],
        overlap_communication=plan.overlap_communication,
    )
    stages, factors = tasks_of_parts([model], plan, passes_of_plan(plan), CLUSTER)
    return build_graph(stages, model.template, passes_of_plan(plan)), factors


@pytest.mark.parametrize("name", PLANS)
def test_one_rank_of_a_stage_stands_for_all(name: str) -> None:
    graph, factors = folded(PLANS[name])
    one = play(graph, factors)
    all_ranks = play(unfolded(graph), [of_stage for of_stage in factors for _ in range(RANKS)])
    for rank in range(RANKS):
        own = slice(rank * len(graph), (rank + 1) * len(graph))
        assert all_ranks.starts_s[own] == pytest.approx(one.starts_s, rel=1e-12)
        assert all_ranks.ends_s[own] == pytest.approx(one.ends_s, rel=1e-12)


def test_a_slower_rank_keeps_those_that_it_communicates_with_waiting() -> None:
    """Where ranks differ, one does not stand for all: the comparison above can fail."""
    graph, factors = folded(PLANS["uneven"])
    every = unfolded(graph)
    slow_rank = [LANES.index("compute"), RANKS * len(LANES) + LANES.index("compute")]
    for task, lane in enumerate(every.lanes):
        if lane in slow_rank:
            every.seconds[task] *= 2
    slow = play(every, [of_stage for of_stage in factors for _ in range(RANKS)])
    last = slice((RANKS - 1) * len(graph), None)
    assert max(slow.ends_s[last]) > 1.5 * max(play(graph, factors).ends_s)
