"""Engines whose host issues kernels one by one: the closed form and the event simulator agree."""

from dataclasses import replace

import pytest

from mistlab import catalog
from mistlab.engines.host_time import HostTime
from mistlab.engines.nanotron import NANOTRON
from mistlab.machine.cluster import Cluster
from mistlab.values.model import ModelSpec
from mistlab.values.plan import Plan, StagePlan
from mistlab.values.stages import StageBatch
from mistlab.values.workload import Workload
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

MODEL = ModelSpec.of(family="llama", hidden=2048, layers=8, heads=16, ffn=8192, vocab=32000)
WORKLOAD = Workload(
    model=MODEL, sequence_length=2048, global_batch=64, attention="flash", precision="bf16"
)
CLUSTER = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=2, gpus_per_node=8)


def plan(tensor: int, blocks: tuple[int, ...], micro_batch: int = 1) -> Plan:
    data = 16 // tensor // len(blocks)
    stages = (
        StagePlan(layers=count, data_parallel=data, tensor_parallel=tensor, micro_batch=micro_batch)
        for count in blocks
    )
    return Plan(engine="nanotron", micro_batches=64 // data // micro_batch, stages=tuple(stages))


def closed_s(one: Plan, host_s: float, cluster: Cluster = CLUSTER) -> float:
    host = HostTime(forward_s=host_s / 3, backward_s=2 * host_s / 3)
    predictor = SymbolicPredictor(workload=WORKLOAD, cluster=cluster)
    micro_batches = StageBatch.of_plan(one).layers[:1] * 0 + one.micro_batches
    engine = replace(NANOTRON, name="nanotron", host=host)
    return float(predictor.iterations(StageBatch.of_plan(one), micro_batches, engine=engine)[0])


def test_a_slow_host_is_what_a_step_takes() -> None:
    one = plan(1, (8,))
    fast, slow = closed_s(one, 1e-6), closed_s(one, 30e-3)
    # Eight blocks of four micro-batches on a rank.
    assert slow == pytest.approx(one.micro_batches * 8 * 30e-3, rel=0.15)
    assert fast < slow / 4


def test_a_host_that_is_ahead_costs_nothing() -> None:
    one = plan(1, (8,))
    assert closed_s(one, 1e-6) == pytest.approx(closed_s(one, 1e-4), rel=1e-9)


@pytest.mark.parametrize(
    "one",
    [plan(1, (8,)), plan(2, (4, 4)), plan(4, (3, 3, 2, 0)), plan(2, (2, 2, 2, 2))],
    ids=["one stage", "two stages", "head alone", "four stages"],
)
@pytest.mark.parametrize("profile", ["none", "ultrascale"])
def test_closed_form_and_events_agree(one: Plan, profile: str) -> None:
    named = None if profile == "none" else catalog.profile(profile)
    cluster = replace(CLUSTER, profile=named)
    closed = SymbolicPredictor(workload=WORKLOAD, cluster=cluster).predict(one).iteration_s
    played = EventSimulator(workload=WORKLOAD, cluster=cluster).simulate(one).iteration_s
    assert closed == pytest.approx(played, rel=0.05)


def test_only_the_last_stages_of_nanotron_may_lack_blocks() -> None:
    assert plan(4, (4, 4, 0, 0)).num_stages == 4
    with pytest.raises(ValueError, match=r"stages\[1\].layers: 0 is too small"):
        plan(4, (4, 0, 4, 0))
    with pytest.raises(ValueError, match=r"stages\[3\].layers: 0 is too small"):
        replace(plan(4, (4, 4, 0, 0)), engine="megatron", stages=plan(4, (3, 3, 2, 0)).stages)
