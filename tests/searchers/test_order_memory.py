"""Memory of stages in orders without a formula: what searches ask about is what predictions say,
and bounds of boxes hold."""

import numpy as np
import pytest

from mistlab import catalog
from mistlab.cost.order_memory import OrderedStages, peaks_in_order
from mistlab.graph.stage_model import StageModel
from mistlab.job.search import Problem
from mistlab.plan.dimensions import OFFLOADS, RECOMPUTED
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS, TURNING, chunks_of, order_problem
from mistlab.stages.plan_orders import HeldMoments
from mistlab.stages.stage_batch import StageBatch, StagesInOrder
from searchers.exact.groups import Group
from tests.searchers.test_orders_proven import places_of, plans_in_orders, predictor_of
from tests.sweep import sweep

# To nine digits.
EXACT = 1e-9
ENGINES = ("mistlab", "megatron", "zero-bubble")
Ends = tuple[StageBatch, StageBatch]


@pytest.mark.parametrize("seed", sweep((60, *range(1, 70, 3)), first=1))
def test_stages_in_their_places_need_what_is_predicted(seed: int) -> None:
    problem, plans = plans_in_orders(seed, 10)
    predictor = predictor_of(problem)
    for plan in plans:
        model = StageModel.of(problem.workload, plan.engine)
        found = peaks_in_order(StageBatch.of_plan(plan), places_of(plan), model).peak_bytes
        stages = predictor.predict(plan).stages
        expected = np.array([stage.peak_allocated_bytes for stage in stages])
        assert found == pytest.approx(expected, rel=EXACT)


def drawn_ends(seed: int, rows: int = 400) -> tuple[StageModel, StagesInOrder, Ends]:
    """Stages in random places of a pipeline, with smaller and with larger ratios and numbers of
    recomputed blocks."""
    draw = np.random.default_rng(seed)
    order = [name for name in ORDERS if name != DEFAULT_ORDER][seed % (len(ORDERS) - 1)]
    num_stages = int(draw.integers(2, 7))
    micro_batches = num_stages * int(draw.integers(2, 7))
    fewest = chunks_of(order)
    assert not order_problem(order, num_stages, micro_batches, fewest)
    stage, layers = draw.integers(0, num_stages, rows), draw.integers(fewest, fewest + 9, rows)
    most = draw.integers(1, layers + 1)
    stages = StageBatch(
        layers=layers,
        data_parallel=4,
        tensor_parallel=1,
        micro_batch=2,
        zero=draw.integers(0, 4, rows),
        has_embedding=(stage == 0).astype(np.int64),
        has_head=(stage == (0 if order in TURNING else num_stages - 1)).astype(np.int64),
        micro_batches=micro_batches,
    )
    # Ratios in eighths, a quarter of them zero; a ratio of zero is zero in both.
    largest = {name: draw.integers(-2, 9, rows).clip(0) for name in OFFLOADS}
    smaller = {
        name: np.where(own > 0, draw.integers(1, own.clip(1) + 1), 0)
        for name, own in largest.items()
    }
    ends = (
        stages.with_columns(
            **{name: own / 8 for name, own in smaller.items()},
            **{RECOMPUTED: draw.integers(1, most + 1)},
        ),
        stages.with_columns(
            **{name: own / 8 for name, own in largest.items()}, **{RECOMPUTED: most}
        ),
    )
    workload = Workload(
        model=catalog.model(str(draw.choice(["gpt3-1.3b", "llama-7b"]))),
        sequence_length=2048,
        global_batch=8 * micro_batches,
        attention=str(draw.choice(["flash", "math"])),
        precision="fp16",
    )
    places = StagesInOrder(
        order=order, num_stages=num_stages, micro_batches=micro_batches, stage=stage
    )
    engine = ENGINES[seed // len(ORDERS) % len(ENGINES)]
    return StageModel.of(workload, engine), places, ends


def undercut(seed: int, *, of_others: bool, alike: bool = False) -> float:
    """The most by which stages with smaller savings need less than the figures of those with
    larger ones, as a share of the former; ``alike`` stages have the same ratios."""
    model, places, (least, most) = drawn_ends(seed)
    if alike:
        most = most.with_columns(**{name: least.value(name) for name in OFFLOADS})
    found = peaks_in_order(most, places, model, of_others=of_others).peak_bytes
    return float((found / peaks_in_order(least, places, model).peak_bytes - 1).max())


@pytest.mark.parametrize("seed", sweep(range(90), first=15))
@pytest.mark.parametrize("alike", [False, True])
def test_no_stage_needs_less_memory_than_the_bound_of_its_box(seed: int, *, alike: bool) -> None:
    assert undercut(seed, of_others=True, alike=alike) <= EXACT


@pytest.mark.parametrize("seed", sweep((57, *range(0, 90, 7)), first=3))
def test_no_stage_needs_less_memory_than_with_larger_savings(seed: int) -> None:
    """Nor is any predicted to, as where the head's chunk was taken to run while most is held."""
    assert undercut(seed, of_others=False, alike=True) <= EXACT


def test_where_passes_are_walked_the_bound_of_other_stages_would_be_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The fullest layer runs at another moment than most is kept."""
    model, places, (least, most) = drawn_ends(7)
    found = peaks_in_order(least, places, model).peak_bytes
    monkeypatch.setattr(OrderedStages, "walked", np.empty(0, dtype=np.intp))
    bound = peaks_in_order(most, places, model, of_others=True).peak_bytes
    assert (bound / found - 1).max() > EXACT


def host_beyond(problem: Problem, plan: Plan) -> float:
    """The most by which a search counts more on the host than is predicted, as a share."""
    count, predictor = plan.num_stages, predictor_of(problem)
    group = Group(micro_batches=plan.micro_batches, meshes=(), num_stages=count, order=plan.order)
    held = np.array([group.held(count - 1 - stage) for stage in range(count)])
    batch = StageBatch.of_plan(plan).with_columns(in_flight=held)
    counted = predictor.stage_costs(batch, engine=plan.engine).host_bytes
    expected = np.array([stage.host_bytes for stage in predictor.predict(plan).stages])
    return float((counted / np.maximum(expected, 1.0) - 1).max())


@pytest.mark.parametrize("seed", sweep((46, *range(1, 46, 3)), first=1))
def test_no_stage_has_less_on_the_host_than_searches_count(seed: int) -> None:
    problem, plans = plans_in_orders(seed, 10)
    for plan in plans:
        assert host_beyond(problem, plan) <= EXACT


def test_micro_batches_that_wait_for_weights_would_be_too_many_on_the_host(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, plans = plans_in_orders(46, 10)
    most_held = property(lambda own: own.most_held(1))
    monkeypatch.setattr(HeldMoments, "least_held", most_held)
    assert max(host_beyond(problem, plan) for plan in plans) > EXACT
