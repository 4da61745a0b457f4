"""Any order of whole backward passes trains as a plain run does, hangs nobody and has no races."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("torch")

from mistlab.plan.plan import Plan
from mistlab.schedule import stage_passes as receipts
from mistlab.schedule.placement import loop
from mistlab.stages.plan_orders import passes_of_plan
from mistlab.stages.stage_shape import RING, StageShape
from runtime.checks.collectives.findings import collective_findings
from runtime.checks.races.judge import Judge
from runtime.checks.races.recorded_rank import trace_of
from runtime.checks.sanitizer import unlike_ranks
from tests.pipeline_orders import all_forwards_first, drawn
from tests.runtime.worlds import (
    MIXED,
    ON_HOST,
    TRAINING,
    assert_alike,
    by_plan,
    plainly,
    stage,
    workload,
)
from tests.sweep import sweep

Ordered = Callable[[Plan, str], Plan]


@pytest.fixture
def ordered(tmp_path: Path) -> Ordered:
    """Gives a plan an order of its own."""

    def give(plan: Plan, text: str) -> Plan:
        path = tmp_path / "order.txt"
        path.write_text(text)
        return replace(plan, order=str(path))

    return give


def ahead(stages: int, micro_batches: int) -> str:
    """All but the last stage run all forwards first; the last one alternates."""
    lines = all_forwards_first(stages, micro_batches).splitlines()
    lines[-1] = " ".join(f"Fm{m} Bm{m}" for m in range(micro_batches))
    return "\n".join(lines) + "\n"


def crossed(stages: int, micro_batches: int) -> str:
    """Each stage takes micro-batches in the reverse order of the stage before."""
    lines = all_forwards_first(stages, micro_batches).splitlines()
    for at in range(1, stages, 2):
        forwards, backwards = lines[at].split()[:micro_batches], lines[at].split()[micro_batches:]
        lines[at] = " ".join([*forwards[::-1], *backwards[::-1]])
    return "\n".join(lines) + "\n"


TEXTS = {
    "all forwards first": all_forwards_first(2, 4),
    "all forwards first, and back in reverse": all_forwards_first(2, 4, reverses=True),
    "run ahead": ahead(2, 4),
    "crossed": crossed(2, 4),
    "drawn": drawn(loop(2), 4, 5),
    "drawn again": drawn(loop(2), 4, 7),
}
WORK = workload("llama", kv_heads=2, tied_embeddings=True, batch=16)
STAGES = (
    stage(3, data_parallel=2, zero=3, checkpointed_layers=1, offload=MIXED),
    stage(1, data_parallel=2, zero=1),
)
PLAN = Plan(micro_batches=4, stages=STAGES)


@pytest.mark.parametrize("name", sweep(TEXTS, first=5))
def test_an_order_has_the_losses_of_a_plain_run(name: str, ordered: Ordered) -> None:
    assert_alike(by_plan(WORK, ordered(PLAN, TEXTS[name])), plainly(WORK))


def test_gpipe_has_them_by_its_name() -> None:
    plan = replace(PLAN, order="gpipe")
    assert_alike(by_plan(WORK, plan), plainly(WORK))
    assert not collective_findings(plan, WORK)


@pytest.mark.parametrize(
    ("name", "zero"),
    sweep([("run ahead", 2), ("crossed", 0), ("run ahead", 0), ("crossed", 2)], first=2),
)
def test_other_levels_and_host_steps_have_them_too(name: str, zero: int, ordered: Ordered) -> None:
    work = workload("gpt", biases=True, batch=16)
    training = replace(ON_HOST, clip_norm=0.3)
    stages = tuple(replace(one, zero=zero, offload=MIXED) for one in STAGES)
    plan = ordered(replace(PLAN, stages=stages), TEXTS[name])
    assert_alike(by_plan(work, plan, training), plainly(work, training))


@pytest.mark.parametrize("name", sweep(["drawn", "crossed", "all forwards first"], first=1))
def test_a_single_stage_takes_micro_batches_in_any_order(name: str, ordered: Ordered) -> None:
    text = f"{TEXTS[name].splitlines()[1]}\n"
    plan = Plan(micro_batches=4, stages=(replace(STAGES[0], layers=4, zero=2),))
    assert_alike(by_plan(WORK, ordered(plan, text)), plainly(WORK))


THREE = (
    stage(2, offload=MIXED),
    stage(1, data_parallel=2, micro_batch=1, zero=2),
    stage(1),
)


@pytest.mark.parametrize("seed", range(30))
def test_orders_hang_nobody(seed: int, ordered: Ordered) -> None:
    count = 3 + seed % 5
    plan = ordered(Plan(micro_batches=count, stages=THREE), drawn(loop(3), count, seed))
    assert not collective_findings(plan, WORK, clips=seed % 2 == 0)


@pytest.mark.parametrize("of", [ahead, crossed, all_forwards_first])
def test_long_orders_hang_nobody(of: Callable[[int, int], str], ordered: Ordered) -> None:
    plan = ordered(Plan(micro_batches=16, stages=THREE), of(3, 16))
    assert not collective_findings(plan, WORK)


def test_receivers_that_are_not_ready_earlier_hang(
    ordered: Ordered, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = ordered(Plan(micro_batches=16, stages=THREE), ahead(3, 16))
    monkeypatch.setattr(receipts._DryRun, "let_all_end", lambda _: None)
    receipts.receipts_of.cache_clear()
    try:
        (finding, *_) = collective_findings(plan, WORK)
    finally:
        receipts.receipts_of.cache_clear()
    assert "wait" in str(finding)


@pytest.mark.parametrize("seed", range(8))
def test_a_receiver_has_room_for_all_that_comes(seed: int, ordered: Ordered) -> None:
    plan = ordered(Plan(micro_batches=6, stages=THREE), drawn(loop(3), 6, seed))
    for at, passes in enumerate(passes_of_plan(plan)):
        shape = StageShape.of(plan, at)
        taken: dict[int, int] = {}
        for receipt in shape.receipts.receipts:
            # Whoever had the room before has taken it out.
            assert taken.get(receipt.room, -1) < receipt.before <= receipt.of.number
            taken[receipt.room] = receipt.of.number
        assert {one.of for one in shape.receipts.receipts} == {
            one for one in passes if one.comes_from
        }
        assert max(taken, default=0) < shape.rooms
        assert shape.rooms >= RING


@pytest.mark.parametrize("name", sweep(["drawn", "crossed", "all forwards first"], first=1))
def test_orders_have_no_races(name: str, ordered: Ordered) -> None:
    plan = ordered(PLAN, TEXTS[name])
    for one in unlike_ranks(plan):
        assert not Judge(trace_of(WORK, plan, one.rank, TRAINING)).findings()
