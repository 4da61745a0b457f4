"""Random search: draws plans from the search space, as a baseline that every other strategy must
beat.
"""

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import Ending, Ledger

TOGETHER = 64


def random_search(
    problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
) -> Ending:
    """Draw and predict random plans until the budget is spent."""
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    while True:
        drawn: list[Plan | None] = []
        while len(drawn) < TOGETHER:
            ledger.check_time()
            drawn.append(chosen_plan(problem, space, chooser))
        ledger.predict([plan for plan in drawn if plan is not None])
