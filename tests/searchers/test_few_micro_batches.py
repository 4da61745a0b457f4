"""Small pipelines of one or two micro-batches that offload, each of whose plans is predicted.

Their first and last passes weigh as much as steady ones, which may be longer, since they wait for
the host, and go on after they have sent their outputs.
"""

from dataclasses import replace

import numpy as np
import pytest

from mistlab.job.search import Problem
from mistlab.plan.space import SearchSpace
from searchers.methods.exhaustive import count_plans
from searchers.parts import parts_of
from tests.searchers.drawn import MOST, drawn_problem, drawn_turning
from tests.searchers.test_every_plan import can_have_boxes, wrong_boxes, wrong_proofs
from tests.searchers.test_unlike_blocks import best_of
from tests.sweep import sweep

NAMES = ("+offload", "mist", "wide", "everything")
FEW = ((1,), (1, 2), (2,))
# Seeds of models whose kinds of blocks take turns, or not. The first two were proven wrong when
# first passes counted as no shorter than steady ones, the third when a stage with one large block
# counted the states of two.
SEEDS = (
    *((5033, True), (5147, False), (5534, True)),
    *((seed, turns) for seed in range(5200, 5300) for turns in (False, True)),
)


def drawn(seed: int, *, turns: bool) -> tuple[Problem, SearchSpace]:
    """A problem, and a space whose plans have one or two micro-batches, if there are such plans."""
    problem, space = drawn_turning(seed, NAMES) if turns else drawn_problem(seed, NAMES)
    first = int(np.random.default_rng(seed).integers(len(FEW)))
    for counts in (*FEW[first:], *FEW[:first]):
        fewer = replace(space, micro_batches=counts)
        if 0 < count_plans(problem, fewer, MOST) <= MOST:
            return problem, fewer
    return problem, space


@pytest.mark.parametrize(("seed", "turns"), sweep(SEEDS, first=1))
def test_no_proof_is_wrong_where_few_micro_batches_pass(seed: int, turns: bool) -> None:
    problem, space = drawn(seed, turns=turns)
    best_s = best_of(problem, space)
    assert not [*wrong_proofs(problem, space, best_s, ["mist", "exact"])]
    if can_have_boxes(problem, space) and not parts_of(problem, has_plans=True):
        assert not [*wrong_boxes(problem, space, best_s)]
