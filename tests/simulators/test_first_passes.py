"""Closed form and events where the optimizer's steps of many stages wait for one another."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import with_long_head, workload_of

WORK = workload_of("gpt3-1.3b", 2048, 8)
NODE = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=8)
PLAIN = StagePlan(layers=3, data_parallel=1, tensor_parallel=1, micro_batch=2)


def difference(*stages: StagePlan, work: Workload = WORK) -> float:
    """The closed form's time over the event simulator's, less one."""
    plan = Plan(stages=stages, micro_batches=4)
    closed = SymbolicPredictor(workload=work, cluster=NODE).predict(plan)
    played = EventSimulator(workload=work, cluster=NODE).simulate(plan)
    return closed.iteration_s / played.iteration_s - 1


@pytest.mark.parametrize(
    "offload",
    [Offload(optimizer=1.0), Offload(optimizer=1.0, weights=0.5)],
    ids=["state", "state and weights"],
)
def test_a_first_micro_batch_waits_for_no_state_that_leaves_behind_it(
    offload: Offload,
) -> None:
    stage = replace(PLAIN, offload=offload)
    assert abs(difference(*[stage] * 8, work=with_long_head(WORK))) < 0.01


def test_steps_of_two_blocks_run_ahead_of_the_first_micro_batch() -> None:
    slow = replace(PLAIN, layers=9, offload=Offload(optimizer=1.0))
    others = [replace(PLAIN, offload=Offload(optimizer=1.0, weights=0.5))] * 5
    assert abs(difference(slow, *others)) < 0.01
