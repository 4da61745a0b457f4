"""Orders without a formula: predicted by the longest path, played task by task, and alike."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mistlab import catalog
from mistlab.graph.stage_model import StageModel
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.schedule.orders import interleaved, zero_bubble
from simulators.events import EventSimulator, Simulation
from simulators.memory import memory_of
from simulators.symbolic import SymbolicPredictor
from simulators.timeline import trace_of
from tests.pipeline_orders import all_forwards_first
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 1024, 32, layers=16)
CLUSTER = Cluster(hardware=catalog.hardware("a100-40gb"), nodes=1, gpus_per_node=8)
PLAIN = StagePlan(layers=4, data_parallel=2, tensor_parallel=1, micro_batch=2)
PLAN = Plan(micro_batches=8, stages=(PLAIN,) * 4)
OFFLOADED = replace(
    PLAIN, zero=3, checkpointed_layers=2, offload=Offload(optimizer=0.5, activations=0.5)
)
STAGES = {
    "plain": PLAIN,
    "recomputed in part": replace(PLAIN, checkpointed_layers=2),
    "tensor parallel": replace(PLAIN, data_parallel=1, tensor_parallel=2, micro_batch=4),
    "sharded gradients": replace(PLAIN, zero=2),
    "sharded weights, offloaded": OFFLOADED,
}
TEXTS: dict[str, Callable[[], str]] = {
    "all forwards first": lambda: all_forwards_first(4, 8),
    "and back in reverse": lambda: all_forwards_first(4, 8, reverses=True),
    "interleaved": lambda: interleaved(4, 8, 2),
    "interleaved, a block a chunk": lambda: interleaved(4, 8, 4),
    "zero bubble": lambda: zero_bubble(4, 8),
}


@pytest.fixture(scope="module")
def predictors() -> tuple[SymbolicPredictor, EventSimulator]:
    given = {"workload": WORK, "cluster": CLUSTER}
    return SymbolicPredictor(**given), EventSimulator(**given)


@pytest.fixture
def simulator(predictors: tuple[SymbolicPredictor, EventSimulator]) -> EventSimulator:
    return predictors[1]


def ordered(folder: Path, text: str, plan: Plan = PLAN) -> Plan:
    path = folder / "order.txt"
    path.write_text(text)
    return replace(plan, order=str(path))


def held(simulation: Simulation, plan: Plan) -> list[float]:
    model = StageModel.of(WORK)
    return [one.peak_bytes for one in memory_of(simulation, plan, model, np.full(4, 1e15))]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", TEXTS)
def test_what_is_played_is_near_what_is_predicted(
    name: str,
    stage: str,
    tmp_path: Path,
    predictors: tuple[SymbolicPredictor, EventSimulator],
) -> None:
    plan = ordered(tmp_path, TEXTS[name](), replace(PLAN, stages=(STAGES[stage],) * 4))
    closed, simulator = predictors[0].predict(plan), predictors[1]
    simulation = simulator.simulate(plan)
    # What is sharded or offloaded comes and goes at each turn: more turns hide less of it.
    is_moving = stage.startswith("sharded")
    short, long = (0.03, 0.12) if is_moving else (0.01, 0.02)
    assert 1 - short < closed.iteration_s / simulation.iteration_s < 1 + long
    for one, peak in zip(closed.stages, held(simulation, plan), strict=True):
        assert one.peak_allocated_bytes == pytest.approx(peak, rel=0.03)
    assert any("no run in the order" in note for note in closed.notes)


def test_every_pass_of_every_chunk_is_played_once(
    tmp_path: Path, simulator: EventSimulator
) -> None:
    simulation = simulator.simulate(ordered(tmp_path, interleaved(4, 8, 2)))
    passes = Counter(
        (task.action.kind, task.action.stage, task.action.layer)
        for task in simulation.tasks()
        if task.action.kind in "FB"
    )
    assert set(passes.values()) == {8}
    # Of each stage, two blocks of the first half of the model and two of the second.
    layers = {(stage, layer) for _, stage, layer in passes}
    assert sorted(layer for stage, layer in layers if stage == 1) == [3, 4, 11, 12]
    assert sorted(layer for stage, layer in layers if stage == 0) == [0, 1, 2, 9, 10]
    assert sorted(layer for stage, layer in layers if stage == 3) == [7, 8, 15, 16, 17]


def test_chunks_are_sent_from_the_last_stage_to_the_first(
    tmp_path: Path, simulator: EventSimulator
) -> None:
    graph = simulator.simulate(ordered(tmp_path, interleaved(4, 8, 2))).graph
    ways = Counter((graph.stage(send), graph.stage(to)) for send, to in graph.sends)
    there = {(stage, stage + 1): 2 * 8 for stage in range(3)}
    back = {(stage + 1, stage): 2 * 8 for stage in range(3)}
    assert ways == {**there, **back, (3, 0): 8, (0, 3): 8}


def test_a_single_stage_in_chunks_computes_as_long_as_in_one_piece(
    tmp_path: Path, simulator: EventSimulator
) -> None:
    plan = Plan(micro_batches=8, stages=(replace(PLAIN, layers=16),))
    text = " ".join(f"F0m{m} F1m{m} B1m{m} B0m{m}" for m in range(8))
    whole = simulator.simulate(plan).iteration_s
    chunks = simulator.simulate(ordered(tmp_path, text, plan)).iteration_s
    assert chunks == pytest.approx(whole, rel=0.01)


def test_gradients_of_weights_take_their_share_of_the_backward_pass(
    tmp_path: Path, simulator: EventSimulator
) -> None:
    def computing(plan: Plan) -> dict[str, float]:
        seconds = Counter[str]()
        for task in simulator.simulate(plan).tasks():
            if task.action.kind in "BW" and task.action.layer == 6:
                seconds[task.action.kind] += task.end_s - task.start_s
        return seconds

    recomputed = replace(PLAN, stages=(replace(PLAIN, checkpointed_layers=4),) * 4)
    for plan in (PLAN, recomputed):
        whole, split = computing(plan), computing(ordered(tmp_path, zero_bubble(4, 8), plan))
        assert split["B"] + split["W"] == pytest.approx(whole["B"], rel=0.02)
        # About half of a backward pass, a third with its second forward.
        assert 0.2 < split["W"] / whole["B"] < 0.5


def test_weights_gather_for_inputs_and_gradients_are_reduced_after_weights(
    tmp_path: Path, simulator: EventSimulator
) -> None:
    plan = ordered(tmp_path, zero_bubble(4, 8), replace(PLAN, stages=(OFFLOADED,) * 4))
    of_layer = [
        task
        for task in simulator.simulate(plan).tasks()
        if task.action.layer == 6 and task.action.micro_batch == 3
    ]
    ends = {str(task.action).split(".")[0][1:]: task.end_s for task in of_layer}
    starts = {str(task.action).split(".")[0][1:]: task.start_s for task in of_layer}
    assert ends["U"] <= starts["B"]
    assert ends["A<"] <= starts["B"] < ends["B"] <= starts["W"]
    assert ends["W"] <= starts["R"]


def test_tensor_parallel_ranks_wait_where_nothing_hides_it_any_more(
    tmp_path: Path, simulator: EventSimulator
) -> None:
    def work_s(stage: StagePlan, text: str | None) -> float:
        plan = replace(PLAN, stages=(stage,) * 4)
        if text is not None:
            plan = ordered(tmp_path, text, plan)
        busy = simulator.simulate(plan).busy_s()
        return busy[1]["compute"]

    split, alone = zero_bubble(4, 8), STAGES["tensor parallel"]
    assert work_s(alone, split) > 1.02 * work_s(alone, None)
    assert work_s(PLAIN, split) == pytest.approx(work_s(PLAIN, None), rel=0.01)


def test_a_trace_names_the_passes_of_weights(tmp_path: Path, simulator: EventSimulator) -> None:
    simulation = simulator.simulate(ordered(tmp_path, zero_bubble(4, 8)))
    kinds = Counter(event.get("cat") for event in trace_of(simulation)["traceEvents"])
    assert kinds["gradients of weights"] == kinds["backward"] == 8 * 18


def test_an_order_that_has_a_name_is_predicted_as_the_file_of_its_text(
    tmp_path: Path, predictors: tuple[SymbolicPredictor, EventSimulator]
) -> None:
    """1F1B from a file: by the longest path, which is close to its formula."""
    from mistlab.schedule.orders import one_forward_one_backward  # noqa: PLC0415

    plan = ordered(tmp_path, one_forward_one_backward(4, 8))
    closed, simulator = predictors
    assert simulator.simulate(plan).iteration_s == simulator.simulate(PLAN).iteration_s
    by_path, by_formula = closed.predict_many([plan, PLAN])
    assert by_path.iteration_s == pytest.approx(by_formula.iteration_s, rel=0.005)
    assert [one.memory for one in by_path.stages] == [one.memory for one in by_formula.stages]
