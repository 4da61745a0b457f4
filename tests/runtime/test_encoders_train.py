"""Encoders (BERT, RoBERTa): trained by plans, they lose as the plain model, and keep what is
predicted; tokens are hidden by the number of their sequence."""

from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import Job  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.data import HIDDEN_SHARE, Synthetic, batch_of  # noqa: E402
from runtime.models.config import NOT_HIDDEN  # noqa: E402
from runtime.runnable import check_runnable  # noqa: E402
from tests.added_rows import CLUSTER  # noqa: E402
from tests.runtime.test_lean_blocks import kept_bytes, predicted  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    TRAINING,
    assert_alike,
    by_plan,
    plainly,
    ratios,
    stage,
    workload,
)

ONE = Plan(micro_batches=2, stages=(stage(4, micro_batch=4),))
PLANS = {
    "alone": ONE,
    "stages": Plan(
        micro_batches=4, stages=(stage(2), stage(2, checkpointed_layers=1, data_parallel=1))
    ),
    "ranks": Plan(
        micro_batches=2,
        stages=(stage(tensor_parallel=2, data_parallel=2, zero=2, offload=ratios(0.5, 0, 1, 0.5)),),
    ),
    "lean": Plan(micro_batches=2, stages=(stage(micro_batch=4, lean_layers=4),)),
    "lean stages": Plan(
        micro_batches=4, stages=(stage(2, lean_layers=2), stage(2, lean_layers=1, zero=0))
    ),
}


def encoder(**fields: object) -> Workload:
    return workload("bert", **fields)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("plan", PLANS.values(), ids=PLANS)
def test_a_plan_loses_as_the_plain_model(plan: Plan, attention: str) -> None:
    work = replace(encoder(), attention=attention)
    expected = plainly(encoder())
    found = by_plan(work, plan)
    if any(one.value("lean_layers") for one in plan.stages):
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)
    else:
        assert_alike(found, expected)


def test_dropout_drops_as_in_the_plain_model() -> None:
    work = replace(encoder(dropout=0.1), attention="math")
    for plan in (PLANS["stages"], PLANS["lean"]):
        found, expected = by_plan(work, plan), plainly(work)
        np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-6)


def test_fifty_lean_steps_lose_as_plain_operators() -> None:
    work = replace(encoder(dropout=0.1), attention="math")
    training = replace(TRAINING, learning_rate=1e-3)
    lean, plain = (by_plan(work, plan, training, steps=50) for plan in (PLANS["lean"], ONE))
    np.testing.assert_allclose(lean.losses, plain.losses, rtol=0, atol=1e-5)


@pytest.mark.parametrize("attention", ["flash", "math"])
@pytest.mark.parametrize("operators", range(3))
def test_a_block_keeps_what_is_predicted_to_the_byte(operators: int, attention: str) -> None:
    work = replace(encoder(dropout=0.1, attention_dropout=0.0), attention=attention)
    lean = stage(4, micro_batch=4, lean_layers=4, lean_operators=operators)
    plan = replace(ONE, stages=(lean,))
    less = predicted(work, ONE) - predicted(work, plan)
    assert less > 0
    assert kept_bytes(work, ONE) - kept_bytes(work, plan) == less


def test_every_sequence_hides_as_many_tokens_wherever_it_is() -> None:
    sequences = Synthetic(length=64, vocab=1000, seed=5)
    tokens, targets = batch_of(sequences, 3, 200, hides=True)
    plain, _ = batch_of(sequences, 3, 200)
    is_hidden = targets != NOT_HIDDEN
    assert (is_hidden.sum(1) == round(HIDDEN_SHARE * 64)).all()
    assert torch.equal(tokens[~is_hidden], plain[~is_hidden])
    assert torch.equal(targets[is_hidden], plain[is_hidden])
    marked = (tokens == 999)[is_hidden].float().mean()
    kept = (tokens == plain)[is_hidden].float().mean()
    assert marked == pytest.approx(0.8, abs=0.03)
    assert kept == pytest.approx(0.1, abs=0.03)
    one, own = batch_of(sequences, 7, 1, hides=True)
    assert torch.equal(one[0], tokens[4])
    assert torch.equal(own[0], targets[4])


@pytest.mark.parametrize(
    ("degrees", "message"),
    [
        ({"context_parallel": 2, "data_parallel": 1}, "context_parallel: 2 with an encoder"),
        ({"tensor_parallel": 2, "sequence_parallel": 1}, "sequence_parallel: 1 with an encoder"),
    ],
)
def test_what_encoders_are_not_trained_with_is_refused(
    degrees: dict[str, int], message: str
) -> None:
    plan = Plan(micro_batches=4, stages=(stage(4, **degrees),))
    cluster = replace(CLUSTER, gpus_per_node=2)
    with pytest.raises(InputError, match=message):
        check_runnable(Job(workload=encoder(), cluster=cluster, plan=plan))
