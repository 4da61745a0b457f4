"""A hundred small problems of all spaces, each of whose plans is predicted: no proof is wrong, and
no searcher finds a faster plan than there is."""

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from math import inf
from typing import Any

import numpy as np
import pytest

from mistlab.job.search import Budget, Problem, SearchResult
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER
from searchers.exact.box_costs import BoxCosts
from searchers.exact.groups import Group
from searchers.exact.partials import Completions
from searchers.exact.proof import has_bounds
from searchers.methods import mist
from searchers.methods.exhaustive import all_plans
from searchers.parts import parts_of
from searchers.registry import SEARCHERS
from searchers.savings import contains, why_empty
from searchers.strategy import Ledger, StrategySearcher
from simulators.symbolic import SymbolicPredictor
from tests.searchers.drawn import NAMES, drawn_problem, with_less_memory
from tests.searchers.test_proofs import TooHigh, proven
from tests.sweep import sweep

QUICK = (4, 37, 47, 13)
SEEDS = (*QUICK, *(seed for seed in range(100) if seed not in QUICK))
# To nine digits.
EXACT = 1e-9
PROVING = ("exact", "mist", "exhaustive")
OTHERS = ("mist:published", "aceso", "alpa", "rl", "random")
# As slow as all others together, and asked where nobody waits.
SLOW = ("optuna",)
ENOUGH, FEW = Budget(evaluations=1_000_000), Budget(evaluations=40)

Tried = tuple[Problem, SearchSpace, float]


@cache
def tried(seed: int) -> Tried:
    """A problem, half of them short of memory; its space, and the time of the best of all plans."""
    problem, space = drawn_problem(seed)
    return all_tried(problem, space, seed, is_short=bool(seed // len(NAMES) % 2))


def all_tried(problem: Problem, space: SearchSpace, seed: int, *, is_short: bool) -> Tried:
    """A problem, with less memory if it is to be short of it; its space, and the best time."""
    plans = list(all_plans(problem, space))
    predictions = predictor_of(problem).predict_many(plans)
    if is_short:
        share = np.random.default_rng(seed).uniform(0, 1)
        problem = with_less_memory(problem, predictions, share)
        predictions = predictor_of(problem).predict_many(plans)
    return problem, space, min((one.iteration_s for one in predictions if one.fits), default=inf)


def predictor_of(problem: Problem) -> SymbolicPredictor:
    return SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)


def wrong_proofs(
    problem: Problem, space: SearchSpace, best_s: float, names: Sequence[str]
) -> Iterator[str]:
    """What searchers claim that trying every plan refutes."""
    predictor = predictor_of(problem)
    for name in names:
        searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=predictor)
        result = searcher.search(problem, space, ENOUGH if name in PROVING else FEW, 0)
        yield from (f"{name}: {what}" for what in _wrong(result, best_s))
        if result.plan is not None and not is_member(problem, space, result.plan):
            yield f"{name}: the plan is outside the space"


def is_member(problem: Problem, space: SearchSpace, plan: Plan) -> bool:
    """Whether a space has a plan for a problem, on all GPUs or on a part of them."""
    parts = parts_of(problem, has_plans=not why_empty(problem, space))
    return any(contains(one, space, plan) for one in (problem, *parts))


def _wrong(result: SearchResult, best_s: float) -> Iterator[str]:
    found_s = inf if result.prediction is None else result.prediction.iteration_s
    if found_s < best_s * (1 - EXACT):
        yield f"found {found_s}, but the best plan takes {best_s}"
    if result.status == "OPTIMAL" and found_s > best_s * (1 + EXACT):
        yield f"proves {found_s}, but the best plan takes {best_s}"
    if result.status == "INFEASIBLE" and best_s < inf:
        yield f"proves that no plan fits, but one of {best_s} does"
    if result.lower_bound_s is not None and result.lower_bound_s > best_s * (1 + EXACT):
        yield f"no plan beats {result.lower_bound_s}, but the best plan takes {best_s}"


def wrong_boxes(
    problem: Problem,
    space: SearchSpace,
    best_s: float,
    predictor: Callable[..., SymbolicPredictor] = SymbolicPredictor,
) -> Iterator[str]:
    """What bounds over boxes alone claim that trying every plan refutes."""
    bound_s, ledger = proven(
        problem, space, predictor(workload=problem.workload, cluster=problem.cluster)
    )
    if bound_s > best_s * (1 + EXACT):
        yield f"no plan beats {bound_s}, but the best plan takes {best_s}"
    if bound_s < best_s * (1 - 2 * EXACT):
        yield f"ended with bound {bound_s}, but the best plan takes {best_s}"
    if not best_s * (1 - EXACT) <= ledger.best_s <= best_s * (1 + EXACT) and best_s < inf:
        yield f"found {ledger.best_s}, but the best plan takes {best_s}"


def can_have_boxes(problem: Problem, space: SearchSpace) -> bool:
    """Whether stages choose for themselves, on an engine whose boxes have bounds."""
    ledger = Ledger(predictor=predictor_of(problem), budget=ENOUGH, clock=lambda: 0.0)
    return space.unequal_stages and space.orders == (DEFAULT_ORDER,) and has_bounds(ledger, space)


@pytest.mark.parametrize("seed", sweep(SEEDS, first=len(QUICK)))
def test_no_proof_is_wrong_and_nobody_beats_the_best_plan(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, best_s = tried(seed)
    names = (*PROVING, *OTHERS, *(SLOW if seed not in QUICK else ()))
    assert not [*wrong_proofs(problem, space, best_s, names)]
    if can_have_boxes(problem, space):
        assert not [*wrong_boxes(problem, space, best_s)]
    # As if there were too many ways to save memory to try them all.
    monkeypatch.setattr(mist, "FEW", 0)
    assert not [*wrong_proofs(problem, space, best_s, ["mist"])]


def longer(method: Any) -> Any:
    """A method with a planted fault: what it bounds is larger by half."""
    return lambda *arguments: method(*arguments) * 1.5


def of_least_savings(fits: Any) -> Any:
    """A method with a planted fault: of a box only the ratios that save least may fit."""
    return lambda costs, rows, _, recomputed, **of: fits(costs, rows, rows.low, recomputed, **of)


# Planted faults: predictors, and methods in place of others.
FAULTS: dict[str, tuple[type[SymbolicPredictor], tuple[Any, str, Any] | None]] = {
    "times of a corner that recomputes a block more": (TooHigh, None),
    "fit of the wrong corner": (SymbolicPredictor, (BoxCosts, "_fits", of_least_savings)),
    "completions of partial pipelines": (SymbolicPredictor, (Completions, "least_s", longer)),
    "least work of a group": (SymbolicPredictor, (Group, "least_stages_s", longer)),
}
# Problems with which the test above can fail.
TELLING = (2, 83, 52, 34)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_bound_is_noticed(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor, planted = FAULTS[fault]
    if planted is not None:
        owner, name, made = planted
        monkeypatch.setattr(owner, name, made(getattr(owner, name)))
    assert any([*wrong_boxes(*tried(seed), predictor)] for seed in TELLING)
