"""Small problems with several orders of passes: every plan is predicted, and no proof is wrong."""

from dataclasses import replace
from functools import cache
from math import inf

import numpy as np
import pytest

from mistlab.schedule.orders import DEFAULT_ORDER, ORDERS
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.joining.groups import Group
from searchers.joining.in_orders import AlikeInOrder
from searchers.strategies.exhaustive import all_plans, count_plans
from tests.searchers.drawn import NAMES, drawn_problem, with_less_memory
from tests.searchers.test_every_plan import Tried, longer, predictor_of, wrong_proofs
from tests.sweep import sweep

MOST = 4000
SPACES = ("mist", "wide", "megatron-today", "everything", "+offload")
SEEDS = range(60)
# Problems with which the test of faults can fail.
TELLING = (2, 7, 12, 17)


def with_orders(seed: int) -> tuple[Problem, SearchSpace]:
    """A problem and a space with a few orders, and not too many plans."""
    draw = np.random.default_rng(seed)
    for other in range(seed, 100_000, len(SEEDS)):
        name = SPACES[seed % len(SPACES)]
        problem, space = drawn_problem(NAMES.index(name) + len(NAMES) * other)
        engine = "mistlab" if space.engine == "megatron" and draw.random() < 0.3 else space.engine
        known = [order for order in ORDERS if engine == "mistlab" or order in space.orders]
        count = int(draw.integers(1, min(4, len(known)) + 1))
        some = draw.choice(len(known), count, replace=False)
        space = replace(space, engine=engine, orders=tuple(known[place] for place in some))
        plans = count_plans(problem, space, MOST)
        if 8 <= plans <= MOST and space.orders != (DEFAULT_ORDER,) and problem.cluster.num_gpus > 1:
            return problem, space
    raise AssertionError


@cache
def tried(seed: int) -> Tried:
    problem, space = with_orders(seed)
    plans = list(all_plans(problem, space))
    predictions = predictor_of(problem).predict_many(plans)
    if seed // len(SPACES) % 2:
        share = np.random.default_rng(seed).uniform(0, 1)
        problem = with_less_memory(problem, predictions, share)
        predictions = predictor_of(problem).predict_many(plans)
    return problem, space, min((one.iteration_s for one in predictions if one.fits), default=inf)


@pytest.mark.parametrize("seed", sweep(SEEDS, first=4))
def test_no_proof_in_several_orders_is_wrong(seed: int) -> None:
    problem, space, best_s = tried(seed)
    assert not [*wrong_proofs(problem, space, best_s, ["mist", "exact"])]


# Planted faults: bounds that are longer by half.
FAULTS = {
    "in whatever order": (Group, "least_in_any_order_s"),
    "of alike stages in an order": (AlikeInOrder, "least_s"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_bound_of_orders_is_noticed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner, name = FAULTS[fault]
    monkeypatch.setattr(owner, name, longer(getattr(owner, name)))
    assert any([*wrong_proofs(*tried(seed), ["mist"])] for seed in TELLING)
