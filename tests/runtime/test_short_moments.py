"""Moments of 16 bits: trained as a run written independently, and as large as predicted."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mistlab.graph.stage_model import StageModel  # noqa: E402
from mistlab.plan.plan import Plan  # noqa: E402
from mistlab.plan.workload import Workload  # noqa: E402
from mistlab.stages.stage_batch import StageBatch  # noqa: E402
from runtime.engine.training import Training  # noqa: E402
from tests.runtime import worlds  # noqa: E402
from tests.runtime.plain_run import PlainRun  # noqa: E402
from tests.runtime.worlds import (  # noqa: E402
    ON_HOST,
    Trained,
    alone,
    by_plan,
    ratios,
    sequences,
    stage,
    starting_tensor,
    workload,
)

STEPS = 4
TRAINING = Training(learning_rate=1e-3, epsilon=1e-4, clip_norm=1.0)
HALF_AWAY = ratios(0.5, 0.25, 0.5, 0)
PLANS = {
    "alone": Plan(micro_batches=2, stages=(stage(micro_batch=4),)),
    "sharded": Plan(micro_batches=2, stages=(stage(data_parallel=2, zero=3),)),
    "split": Plan(micro_batches=2, stages=(stage(micro_batch=4, tensor_parallel=2),)),
    "offloaded": Plan(micro_batches=2, stages=(stage(2, micro_batch=4, offload=HALF_AWAY),) * 2),
}


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def short(**fields: object) -> Workload:
    return replace(workload(**fields), optimizer="adamw-bf16")  # type: ignore[arg-type]


def plainly(work: Workload, moments: torch.dtype | None) -> tuple[list[float], PlainRun]:
    """A plain run's losses, and the run."""
    tied = work.model.tied_embeddings
    start = {
        name: starting_tensor(name, tuple(one.shape), tied=tied)
        for name, one in worlds.model_of(work).named_parameters()
    }
    run = PlainRun(work.model, start, TRAINING, torch.float32, moments)
    return [run.step(sequences(work, step).split(4))[0] for step in range(STEPS)], run


def apart(found: Trained, run: PlainRun) -> float:
    """How far a run's weights lie from a plain run's."""
    pairs = ((found.weights[name].double(), one) for name, one in run.weights.items())
    return sum(float((mine - one).square().sum()) for mine, one in pairs) ** 0.5


@pytest.mark.parametrize("on_host", [False, True])
@pytest.mark.parametrize("name", PLANS)
def test_losses_equal_a_plain_run_with_moments_of_16_bits(name: str, on_host: bool) -> None:
    """Weights are far nearer to its own than to those of moments of 32 bits."""
    work = short()
    training = replace(TRAINING, steps_on_host=on_host)
    found = by_plan(work, PLANS[name], training, steps=STEPS)
    losses, own = plainly(work, torch.bfloat16)
    np.testing.assert_allclose(found.losses, losses, rtol=1e-6)
    assert 20 * apart(found, own) < apart(found, plainly(work, None)[1])


@pytest.mark.parametrize("offload", [ratios(0, 0, 0, 0), ratios(0, 0, 0.5, 0)])
def test_states_take_what_is_predicted(offload: object) -> None:
    """Eight bytes a parameter, on the device and, in the step of offloaded states, on their way."""
    work = short(hidden=128, ffn=512, vocab=128, precision="bf16")
    plan = Plan(micro_batches=2, stages=(stage(4, offload=offload),))
    figures = StageModel.of(work).figures(StageBatch.of_plan(plan))
    state = alone(work, plan, "eager").state
    held = state.held_bytes()
    assert held == {name: getattr(figures, f"{name}_bytes")[0] for name in held}
    wide = StageModel.of(replace(work, optimizer="adamw")).figures(StageBatch.of_plan(plan))
    assert 3 * figures.optimizer_bytes[0] == 2 * wide.optimizer_bytes[0]
    state.staging.open()
    assert state.staging.size_bytes == figures.step_buffer_bytes[0]


def test_a_checkpoint_goes_on_with_the_same_losses(tmp_path: Path) -> None:
    from runtime.checkpoints.checkpoint import load, save  # noqa: PLC0415

    work, plan = short(), PLANS["alone"]
    first, other = (alone(work, plan, "eager", ON_HOST) for _ in range(2))
    worlds.run_step(first, work, first.connections, 0)
    load(other, save(first, tmp_path))
    reports = [worlds.run_step(one, work, one.connections, 1) for one in (first, other)]
    assert reports[0] == reports[1]
    # Moments of 32 bits go on from ones of 16.
    wide = alone(replace(work, optimizer="adamw"), plan, "eager", ON_HOST)
    load(wide, tmp_path / "step-1")
    assert worlds.run_step(wide, work, wide.connections, 1) == reports[0]
