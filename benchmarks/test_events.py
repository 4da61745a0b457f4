"""How many tasks a second the event simulator plays, with contention, beside bare SimPy.

GPT-3 22B on four nodes of eight L4 in four stages with ZeRO-3 and offloading of everything, so that
all four streams are busy and slow one another down. Rates are in ``extra_info``, with what the same
number of bare SimPy timeouts in as many processes takes. Run on one core:
``taskset -c 0 make benchmark``.
"""

from collections.abc import Generator
from time import perf_counter

import pytest
from simpy import Environment, Event

from mistlab import catalog
from mistlab.cluster import Cluster
from mistlab.interference import STREAMS
from mistlab.plan import Offload, Plan, StagePlan
from mistlab.workload import Workload
from simulators.events import EventSimulator

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
    """Seconds of as many SimPy timeouts, in as many processes as there are streams."""
    environment = Environment()

    def process(count: int) -> Generator[Event, None, None]:
        for _ in range(count):
            yield environment.timeout(1.0)

    processes = STAGES * len(STREAMS)
    for _ in range(processes):
        environment.process(process(timeouts // processes))
    begin = perf_counter()
    environment.run()
    return perf_counter() - begin


@pytest.mark.parametrize("micro_batches", [32, 128])
@pytest.mark.parametrize("offloaded", OFFLOADS)
def test_tasks_a_second(
    benchmark, simulator: EventSimulator, offloaded: str, micro_batches: int
) -> None:
    plan = plan_of(offloaded, micro_batches)
    simulator.simulate(plan)

    simulation = benchmark.pedantic(simulator.simulate, args=(plan,), rounds=5)

    assert len(simulation) > 100 * micro_batches
    median_s = benchmark.stats["median"]
    benchmark.extra_info["tasks"] = len(simulation)
    benchmark.extra_info["tasks_per_s"] = len(simulation) / median_s
    bare = sorted(bare_s(len(simulation)) for _ in range(5))[2]
    benchmark.extra_info["times_bare_simpy"] = median_s / bare
