"""Stages with passes for gradients of weights (W) train as a plain run does, hang nobody, have no
races and no hidden waits; W runs where the event simulator has it."""

from collections.abc import Callable
from dataclasses import replace
from itertools import chain
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch
from torch import Tensor

from mistlab.cost.order_memory import figures_in_order
from mistlab.graph.stage_model import StageModel
from mistlab.plan.plan import Offload, Plan
from mistlab.schedule.orders import ORDERS
from mistlab.schedule.placement import loop
from mistlab.stages.stage_program import iterations
from mistlab.stages.stage_shape import StageShape
from runtime.checks.collectives.calls import THEIR_GRADIENTS, calls_of
from runtime.checks.collectives.findings import collective_findings
from runtime.checks.fake.fake_device import device_findings
from runtime.checks.races.judge import Judge
from runtime.checks.races.recorded_rank import trace_of
from runtime.checks.sanitizer import unlike_ranks
from runtime.comm.topology import connected, isolated
from runtime.engine.streams.lanes import StreamedRanks
from runtime.engine.work import optimizer
from runtime.engine.work.layer_passes import Passes
from tests.pipeline_orders import drawn
from tests.runtime.chunk_plans import PLACEMENTS, any_plan, ordered
from tests.runtime.planted import plant
from tests.runtime.program_races import needless, races, unallocated
from tests.runtime.taken_memory import assert_predicted, memory_taken, taken_bytes
from tests.runtime.test_chunks_train import KEPT, SIZED
from tests.runtime.thread_ranks import Meeting, run_threads
from tests.runtime.worlds import (
    CPU,
    MIXED,
    ON_HOST,
    TRAINING,
    assert_alike,
    by_plan,
    plainly,
    stage,
    thread_groups,
    workload,
)
from tests.sweep import sweep

WORK = workload("llama", layers=5, kv_heads=2, tied_embeddings=True)
FIRST = stage(3, data_parallel=2, zero=2, micro_batch=1, checkpointed_layers=1, offload=MIXED)
PLAN = Plan(micro_batches=4, stages=(FIRST, stage(2)), order="zb-h1")


@pytest.mark.parametrize(
    "order", sweep(["zb-h1", "zb-v", "zb-2p", "dualpipe-v", "v-half", "v-min"], first=2)
)
def test_orders_with_passes_for_weights_have_the_losses_of_a_plain_run(order: str) -> None:
    assert_alike(by_plan(WORK, replace(PLAN, order=order)), plainly(WORK))


@pytest.mark.slow
@pytest.mark.parametrize("order", ORDERS)
def test_every_order_that_has_a_name_is_trained(order: str) -> None:
    work = workload("gpt", layers=16, tied_embeddings=True)
    plan = Plan(micro_batches=4, stages=(stage(8, offload=MIXED), stage(8)), order=order)
    assert_alike(by_plan(work, plan), plainly(work))


@pytest.mark.parametrize("family", sweep(["gpt", "falcon", "llama"], first=2))
def test_tensor_parallel_stages_that_step_on_the_host_have_them_too(family: str) -> None:
    one = stage(2, tensor_parallel=2, offload=MIXED)
    plan = Plan(micro_batches=4, stages=(one, replace(one, tensor_parallel=1)), order="zb-h1")
    work = workload(family, biases=True)
    training = replace(ON_HOST, clip_norm=0.3)
    assert_alike(by_plan(work, plan, training), plainly(work, training))


def test_a_stage_may_have_them_beside_one_that_has_not(tmp_path: Path) -> None:
    text = drawn(loop(2), 4, 2, splitting=[1])
    plan = ordered(replace(PLAN, stages=(replace(FIRST, zero=3), stage(2))), text, tmp_path)
    assert_alike(by_plan(WORK, plan), plainly(WORK))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("name", PLACEMENTS)
def test_any_plan_with_passes_for_weights_has_them(name: str, seed: int, tmp_path: Path) -> None:
    work, plan = any_plan(PLACEMENTS[name], seed, tmp_path, splits=True)
    training = replace(ON_HOST, clip_norm=0.3) if seed % 2 else TRAINING
    assert_alike(
        by_plan(work, plan, training, seed=seed),
        plainly(work, training),
    )


def test_gradients_that_w_leaves_out_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Passes.of_weights, "for add in left.add:", "for add in left.add[1:]:")
    with pytest.raises(AssertionError):
        assert_alike(by_plan(WORK, PLAN), plainly(WORK))


@pytest.mark.parametrize("seed", [0, *sweep(range(1, 40), first=0)])
@pytest.mark.parametrize("name", PLACEMENTS)
def test_passes_for_weights_hang_nobody(name: str, seed: int, tmp_path: Path) -> None:
    work, plan = any_plan(PLACEMENTS[name], seed, tmp_path, splits=True)
    assert not collective_findings(plan, work, clips=seed % 2 == 0, steps_on_host=seed % 3 == 0)


def test_products_with_a_pass_of_their_own_hide_no_reduction() -> None:
    plan = Plan(micro_batches=2, stages=(stage(2, tensor_parallel=2), stage(2, tensor_parallel=2)))
    for order, beside in (("1f1b", True), ("zb-h1", False)):
        steps = calls_of(replace(plan, order=order), workload()).training[0].steps
        calls = [call for step in steps for call in step.calls if call.what == THEIR_GRADIENTS]
        tensor = [call.beside for call in calls if call.group == "tensor"]
        assert tensor
        assert set(tensor) == {beside}


@pytest.mark.parametrize("seed", sweep(range(12), first=1))
@pytest.mark.parametrize("name", sweep(PLACEMENTS, first=4))
def test_programs_with_passes_for_weights_have_no_race(
    name: str, seed: int, tmp_path: Path
) -> None:
    work, plan = any_plan(PLACEMENTS[name], seed, tmp_path, splits=True)
    tied = work.model.tied_embeddings
    for number in range(plan.num_stages):
        shape = StageShape.of(
            plan, number, clips=seed % 2 == 0, tied=tied, steps_on_host=seed % 3 == 0
        )
        programs = iterations(shape, 3)
        ops = list(chain.from_iterable(programs))
        assert programs[1] == programs[2]
        assert races(ops) == []
        assert unallocated(ops) == []


def test_every_wait_of_passes_for_weights_left_out_makes_a_race() -> None:
    plan = replace(PLAN, micro_batches=2)
    ops = list(chain.from_iterable(iterations(StageShape.of(plan, 0, clips=True, tied=True), 2)))
    assert needless(ops, len(ops) // 2) == []


@pytest.mark.parametrize("order", sweep(["zb-h1", "zb-v"], first=1))
def test_streams_use_memory_in_order_that_waits_for_w(order: str) -> None:
    plan = replace(PLAN, micro_batches=2, order=order)
    for one in unlike_ranks(plan):
        assert not Judge(trace_of(WORK, plan, one.rank, TRAINING)).findings()


@pytest.mark.parametrize("order", sweep(["zb-h1", "zb-v"], first=1))
def test_passes_for_weights_keep_no_host_waiting(order: str) -> None:
    plan = replace(PLAN, micro_batches=2, order=order)
    work = replace(WORK, precision="bf16")
    assert device_findings(work, plan, 0, replace(TRAINING, clip_norm=1.0)) == ()


@pytest.mark.parametrize(("again", "offload"), sweep(KEPT, first=2))
@pytest.mark.parametrize("order", sweep(["zb-2p", "zb-v", "zb-h1"], first=2))
def test_stages_take_what_is_predicted_until_w(
    order: str, again: int, offload: Offload, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever is computed again, and on the host meanwhile."""
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    one = stage(4, checkpointed_layers=again, offload=offload)
    plan = Plan(micro_batches=4, stages=(one, one), order=order)
    predicted = figures_in_order([plan], StageModel.of(SIZED))
    for number in range(2):
        taken, on_host = memory_taken(SIZED, plan, isolated(plan, number, CPU, 0))
        assert_predicted(taken, predicted.peak_bytes[number], offload)
        assert on_host == pytest.approx(predicted.host_bytes[number], rel=1e-3)


SPLIT = stage(2, tensor_parallel=2, sequence_parallel=1, checkpointed_layers=1, offload=MIXED)


@pytest.mark.parametrize(
    ("family", "order"), sweep([("gpt", "zb-h1"), ("falcon", "zb-v"), ("llama", "zb-2p")], first=2)
)
def test_ranks_that_split_tokens_gather_them_in_w(family: str, order: str) -> None:
    plan = Plan(micro_batches=4, stages=(SPLIT, SPLIT), order=order)
    work = workload(family, tied_embeddings=order == "zb-v")
    assert_alike(by_plan(work, plan), plainly(work))


def test_tokens_of_one_rank_alone_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    right = StreamedRanks.gather_tokens

    def gathered(self: StreamedRanks, tensor: Tensor, *, again: bool = False) -> Tensor:
        whole = right(self, tensor)
        return torch.cat([tensor] * self.size, 1) if again else whole

    monkeypatch.setattr(StreamedRanks, "gather_tokens", gathered)
    plan, work = Plan(micro_batches=4, stages=(SPLIT, SPLIT), order="zb-h1"), workload("gpt")
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, plan), plainly(work))


def test_ranks_that_split_tokens_take_what_is_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gradients of row-split products stay whole until W."""
    monkeypatch.setattr(optimizer, "CHUNK", 2**17)
    one = stage(4, tensor_parallel=2, sequence_parallel=1)
    plan = Plan(micro_batches=4, stages=(one, one), order="zb-2p")

    def rank_of(rank: int, meeting: Meeting) -> int:
        return taken_bytes(SIZED, plan, connected(plan, rank, thread_groups(meeting, rank)))

    predicted = figures_in_order([plan], StageModel.of(SIZED)).peak_bytes
    for rank, taken in enumerate(run_threads(plan.num_gpus, rank_of)):
        assert taken == pytest.approx(predicted[rank // 2], rel=0.02)


EMBEDDING_FIRST = "F0m0 F1m0 B1m0 F0m1 F1m1 B1m1 B0m0 W0m0 B0m1 W0m1 W1m1 W1m0\n"


def table_of_two_chunks(folder: Path) -> Plan:
    """The embedding's chunk begins and ends its W before the head's."""
    one = stage(4, data_parallel=2, tensor_parallel=2, zero=1, micro_batch=2)
    return ordered(Plan(micro_batches=2, stages=(one,)), EMBEDDING_FIRST, folder)


def test_a_shared_table_has_the_heads_gradients_before_the_embedding_ends(tmp_path: Path) -> None:
    plan, work = table_of_two_chunks(tmp_path), workload(tied_embeddings=True)
    assert_alike(by_plan(work, plan), plainly(work))
    shape = StageShape.of(plan, 0, clips=True, tied=True)
    assert shape.adds_table_in_b(shape.last_layer)
    assert races(list(chain.from_iterable(iterations(shape, 3)))) == []


def test_the_heads_gradients_in_its_w_would_come_too_late(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, forget_programs: Callable[[], None]
) -> None:
    monkeypatch.setattr(StageShape, "adds_table_in_b", lambda *_: False)
    forget_programs()
    work = workload(tied_embeddings=True)
    with pytest.raises(AssertionError):
        assert_alike(by_plan(work, table_of_two_chunks(tmp_path)), plainly(work))
