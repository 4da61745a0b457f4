"""Waits of played passes: no two tasks use a buffer in no order, and repeated slots are derived
ones."""

from collections import defaultdict
from collections.abc import Collection
from dataclasses import replace

import pytest

from mistlab.cost.tasks import TaskModel
from mistlab.engines.engine import ENGINES
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.schedule.slots import Phase
from mistlab.stages.pass_columns import PLAYED, PassColumns, PassShape, columns_of, derived
from mistlab.stages.pass_tasks import PassTasks
from mistlab.stages.plan_orders import passes_of_plan
from mistlab.stages.stage_program import Op
from mistlab.stages.stage_shape import StageShape
from simulators.build import build_graph
from simulators.events import tasks_of_parts
from simulators.graph import TaskGraph
from tests.runtime.program_races import races
from tests.simulators.test_ranks import CLUSTER, WORK

EVERYTHING = Offload(weights=0.5, gradients=1.0, optimizer=1.0, activations=0.5)
STAGE = StagePlan(layers=12, data_parallel=4, tensor_parallel=1, micro_batch=1, offload=EVERYTHING)
PLANS = {
    **{
        f"ZeRO-{zero}, everything offloaded": Plan(
            micro_batches=4, stages=(replace(STAGE, zero=zero, layers=3), replace(STAGE, layers=21))
        )
        for zero in range(4)
    },
    **{
        f"{kind} offloaded": Plan(
            micro_batches=4, stages=(replace(STAGE, zero=2, offload=Offload(**{kind: 0.5})),) * 2
        )
        for kind in ("weights", "gradients", "optimizer", "activations")
    },
    **{
        f"{engine}{', nothing overlapped' * (not overlaps)}, ZeRO-{zero}": Plan(
            engine=engine,
            overlap_communication=overlaps,
            micro_batches=4,
            stages=(replace(STAGE, layers=24, zero=zero, offload=Offload()),),
        )
        for engine, zero in (("megatron", 1), ("deepspeed", 2), ("deepspeed", 3))
        for overlaps in (True, False)
    },
    "stages of one layer": Plan(
        micro_batches=6, stages=tuple(replace(STAGE, layers=n, zero=3) for n in (1, 1, 21, 1))
    ),
}


def played(plan: Plan, stage: int, lacking: Collection[tuple[str, str]] = ()) -> list[Op]:
    """The tasks of a stage as they are issued, with the waits of the graph that is played."""
    engine = ENGINES[plan.engine]
    overlaps = plan.overlap_communication
    model = TaskModel.of(WORK, CLUSTER, engine, overlap_communication=overlaps)
    passes = passes_of_plan(plan)
    parts, _ = tasks_of_parts([model], plan, passes, CLUSTER)
    graph = build_graph(parts, model.template, passes)
    numbers = numbers_by_name(graph, stage)
    shape = StageShape.of(plan, stage)
    issued: list[tuple[int, Op]] = []
    for one in passes[stage]:
        for task in PassTasks(shape, PLAYED).of_pass(one):
            waiting = numbers[task.name, task.layer, one.micro_batch]
            if not isinstance(task.row, str) and waiting:
                lane = "compute" if task.name in ("F", "B") else f"only {task.name}"
                op = Op(
                    task=graph.action(waiting[0]),
                    lane=lane,  # type: ignore[arg-type]
                    phase=one.phase,
                    reads=task.reads,
                    writes=task.writes,
                )
                issued.append((waiting.pop(0), op))
    return with_waits(graph, issued, lacking)


def numbers_by_name(graph: TaskGraph, stage: int) -> dict[tuple[str, int, int], list[int]]:
    found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for number, (kind, direction, layer) in enumerate(graph.labels):
        if graph.stage(number) == stage and layer is not None:
            name = f"{kind}{direction or ''}"
            found[name, layer, graph.micro_batches[number]].append(number)
    return found


def with_waits(
    graph: TaskGraph, issued: list[tuple[int, Op]], lacking: Collection[tuple[str, str]]
) -> list[Op]:
    """A wait for a start is one for all that must have ended before that."""
    place = {number: place for place, (number, _) in enumerate(issued)}
    name = {number: op.name for number, op in issued}
    ends: dict[int, set[int]] = defaultdict(set)
    starts: dict[int, set[int]] = defaultdict(set)
    for source, task, ended in graph.edges():
        if source in place and task in place and (name[source], name[task]) not in lacking:
            (ends if ended else starts)[task].add(source)
    ops = []
    for number, op in issued:
        before = ends[number].union(*(ends[started] for started in starts[number]))
        back = tuple(sorted(place[number] - place[source] for source in before))
        assert min(back, default=1) > 0
        ops.append(replace(op, waits=back))
    return ops


@pytest.mark.parametrize("name", PLANS)
def test_tasks_of_a_played_stage_that_use_a_buffer_are_ordered(name: str) -> None:
    plan = PLANS[name]
    for stage in range(plan.num_stages):
        ops = played(plan, stage)
        assert len(ops) > 20
        assert races(ops) == []


@pytest.mark.parametrize(
    "lacking", [("A>", "F"), ("A>", "A<"), ("P>", "S"), ("P>", "P<"), ("O>", "O<"), ("R", "G>")]
)
def test_a_stage_that_is_played_without_some_waits_has_races(lacking: tuple[str, str]) -> None:
    plan = PLANS["ZeRO-2, everything offloaded"]
    assert races(played(plan, 0, [lacking]))


LAYER = frozenset({"F", "B", "S", "U", "R", "P<", "P>", "G<", "G>", "O<", "O>", "A<", "A>"})
KEPT = frozenset({"F", "B", "S", "U", "R"})


PHASES: tuple[Phase, ...] = ("first_forward", "forward", "backward", "last_backward")


def alike_within(phase: Phase, zero: int, depth: int, count: int, lacks: str) -> PassShape:
    """A pass through so many layers alike, and one at each end that has nothing to swap."""
    layer = frozenset(name for name in LAYER if name[0] not in lacks)
    return PassShape(
        rows=ENGINES["mistlab"].template().phases[phase],
        depth=depth,
        phase=phase,
        zero=zero,
        names=(KEPT, *[layer] * count, KEPT),
    )


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("zero", range(4))
@pytest.mark.parametrize("depth", range(4))
@pytest.mark.parametrize("lacks", ["", "G", "PO"])
def test_a_slot_that_is_repeated_is_what_would_be_derived(
    phase: Phase, zero: int, depth: int, lacks: str
) -> None:
    for count in (12, 21, 26):
        shape = alike_within(phase, zero, depth, count, lacks)
        whole, repeated = derived(shape), columns_of(shape)
        assert (repeated is whole) == (count <= 4 * depth + 5)
        for column in PassColumns.__dataclass_fields__:
            assert getattr(repeated, column) == getattr(whole, column), column


def test_layers_that_tasks_of_others_pass_over_are_all_derived() -> None:
    """The last layer is gathered after the first one, whatever lies between."""
    shape = alike_within("forward", 3, 1, 30, lacks="U")
    assert columns_of(shape) is derived(shape)
