"""Closed form and events where passes for gradients of weights wait for their reductions."""

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 64)
# Each stage has the GPUs of two nodes, so gradients are reduced over the network.
NODES = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=4, gpus_per_node=4)


@pytest.mark.parametrize("order", ["zb-h1", "zb-2p", "zb-v"])
@pytest.mark.parametrize("zero", [2, 3])
def test_a_pass_for_weights_takes_as_long_as_its_reductions(order: str, zero: int) -> None:
    stage = StagePlan(layers=12, data_parallel=8, tensor_parallel=1, micro_batch=1, zero=zero)
    plan = Plan(stages=(stage, stage), micro_batches=8, order=order)
    closed = SymbolicPredictor(workload=WORK, cluster=NODES).predict(plan)
    played = EventSimulator(workload=WORK, cluster=NODES).simulate(plan)
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.03)
