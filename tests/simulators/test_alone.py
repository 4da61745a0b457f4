"""One stage of a plan on a GPU by itself: nothing is sent, nobody keeps it waiting."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.cost.kernels import model_flop, stage_flop
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 8)
TIED = replace(WORK, model=replace(WORK.model, name="", tied_embeddings=True))
HARDWARE = catalog.hardware("l4-24gb")
# A machine whose transfers between GPUs were never measured.
assert HARDWARE.transfers is not None
ONE_GPU = Cluster(
    hardware=replace(
        HARDWARE,
        transfers=replace(
            HARDWARE.transfers,
            in_node=None,
            across_nodes=None,
            groups=tuple(
                replace(group, all_reduce=None, all_gather=None, reduce_scatter=None)
                for group in HARDWARE.transfers.groups
            ),
        ),
    ),
    nodes=2,
    gpus_per_node=3,
).alone
STAGE = StagePlan(layers=7, data_parallel=1, tensor_parallel=1, micro_batch=1)
SWAPPED = Offload(weights=0.25, gradients=0.5, optimizer=1.0, activations=0.25)
PLAN = Plan(
    micro_batches=8,
    stages=(
        STAGE,
        replace(STAGE, layers=9, checkpointed_layers=4, offload=Offload(optimizer=0.5)),
        replace(STAGE, layers=8, checkpointed_layers=8, offload=SWAPPED),
    ),
)


def predictor(work: Workload) -> SymbolicPredictor:
    return SymbolicPredictor(workload=work, cluster=ONE_GPU)


def test_a_plan_of_one_stage_is_that_stage_alone() -> None:
    plan = Plan(micro_batches=8, stages=(replace(STAGE, layers=24, checkpointed_layers=12),))
    for work in (WORK, TIED):
        assert predictor(work).predict_stage(plan, 0) == predictor(work).predict(plan)


@pytest.mark.parametrize("work", [WORK, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize("stage", range(3))
def test_a_stage_alone_is_busy_for_its_micro_batches_and_what_comes_once(
    stage: int, work: Workload
) -> None:
    found = predictor(work).predict_stage(PLAN, stage)
    (one,) = found.stages
    busy_s = PLAN.micro_batches * one.stable_s + one.delta_forward_s + one.delta_backward_s
    assert found.iteration_s == pytest.approx(busy_s)
    played = EventSimulator(workload=work, cluster=ONE_GPU).simulate_stage(PLAN, stage)
    assert {task.action.stage for task in played.tasks()} == {stage}
    assert found.iteration_s == pytest.approx(played.iteration_s, rel=0.02)


@pytest.mark.parametrize("stage", range(3))
def test_a_stage_alone_takes_the_memory_that_it_takes_among_others(stage: int) -> None:
    of_plan = SymbolicPredictor(
        workload=TIED, cluster=Cluster(hardware=HARDWARE, nodes=1, gpus_per_node=3)
    ).predict(PLAN)
    (alone,) = predictor(TIED).predict_stage(PLAN, stage).stages
    among = of_plan.stages[stage]
    for name in ("peak_allocated_bytes", "peak_reserved_bytes", "host_bytes", "memory"):
        assert getattr(alone, name) == getattr(among, name)


def test_the_arithmetic_of_stages_adds_up_to_the_models() -> None:
    total = sum(stage_flop(WORK, PLAN, stage) for stage in range(PLAN.num_stages))
    assert total == pytest.approx(model_flop(WORK))
    mfu = predictor(WORK).predict_stage(PLAN, 1).mfu
    assert 0.1 < mfu < 1
