"""Mist's hierarchical search: Pareto sets of stages, joined by a mixed-integer linear programme.

After Mist (EuroSys 2025), with true frontiers instead of weighted sums, and only for stages that a
pipeline can have. Where a space has so many ratios that looking at all would take long, ratios are
looked at coarse to fine; the result then comes with the gap to what arithmetic alone allows.
"""

from math import prod

import numpy as np

from mistlab.values.dimensions import names_of
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.joining.hierarchy import Hierarchy
from searchers.joining.milp import join_by
from searchers.ledger import Ledger
from searchers.strategy import Ending, NeedsStageCosts, Strategy

# Up to so many ways to save memory, recomputation aside, all of them are looked at.
FEW = 256
# Seconds for joining the stages of one group of pipelines.
PATIENCE_S = 30.0


def mist_with(solver: str) -> Strategy:
    """The strategy with one of the solvers of ``searchers.joining.milp``."""
    join = join_by(solver, PATIENCE_S)

    def mist(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        hierarchy = Hierarchy.of(problem, space, ledger)
        is_small = _ways(space) <= FEW
        if not space.unequal_stages:
            return hierarchy.all_alike() if is_small else hierarchy.most_alike()
        # Stages of unequal sizes are left to the exact searcher.
        if is_small and not space.unequal_meshes:
            return hierarchy.joined(join)
        return hierarchy.joined_coarse_to_fine(join)

    return NeedsStageCosts(mist)


def _ways(space: SearchSpace) -> int:
    return prod(len(space.listed(name) or ()) for name in names_of("savings"))
