"""Small problems of models whose kinds of blocks take turns, each of whose plans is predicted, some
of them on clusters of which plans may leave GPUs idle."""

from math import inf

import numpy as np
import pytest

from mistlab.job.search import Problem
from mistlab.plan.named_spaces import SPACES
from mistlab.plan.space import SearchSpace
from searchers.exact.ranges import takes_ranges
from searchers.methods import mist
from searchers.methods.exhaustive import all_plans
from searchers.parts import parts_of
from searchers.savings import why_empty
from tests.searchers.drawn import drawn_turning, with_less_memory
from tests.searchers.test_every_plan import (
    can_have_boxes,
    predictor_of,
    wrong_boxes,
    wrong_proofs,
)
from tests.sweep import sweep

NAMES = tuple(name for name, space in SPACES.items() if takes_ranges(space))


def tried(seed: int) -> tuple[Problem, SearchSpace, float]:
    """A problem, half of them short of memory; its space, and the time of the best of all plans, on
    all GPUs or on some."""
    problem, space = drawn_turning(seed, NAMES)
    best_s = best_of(problem, space)
    if seed // len(NAMES) % 2 and best_s < inf:
        predictions = predictor_of(problem).predict_many(list(all_plans(problem, space)))
        share = np.random.default_rng(seed).uniform(0, 1)
        if predictions:
            problem = with_less_memory(problem, predictions, share)
            best_s = best_of(problem, space)
    return problem, space, best_s


def best_of(problem: Problem, space: SearchSpace) -> float:
    """The time of the best of all plans, which may use a part of the cluster alone."""
    whole = not why_empty(problem, space)
    parts = parts_of(problem, has_plans=whole)
    every = (*((problem,) if whole else ()), *parts)
    plans = [plan for one in every for plan in all_plans(one, space)]
    # A plan that leaves GPUs idle runs on the whole cluster.
    predictions = predictor_of(problem).predict_many(plans)
    return min((one.iteration_s for one in predictions if one.fits), default=inf)


@pytest.mark.parametrize("seed", sweep(range(300), first=2))
def test_no_proof_is_wrong_where_blocks_take_turns(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem, space, best_s = tried(seed)
    assert not [*wrong_proofs(problem, space, best_s, ["mist", "exact", "aceso"])]
    if can_have_boxes(problem, space) and not parts_of(problem, has_plans=True):
        assert not [*wrong_boxes(problem, space, best_s)]
    # As if there were too many ways to save memory to try them all.
    monkeypatch.setattr(mist, "FEW", 0)
    assert not [*wrong_proofs(problem, space, best_s, ["mist"])]
