"""The event simulator: where it agrees with the closed form exactly, and what it keeps to."""

import os
import subprocess
import sys
from collections import defaultdict
from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest

from mistlab import catalog
from mistlab.engines.engine import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import GroupSlowdowns, Interference
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.schedule.slots import Sends
from mistlab.stages.stage_batch import StageBatch
from simulators.events import EventSimulator, PlayedTask, Simulation
from simulators.graph import LANES, SENDS
from simulators.symbolic import SymbolicPredictor
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 2048, 32)
# Streams that do not slow one another down.
APART = Interference(groups=(GroupSlowdowns(gpus_in_node=2, nodes=1, slowdowns=()),))
EVERYTHING = Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=0.5)
PLAIN = StagePlan(layers=24, data_parallel=1, tensor_parallel=1, micro_batch=1)
HALF = replace(PLAIN, layers=12, data_parallel=2)


def cluster_of(hardware: str = "l4-24gb", *, contention: bool = True) -> Cluster:
    found = catalog.hardware(hardware)
    if not contention:
        found = replace(found, interference=APART)
    return Cluster(hardware=found, nodes=1, gpus_per_node=8)


def simulated(plan: Plan, *, contention: bool = True) -> Simulation:
    cluster = cluster_of(contention=contention)
    return EventSimulator(workload=WORK, cluster=cluster).simulate(plan)


def plan_of(*stages: StagePlan, micro_batches: int = 16, **fields: object) -> Plan:
    return Plan(stages=stages, micro_batches=micro_batches, **fields)  # type: ignore[arg-type]


EXACT = {
    "one stage": plan_of(PLAIN, micro_batches=32),
    "one stage, all recomputed": plan_of(replace(PLAIN, checkpointed_layers=24), micro_batches=32),
    "one stage, tensor parallel": plan_of(replace(PLAIN, tensor_parallel=4), micro_batches=32),
    "one micro-batch": plan_of(replace(PLAIN, micro_batch=32), micro_batches=1),
    "one micro-batch, uneven stages": plan_of(
        *(replace(PLAIN, layers=n, micro_batch=32) for n in (3, 9, 5, 7)), micro_batches=1
    ),
    "Megatron, one stage": plan_of(PLAIN, micro_batches=32, engine="megatron"),
    "Megatron, one after another": plan_of(
        replace(PLAIN, data_parallel=4),
        micro_batches=8,
        engine="megatron",
        overlap_communication=False,
    ),
    "DeepSpeed, sharded weights, one after another": plan_of(
        replace(PLAIN, data_parallel=4, zero=3),
        micro_batches=8,
        engine="deepspeed",
        overlap_communication=False,
    ),
}


@pytest.mark.parametrize("hardware", ["l4-24gb", "a100-40gb"])
@pytest.mark.parametrize("name", EXACT)
def test_where_nothing_overlaps_the_closed_form_is_met_exactly(name: str, hardware: str) -> None:
    cluster, plan = cluster_of(hardware), EXACT[name]
    closed = SymbolicPredictor(workload=WORK, cluster=cluster).predict(plan)
    played = EventSimulator(workload=WORK, cluster=cluster).predict(plan)
    assert played.iteration_s == pytest.approx(closed.iteration_s, rel=1e-9)
    assert played.predictor == "events"
    assert [stage.memory for stage in played.stages] == [stage.memory for stage in closed.stages]
    width = closed.iteration_s_high / closed.iteration_s
    assert played.iteration_s_high / played.iteration_s == pytest.approx(width)


@pytest.mark.parametrize("engine", ["mistlab", "megatron"])
@pytest.mark.parametrize("nodes", [2, 4, 8])
@pytest.mark.parametrize("tensor", [2, 8])
def test_one_stage_a_node_is_near_the_closed_form(engine: str, nodes: int, tensor: int) -> None:
    """GPT-3 22B, whose sends take up to half of what a stage takes for a micro-batch."""
    work = replace(WORK, model=catalog.model("gpt3-22b"), global_batch=256)
    cluster = replace(cluster_of("a100-40gb"), nodes=nodes)
    stage = replace(
        PLAIN, layers=48 // nodes, data_parallel=8 // tensor, tensor_parallel=tensor, micro_batch=2
    )
    micro_batches = 256 // (2 * stage.data_parallel)
    plan = plan_of(*[stage] * nodes, micro_batches=micro_batches, engine=engine)
    closed_s = SymbolicPredictor(workload=work, cluster=cluster).predict(plan).iteration_s
    played_s = EventSimulator(workload=work, cluster=cluster).predict(plan).iteration_s
    assert closed_s == pytest.approx(played_s, rel=0.01)


@pytest.mark.parametrize("micro_batch", [1, 2, 4])
def test_rounds_lose_what_passes_and_sends_lose_side_by_side(micro_batch: int) -> None:
    """Eight stages that wait for their sends, and whose passes run beside what is left of them."""
    work = replace(WORK, model=catalog.model("gpt3-22b"), sequence_length=4096, global_batch=256)
    cluster = replace(cluster_of("a100-40gb"), nodes=8)
    stage = replace(PLAIN, layers=6, tensor_parallel=8, micro_batch=micro_batch)
    plan = plan_of(*[stage] * 8, micro_batches=256 // micro_batch)
    closed_s = SymbolicPredictor(workload=work, cluster=cluster).predict(plan).iteration_s
    played_s = EventSimulator(workload=work, cluster=cluster).predict(plan).iteration_s
    assert closed_s == pytest.approx(played_s, rel=0.005)


BLOCKING = replace(ENGINES["mistlab"], sends="blocking")


@pytest.mark.parametrize("hardware", ["l4-24gb", "a100-40gb"])
def test_stages_that_wait_for_each_transfer_take_what_the_closed_form_says(hardware: str) -> None:
    cluster = cluster_of(hardware)
    plan = plan_of(*[replace(PLAIN, layers=6)] * 4, micro_batches=32)
    (closed_s,) = SymbolicPredictor(workload=WORK, cluster=cluster).iterations(
        StageBatch.of_plan(plan),
        np.array([plan.micro_batches]),
        engine=BLOCKING,
    )
    simulator = EventSimulator(workload=WORK, cluster=cluster)
    blocking_s = simulator.simulate(plan, engine=BLOCKING).iteration_s
    assert blocking_s == pytest.approx(closed_s, rel=1e-9)
    assert blocking_s > simulator.simulate(plan).iteration_s


def test_parts_of_activations_are_sent_and_gathered() -> None:
    """Each of two tensor-parallel ranks sends half across nodes; NVLink brings the other half."""
    cluster = replace(cluster_of("a100-40gb"), nodes=2)
    half = replace(PLAIN, layers=12, data_parallel=4, tensor_parallel=2)
    plan = plan_of(half, half, micro_batches=8)
    simulator = EventSimulator(workload=WORK, cluster=cluster)

    def sent_s(sends: Sends) -> float:
        played = simulator.simulate(plan, engine=replace(ENGINES["mistlab"], sends=sends)).tasks()
        return next(task.end_s - task.start_s for task in played if task.action.kind == "X")

    # Latencies are of both messages.
    whole_s, split_s = sent_s("overlapped"), sent_s("split")
    assert 0.5 * whole_s < split_s < 0.6 * whole_s
    whole = replace(half, data_parallel=8, tensor_parallel=1)
    alone = plan_of(whole, whole, micro_batches=4)
    assert simulator.simulate(
        alone, engine=replace(ENGINES["mistlab"], sends="split")
    ).iteration_s == pytest.approx(simulator.simulate(alone).iteration_s, rel=1e-12)


BUSY = {
    "all features": plan_of(*[replace(HALF, zero=3, offload=EVERYTHING)] * 2),
    "uneven": plan_of(
        replace(HALF, layers=8, zero=1, checkpointed_layers=3, offload=Offload(optimizer=0.5)),
        replace(HALF, layers=16, zero=2, offload=Offload(gradients=1.0, activations=0.25)),
    ),
    "stages of one layer": plan_of(
        *(replace(HALF, layers=n, zero=3, offload=EVERYTHING) for n in (1, 22, 1))
    ),
    "Megatron": plan_of(HALF, HALF, engine="megatron"),
    "DeepSpeed": plan_of(*[replace(HALF, zero=3)] * 2, engine="deepspeed"),
    "fewer micro-batches than stages": plan_of(
        *[replace(HALF, layers=6, micro_batch=8, zero=1, offload=EVERYTHING)] * 4, micro_batches=2
    ),
}


@cache
def played(name: str, *, contention: bool = True) -> Simulation:
    return simulated(BUSY[name], contention=contention)


all_busy = pytest.mark.parametrize("name", BUSY)


def found(simulation: Simulation) -> dict[str, PlayedTask]:
    return {str(task.action): task for task in simulation.tasks()}


@all_busy
def test_no_task_starts_before_what_it_waits_for(name: str) -> None:
    simulation = played(name)
    starts, ends = simulation.times.starts_s, simulation.times.ends_s
    edges = list(simulation.graph.edges())
    assert len(edges) >= len(simulation)
    for source, task, ended in edges:
        assert starts[task] >= (ends if ended else starts)[source]


@all_busy
def test_layers_compute_after_their_inputs(name: str) -> None:
    """Worked out from the actions alone, not from what the graph was told."""
    tasks = found(played(name))
    checked = 0
    for task in tasks.values():
        action = task.action
        if action.kind not in "FBRS" or action.layer is None:
            continue
        before: list[object] = []
        here = f"{action.stage}{{}}.{action.layer}m{action.micro_batch}"
        if action.kind == "F":
            before.append(f"{action.stage}F.{action.layer - 1}m{action.micro_batch}")
            before += [here.format("S"), here.format("A<")] if action.micro_batch == 0 else []
        elif action.kind == "B":
            before += [here.format("F"), here.format("A<"), here.format("A>")]
            before.append(f"{action.stage}B.{action.layer + 1}m{action.micro_batch}")
        elif action.kind == "R":
            before.append(here.format("B"))
        else:
            before += [here.format("O<")]
        for text in before:
            if text in tasks and not (action.kind == "F" and "A<" in str(text)):
                checked += 1
                assert tasks[str(text)].end_s <= task.start_s, f"{action} before {text}"
    assert checked > 100


@all_busy
def test_a_layers_gather_ends_before_it_computes(name: str) -> None:
    """A layer is gathered once in each pass that gathers it."""
    simulation = played(name)
    gathers: dict[tuple[int, int, int], list[PlayedTask]] = defaultdict(list)
    computes: dict[tuple[int, int, int], list[PlayedTask]] = defaultdict(list)
    for task in simulation.tasks():
        action = task.action
        if action.kind in "UFB":
            key = action.stage, action.layer or 0, action.micro_batch
            (gathers if action.kind == "U" else computes)[key].append(task)
    for key, of_layer in gathers.items():
        for gather, compute in zip(of_layer, computes[key], strict=False):
            assert gather.end_s <= compute.start_s


@pytest.mark.parametrize("name", [n for n, plan in BUSY.items() if plan.stages[0].zero == 3])
def test_prefetching_stays_within_its_buffers(name: str) -> None:
    """While a layer computes, at most the next one's weights are there or on their way."""
    simulation = played(name)
    for stage in range(BUSY[name].num_stages):
        of_stage = [t for t in simulation.tasks() if t.action.stage == stage]
        computing = [t for t in of_stage if t.action.kind in "FB"]
        gathers = [t for t in of_stage if t.action.kind == "U"]
        # A pass gathers every layer once, in the order in which it computes them.
        assert len(gathers) == len(computing)
        for position, gather in enumerate(gathers[1:], start=1):
            assert gather.start_s >= computing[position - 1].start_s


@all_busy
def test_lanes_run_one_task_at_a_time(name: str) -> None:
    spans: dict[tuple[int, str], list[tuple[float, float]]] = defaultdict(list)
    for task in played(name).tasks():
        spans[task.action.stage, task.lane].append((task.start_s, task.end_s))
    for of_lane in spans.values():
        of_lane.sort()
        for (_, end), (start, _) in pairwise(of_lane):
            assert start >= end


@all_busy
def test_without_contention_busy_time_is_the_sum_of_durations(name: str) -> None:
    simulation = played(name, contention=False)
    sums = defaultdict(float)
    for lane, seconds in zip(simulation.graph.lanes, simulation.graph.seconds, strict=True):
        sums[divmod(lane, len(LANES))] += seconds
    for stage, busy in enumerate(simulation.busy_s()):
        for lane, name_of_lane in enumerate(LANES):
            # A send and a collective of one stage always share their links.
            shares = name_of_lane in ("gpu_to_gpu", SENDS)
            assert busy[name_of_lane] >= sums[stage, lane] * (1 - 1e-9)
            assert shares or busy[name_of_lane] == pytest.approx(sums[stage, lane], rel=1e-9)


@all_busy
def test_contention_takes_longer_and_stretches_every_task(name: str) -> None:
    simulation = played(name)
    assert simulation.iteration_s >= played(name, contention=False).iteration_s
    for task, seconds in zip(simulation.tasks(), simulation.graph.seconds, strict=True):
        assert task.end_s - task.start_s >= seconds * (1 - 1e-9)


@all_busy
def test_the_same_plan_gives_the_same_trace(name: str) -> None:
    again = simulated(BUSY[name])
    assert again.times == played(name).times
    assert list(again.tasks()) == list(played(name).tasks())


def test_the_trace_is_the_same_in_another_process() -> None:
    program = (
        "from tests_of_events import *\nprint(repr(simulated(BUSY['all features']).times.ends_s))"
    )
    load = (
        "import importlib.util, sys\n"
        f"spec = importlib.util.spec_from_file_location('tests_of_events', {__file__!r})\n"
        "sys.modules['tests_of_events'] = module = importlib.util.module_from_spec(spec)\n"
        "spec.loader.exec_module(module)\n"
    )
    for seed in ("1", "2"):
        printed = subprocess.run(
            [sys.executable, "-c", load + program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
            text=True,
        ).stdout
        assert printed.strip() == repr(played("all features").times.ends_s)


def test_offloading_overlaps_with_computing() -> None:
    offload = Offload(optimizer=1.0, activations=1.0)
    plan = plan_of(replace(PLAIN, offload=offload), micro_batches=32)
    simulation = simulated(plan, contention=False)
    (busy,) = simulation.busy_s()
    assert busy["device_to_host"] > 0.1 * busy["compute"]
    longest, together = max(busy.values()), sum(busy.values())
    last = max(simulation.times.ends_s)
    assert longest < last < 0.9 * together


def test_stages_run_ahead_as_the_order_says() -> None:
    simulation = simulated(plan_of(HALF, HALF))
    first = [
        f"{task.action.kind}{task.action.micro_batch}"
        for task in sorted(simulation.tasks(), key=lambda task: task.start_s)
        if task.action.stage == 0 and task.action.kind in "FB" and task.action.layer == 1
    ]
    assert first[:4] == ["F0", "F1", "B0", "F2"]


def first_of(simulation: Simulation, stage: int, kind: str) -> list[float]:
    """When a stage's tasks of a kind in the first micro-batch start."""
    return [
        task.start_s
        for task in simulation.tasks()
        if (task.action.stage, task.action.kind, task.action.micro_batch) == (stage, kind, 0)
    ]


def test_steps_need_no_activations_and_run_before_they_come() -> None:
    simulation = simulated(plan_of(HALF, HALF))
    assert len(first_of(simulation, 1, "S")) == HALF.layers + 1
    assert max(first_of(simulation, 1, "S")) < min(first_of(simulation, 1, "F"))


def test_where_weights_are_offloaded_steps_wait_for_buffers() -> None:
    """What a step makes of the weights stays on the GPU until the layer has computed."""
    stage = replace(HALF, offload=Offload(weights=1.0, optimizer=1.0))
    simulation = simulated(plan_of(HALF, stage))
    steps, computes = first_of(simulation, 1, "S"), first_of(simulation, 1, "F")
    assert all(step >= before for step, before in zip(steps[2:], computes, strict=False))


def test_no_forward_overtakes_a_step_that_the_table_has_before_it() -> None:
    """A stream is a queue: the step of the layer ahead goes first, though its state comes late."""
    stage = replace(HALF, zero=2, offload=Offload(weights=0.5, optimizer=1.0))
    simulation = simulated(plan_of(stage, stage))
    for of_stage in range(2):
        steps = first_of(simulation, of_stage, "S")
        computes = first_of(simulation, of_stage, "F")
        assert all(step < after for step, after in zip(steps[1:], computes, strict=False))


def test_a_gather_of_sharded_weights_waits_until_its_layer_has_stepped() -> None:
    """Weights that stay on the GPU, which a step writes outside the ring that gathers fill."""
    stage = replace(HALF, zero=3)
    tasks = [*simulated(plan_of(stage, stage)).tasks()]
    gathers, steps = ([t for t in tasks if t.action.kind == kind] for kind in "US")
    assert len(steps) == WORK.model.layers + 2
    for step in steps:
        gathered_s = [t.start_s for t in gathers if t.action.layer == step.action.layer]
        assert min(gathered_s, default=step.end_s) >= step.end_s > step.start_s


def test_a_send_goes_beside_reductions() -> None:
    """The stage before waits for its gradients, nobody for the reduced ones."""
    slow = Cluster(
        hardware=replace(catalog.hardware("l4-24gb"), interference=APART),
        nodes=1,
        gpus_per_node=8,
        intra_node_gbytes_per_s=1.0,
    )
    plan = plan_of(HALF, HALF, engine="megatron")
    simulation = EventSimulator(workload=WORK, cluster=slow).simulate(plan)
    last = plan.micro_batches - 1
    of_stage = [t for t in simulation.tasks() if t.action.stage == 1]
    computed = max(t.end_s for t in of_stage if t.action.kind == "B")
    (send,) = (t for t in of_stage if t.action.kind == "X" and t.action.micro_batch == last)
    reductions = [t for t in of_stage if t.action.kind == "R"]
    assert sum(t.start_s >= computed for t in reductions) > 1
    assert send.start_s == pytest.approx(computed)
    assert any(t.start_s < send.start_s < t.end_s for t in reductions)
