"""Orders whose parts turn round at the last stage, and texts that say where parts lie."""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mistlab.core.values import InputError
from mistlab.cost.order_path import order_bound_s
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.orders import TURNING, order_problem
from mistlab.schedule.placement import Placement, StageChunk, loop, most_chunks, turning
from mistlab.schedule.stage_passes import passes_of
from mistlab.stages.part_times import SplitTimes
from mistlab.stages.plan_orders import in_flight_of_plan, named_order, order_of_plan, order_of_text
from mistlab.stages.stage_batch import StageBatch, batch_of_parts
from mistlab.stages.stage_shape import parts_of_plan
from tests.mistlab.test_order_path import equal, order_iteration_s

STAGE = StagePlan(layers=4, data_parallel=1, tensor_parallel=1, micro_batch=1)


def torch_lines(schedule: type, stages: int, micro_batches: int) -> list[str]:
    """The order of a class of torch's, as our text; a joint pass is its forward and its backward,
    and a whole backward is B and W."""
    words = {"FORWARD": "F", "BACKWARD_INPUT": "B", "BACKWARD_WEIGHT": "W", "FULL_BACKWARD": "BW"}
    lines = []
    for stage in range(stages):
        own: Any = SimpleNamespace(
            pp_group_size=stages, _n_microbatches=micro_batches, num_stages=2 * stages
        )
        line = []
        for action in schedule._calculate_single_rank_operations(own, stage):  # type: ignore[attr-defined]
            for one in action.sub_actions or [action] if action else []:
                place = f"{int(one.stage_index != stage)}m{one.microbatch_index}"
                line += [kind + place for kind in words[one.computation_type.name]]
        lines.append(" ".join(line))
    return lines


@pytest.mark.parametrize("stages", [2, 3, 4, 7])
def test_the_orders_are_torch_s(stages: int) -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    for micro_batches in (1, stages, 2 * stages, 3 * stages + 1):
        ours = str(named_order("zb-v", stages, micro_batches)).splitlines()[1:]
        assert ours == torch_lines(schedules.ScheduleZBVZeroBubble, stages, micro_batches)
    for micro_batches in (2 * stages, 3 * stages + 1):
        ours = str(named_order("dualpipe-v", stages, micro_batches)).splitlines()[1:]
        assert ours == torch_lines(schedules.ScheduleDualPipeV, stages, micro_batches)


@pytest.mark.parametrize("stages", [2, 4, 8])
def test_zb_v_waits_for_nothing_and_holds_as_much_as_1f1b(stages: int) -> None:
    """With F, B and W as long as one another, and stages that step apart (Qi et al. 2023)."""
    half = np.full((1, 2 * stages), 0.5)
    split = SplitTimes(weights_s=half, less_s=half, first_s=half)
    passes = passes_of(named_order("zb-v", stages, 24))
    times = equal(2 * stages, 0.5, 1.0)
    path_s = order_iteration_s(times, passes, split, steps_apart=True)
    assert path_s == pytest.approx(24 * 3.0)
    assert [of_stage.most_held for of_stage in passes] == [2 * stages] * stages
    together_s = order_iteration_s(times, passes, split)
    assert together_s == pytest.approx(24 * 3.0 + 0.5 * (stages - 1))
    assert order_bound_s(times, turning(stages), 24, splits=True) <= together_s


@pytest.mark.parametrize("stages", [2, 3, 4, 5, 8, 9, 16])
def test_building_blocks_hold_half_and_a_third(stages: int) -> None:
    """The published peaks in micro-batches, and how long is waited for with equal F, B and W."""
    micro_batches = 4 * stages
    held, waited = {}, {}
    for name in ("v-half", "v-min"):
        order = order_of_text(str(named_order(name, stages, micro_batches)), stages, micro_batches)
        passes = passes_of(order)
        held[name] = max(of_stage.most_held for of_stage in passes) / 2
        half = np.full((1, 2 * stages), 0.5)
        split = SplitTimes(weights_s=half, less_s=half, first_s=half)
        times = equal(2 * stages, 0.5, 1.0)
        path_s = order_iteration_s(times, passes, split, steps_apart=True)
        waited[name] = float(path_s[0]) / 3 - micro_batches
    assert held == {"v-half": (stages + 2) // 2, "v-min": (stages + 4) // 3}
    # About a half, and up to two thirds, of a micro-batch for each stage; 1F1B waits for one.
    assert waited["v-half"] <= 0.58 * stages
    assert waited["v-min"] <= 2 / 3 * stages


@pytest.mark.parametrize("name", ["v-half", "v-min"])
@pytest.mark.parametrize("micro_batches", [1, 2, 5])
def test_building_blocks_run_few_micro_batches(name: str, micro_batches: int) -> None:
    for stages in (1, 2, 3, 4, 7, 8):
        text = str(named_order(name, stages, micro_batches))
        assert order_of_text(text, stages, micro_batches).micro_batches == micro_batches


def test_a_send_between_two_parts_of_a_stage_takes_no_time() -> None:
    """There are six sends each way in a V of four stages, and seven in a loop."""
    half = np.full((1, 8), 0.5)
    split = SplitTimes(weights_s=half, less_s=half, first_s=half)
    passes = passes_of(named_order("zb-v", 4, 1))
    times = replace(equal(8, 0.5, 1.0), point_to_point_s=2 * 0.1 * (half > 0) * VIA)
    path_s = order_iteration_s(times, passes, split)
    # One micro-batch goes all the way; the last W of the first part is done while nobody waits.
    assert path_s == pytest.approx(8 * 0.5 + 8 * 0.5 + 2 * 6 * 0.1 + 2 * 0.5)


# Whether a part of four stages in a V sends its outcome over a link.
VIA = np.array([[1, 1, 1, 0, 1, 1, 1, 1]])


def test_parts_turn_round_and_the_first_stage_has_both_ends() -> None:
    plan = Plan(micro_batches=6, stages=(replace(STAGE, layers=5), STAGE, STAGE), order="zb-v")
    placement = order_of_plan(plan).placement
    assert placement == turning(3)
    assert placement.places[3:] == (StageChunk(2, 1), StageChunk(1, 1), StageChunk(0, 1))
    parts = parts_of_plan(plan, placement)
    assert [(len(one.blocks), one.has_embedding, one.has_head) for one in parts] == [
        *((3, True, False), (2, False, False), (2, False, False)),
        *((2, False, False), (2, False, False), (2, False, True)),
    ]
    assert [one.blocks.start for one in parts] == [1, 4, 6, 8, 10, 12]
    stages = StageBatch.of_plan(plan)
    assert stages.has_embedding.tolist() == stages.has_head.tolist() == [1, 0, 0]
    batch = batch_of_parts([plan], placement)
    assert batch.comes_from.tolist() == [-1, -1, -1, 0, 1, 1]
    assert batch.goes_to.tolist() == [1, 1, 0, -1, -1, 1]
    assert batch.shares_table.all()
    assert in_flight_of_plan(plan) == pytest.approx([6 * 3 / 5, 3, 3])


def test_parts_of_a_loop_lie_as_they_did() -> None:
    placement = loop(3, 2)
    assert placement.parts == {StageChunk(s, c): 3 * c + s for c in range(2) for s in range(3)}
    assert {placement.goes_to(part) for part in range(6)} == {1}
    assert [placement.sends_away(part) for part in range(6)] == [True] * 5 + [False]


@pytest.mark.parametrize("name", TURNING)
def test_a_file_says_where_parts_lie(name: str, tmp_path: Path) -> None:
    plan = Plan(micro_batches=8, stages=(STAGE, STAGE, STAGE), order=name)
    order = order_of_plan(plan)
    assert str(order).startswith("parts 0 1 2 2 1 0\nF0m0 ")
    (tmp_path / "v.txt").write_text(str(order))
    assert order_of_plan(replace(plan, order=str(tmp_path / "v.txt"))) == order


def test_any_way_from_stage_to_neighbouring_stage_can_be_said() -> None:
    """A W: down, up, down and up."""
    text = "parts 0 1 1 0 0 1 1 0\n"
    text += "F0m0 F1m0 F2m0 F3m0 B3m0 B2m0 B1m0 B0m0\n" * 2
    order = order_of_text(text, 2, 1)
    assert order.chunks == 4
    assert str(order) == text
    assert order.source(0, order.stages[0][2]) == StageChunk(0, 1)


LINES = "F0m0 F1m0 B1m0 B0m0\n" * 3


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("parts 0 1 2 2 1 x\n" + LINES, "line 1: 'x' is not a stage: write numbers from 0 to 2"),
        ("parts 0 1 3 3 1 0\n" + LINES, "line 1: '3' is not a stage"),
        ("parts 0 1 1 0\n" + LINES, "line 1: puts parts on 2 of 3 stages: name every stage"),
        ("parts 0 1 2 2 1 1\n" + LINES, "do not give every stage equally many chunks"),
        ("parts 0 2 1 1 2 0\n" + LINES, "part 0 is on stage 0 and part 1 on stage 2, which do not"),
        ("parts 0 1 2\n" + LINES, "line 1: gives each stage 1 chunk, but the passes below name 2"),
        (
            "parts 0 1 2 2 1 0\n" + LINES.replace("B0m0", "", 1),
            "line 2: B0m0 (backward",
        ),
        ("parts 0 1 2 2 1 0\n" + LINES.replace("F1m0", "Fm0", 1), "line 2: Fm0 names no chunk"),
        ("parts 0 1 2 0 1 2\n" + LINES[: 2 * len(LINES) // 3], "has 2 lines for 3 stages"),
        (
            "parts 0 1 2 2 1 0\n" + "F1m0 F0m0 B0m0 B1m0\n" + LINES[len(LINES) // 3 :],
            "F1m0 of line 2 waits for F1m0 of line 3",
        ),
    ],
)
def test_parts_that_cannot_lie_so_are_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError) as error:
        order_of_text(text, 3, 1)
    assert problem in str(error.value)


def test_too_few_blocks_or_micro_batches_are_refused() -> None:
    assert most_chunks((1, 2, 2), turns=True) == 2
    assert "blocks for 1 chunks" in order_problem("zb-v", 3, 6, most_chunks((2, 2, 1), turns=True))
    assert not order_problem("zb-v", 3, 2, 2)
    assert "there are 5 micro-batches for 6 parts" in order_problem("dualpipe-v", 3, 5, 2)
    with pytest.raises(InputError, match="micro-batches, or order zb-v"):
        named_order("dualpipe-v", 3, 5)


def test_a_placement_needs_every_stage() -> None:
    with pytest.raises(InputError, match="on stages 0 2 do not give"):
        Placement((0, 2))


def dualpipe(stages: int, micro_batches: int) -> list[list[tuple[str, int, int]]]:
    """The passes of DualPipe (DeepSeek V3), as kind, direction and micro-batch: a stage and its
    mirror image hold the same two parts, and take those of DualPipeV in the middle of the model.

    Half of the micro-batches enter at the first stage (direction 0), half at the last.
    """
    half = named_order("dualpipe-v", stages // 2, micro_batches // 2)
    lines = []
    for stage in range(stages):
        mirrored = stage >= stages // 2
        own = half.stages[stages - 1 - stage if mirrored else stage]
        lines.append([(one.kind, one.chunk ^ mirrored, one.micro_batch) for one in own])
    return lines


def played_s(lines: list[list[tuple[str, int, int]]], seconds: dict[str, float]) -> float:
    """How long stages take that run these passes, each as soon as its input has come for nothing:
    direction 0 goes from the first stage to the last."""
    ends: dict[tuple[int, str, int, int], float] = {}
    free, done = [0.0] * len(lines), [0] * len(lines)
    while any(place < len(line) for place, line in zip(done, lines, strict=True)):
        for stage, line in enumerate(lines):
            while done[stage] < len(line):
                kind, direction, micro_batch = line[done[stage]]
                forward = (kind == "F") == (direction == 0)
                source = stage - 1 if forward else stage + 1
                begin = free[stage]
                if kind != "W" and 0 <= source < len(lines):
                    if (source, kind, direction, micro_batch) not in ends:
                        break
                    begin = max(begin, ends[source, kind, direction, micro_batch])
                free[stage] = begin + seconds[kind]
                ends[stage, kind, direction, micro_batch] = free[stage]
                done[stage] += 1
    return max(free)


def test_dualpipe_takes_as_long_as_dualpipe_v_on_half_the_stages() -> None:
    """So a plan says DualPipe of P stages as P / 2 stages with twice the replicas."""
    stages, micro_batches = 6, 16
    seconds = {"F": 1.0, "B": 1.2, "W": 0.7}
    both = played_s(dualpipe(stages, micro_batches), seconds)
    one = np.ones((1, stages))
    split = SplitTimes(weights_s=0.7 * one, less_s=0.7 * one, first_s=0.7 * one)
    passes = passes_of(named_order("dualpipe-v", stages // 2, micro_batches // 2))
    assert order_iteration_s(equal(stages, 1.0, 1.9), passes, split) == pytest.approx(both)


def test_a_stage_needs_a_block_for_each_part_without_an_end() -> None:
    """Blocks go to the first chunks first: of a W's first stage the one with the embedding too."""
    twice = Placement((0, 1, 1, 0, 0, 1, 1, 0))
    assert [twice.blocks_needed(stage) for stage in (0, 1)] == [3, 4]
    assert 0 in twice.shares_of_blocks(2, 0)[1:-1]
    assert [turning(2).blocks_needed(stage) for stage in (0, 1)] == [0, 2]
    assert [loop(2, 2).blocks_needed(stage) for stage in (0, 1)] == [1, 1]
