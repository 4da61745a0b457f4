"""Pipeline orders: their text, what is refused in it, and the passes that follow from it."""

import tracemalloc
from dataclasses import replace
from itertools import accumulate, product
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from mistlab.core.values import FieldError, InputError
from mistlab.plan.plan import Plan, StagePlan
from mistlab.schedule.orders import (
    ORDERS,
    in_flight,
    interleaved,
    one_forward_one_backward,
    order_problem,
    zero_bubble,
)
from mistlab.schedule.placement import StageChunk, loop, most_chunks
from mistlab.schedule.stage_passes import StagePass, passes_of
from mistlab.stages.plan_orders import in_flight_of_plan, named_order, order_of_plan, order_of_text
from mistlab.stages.stage_shape import parts_of_plan

stage_counts = st.integers(1, 8)
micro_batch_counts = st.integers(1, 12)
names = st.sampled_from(sorted(ORDERS))


@given(stage_counts, micro_batch_counts, names)
def test_every_micro_batch_goes_forward_and_back_once_on_every_stage(
    stages: int, micro_batches: int, name: str
) -> None:
    assume(not order_problem(name, stages, micro_batches, most_chunks=8))
    order = named_order(name, stages, micro_batches)
    for passes in order.stages:
        for kind, chunk in product("FB", range(order.chunks)):
            found = [one for one in passes if (one.kind, one.chunk) == (kind, chunk)]
            assert [one.micro_batch for one in found] == list(range(micro_batches))


@given(stage_counts, micro_batch_counts, names)
def test_an_order_comes_back_from_its_text(stages: int, micro_batches: int, name: str) -> None:
    assume(not order_problem(name, stages, micro_batches, most_chunks=8))
    order = named_order(name, stages, micro_batches)
    assert order_of_text(str(order), stages, micro_batches) == order


@given(stage_counts, micro_batch_counts)
def test_what_is_in_flight_is_what_1f1b_holds(stages: int, micro_batches: int) -> None:
    passes = passes_of(named_order("1f1b", stages, micro_batches))
    expected = [in_flight(stage, stages, micro_batches) for stage in range(stages)]
    assert [of_stage.most_held for of_stage in passes] == expected


# Two stages of two chunks each, two micro-batches.
CHUNKS = """
F0m0 F0m1 F1m0 F1m1 B1m0 B1m1 B0m0 B0m1
F0m0 F0m1 F1m0 B1m0 F1m1 B1m1 B0m0 B0m1
""".strip()
# Two stages, three micro-batches; the gradients of weights fill the ends.
SPLIT = """
Fm0 Fm1 Bm0 Fm2 Bm1 Bm2 Wm0 Wm1 Wm2
Fm0 Bm0 Fm1 Bm1 Wm0 Fm2 Bm2 Wm1 Wm2
""".strip()


def shown(one: StagePass) -> tuple[object, ...]:
    return one.kind, one.chunk, one.micro_batch, one.phase, one.is_first


def test_passes_of_chunks_say_where_micro_batches_come_from_and_go_to() -> None:
    first, last = passes_of(order_of_text(CHUNKS, 2, 2))
    assert [shown(one) for one in first][:5] == [
        ("F", 0, 0, "first_forward", True),
        ("F", 0, 1, "forward", False),
        ("F", 1, 0, "first_forward", True),
        ("F", 1, 1, "forward", False),
        ("B", 1, 0, "backward", True),
    ]
    assert (first.most_held, last.most_held) == (4, 3)
    ways = {(one.kind, one.chunk): (one.comes_from, one.goes_to) for one in first}
    assert ways["F", 0] == (None, StageChunk(1, 0))
    assert ways["F", 1] == (StageChunk(1, 0), StageChunk(1, 1))
    assert ways["B", 1] == (StageChunk(1, 1), StageChunk(1, 0))
    assert ways["B", 0] == (StageChunk(1, 0), None)
    ways = {(one.kind, one.chunk): (one.comes_from, one.goes_to) for one in last}
    assert ways["F", 1] == ways["B", 1][::-1] == (StageChunk(0, 1), None)


def test_gradients_of_weights_end_what_their_passes_hold() -> None:
    first, last = passes_of(order_of_text(SPLIT, 2, 3))
    assert [one.phase for one in first if one.kind == "B"] == ["backward"] * 3
    assert [one.phase for one in first if one.kind == "W"] == ["backward"] * 2 + ["last_backward"]
    assert [one.is_first for one in first if one.kind == "W"] == [True, False, False]
    assert first.splits_backward
    assert (first.most_held, last.most_held) == (3, 2)
    assert all(one.comes_from is one.goes_to is None for one in first if one.kind == "W")


def test_phases_follow_the_order_and_not_the_numbers() -> None:
    (passes,) = passes_of(order_of_text("Fm2 Fm0 Bm2 Fm1 Bm1 Bm0", 1, 3))
    assert [one.phase for one in passes] == [
        *("first_forward", "forward", "backward", "forward", "backward", "last_backward")
    ]
    assert [one.is_first for one in passes] == [True, False, True, False, False, False]


NO_CHUNK = "line 1: Fm0 names no chunk, but stages have 2 chunks (line 1 has F1m0): write F0m0"
CIRCLE = (
    "in a cycle: Bm0 of line 1 waits for Bm0 of line 2, which is after Fm1 of line 2; "
    "Fm1 of line 2 waits for Fm1 of line 1, which is after Bm0 of line 1: put one of them after"
)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("Fm0 Bm0 Fm1 Bm1", "has 1 line for 2 stages: give one line for each stage"),
        (f"{CHUNKS}\nFm0", "has 3 lines for 2 stages: give one line for each stage"),
        ("Fm0\n0Bm0", "line 2: '0Bm0' is not a pass: write F, B or W, the chunk, m and"),
        ("Fm0\nFm00", "line 2: 'Fm00' is not a pass: write F"),
        ("Fm0\n\0\x01", "line 2: '\\x00\\x01' is not a pass: write F"),
        ("Fm0 Fm2\nFm0", "line 1: Fm2 (forward pass of micro-batch 2) does not exist: the plan's"),
        (
            "Fm0 Bm0 Fm1 Bm1\nFm0 Bm0 Fm1",
            "line 2: Bm1 (backward pass of micro-batch 1) is",
        ),
        ("Fm0 Fm0\nFm0", "line 1: Fm0 (forward pass of micro-batch 0) is there twice: leave one"),
        (
            "Bm0 Fm0 Fm1 Bm1\nFm0",
            "comes before Fm0, its forward pass: put it after Fm0",
        ),
        (
            "Fm0 Fm1 Bm0 Bm1\nFm0 Wm0 Bm0 Fm1 Bm1 Wm1",
            "line 2: Wm0 (gradients of weights of micro-batch 0) comes before Bm0, the gradient of",
        ),
        (
            "Fm0 Fm1 Bm0 Bm1\nFm0 Bm0 Wm0 Fm1 Bm1",
            "Wm1 (gradients of weights of micro-batch 1) is missing: put it where it is to run",
        ),
        (
            CHUNKS.replace("F1m0", "F2m0"),
            "line 1: F1m0 (forward pass of micro-batch 0",
        ),
        (f"{CHUNKS} F3m0", "line 2: F3m0 is of chunk 3, but chunks are 0 to 1: number them"),
        (CHUNKS.replace("F0m0", "Fm0"), NO_CHUNK),
        (CHUNKS.replace("F1m0", "Fm0"), "line 1: Fm0 names no chunk"),
        ("Fm0 Bm0 Fm1 Bm1\nFm0 Fm1 Bm0 Bm1", CIRCLE),
    ],
)
def test_an_order_that_cannot_run_is_refused(text: str, problem: str) -> None:
    with pytest.raises(InputError) as caught:
        order_of_text(text, 2, 2)
    assert problem in str(caught.value)


@given(st.integers(1, 6), st.integers(1, 3), st.integers(1, 3))
def test_published_orders_can_be_said(stages: int, rounds: int, chunks: int) -> None:
    text = interleaved(stages, rounds * stages, chunks)
    order = order_of_text(text, stages, rounds * stages)
    assert order.chunks == chunks
    assert str(order) == (text if chunks > 1 else text.replace("0m", "m"))
    split = passes_of(order_of_text(zero_bubble(stages, rounds * stages), stages, rounds * stages))
    assert [of_stage.most_held for of_stage in split] == [stages] * stages


@given(st.integers(1, 6))
def test_zb_h2_holds_less_than_twice_as_much_and_zb_2p_counts_freed_halves(stages: int) -> None:
    """Micro-batches held: those that B frees by a half count a half until their W."""

    def most(order: str, after_backward: float) -> float:
        changes = {"F": 1.0, "B": after_backward - 1, "W": -after_backward}
        sums = [
            list(accumulate(changes[one.kind] for one in line))
            for line in named_order(order, stages, 4 * stages).stages
        ]
        return max(map(max, sums))

    assert most("zb-h1", 1.0) == stages
    assert most("zb-h2", 1.0) == 2 * stages - 1
    assert most("zb-2p", 0.5) <= 2 * stages


TWO = tuple(StagePlan(layers=2, data_parallel=1, tensor_parallel=1, micro_batch=1) for _ in "ab")


def plan_of(path: Path | str, micro_batches: int = 2) -> Plan:
    return Plan(micro_batches=micro_batches, order=str(path), stages=TWO)


def test_a_stage_holds_the_share_of_its_blocks_that_its_chunks_have(tmp_path: Path) -> None:
    path = tmp_path / "chunks.txt"
    path.write_text(CHUNKS)
    assert in_flight_of_plan(plan_of(path)) == [2.0, 1.5]
    # Two micro-batches in the first chunk, of one block, and one in the other, of two.
    path.write_text("F0m0 F1m0 B1m0 F0m1 F1m1 B1m1 B0m0 B0m1")
    uneven = replace(plan_of(path), stages=(replace(TWO[0], layers=3),))
    assert in_flight_of_plan(uneven) == [pytest.approx((1 + 1 + 2) / 3)]


def test_chunks_share_a_stage_s_blocks_and_the_last_ones_are_recomputed() -> None:
    stage = replace(TWO[0], layers=5, checkpointed_layers=3)
    parts = parts_of_plan(
        Plan(micro_batches=1, stages=(stage, replace(stage, layers=3))), loop(2, 2)
    )
    assert [(one.stage, one.chunk) for one in parts] == [(0, 0), (1, 0), (0, 1), (1, 1)]
    assert [one.blocks for one in parts] == [*(range(1, 3), range(3, 5), range(5, 8), range(8, 9))]
    assert [one.treated["checkpointed_layers"] for one in parts] == [0, 2, 3, 1]
    assert [one.first_layer for one in parts] == [0, 3, 5, 8]
    assert [(one.has_embedding, one.has_head) for one in parts] == [
        *((True, False), (False, False), (False, False), (False, True))
    ]


def test_the_parts_with_embedding_and_head_may_have_no_block() -> None:
    inner = replace(TWO[0], layers=3)
    parts = parts_of_plan(Plan(micro_batches=3, stages=(TWO[0], inner, TWO[1])), loop(3, 3))
    assert [len(one.blocks) for one in parts] == [0, *[1] * 7, 0]
    assert [
        (one.first_layer, one.has_embedding, one.has_head) for one in (parts[0], parts[-1])
    ] == [
        (0, True, False),
        (8, False, True),
    ]
    assert most_chunks((2, 3, 2)) == 3
    assert most_chunks((2, 2, 3)) == 2


def test_a_file_that_is_no_order_of_the_plan_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "order.txt"

    def problem(content: bytes | None, micro_batches: int = 2) -> str:
        if content is not None:
            path.write_bytes(content)
        with pytest.raises(FieldError) as caught:
            order_of_plan(plan_of(path, micro_batches))
        assert str(caught.value).startswith(f"plan.order: {path}: ")
        return caught.value.problem

    assert "cannot be read (No such file or directory): give the path" in problem(None)
    fits = one_forward_one_backward(2, 2).encode()
    assert "line 1: Fm2 (forward pass of micro-batch 2) is missing: put" in problem(
        fits, micro_batches=3
    )
    assert "does not exist: the plan's micro-batches are 0 to 1" in problem(
        one_forward_one_backward(2, 3).encode()
    )
    assert "line 2: is not text: write passes like F0m3" in problem(b"Fm0\n\xff\xfe\x00")
    assert "line 1: '\\x00\\x01' is not a pass" in problem(b"\x00\x01\nFm0")
    assert "has 4 chunks for each stage, but plan.stages[0] has 2 layers: give" in problem(
        interleaved(2, 2, 4).encode()
    )
    path.unlink()
    path.mkdir()
    assert "is a directory: give the path of an order file" in problem(None)


def test_text_far_longer_than_a_plan_needs_is_refused_unread(tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    with path.open("wb") as file:
        file.truncate(100 * 2**20)
    tracemalloc.start()
    with pytest.raises(
        FieldError, match=r"has 104,857,600 bytes, but all passes of the plan need \d+ "
    ):
        order_of_plan(plan_of(path))
    _, most_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert most_bytes < 2**20


def test_a_mark_of_the_bytes_order_before_the_text_is_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "order.txt"
    path.write_bytes(b"\xef\xbb\xbf" + one_forward_one_backward(2, 2).encode())
    assert order_of_plan(plan_of(path)) == named_order("1f1b", 2, 2)


def test_an_order_that_does_not_end_is_refused() -> None:
    with pytest.raises(FieldError, match="is not a regular file: give the path of an"):
        order_of_plan(plan_of("/dev/zero"))


def test_an_unknown_order_is_refused_with_near_ones() -> None:
    with pytest.raises(FieldError, match=r"'1f1' is not a known order, .*: did you mean '1f1b'"):
        plan_of("1f1")
