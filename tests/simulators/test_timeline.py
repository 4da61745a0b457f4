"""Traces of simulations: what the Trace Event Format asks for."""

import json

import pytest

from mistlab import catalog
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from simulators.events import EventSimulator, Simulation
from simulators.timeline import MICROSECONDS, trace_of, trace_text
from tests.workloads import workload_of


def simulation_of(engine: str) -> Simulation:
    offload = Offload(optimizer=0.5, activations=0.5 if engine == "mistlab" else 0.0)
    stage = StagePlan(
        layers=12, data_parallel=2, tensor_parallel=1, micro_batch=1, zero=2, offload=offload
    )
    work = workload_of("gpt3-1.3b", 2048, 8)
    cluster = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=4)
    plan = Plan(engine=engine, micro_batches=4, stages=(stage, stage))
    return EventSimulator(workload=work, cluster=cluster).simulate(plan)


SIMULATIONS = {engine: simulation_of(engine) for engine in ("mistlab", "megatron")}
engines = pytest.mark.parametrize("engine", SIMULATIONS)


@engines
def test_every_task_is_an_event_of_its_stage_and_stream(engine: str) -> None:
    simulation = SIMULATIONS[engine]
    events = trace_of(simulation)["traceEvents"]
    named = {
        (event["pid"], event["tid"]): event["args"]["name"]
        for event in events
        if event["name"] == "thread_name"
    }
    drawn = {
        (event["name"], named[event["pid"], event["tid"]], event["ts"], event["dur"])
        for event in events
        if event["ph"] == "X"
    }
    assert drawn == {
        (
            str(task.action),
            task.lane.replace("_", "-"),
            task.start_s * MICROSECONDS,
            (task.end_s - task.start_s) * MICROSECONDS,
        )
        for task in simulation.tasks()
    }
    assert len(drawn) == len(simulation)
    assert {e["pid"] for e in events if e["name"] == "process_name"} == {0, 1}


@engines
def test_events_are_in_order_of_time_after_the_names(engine: str) -> None:
    events = trace_of(SIMULATIONS[engine])["traceEvents"]
    phases = "".join(event["ph"] for event in events)
    assert phases.startswith("M")
    assert "M" not in phases.lstrip("M")
    times = [event["ts"] for event in events if event["ph"] != "M"]
    assert times == sorted(times)


@engines
def test_every_flow_goes_from_a_send_to_a_later_task_of_the_next_stage(engine: str) -> None:
    events = trace_of(SIMULATIONS[engine])["traceEvents"]
    slices = {(e["pid"], e["tid"], e["ts"]): e for e in events if e["ph"] == "X"}
    ends: dict[str, dict[int, dict[str, object]]] = {"s": {}, "f": {}}
    for event in events:
        if event["ph"] in ends:
            assert event["id"] not in ends[event["ph"]]
            ends[event["ph"]][event["id"]] = slices[event["pid"], event["tid"], event["ts"]]
    sent, received = ends["s"], ends["f"]
    # Four micro-batches forward, four back.
    assert sent.keys() == received.keys()
    assert len(sent) == 8
    for number, send in sent.items():
        assert "X" in str(send["name"])
        assert send["pid"] != received[number]["pid"]
        assert send["ts"] + send["dur"] <= received[number]["ts"] + 1e-3  # type: ignore[operator]


def test_the_text_is_json() -> None:
    simulation = SIMULATIONS["mistlab"]
    assert json.loads(trace_text(simulation)) == trace_of(simulation)
