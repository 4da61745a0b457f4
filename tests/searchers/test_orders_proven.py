"""Small problems with several orders of passes: every plan is predicted, and no proof is wrong."""

from collections.abc import Callable
from dataclasses import fields, replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from mistlab.cost.pipeline import no_stages
from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS, TURNING
from mistlab.stages.stage_batch import (
    StageBatch,
    StageCosts,
    StagePeaks,
    StageSeconds,
    StagesInOrder,
    StageTimes,
)
from searchers.exact.groups import Group
from searchers.exact.hierarchy import AlikeInOrder
from searchers.exact.order_costs import OrderTraits, chains_in_front
from searchers.methods.exhaustive import all_plans, count_plans
from simulators import symbolic
from tests.searchers.drawn import NAMES, drawn_problem
from tests.searchers.test_every_plan import (
    EXACT,
    Tried,
    all_tried,
    longer,
    predictor_of,
    wrong_proofs,
)
from tests.sweep import sweep

MOST = 4000
SPACES = ("mist", "wide", "megatron-today", "everything", "+offload")
# Parts lie in a loop in the orders of the first so many problems, and in a V in some of the others.
LOOPS = 60
SEEDS = range(LOOPS + 30)
# Problems with which each test of a fault can fail.
TELLING = {
    "in whatever order": 32,
    "of alike stages in an order": 32,
    "of a stage in an order": 36,
    "of what a stage holds in an order": 39,
}


def with_orders(seed: int) -> tuple[Problem, SearchSpace]:
    """A problem and a space with a few orders, and not too many plans."""
    draw = np.random.default_rng(seed)
    orders = [order for order in ORDERS if seed >= LOOPS or order not in TURNING]
    for other in range(seed, 100_000, LOOPS):
        name = SPACES[seed % len(SPACES)]
        problem, space = drawn_problem(NAMES.index(name) + len(NAMES) * other)
        engine = "mistlab" if space.engine == "megatron" and draw.random() < 0.3 else space.engine
        known = [order for order in orders if engine == "mistlab" or order in space.orders]
        count = int(draw.integers(1, min(4, len(known)) + 1))
        some = draw.choice(len(known), count, replace=False)
        space = replace(space, engine=engine, orders=tuple(known[place] for place in some))
        plans = count_plans(problem, space, MOST)
        if 8 <= plans <= MOST and space.orders != (DEFAULT_ORDER,) and problem.cluster.num_gpus > 1:
            return problem, space
    raise AssertionError


@cache
def tried(seed: int) -> Tried:
    return all_tried(*with_orders(seed), seed, is_short=bool(seed // len(SPACES) % 2))


@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_no_proof_in_several_orders_is_wrong(seed: int) -> None:
    problem, space, best_s = tried(seed)
    assert not [*wrong_proofs(problem, space, best_s, ["mist", "exact"])]


def longer_in_order(in_order: Any) -> Any:
    """A method with a planted fault: passes of stages take longer by half."""

    def found(*arguments: Any) -> StageCosts:
        costs: StageCosts = in_order(*arguments)
        both = ("forward_s", "backward_s")
        times = {name: 1.5 * getattr(costs.seconds, name) for name in both}
        return replace(costs, seconds=replace(costs.seconds, **times))

    return found


def fuller(peaks_in_order: Callable[..., StagePeaks]) -> Callable[..., StagePeaks]:
    """A function with a planted fault: stages hold three times as much."""

    def found(*arguments: Any, **options: Any) -> StagePeaks:
        peaks = peaks_in_order(*arguments, **options)
        both = ("forward_peak_bytes", "backward_peak_bytes")
        return replace(peaks, **{name: 3 * getattr(peaks, name) for name in both})

    return found


# Planted faults: owners, names, and what takes their place. Arithmetic alone is far below times.
FAULTS: dict[str, tuple[Any, str, Callable[[Any], Any]]] = {
    "in whatever order": (Group, "least_in_any_order_s", lambda true: longer(longer(longer(true)))),
    "of alike stages in an order": (AlikeInOrder, "least_s", longer),
    "of a stage in an order": (OrderTraits, "in_order", longer_in_order),
    "of what a stage holds in an order": (symbolic, "peaks_in_order", fuller),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_bound_of_orders_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name, planted = FAULTS[fault]
    monkeypatch.setattr(owner, name, planted(getattr(owner, name)))
    assert [*wrong_proofs(*tried(TELLING[fault]), ["mist"])]


def plans_in_orders(seed: int, count: int = 20) -> tuple[Problem, list[Plan]]:
    """Some plans of a small problem whose order has no formula."""
    problem, space, _ = tried(seed)
    return problem, some_in_orders(problem, space, seed, count)


def some_in_orders(problem: Problem, space: SearchSpace, seed: int, count: int) -> list[Plan]:
    """Some plans of a space whose order has no formula."""
    plans = [plan for plan in all_plans(problem, space) if plan.order != DEFAULT_ORDER]
    draw = np.random.default_rng(seed)
    count = min(count, len(plans))
    return [plans[place] for place in (draw.choice(len(plans), count) if plans else ())]


def places_of(plan: Plan) -> StagesInOrder:
    """The places of a plan's stages."""
    return StagesInOrder(
        order=plan.order,
        num_stages=plan.num_stages,
        micro_batches=plan.micro_batches,
        stage=np.arange(plan.num_stages),
    )


def bound_of(problem: Problem, plan: Plan) -> float:
    """The least time of a plan in its order, as a share of its time."""
    predictor = predictor_of(problem)
    batch = StageBatch.of_plan(plan)
    costs = predictor.stage_costs(batch, engine=plan.engine)

    def seconds(some: StageBatch, _: StageBatch) -> StageSeconds:
        return predictor.part_seconds(some, engine=plan.engine)

    traits = OrderTraits.of(plan.order, plan.engine, plan.micro_batches)
    in_order = traits.in_order(costs, (batch, batch), places_of(plan), seconds)
    count = plan.num_stages
    group = Group(micro_batches=plan.micro_batches, meshes=(), num_stages=count, order=plan.order)
    chains = no_stages(1)
    for after, stage in enumerate(reversed(range(count))):
        times = {
            one.name: getattr(in_order.seconds, one.name)[[stage]] for one in fields(StageTimes)
        }
        chains = chains_in_front(group, plan.engine, StageTimes(**times), chains, after)
    return float(chains.whole[0]) / predictor.predict(plan).iteration_s


@pytest.mark.parametrize("seed", sweep((12, 7, 5, 14, 19, 26, 46, 51, 55), first=1))
def test_no_plan_in_an_order_undercuts_the_bounds_of_its_stages(seed: int) -> None:
    problem, plans = plans_in_orders(seed)
    times = [bound_of(problem, plan) for plan in plans]
    assert max(times) <= 1 + EXACT
    # Bounds that searches can use.
    assert max(times) > 0.8
