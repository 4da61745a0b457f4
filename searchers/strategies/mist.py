"""Mist's hierarchical search: Pareto sets of stages, joined by a mixed-integer linear programme.

It follows Mist (EuroSys 2025), but with true frontiers instead of weighted sums, and only with
stages that a pipeline can have. Where a space has too many ratios to try all, ratios are tried from
coarse to fine; the result then has its gap to a bound from arithmetic alone.
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

# Up to this many ways to save memory (without recomputation), all of them are tried.
FEW = 256
# Seconds that the solver has to join the stages of one group of pipelines.
PATIENCE_S = 30.0


def mist_with(solver: str) -> Strategy:
    """The strategy with one of the solvers of ``searchers.joining.milp``."""
    join = join_by(solver, PATIENCE_S)

    def mist(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        hierarchy = Hierarchy.of(problem, space, ledger)
        is_small = _ways(space) <= FEW
        if not space.unequal_stages and space.layers_off_balance != 0:
            return hierarchy.joined_alike(join) if is_small else hierarchy.near_alike(join)
        if not space.unequal_stages:
            return hierarchy.all_alike() if is_small else hierarchy.most_alike()
        # Stages of unequal sizes are left to the exact searcher.
        if is_small and not space.unequal_meshes:
            return hierarchy.joined(join)
        return hierarchy.joined_coarse_to_fine(join)

    return NeedsStageCosts(mist)


def _ways(space: SearchSpace) -> int:
    return prod(len(space.listed(name) or ()) for name in names_of("savings"))
