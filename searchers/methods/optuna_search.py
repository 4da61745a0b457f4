"""Searches with Optuna's samplers (TPE, CMA-ES, NSGA-II, random keys), as an Optuna study that may
be stored and continued.

A plan is made from a vector of numbers in [0, 1), called keys, one for each choice that any plan of
the space may need. So all plans have the same keys. A key selects among the options of its choice
(random keys, Bean 1994).
"""

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.space import SearchSpace
from searchers.strategy import Ending, Ledger, Strategy


def optuna_strategy(sampler: str, storage: str | None = None) -> Strategy:
    """A strategy that samples plans with one of Optuna's samplers, named as in
    ``optuna_study.SAMPLERS``.

    ``storage`` keeps the study, so that it can be continued or shared between processes: a database
    (``sqlite:///study.db``) or the path of a journal file. Studies are named by sampler, space and
    problem; processes that share a study need different seeds.
    """
    # Imported here, since importing Optuna takes half a second, which neither a budget nor users of
    # other searchers should pay for.
    from searchers.methods.optuna_study import sample  # noqa: PLC0415

    def search(
        problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
    ) -> Ending:
        return sample(problem, space, ledger, draw, sampler=sampler, storage=storage)

    return search
