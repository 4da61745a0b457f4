"""Measures how many tasks a second the event simulator plays, with contention, compared with bare
SimPy.

The plan trains GPT-3 22B on four nodes of eight L4, in four stages with ZeRO-3 and everything
offloaded, so that all four streams are busy and slow one another down; memory is tracked over time.
``extra_info`` has the rates, and how long as many bare SimPy timeouts take in equally many
processes. Further cases show how time grows with stages, micro-batches and layers, and GPT-3 175B
on 1,024 GPUs. Run on one core: ``taskset -c 0 make benchmark``.
"""

import resource
from collections.abc import Generator
from dataclasses import replace
from time import process_time
from typing import Any

import numpy as np
import pytest
from simpy import Environment, Event

from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import STREAMS
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.events import EventSimulator, Simulation
from simulators.memory import memory_of

STAGES = 4
OFFLOADS = {
    "nothing": Offload(),
    "everything": Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=0.5),
}


@pytest.fixture(scope="module")
def simulator() -> EventSimulator:
    work = Workload(
        model=catalog.model("gpt3-22b"),
        sequence_length=2048,
        global_batch=1024,
        attention="flash",
        precision="fp16",
    )
    cluster = Cluster(hardware=catalog.hardware("l4-24gb"), nodes=4, gpus_per_node=8)
    return EventSimulator(workload=work, cluster=cluster)


def plan_of(offloaded: str, micro_batches: int) -> Plan:
    stage = StagePlan(
        layers=12,
        data_parallel=8,
        tensor_parallel=1,
        micro_batch=1024 // 8 // micro_batches,
        zero=3,
        offload=OFFLOADS[offloaded],
    )
    return Plan(micro_batches=micro_batches, stages=(stage,) * STAGES)


def bare_s(timeouts: int) -> float:
    """The seconds of equally many SimPy timeouts, in as many processes as there are streams."""
    environment = Environment()

    def process(count: int) -> Generator[Event, None, None]:
        for _ in range(count):
            yield environment.timeout(1.0)

    processes = STAGES * len(STREAMS)
    for _ in range(processes):
        environment.process(process(timeouts // processes))
    begin = process_time()
    environment.run()
    return process_time() - begin


def with_memory(simulator: EventSimulator, plan: Plan) -> Simulation:
    """Simulate an iteration and track its memory."""
    simulation = simulator.simulate(plan)
    room = np.full(plan.num_stages, float(simulator.cluster.memory_bytes))
    assert len(memory_of(simulation, plan, StageModel.of(simulator.workload), room)) == STAGES
    return simulation


@pytest.mark.parametrize("micro_batches", [32, 128])
@pytest.mark.parametrize("offloaded", OFFLOADS)
def test_tasks_a_second(
    benchmark: Any, simulator: EventSimulator, offloaded: str, micro_batches: int
) -> None:
    plan = plan_of(offloaded, micro_batches)
    with_memory(simulator, plan)

    simulation = benchmark.pedantic(with_memory, args=(simulator, plan), rounds=5)

    assert len(simulation) > 100 * micro_batches
    median_s = benchmark.stats["median"]
    benchmark.extra_info["tasks"] = len(simulation)
    benchmark.extra_info["tasks_per_s"] = len(simulation) / median_s
    bare = sorted(bare_s(len(simulation)) for _ in range(5))[2]
    benchmark.extra_info["times_bare_simpy"] = median_s / bare


STAGE = StagePlan(
    layers=6,
    data_parallel=4,
    tensor_parallel=1,
    micro_batch=1,
    zero=3,
    offload=OFFLOADS["everything"],
)


@pytest.mark.parametrize(
    ("stages", "micro_batches", "layers"),
    [
        *((stages, 32, 6) for stages in (1, 2, 4, 8)),
        *((4, micro_batches, 6) for micro_batches in (8, 16, 64, 128)),
        *((4, 32, layers) for layers in (3, 12, 24)),
    ],
)
def test_growth(
    benchmark: Any, simulator: EventSimulator, stages: int, micro_batches: int, layers: int
) -> None:
    plan = Plan(micro_batches=micro_batches, stages=(replace(STAGE, layers=layers),) * stages)
    simulator.simulate(plan)

    simulation = benchmark.pedantic(simulator.simulate, args=(plan,), rounds=5)

    benchmark.extra_info["tasks"] = len(simulation)
    benchmark.extra_info["tasks_per_s"] = len(simulation) / benchmark.stats["median"]


def test_175_billion_parameters_on_1024_gpus(benchmark: Any) -> None:
    work = Workload(
        model=catalog.model("gpt3-175b"),
        sequence_length=2048,
        global_batch=1536,
        attention="flash",
        precision="fp16",
    )
    cluster = Cluster(hardware=catalog.hardware("a100-80gb"), nodes=128, gpus_per_node=8)
    offload = Offload(optimizer=0.5, activations=0.25)
    stage = StagePlan(
        layers=12, data_parallel=16, tensor_parallel=8, micro_batch=1, zero=2, offload=offload
    )
    plan = Plan(micro_batches=96, stages=(stage,) * 8)

    simulation = benchmark.pedantic(
        lambda: EventSimulator(workload=work, cluster=cluster).simulate(plan), rounds=3
    )

    benchmark.extra_info["tasks"] = len(simulation)
    benchmark.extra_info["tasks_per_s"] = len(simulation) / benchmark.stats["median"]
    benchmark.extra_info["largest_resident_gib"] = (
        resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB_BYTES
    )
    assert benchmark.stats["max"] < 60
