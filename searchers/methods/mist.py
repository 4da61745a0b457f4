"""Mist's two-level search: Pareto frontiers of stages are joined into pipelines, with a proof of
how close to optimal the best plan is.

It follows Mist (EuroSys 2025), but with true Pareto frontiers instead of weighted sums, and only
with stages that a pipeline can have. If a space has too many offload ratios to try all, ranges of
ratios (boxes) get lower bounds, and are cut in half where the best plan may be
(``searchers.exact.proof``); the result is proven optimal, or has a gap to these bounds. If the
predictor has no bounds for ranges, ratios are tried from coarse to fine, and the gap is to a simple
bound from the least times of blocks. If stages may have unequal meshes, smaller parts of the space
are searched first. Pipeline schedules other than 1F1B are separate branches
(``searchers.exact.branches``).
"""

from contextlib import suppress
from functools import partial

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER
from searchers.exact.branches import in_branches
from searchers.exact.candidates import Menus
from searchers.exact.divisions import takes_turns
from searchers.exact.group_tasks import Joiner
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.near_plans import NearPlans
from searchers.exact.programme import join as join_exactly
from searchers.exact.ranges import searched_by_ranges, takes_ranges
from searchers.meshes import as_in, parts_of, pipelines
from searchers.savings import ways_listed
from searchers.strategy import BudgetSpentError, Ending, Ledger, NeedsStageCosts, Strategy

# If a stage has at most this many memory-saving strategies (recomputation aside), all are
# enumerated.
FEW = 256
# The seconds after which the solver that combines the stages of one group of pipelines is stopped.
PATIENCE_S = 30.0
# The seconds after which the proof by lower bounds is stopped; most problems in which all stages
# have equal meshes are proven sooner.
PROOF_S = 60.0
# The share of a budget's seconds that is spent on searching smaller parts of the search space
# before all of it.
PARTS_SHARE = 0.25


def mist_with(solver: str, tolerance: float = 0.0) -> Strategy:
    """Mist's strategy with one of the solvers of ``searchers.exact.milp``. It ends once its plan is
    proven to be within ``tolerance`` (a share) of the best.
    """
    join = partial(_joined_by, solver)

    def mist(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        turns = takes_turns(problem.workload)
        if turns and not space.unequal_stages and space.orders == (DEFAULT_ORDER,):
            return searched_by_ranges(problem, space, ledger)

        def joined(part: SearchSpace) -> Ending:
            # The solver only counts the blocks of a stage. If kinds of blocks alternate, it matters
            # which blocks these are, so the exact dynamic programme is used.
            joiner = join_exactly if turns else join
            return _joined(problem, part, ledger, joiner, tolerance)

        if space.orders == (DEFAULT_ORDER,):
            return joined(space)
        return in_branches(problem, space, ledger, joined)

    return NeedsStageCosts(mist, takes_orders=True, takes_ranges=takes_ranges)


def _joined(
    problem: Problem, space: SearchSpace, ledger: Ledger, join: Joiner, tolerance: float
) -> Ending:
    """The best plan of a search space with schedule 1F1B; smaller parts of the space are searched
    first.
    """
    # The lower bounds of the whole space are computed first, since a budget may end while parts of
    # it are searched.
    whole = Hierarchy.of(problem, space, ledger)
    seconds = min(PROOF_S, PARTS_SHARE * ledger.seconds_left)
    in_words = ledger.for_part(lambda plan: as_in(plan, space))
    with suppress(BudgetSpentError), ledger.for_seconds(seconds), in_words:
        for part in parts_of(space):
            if next(pipelines(problem, part), None) is not None:
                _searched(Hierarchy.of(problem, part, ledger), join, tolerance)
    if ledger.evaluations_left == 0:
        raise BudgetSpentError
    return _searched(whole, join, tolerance)


def _searched(hierarchy: Hierarchy, join: Joiner, tolerance: float) -> Ending:
    space = hierarchy.space
    # Pipelines of stages of unequal sizes are too many to join them all, even in a small space.
    is_small = ways_listed(space) <= FEW
    if space.unequal_stages and hierarchy.has_bounds and (space.unequal_meshes or not is_small):
        return hierarchy.proven(tolerance=tolerance, seconds=PROOF_S)
    if not space.unequal_stages and space.layers_off_balance != 0:
        ending = hierarchy.joined_alike(join) if is_small else hierarchy.near_alike(join)
    elif not space.unequal_stages:
        ending = hierarchy.all_alike() if is_small else hierarchy.most_alike()
    elif is_small and not space.unequal_meshes:
        ending = hierarchy.joined(join)
    else:
        ending = hierarchy.joined_coarse_to_fine(join)
    if ending.status == "OPTIMAL":
        ledger, work = hierarchy.ledger, hierarchy.work
        near = NearPlans.of(hierarchy.problem, space, ledger, work, hierarchy.least_s)
        with suppress(BudgetSpentError):
            near.listed()
        near.show()
    return ending


def _joined_by(solver: str, menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """Combines stages with a solver where a pipeline has several stages; the solver is imported
    only when it is needed.
    """
    if menus.group.num_stages == 1:
        return join_exactly(menus, limit_s)
    from searchers.exact.milp import join_by  # noqa: PLC0415 (the solver is slow to import)

    return join_by(solver, PATIENCE_S)(menus, limit_s)
