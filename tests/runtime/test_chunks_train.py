"""Stages of several chunks train as a plain run does, hang nobody, have no races and no hidden
waits, and hold what is predicted."""

from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("torch")

from torch import Tensor

from mistlab.cost.order_memory import figures_in_order
from mistlab.graph.stage_model import StageModel
from mistlab.plan.plan import NO_OFFLOAD, Offload, Plan
from mistlab.schedule import stage_passes as receipts
from mistlab.schedule.orders import dualpipe_v, zb_v_text
from mistlab.stages.stage_program import Op, iterations
from mistlab.stages.stage_shape import StageShape
from runtime.checkpoints import checkpoint
from runtime.checks.collectives.findings import collective_findings, few_batches
from runtime.checks.fake.fake_device import device_findings
from runtime.checks.races.judge import Judge
from runtime.checks.races.recorded_rank import trace_of
from runtime.checks.sanitizer import unlike_ranks
from runtime.comm.topology import connected, isolated
from runtime.engine.storage.boundary import Boundary
from runtime.engine.streams.device_streams import SimulatedStreams
from runtime.engine.work import optimizer
from tests.pipeline_orders import drawn, whole_backwards
from tests.runtime.chunk_plans import PLACEMENTS, any_plan, ordered
from tests.runtime.program_races import needless, races, unallocated
from tests.runtime.taken_memory import SIZES, assert_predicted, memory_taken
from tests.runtime.thread_ranks import Meeting, run_threads
from tests.runtime.worlds import (
    CPU,
    MIXED,
    ON_HOST,
    TRAINING,
    alone,
    assert_alike,
    begun,
    by_plan,
    plainly,
    ratios,
    run_step,
    stage,
    thread_groups,
    workload,
)
from tests.sweep import sweep

LARGE = stage(3, data_parallel=2, zero=3, checkpointed_layers=1, offload=MIXED, micro_batch=1)
WORK = workload("llama", layers=5, kv_heads=2, tied_embeddings=True)
PLAN = Plan(micro_batches=4, stages=(LARGE, stage(2, data_parallel=2, zero=1, micro_batch=1)))
TEXTS = {
    "a V": whole_backwards(zb_v_text(2, 4)),
    "another V": whole_backwards(dualpipe_v(2, 4)),
    "drawn round": drawn(PLACEMENTS["loop of two stages"], 4, 3),
    "drawn in a V": drawn(PLACEMENTS["V of two stages"], 4, 4),
}
NAMED = replace(PLAN, order="interleaved-2")


def test_interleaved_chunks_have_the_losses_of_a_plain_run() -> None:
    assert_alike(by_plan(WORK, NAMED), plainly(WORK))


@pytest.mark.parametrize("name", sweep(TEXTS, first=2))
def test_chunks_in_any_order_have_them_too(name: str, tmp_path: Path) -> None:
    assert_alike(by_plan(WORK, ordered(PLAN, TEXTS[name], tmp_path)), plainly(WORK))


@pytest.mark.parametrize("order", sweep(["interleaved-2", "a V"], first=1))
def test_chunks_of_tensor_parallel_stages_that_step_on_the_host_have_them_too(
    order: str, tmp_path: Path
) -> None:
    one = stage(3, tensor_parallel=2, micro_batch=2, zero=0, offload=MIXED, checkpointed_layers=1)
    plan = Plan(micro_batches=4, stages=(one, replace(one, tensor_parallel=1)))
    plan = ordered(plan, TEXTS[order], tmp_path) if order in TEXTS else replace(plan, order=order)
    work = workload("gpt", layers=6, biases=True)
    training = replace(ON_HOST, clip_norm=0.3)
    assert_alike(by_plan(work, plan, training), plainly(work, training))


def test_chunks_of_one_stage_hand_over_without_a_message() -> None:
    plan = Plan(micro_batches=4, stages=(replace(LARGE, layers=5),), order="interleaved-3")
    assert_alike(by_plan(WORK, plan), plainly(WORK))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PLACEMENTS)
def test_any_plan_of_chunks_has_them_too(name: str, seed: int, tmp_path: Path) -> None:
    work, plan = any_plan(PLACEMENTS[name], seed, tmp_path)
    training = replace(ON_HOST, clip_norm=0.3) if seed % 2 else TRAINING
    assert_alike(by_plan(work, plan, training, seed=seed), plainly(work, training))


def test_the_activations_of_another_chunk_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stage computes with what it received before, for another chunk or micro-batch."""
    right, before = Boundary.taken, dict[object, Tensor]()

    def taken(self: Boundary, op: Op) -> Tensor:
        tensor = right(self, op)
        wrong = before.get((self, op.name), tensor)
        before[self, op.name] = tensor.clone()
        return wrong

    monkeypatch.setattr(Boundary, "taken", taken)
    with pytest.raises(AssertionError):
        assert_alike(by_plan(WORK, NAMED), plainly(WORK))


@pytest.mark.parametrize("seed", [*range(2), *sweep(range(2, 40), first=0)])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_chunks_hang_nobody(name: str, seed: int, tmp_path: Path) -> None:
    work, plan = any_plan(PLACEMENTS[name], seed, tmp_path)
    findings = collective_findings(plan, work, clips=seed % 2 == 0, steps_on_host=seed % 3 == 0)
    assert not findings


@pytest.mark.parametrize(("stages", "chunks"), [(2, 2), (3, 3), (4, 2)])
def test_long_interleaved_pipelines_hang_nobody(stages: int, chunks: int) -> None:
    one = stage(chunks, micro_batch=1)
    plan = Plan(micro_batches=24, stages=(one,) * stages, order=f"interleaved-{chunks}")
    work = workload(layers=chunks * stages, batch=24)
    assert not collective_findings(plan, work)
    assert few_batches(plan).micro_batches % stages == 0


def test_receivers_of_chunks_that_are_not_ready_earlier_hang(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for seed in range(4):
        work, plan = any_plan(PLACEMENTS["V of three stages"], seed, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(receipts._DryRun, "let_all_end", lambda _: None)
            receipts.receipts_of.cache_clear()
            found += collective_findings(plan, work)
        receipts.receipts_of.cache_clear()
    assert {one.trouble for one in found} == {"deadlock"}


def joined(shape: StageShape, count: int = 3) -> list[Op]:
    return list(chain.from_iterable(iterations(shape, count)))


@pytest.mark.parametrize("seed", sweep(range(12), first=1))
@pytest.mark.parametrize("name", PLACEMENTS)
def test_programs_of_chunks_have_no_race_and_repeat_themselves(
    name: str, seed: int, tmp_path: Path
) -> None:
    _, plan = any_plan(PLACEMENTS[name], seed, tmp_path)
    for number in range(plan.num_stages):
        shape = StageShape.of(
            plan, number, clips=seed % 2 == 0, tied=seed % 2 == 0, steps_on_host=seed % 3 == 0
        )
        _, second, third = iterations(shape, 3)
        assert second == third
        assert races(joined(shape)) == []
        assert unallocated(joined(shape)) == []


def test_every_wait_of_chunks_left_out_makes_a_race() -> None:
    shape = StageShape.of(NAMED, 0, clips=True, tied=True)
    ops = joined(shape, 2)
    assert needless(ops, len(ops) // 2) == []


FEW = ["interleaved-2", "a V"]


def few(name: str, folder: Path) -> Plan:
    """A plan of two micro-batches, which has every kind of task."""
    if name == "a V":
        text = whole_backwards(zb_v_text(2, 2))
        return ordered(replace(PLAN, micro_batches=2), text, folder)
    return replace(PLAN, micro_batches=2, order=name)


@pytest.mark.parametrize("name", FEW)
def test_streams_of_chunks_use_memory_in_order(name: str, tmp_path: Path) -> None:
    plan = few(name, tmp_path)
    ranks = unlike_ranks(plan)
    assert sum(one.stands_for for one in ranks) == plan.num_gpus
    for one in ranks:
        assert not Judge(trace_of(WORK, plan, one.rank, TRAINING)).findings()


@pytest.mark.parametrize("rank", sweep([0, 2], first=1))
@pytest.mark.parametrize("name", sweep(FEW, first=1))
def test_chunks_keep_no_host_waiting(name: str, rank: int, tmp_path: Path) -> None:
    plan = few(name, tmp_path)
    work = replace(WORK, precision="bf16")
    assert device_findings(work, plan, rank, replace(TRAINING, clip_norm=1.0)) == ()


SIZED = workload("gpt", layers=8, batch=8, **SIZES)
AWAY = ratios(0, 0, 0, 1)
# Blocks that are computed again of the four of a stage, and ratios.
KEPT = [(1, AWAY), (0, NO_OFFLOAD), (3, AWAY), (2, NO_OFFLOAD), (0, AWAY)]


@pytest.mark.parametrize(("again", "offload"), sweep(KEPT, first=1))
@pytest.mark.parametrize("name", sweep(["interleaved-2", "a V"], first=1))
def test_stages_of_chunks_take_what_is_predicted(
    name: str, again: int, offload: Offload, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the device and on the host, though one chunk keeps more than the other."""
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    one = stage(4, checkpointed_layers=again, offload=offload)
    plan = Plan(micro_batches=4, stages=(one, one))
    plan = ordered(plan, TEXTS[name], tmp_path) if name in TEXTS else replace(plan, order=name)
    assert_takes_what_is_predicted(plan, offload)


@pytest.mark.parametrize("again", sweep([2, 3, 1, 4], first=2))
@pytest.mark.parametrize("name", sweep(["drawn in a V", "another V", "a V"], first=1))
def test_vs_that_recompute_take_what_is_predicted(
    name: str, again: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The fullest chunk need not recompute, and need not run beside the head's activations."""
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    one = stage(4, checkpointed_layers=again)
    plan = ordered(Plan(micro_batches=4, stages=(one, one)), TEXTS[name], tmp_path)
    assert_takes_what_is_predicted(plan, NO_OFFLOAD)


def assert_takes_what_is_predicted(plan: Plan, offload: Offload) -> None:
    """Each stage of a plan does, whose stages have these ratios."""
    predicted = figures_in_order([plan], StageModel.of(SIZED))
    for number in range(plan.num_stages):
        taken, on_host = memory_taken(SIZED, plan, isolated(plan, number, CPU, 0))
        assert_predicted(taken, predicted.peak_bytes[number], offload)
        assert on_host == pytest.approx(predicted.host_bytes[number], rel=1e-3)


@pytest.mark.parametrize("name", ["interleaved-2", "a V", "zb-v"])
def test_a_pipeline_of_chunks_goes_on_from_another_plan(name: str, tmp_path: Path) -> None:
    """From one stage of three chunks."""
    one = stage(5, micro_batch=2, offload=MIXED)
    first = alone(WORK, Plan(micro_batches=4, stages=(one,), order="interleaved-3"), "lazy")
    begins = run_step(first, WORK, first.connections, 0).loss
    saved = checkpoint.save(first, tmp_path)
    plan = ordered(PLAN, TEXTS[name], tmp_path) if name in TEXTS else replace(PLAN, order=name)

    def rank_of(rank: int, meeting: Meeting) -> list[float | None]:
        connections = connected(plan, rank, thread_groups(meeting, rank))
        executor = begun(WORK, plan, connections, SimulatedStreams(), TRAINING)
        checkpoint.load(executor, saved)
        return [run_step(executor, WORK, connections, step).loss for step in (1, 2)]

    found = [begins, *run_threads(plan.num_gpus, rank_of)[0]]
    assert found == pytest.approx(plainly(WORK).losses, rel=1e-6)
