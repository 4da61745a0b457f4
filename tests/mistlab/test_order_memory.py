"""The memory of stages in orders of passes: against the closed form, and against bounds of it."""

from dataclasses import replace

import numpy as np
import pytest

from mistlab.cost.order_memory import figures_in_order
from mistlab.graph.stage_model import StageModel
from mistlab.plan.plan import Offload, Plan, StagePlan
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS, order_problem
from mistlab.stages.plan_orders import HeldMoments, moments_of_plan
from mistlab.stages.stage_batch import StageBatch, StageFigures
from tests.sweep import sweep
from tests.workloads import workload_of

WORK = workload_of("gpt3-1.3b", 1024, 64, layers=64)
PEAKS = ("forward_peak_bytes", "backward_peak_bytes")


@pytest.fixture(scope="module")
def model() -> StageModel:
    return StageModel.of(WORK)


def drawn_stage(draw: np.random.Generator) -> StagePlan:
    layers = int(draw.integers(8, 12))
    ratios = (float(draw.choice(some)) for some in ((0, 0.5), (0, 0.5), (0, 1), (0, 0.25, 0.5, 1)))
    return StagePlan(
        layers=layers,
        data_parallel=int(draw.choice([1, 2])),
        tensor_parallel=1,
        micro_batch=int(draw.choice([1, 2])),
        zero=int(draw.integers(0, 4)),
        checkpointed_layers=int(draw.integers(0, layers + 1)),
        offload=Offload(
            weights=next(ratios),
            gradients=next(ratios),
            optimizer=next(ratios),
            activations=next(ratios),
        ),
    )


def drawn_plans(order: str, count: int) -> list[Plan]:
    draw, found = np.random.default_rng(len(order)), list[Plan]()
    while len(found) < count:
        stages, micro_batches = int(draw.choice([1, 2, 4, 6])), int(draw.choice([4, 8, 12]))
        if not order_problem(order, stages, micro_batches, most_chunks=8):
            own = tuple(drawn_stage(draw) for _ in range(stages))
            found.append(Plan(micro_batches=micro_batches, stages=own, order=order))
    return found


def least(plan: Plan, model: StageModel) -> StageFigures:
    """What searches count at least for a plan's stages."""
    held = np.array([moments.least_held for moments in moments_of_plan(plan)])
    return model.figures(StageBatch.of_plan(plan).with_columns(in_flight=held))


def beyond(plan: Plan, model: StageModel, bound: StageFigures) -> np.ndarray:
    """What is predicted of a plan's stages with offloaded activations, in times of a bound: at the
    peak, and on the host."""
    found = figures_in_order([plan], model)
    return np.stack(
        [
            found.peak_bytes / bound.peak_bytes,
            found.host_bytes / np.maximum(1.0, bound.host_bytes),
        ]
    )[:, bound.host_bytes > 0]


@pytest.mark.parametrize(
    "order", sweep(["zb-v", "interleaved-4", *sorted({*ORDERS} - {DEFAULT_ORDER})], first=2)
)
def test_no_stage_holds_less_than_searches_count_at_least(order: str, model: StageModel) -> None:
    for plan in drawn_plans(order, 30):
        assert (beyond(plan, model, least(plan, model)) > 1 - 1e-9).all()


def test_what_walked_passes_hold_would_be_less(
    model: StageModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks that stay beside one another in the closed form are in different chunks."""
    plans = drawn_plans("interleaved-4", 30)
    bounds = [least(plan, model) for plan in plans]
    monkeypatch.setattr(HeldMoments, "least_held", 0)
    both = zip(plans, bounds, strict=True)
    assert min(beyond(plan, model, bound)[0].min() for plan, bound in both) < 0.9995


@pytest.mark.parametrize("seed", sweep(range(20), first=4))
def test_walked_passes_of_1f1b_hold_what_the_closed_form_counts(
    seed: int, model: StageModel
) -> None:
    draw = np.random.default_rng(seed)
    stages = []
    for one in (drawn_stage(draw) for _ in range(int(draw.choice([1, 2, 4])))):
        again = one.layers * int(draw.integers(0, 2))
        away = replace(one.offload, activations=max(0.25, one.offload.activations))
        stages.append(replace(one, checkpointed_layers=again, offload=away))
    plan = Plan(micro_batches=int(draw.choice([1, 2, 6])), stages=tuple(stages))
    closed, walked = model.figures(StageBatch.of_plan(plan)), figures_in_order([plan], model)
    for name in (*PEAKS, "host_bytes", "activations_bytes"):
        np.testing.assert_allclose(getattr(walked, name), getattr(closed, name), rtol=1e-9)
