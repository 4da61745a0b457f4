"""Programs are free of races, and every wait in them is needed."""

from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mistlab.engines.engine import ENGINES
from mistlab.plan.plan import Plan
from mistlab.schedule.orders import zb_v_text
from mistlab.stages.plan_orders import passes_of_plan
from mistlab.stages.stage_program import Op, iterations
from mistlab.stages.stage_shape import StageShape
from simulators.build import StageTasks, build_graph
from tests.pipeline_orders import whole_backwards
from tests.runtime.program_races import needless, path, races, unallocated
from tests.runtime.worlds import MIXED, random_plan, stage
from tests.sweep import sweep

ITERATIONS = 3


def programs(seed: int) -> list[list[list[Op]]]:
    """For each stage of a random plan, its programs of some iterations."""
    work, plan = random_plan(seed, most_ranks=16)
    tied = work.model.tied_embeddings
    shapes = [
        StageShape.of(plan, one, clips=seed % 2 == 0, tied=tied, steps_on_host=seed % 3 == 0)
        for one in range(plan.num_stages)
    ]
    return [iterations(shape, ITERATIONS) for shape in shapes]


def joined(program: list[list[Op]]) -> list[Op]:
    return list(chain.from_iterable(program))


@pytest.mark.parametrize("seed", sweep(range(100), first=30))
def test_programs_of_random_plans_have_no_race(seed: int) -> None:
    for program in programs(seed):
        assert races(joined(program)) == []
        assert unallocated(joined(program)) == []


@pytest.mark.parametrize("seed", sweep(range(100), first=30))
def test_iterations_after_the_first_are_alike(seed: int) -> None:
    for _, second, third in programs(seed):
        assert second == third


@pytest.mark.parametrize("seed", range(8))
def test_every_wait_left_out_makes_a_race(seed: int) -> None:
    for program in programs(seed):
        ops = joined(program)
        assert needless(ops, len(ops) - len(program[-1])) == []


def test_a_wait_too_many_comes_with_the_path_that_implies_it() -> None:
    plan = Plan(micro_batches=2, stages=(stage(offload=MIXED),))
    (program,) = iterations(StageShape.of(plan, 0), 1)
    backward = next(n for n, op in enumerate(program) if op.name == "B" and op.layer == 2)
    forward = next(n for n, op in enumerate(program) if op.name == "F" and op.layer == 2)
    leads = [program[number].name for number in path(program, forward, backward)]
    assert leads[0] == "F"
    assert leads[-1] == "B"
    assert "A<" not in leads or "A>" in leads


def lanes_of_program(ops: list[Op]) -> dict[str, list[str]]:
    """The table's tasks by lane, as text. Receipts take no time and are no tasks elsewhere."""
    found: dict[str, list[str]] = {}
    for op in ops:
        if not isinstance(op.task, str) and op.name != "Y":
            lane = "send" if op.lane.startswith("send") else op.lane
            found.setdefault(lane, []).append(str(op.task))
    return found


def lanes_of_simulation(plan: Plan, index: int) -> dict[str, list[str]]:
    """The same tasks as the event simulator has them, in the order of its slot table."""
    template = ENGINES[plan.engine].template()
    passes = passes_of_plan(plan)
    parts = []
    for one, chunk in passes[0].placement.places:
        shape = StageShape.of(plan, one)
        layers = shape.chunks[chunk].layers
        # Of rows of one kind the one that the lowest level of ZeRO has says which layers have it.
        rows = sorted(
            (row for phase in template.phases.values() for row in phase),
            key=lambda row: -row.from_zero,
        )
        seconds = {
            (row.kind, row.direction): [1.0 * shape.has(row, layer) for layer in layers]
            for row in rows
        }
        seconds["W", None] = [1.0 for _ in layers]
        parts.append(
            StageTasks(
                stage=one,
                first_layer=layers.start,
                zero=shape.zero,
                seconds=seconds,
                send_s=1.0,
            )
        )
    graph = build_graph(parts, template, passes)
    found: dict[str, list[str]] = {}
    for task in range(len(graph)):
        if graph.stage(task) == index:
            action = graph.action(task)
            names = {"U": "all_gather", "R": "reduce_scatter", "X": "send"}
            lane = names.get(action.kind, graph.lane(task))
            found.setdefault(lane, []).append(str(action))
    return found


@pytest.mark.parametrize("seed", sweep(range(100), first=30))
def test_lanes_run_the_simulators_tasks_in_the_simulators_order(seed: int) -> None:
    _, plan = random_plan(seed, most_ranks=16)
    for index in range(plan.num_stages):
        (program,) = iterations(StageShape.of(plan, index), 1)
        assert lanes_of_program(program) == lanes_of_simulation(plan, index)


@pytest.mark.parametrize("order", ["interleaved-2", "in a V", "zb-h1", "zb-v"])
def test_lanes_run_the_simulators_tasks_of_chunks_in_its_order(order: str, tmp_path: Path) -> None:
    if order == "in a V":
        file = tmp_path / "order.txt"
        file.write_text(whole_backwards(zb_v_text(3, 6)))
        order = str(file)
    first = stage(4, zero=3, data_parallel=2, offload=MIXED, micro_batch=1)
    plan = Plan(micro_batches=6, stages=(first, stage(3), stage(2, offload=MIXED)), order=order)
    for index in range(plan.num_stages):
        (program,) = iterations(StageShape.of(plan, index), 1)
        assert lanes_of_program(program) == lanes_of_simulation(plan, index)
