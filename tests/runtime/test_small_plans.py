"""A small plan has the structure of the plan that it stands for."""

from dataclasses import replace

import pytest

from tests.workloads import workload_of

pytest.importorskip("torch")

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.schedule.stage_program import iterations
from mistlab.schedule.stage_shape import StageShape
from mistlab.values.job import Job
from mistlab.values.plan import Offload, Plan, StagePlan
from mistlab.values.workload import Workload
from runtime.checks.sanitizer import MOST_BLOCKS, SmallPlan, small, unlike_ranks
from runtime.comm.topology import Topology
from tests.runtime.worlds import random_plan
from tests.sweep import sweep

LARGE = Plan(
    micro_batches=65,
    stages=(
        StagePlan(layers=33, data_parallel=8, tensor_parallel=4, micro_batch=2, zero=2),
        StagePlan(
            layers=47,
            data_parallel=4,
            tensor_parallel=8,
            micro_batch=4,
            checkpointed_layers=20,
            offload=Offload(optimizer=0.25, activations=0.5),
        ),
    ),
)
WORK = workload_of("llama3-70b", 8192, 16 * 65, "bf16")


def kinds(plan: Plan) -> list[set[tuple[str, str, str]]]:
    """For each stage the kinds of tasks that it has, by lane and phase."""
    return [
        {
            (op.name, op.lane, op.phase)
            for program in iterations(StageShape.of(plan, stage, clips=True, tied=True), 2)
            for op in program
        }
        for stage in range(plan.num_stages)
    ]


def transfers(plan: Plan) -> list[list[int]]:
    """For each rank whom it exchanges with."""
    topology = Topology(plan=plan)
    return [
        [
            one.peer
            for other in (topology.place(rank).stage - 1, topology.place(rank).stage + 1)
            if 0 <= other < plan.num_stages
            for way in (False, True)
            for one in topology.transfers(rank, to_stage=other, receives=way)
        ]
        for rank in range(plan.num_gpus)
    ]


def assert_stands_for(made: SmallPlan, work: Workload, plan: Plan) -> None:
    assert kinds(made.plan) == kinds(plan)
    assert transfers(made.plan) == transfers(plan)
    for own, whole in zip(made.plan.stages, plan.stages, strict=True):
        assert (own.layers - whole.layers) % 2 == 0
        assert (own.zero, own.offload) == (whole.zero, whole.offload)
        assert bool(own.checkpointed_layers) == bool(whole.checkpointed_layers)
        assert (own.checkpointed_layers < own.layers) == (whole.checkpointed_layers < whole.layers)
    # All checks of a job hold for it.
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=8, gpus_per_node=8)
    Job(workload=made.workload, cluster=cluster, plan=made.plan)
    grouped = made.workload.model.kv_heads < made.workload.model.heads
    assert grouped == (work.model.kv_heads < work.model.heads)


def test_a_large_plan_becomes_small_and_keeps_its_structure() -> None:
    made = small(WORK, LARGE)
    assert_stands_for(made, WORK, LARGE)
    assert max(stage.layers for stage in made.plan.stages) <= MOST_BLOCKS
    assert made.workload.model.hidden < 300
    assert "6 micro" in " ".join(made.left_out) or "5 micro" in " ".join(made.left_out)


@pytest.mark.parametrize("order", ["interleaved-2", "interleaved-4"])
def test_a_large_plan_of_chunks_keeps_its_structure(order: str) -> None:
    plan = replace(LARGE, micro_batches=66, order=order)
    work = replace(WORK, global_batch=16 * 66)
    made = small(work, plan)
    assert_stands_for(made, work, plan)
    assert made.plan.micro_batches <= 6
    assert max(stage.layers for stage in made.plan.stages) <= 12


@pytest.mark.parametrize("seed", sweep(range(20), first=8))
def test_random_plans_keep_their_structure(seed: int) -> None:
    work, plan = random_plan(seed, most_ranks=16)
    assert_stands_for(small(work, plan), work, plan)


@pytest.mark.parametrize("seed", sweep(range(40), first=12))
def test_ranks_that_differ_stand_for_all(seed: int) -> None:
    _, plan = random_plan(seed, most_ranks=16)
    unlike = unlike_ranks(plan)
    assert sum(one.stands_for for one in unlike) == plan.num_gpus
    assert len({one.rank for one in unlike}) == len(unlike)
    assert {one.stage for one in unlike} == set(range(plan.num_stages))
