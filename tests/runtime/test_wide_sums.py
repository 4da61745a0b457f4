"""Gradients that are summed and reduced in 32 bits: as a run written independently has them."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from torch import Tensor  # noqa: E402

from mistlab.engines.engine import Precision, Sums  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from runtime.engine.work.stage_modules import TIED  # noqa: E402
from runtime.models.config import TYPE_OF_PRECISION  # noqa: E402
from tests.runtime import worlds  # noqa: E402
from tests.runtime.plain_run import PlainRun  # noqa: E402
from tests.runtime.thread_ranks import ThreadGroup  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    Trained,
    alone,
    by_plan,
    random_plan,
    ratios,
    sequences,
    stage,
    starting_tensor,
    workload,
)
from tests.sweep import sweep  # noqa: E402

STEPS = 2
IN_BITS: tuple[tuple[Sums, torch.dtype], ...] = (
    ("32bit", torch.float32),
    ("16bit", torch.bfloat16),
)
TRAINING = Training(learning_rate=1e-3, epsilon=1e-6, clip_norm=1.0)
# Of a loss; and of all weights' distance from a plain run, beside what they have moved.
CLOSE: dict[Precision, tuple[float, float]] = {"fp32": (1e-6, 1e-4), "bf16": (5e-4, 0.1)}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def starting_weights(work: Workload) -> dict[str, Tensor]:
    tied = work.model.tied_embeddings
    return {
        name: starting_tensor(name, tuple(one.shape), tied=tied)
        for name, one in worlds.model_of(work).named_parameters()
    }


def plain_run(work: Workload, plan: Plan, training: Training = TRAINING) -> PlainRun:
    return PlainRun(work.model, starting_weights(work), training, TYPE_OF_PRECISION[work.precision])


def micro_batches_of(work: Workload, plan: Plan, step: int) -> Sequence[Tensor]:
    return sequences(work, step).split(work.global_batch // plan.micro_batches)


def random_case(seed: int, precision: Precision) -> tuple[Workload, Plan, Training]:
    """A plan of everything; a third each clip, scale their losses, or step what is offloaded on the
    host."""
    work, plan = random_plan(10_000 + seed)
    training = (
        TRAINING,
        replace(TRAINING, loss_scale=2.0**10, clip_norm=0.3),
        replace(TRAINING, clip_norm=None, steps_on_host=True),
    )[seed % 3]
    return replace(work, precision=precision, gradients="32bit"), plan, training


def assert_close(
    work: Workload, plan: Plan, training: Training, found: Trained, plain: PlainRun
) -> None:
    of_loss, of_weights = CLOSE[work.precision]
    start = starting_weights(work)
    expected = [plain.step(micro_batches_of(work, plan, step)) for step in range(STEPS)]
    losses, norms = zip(*expected, strict=True)
    np.testing.assert_allclose(found.losses, losses, rtol=of_loss)
    if training.needs_norm:
        mine = [report.gradient_norm for report in found.reports]
        np.testing.assert_allclose(mine, norms, rtol=20 * of_loss)
    moved = far = 0.0
    for name, one in plain.weights.items():
        if work.model.tied_embeddings and name == TIED:
            continue
        far += float((found.weights[name].double() - one).square().sum())
        moved += float((start[name].double() - one).square().sum())
    assert (far / moved) ** 0.5 < of_weights


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("seed", sweep(range(100), first=6))
def test_random_plans_train_as_a_run_of_their_formulas(seed: int, precision: Precision) -> None:
    work, plan, training = random_case(seed, precision)
    found = by_plan(work, plan, training, seed=seed, steps=STEPS)
    assert_close(work, plan, training, found, plain_run(work, plan, training))


def gradients_of(sums: Sums, micro_batches: int, **fields: object) -> Tensor:
    """Sums of a batch's gradients in which every micro-batch is the same."""
    work = workload(layers=2, batch=2 * micro_batches, precision="bf16")
    work = replace(work, gradients=sums)
    plan = Plan(micro_batches=micro_batches, stages=(stage(2, **fields),))  # type: ignore[arg-type]
    executor = alone(work, plan, "eager", Training())
    one = sequences(replace(work, global_batch=2), 0)
    executor.iterate([(one[:, :-1], one[:, 1:])] * micro_batches)
    executor.report()
    state = executor.state
    kept = [state.layers[layer].gradients for layer in executor.layers]
    return torch.cat([one for split in kept for one in (split.resident, split.tail)]).double()


@pytest.mark.parametrize("offloaded", [0.0, 0.5])
def test_sums_of_many_micro_batches_lose_nothing_in_32_bits(offloaded: float) -> None:
    offload = ratios(0.0, offloaded, 0.0, 0.0)
    one = gradients_of("32bit", 1)
    for sums, least, most in (("32bit", 0.0, 1e-5), ("usual", 0.0, 1e-5), ("16bit", 5e-3, 0.1)):
        many = gradients_of(sums, 32, offload=offload)
        assert least <= (many - one).norm() / one.norm() <= most, sums


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_sums_are_reduced_in_their_bits(zero: int, monkeypatch: pytest.MonkeyPatch) -> None:
    reduced: list[torch.dtype] = []
    name = "reduce_scatter" if zero else "all_reduce"
    reduce = getattr(ThreadGroup, name)

    def noted(self: ThreadGroup, tensor: Tensor, *others: object) -> object:
        if tensor.numel() > 100:
            reduced.append(tensor.dtype)
        return reduce(self, tensor, *others)

    monkeypatch.setattr(ThreadGroup, name, noted)
    one = stage(2, data_parallel=2, micro_batch=1, zero=zero)
    for sums, dtype in IN_BITS:
        reduced.clear()
        work = replace(workload(layers=2, batch=2, precision="bf16"), gradients=sums)
        by_plan(work, Plan(micro_batches=1, stages=(one,)), TRAINING, steps=1)
        assert set(reduced) == {dtype}
