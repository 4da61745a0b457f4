"""Engines that train adapters alone: no gradients of weights, in time and in memory."""

import pytest

from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=4)
WORK = workload_of("llama-7b", 4096, 32, "bf16")
STAGE = StagePlan(layers=16, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=1)


def plan(engine: str) -> Plan:
    return Plan(engine=engine, micro_batches=16, stages=(STAGE, STAGE))


@pytest.mark.parametrize("engine", ["megatron-core", "megatron-bridge", "fsdp"])
def test_adapters_spare_a_third_of_the_products(engine: str) -> None:
    predictor = SymbolicPredictor(workload=WORK, cluster=CLUSTER)
    whole, adapters = (
        predictor.predict(plan(name)).iteration_s for name in (engine, f"{engine}-adapters")
    )
    # Attention and what only moves bytes stay.
    assert 2 / 3 < adapters / whole < 0.85


def test_adapters_need_frozen_weights_alone() -> None:
    memory = ENGINES["megatron-core-adapters"].memory["bf16"]
    assert (memory.weight, memory.gradient, memory.optimizer) == (2, 0, 0)
    predictor = SymbolicPredictor(workload=WORK, cluster=CLUSTER)
    whole, adapters = (
        predictor.predict(plan(name)).stages[0].peak_allocated_bytes
        for name in ("megatron-core", "megatron-core-adapters")
    )
    blocks = 16 * (4 * 4096 * 4096 + 3 * 4096 * 11008)
    # 4 bytes of a gradient, and half of 12 of the optimizer's state.
    assert whole - adapters == pytest.approx((blocks + 32000 * 4096) * 10, rel=0.05)


def test_a_played_plan_of_adapters_takes_as_long_as_predicted() -> None:
    one = plan("megatron-core-adapters")
    closed = SymbolicPredictor(workload=WORK, cluster=CLUSTER).predict(one)
    played = EventSimulator(workload=WORK, cluster=CLUSTER).predict(one)
    assert closed.iteration_s == pytest.approx(played.iteration_s, rel=0.02)
