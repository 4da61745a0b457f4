"""The policy moves towards what is rewarded."""

import numpy as np

from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from searchers.methods.rl import Policy
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from tests.searchers.problems import SMALL, predictor_of


def test_rewarded_choices_become_likely() -> None:
    policy = Policy(draw=np.random.default_rng(0))
    for _ in range(100):
        policy.begin()
        plans = [policy.plan(SMALL, space_of("3d")) for _ in range(64)]
        recomputing = [
            plan is not None and plan.stages[0].checkpointed_layers > 0 for plan in plans
        ]
        policy.learn(np.where(recomputing, 1.0, -1.0))
    assert sum(recomputing) > 55


def test_a_space_that_is_used_up_ends_the_search() -> None:
    searcher = StrategySearcher(strategy=SEARCHERS["rl"], predictor=predictor_of(SMALL))
    result = searcher.search(SMALL, space_of("3d"), Budget(evaluations=10_000), 0)
    assert result.status == "FEASIBLE"
    assert result.plan_evaluations < 100
