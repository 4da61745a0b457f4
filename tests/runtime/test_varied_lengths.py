"""Micro-batches of documents that vary in length, sorted or balanced: plans lose as a plain run of
each document by itself, though ranks have unequal numbers of tokens."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.lengths import lengths_from  # noqa: E402
from mistlab.plan.model_parts import Experts  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from runtime.document_batches import DocumentBatch, batches_of_step, check_filling  # noqa: E402
from runtime.documents import VARYING, Filling, PackedSequences  # noqa: E402
from simulators.lengths import Arranger, LengthCosts  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime.test_documents_train import each_apart, packed_of  # noqa: E402
from tests.runtime.test_lean_blocks import kept_bytes, predicted  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    MIXED,
    alone,
    assert_alike,
    by_plan,
    ratios,
    run_step,
    stage,
    workload,
)

EVEN = 40
# Few of these documents fit into a sequence, so that balanced micro-batches are not full.
LUMPY = lengths_from("uniform:5:24")
PLANS = {
    "two ranks": Plan(micro_batches=2, stages=(stage(4, data_parallel=2, zero=2),)),
    "split tokens": Plan(
        micro_batches=2, stages=(stage(tensor_parallel=2, micro_batch=4, sequence_parallel=1),)
    ),
    "stages": Plan(
        micro_batches=4,
        stages=(stage(2, offload=MIXED), stage(2, checkpointed_layers=1)),
    ),
    "weights later": Plan(micro_batches=4, order="zb-h1", stages=(stage(2), stage(2))),
    "all away": Plan(
        micro_batches=2,
        stages=(stage(4, data_parallel=2, zero=3, offload=ratios(0.5, 0, 1, 1)),),
    ),
}


def varied(work: Any, filling: Filling) -> PackedSequences:
    packed = packed_of(work, filling, LUMPY)
    packed.even_tokens = EVEN
    return packed


def all_batches(packed: PackedSequences, plan: Plan, step: int) -> list[list[DocumentBatch]]:
    """The micro-batches of each replica."""
    return [
        batches_of_step(packed, plan, step=step, replica=replica, stage=0)
        for replica in range(plan.stages[0].data_parallel)
    ]


@pytest.mark.parametrize(
    ("family", "plan", "filling"),
    [
        ("llama", "two ranks", "sorted"),
        ("llama", "two ranks", "balanced"),
        ("gpt", "split tokens", "sorted"),
        ("gpt", "split tokens", "balanced"),
        ("llama", "stages", "sorted"),
        ("llama", "weights later", "balanced"),
        ("gpt", "all away", "balanced"),
    ],
)
def test_a_plan_loses_as_documents_each_by_itself(family: str, plan: str, filling: Filling) -> None:
    work = workload(family, sequence_length=24)
    packed, of_plan = varied(work, filling), PLANS[plan]
    sizes = [
        {batch.length * len(batch.rows) for batches in each for batch in batches}
        for each in (all_batches(packed, of_plan, step) for step in range(3))
    ]
    assert all(len(of_step) > 1 for of_step in sizes)
    if plan == "two ranks":
        targets = [
            sum(int((row[:, 1] - 1).sum()) for batch in batches for row in batch.rows)
            for batches in all_batches(packed, of_plan, 0)
        ]
        assert targets[0] != targets[1]
    trained = by_plan(work, of_plan, packed=lambda: varied(work, filling))
    assert_alike(trained, each_apart(work, filling, lengths=LUMPY))


@pytest.mark.parametrize("filling", VARYING)
def test_micro_batches_have_each_document_of_a_step_once(filling: Filling) -> None:
    work = workload(sequence_length=24, batch=16)
    plan = Plan(micro_batches=4, stages=(stage(4, data_parallel=2),))
    for step in range(3):
        packed = varied(work, filling)
        each = all_batches(packed, plan, step)
        rows = [row for batches in each for batch in batches for row in batch.rows]
        expected = np.concatenate(packed.rows(step))
        assert sorted(map(tuple, np.concatenate(rows))) == sorted(map(tuple, expected))
        for batches in each:
            assert len(batches) == 4
            assert all(len(batch.rows) == (2 if filling == "sorted" else 1) for batch in batches)
            assert all(batch.length <= (24, 48)[filling == "balanced"] for batch in batches)
            longest = [max(int(row[:, 1].sum()) for row in one.rows) for one in batches]
            assert longest == [batch.length for batch in batches]


def test_documents_are_balanced_as_simulated() -> None:
    """The runtime and the simulator distribute the same documents alike."""
    work = workload(sequence_length=24, batch=16)
    plan = Plan(micro_batches=4, stages=(stage(4, data_parallel=2),))
    packed = varied(work, "balanced")
    arranger = Arranger(
        lengths=LUMPY.within(24, cuts=True),
        costs=LengthCosts(token=EVEN / 4096, square=1 / 4096),
        ranks=2,
        micro_batches=4,
        sequences=2,
        context=24,
        draw=np.random.default_rng(0),
    )
    expected = arranger._dealt([row[:, 1].tolist() for row in packed.rows(0)])
    each = all_batches(packed, plan, 0)
    assert expected == [batch.rows[0][:, 1].tolist() for batches in each for batch in batches]
    costs = [sum(n * (EVEN + n) for n in one) for one in expected]
    assert max(costs) < 1.25 * min(costs)


@pytest.mark.parametrize(("filling", "recomputed"), [("sorted", 4), ("balanced", 0)])
def test_a_stage_keeps_what_is_predicted_of_each_length(filling: Filling, recomputed: int) -> None:
    """To the byte, and never more than of whole sequences. Besides what blocks keep, there are the
    inputs of embedding and head, a number of bytes for each token."""
    work = workload("llama", sequence_length=32, batch=8)
    plan = Plan(micro_batches=4, stages=(stage(4, micro_batch=2, checkpointed_layers=recomputed),))
    whole, tokens = kept_bytes(work, plan), 2 * 32
    of_ends = (whole - predicted(work, plan)) / tokens
    executor, packed = alone(work, plan, "eager"), varied(work, filling)
    for step in range(3):
        executor.passes.peak_bytes = 0
        run_step(executor, work, executor.connections, step, packed)
        batches = batches_of_step(packed, plan, step=step, replica=0, stage=0)
        kept = [
            predicted(*_as_long(work, plan, batch)) + of_ends * batch.length * len(batch.rows)
            for batch in batches
        ]
        assert len(set(kept)) > 1
        assert executor.passes.peak_bytes == max(kept) < whole
        assert executor.passes.held_bytes == 0


def _as_long(work: Any, plan: Plan, batch: DocumentBatch) -> tuple[Any, Plan]:
    """A plan whose whole micro-batches have the size of a batch of documents."""
    (own,), sequences = plan.stages, len(batch.rows)
    sized = replace(work, sequence_length=batch.length, global_batch=plan.micro_batches * sequences)
    return sized, replace(plan, stages=(replace(own, micro_batch=sequences),))


@pytest.mark.parametrize("filling", VARYING)
def test_dropout_drops_alike_by_plans_of_equal_micro_batches(filling: Filling) -> None:
    work = workload(sequence_length=24, dropout=0.1, attention_dropout=0.0)
    apart, split = (
        by_plan(
            work,
            Plan(micro_batches=2, stages=(stage(4, micro_batch=4, **degrees),)),
            packed=lambda: varied(work, filling),
        )
        for degrees in ({}, {"tensor_parallel": 2, "sequence_parallel": 1})
    )
    assert_alike(apart, split)


@pytest.mark.parametrize(
    ("filling", "fields", "stages", "message"),
    [
        (
            "sorted",
            {},
            (stage(2, data_parallel=2), stage(2, micro_batch=4)),
            r"sorted: plan.stages\[1\].micro_batch is 4, but 2 in stage 0, .* give all stages the",
        ),
        (
            "balanced",
            {"experts": Experts(count=4, active=2, ffn=32)},
            (stage(4),),
            "balanced: ranks that exchange tokens with experts .*: give --filling packed",
        ),
        (
            "balanced",
            {"attention": "math"},
            (stage(4),),
            "balanced: a micro-batch is a single sequence, .* give workload.attention: flash",
        ),
    ],
)
def test_what_needs_equal_micro_batches_is_refused(
    filling: Filling, fields: dict[str, Any], stages: Any, message: str
) -> None:
    work = workload("llama", **fields)
    plan = Plan(micro_batches=len(stages) * 2, stages=stages)
    cluster = replace(CLUSTER, gpus_per_node=plan.num_gpus)
    sized = replace(work, global_batch=plan.micro_batches * 2 * stages[0].data_parallel)
    job = Job(workload=sized, cluster=cluster, plan=plan)
    with pytest.raises(InputError, match=message):
        check_filling(job, filling)
    check_filling(job, "packed")
