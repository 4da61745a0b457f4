"""Mist's hierarchical search: Pareto sets of stages, joined to pipelines, with a proof.

It follows Mist (EuroSys 2025), but with true frontiers instead of weighted sums, and only with
stages that a pipeline can have. Where a space has too many ratios to try all, boxes of ratios have
bounds, and are halved where the best plan may be (``searchers.joining.proof``). The result is
proven, or has its gap to the bounds. Where nothing bounds boxes, ratios are tried from coarse to
fine, and the gap is to a bound from arithmetic alone. Where meshes may be unequal, the search
begins with smaller parts of the space.
"""

import numpy as np

from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.joining.hierarchy import Hierarchy
from searchers.joining.milp import join_by
from searchers.ledger import Ledger
from searchers.parts import as_in, parts_of
from searchers.room import ways_listed
from searchers.strategy import Ending, NeedsStageCosts, Strategy

# Up to this many ways to save memory (without recomputation), all of them are tried.
FEW = 256
# Seconds that the solver has to join the stages of one group of pipelines.
PATIENCE_S = 30.0
# Seconds for bounds over boxes of ratios, for stages of equally many GPUs and of any. Most problems
# of the first kind end sooner; those of the second have their plan from a quick search before.
PROOF_S, UNEQUAL_S = 60.0, 15.0
# Seconds for the bounds of a part of a space, before the whole space is searched.
PART_S = 20.0


def mist_with(solver: str, tolerance: float = 0.0) -> Strategy:
    """The strategy with one of the solvers of ``searchers.joining.milp``; it ends when its plan is
    known to be within a tolerance (a share of the plan's time) of the best."""
    join = join_by(solver, PATIENCE_S)

    def mist(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        try:
            for part in parts_of(space):
                searched(problem, part, ledger, PART_S)
        finally:
            ledger.say_as(lambda plan: as_in(plan, space))
        return searched(problem, space, ledger, PROOF_S)

    def searched(problem: Problem, space: SearchSpace, ledger: Ledger, seconds: float) -> Ending:
        hierarchy = Hierarchy.of(problem, space, ledger)
        is_small = ways_listed(space) <= FEW
        if not space.unequal_stages and space.layers_off_balance != 0:
            return hierarchy.joined_alike(join) if is_small else hierarchy.near_alike(join)
        if not space.unequal_stages:
            return hierarchy.all_alike() if is_small else hierarchy.most_alike()
        # Stages of unequal sizes are left to the exact searcher.
        if is_small and not space.unequal_meshes:
            return hierarchy.joined(join)
        if not space.unequal_meshes and hierarchy.has_bounds:
            return hierarchy.proven(tolerance=tolerance, seconds=seconds)
        return hierarchy.joined_coarse_to_fine(join, tolerance=tolerance, seconds=UNEQUAL_S)

    return NeedsStageCosts(mist)
