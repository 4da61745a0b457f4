"""Exact search: the fastest plan of a search space with a proof, over all ways in which each stage
may save memory.
"""

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER
from searchers.exact.branches import can_prove
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.programme import join
from searchers.exact.ranges import takes_ranges
from searchers.savings import too_many_ways
from searchers.strategy import OTHER_ORDERS, Ending, Ledger, NeedsStageCosts


def _exact(
    problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
) -> Ending:
    """Find the fastest plan with a proof, or prove that no plan fits in memory. Refuses search
    spaces with too many strategies to list, and spaces that allow both different stages and
    schedules other than 1F1B.
    """
    if space.orders != (DEFAULT_ORDER,) and not can_prove(space, ledger):
        return Ending(status="REFUSED", reason=OTHER_ORDERS)
    if reason := too_many_ways(problem, space):
        return Ending(status="REFUSED", reason=reason)
    hierarchy = Hierarchy.of(problem, space, ledger)
    if space.unequal_stages:
        return hierarchy.joined(join)
    return hierarchy.all_alike() if space.layers_off_balance == 0 else hierarchy.joined_alike(join)


exact = NeedsStageCosts(_exact, takes_orders=True, takes_ranges=takes_ranges)
