"""Branch and bound over the pipeline schedules (such as 1F1B) of a search space: each schedule is a
branch with a lower bound of its own.

The iteration time under 1F1B has a closed form, by which stages are joined. Other schedules have
only lower bounds, valid however the passes are run; whole plans are predicted where the bound is
below the best plan's time. The smallest bound of all branches is the lower bound of the space.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace

from mistlab.job.search import Problem
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, chunks_of, order_problem
from searchers.exact.groups import Group, groups_in_orders
from searchers.exact.hierarchy import AlikeInOrder, Hierarchy
from searchers.exact.proof import has_bounds, proven_s
from searchers.meshes import allows, layer_counts, orders_of, pipelines
from searchers.savings import ways_listed
from searchers.strategy import OTHER_ORDERS, BudgetSpentError, Ending, Ledger

# If a stage has at most this many memory-saving strategies (recomputation aside), all are
# enumerated.
FEW = 256
# The share of a budget's seconds that is spent on plans with schedule 1F1B, whose iteration time
# has a closed form.
FORMULA_SHARE = 0.6
# The seconds for finding plans with schedules other than 1F1B, before their proof begins.
OTHERS_S = 30.0
# The second of the search at which the proof for schedules other than 1F1B ends, unless the proof
# would then be shorter than ``OTHERS_S``.
UNTIL_S = 90.0


def in_branches(
    problem: Problem, space: SearchSpace, ledger: Ledger, search: Callable[[SearchSpace], Ending]
) -> Ending:
    """The best plan over all pipeline schedules of a space; ``search`` solves the part of the space
    with schedule 1F1B.
    """
    if not has_bounds(ledger, space):
        return Ending(status="REFUSED", reason=OTHER_ORDERS)
    whole = Hierarchy.of(problem, space, ledger)
    if _is_alike(space):
        return whole.all_alike() if ways_listed(space) <= FEW else whole.most_alike()
    bounds = [_with_formula_s(problem, space, ledger, search)]
    with suppress(BudgetSpentError), ledger.for_seconds(OTHERS_S):
        _reorder(problem, space, ledger)
        if DEFAULT_ORDER not in space.orders:
            # Pipelines that can run none of the space's schedules use 1F1B.
            whole.show_alike()
        whole.show_in_orders(AlikeInOrder.show_coarse)
    left_s = min(max(OTHERS_S, UNTIL_S - ledger.wall_s), ledger.seconds_left)
    bounds.append(_without_formula_s(problem, space, ledger, whole, left_s))
    if ledger.evaluations_left == 0 or ledger.seconds_left == 0:
        ledger.bounded(min(bounds))
        raise BudgetSpentError
    return Ending.of(ledger, min(bounds))


def can_prove(space: SearchSpace, ledger: Ledger) -> bool:
    """Whether a search can list every plan of a space that allows several pipeline schedules."""
    return _is_alike(space) and has_bounds(ledger, space)


def _is_alike(space: SearchSpace) -> bool:
    return not space.unequal_stages and space.layers_off_balance == 0


def _with_formula_s(
    problem: Problem, space: SearchSpace, ledger: Ledger, search: Callable[[SearchSpace], Ending]
) -> float:
    """A lower bound in seconds of the iteration times of all plans with schedule 1F1B."""
    pipeline = space.pipeline
    if DEFAULT_ORDER not in space.orders:
        # A pipeline of one stage has schedule 1F1B only, since its passes wait for no other stage.
        if not allows(pipeline, 1):
            return float("inf")
        pipeline = (1,)
    with_formula = replace(space, orders=(DEFAULT_ORDER,), pipeline=pipeline)
    if next(pipelines(problem, with_formula), None) is None:
        return float("inf")
    bounds = [0.0]
    with (
        suppress(BudgetSpentError),
        ledger.for_seconds(FORMULA_SHARE * ledger.seconds_left),
        ledger.for_part(lambda plan: plan, bounds.append),
    ):
        ending = search(with_formula)
        bounds.append(float("inf") if ending.status == "INFEASIBLE" else ending.lower_bound_s or 0)
    return max(bounds)


def _without_formula_s(
    problem: Problem, space: SearchSpace, ledger: Ledger, whole: Hierarchy, seconds: float
) -> float:
    """A lower bound in seconds of the iteration times of all plans with schedules other than 1F1B.
    Pipelines are bounded in groups of equal degrees; each round improves the smallest bound.
    """
    orders = {group: whole.bound_s(group) for group in groups_in_orders(problem, space)}
    others = [
        least_s
        for group, least_s in whole.least_s.items()
        if _may_lack_schedules(problem, space, group)
    ]
    bounds = [float("inf")]
    if orders:
        proven = proven_s(
            problem, space, ledger, whole.work, orders, tolerance=0.0, seconds=seconds
        )
        bounds.append(proven)
    return min([*bounds, *others])


def _may_lack_schedules(problem: Problem, space: SearchSpace, group: Group) -> bool:
    """Whether some pipelines of a group may be able to run none of the space's schedules. Then
    their only lower bound comes from the least times of their blocks.
    """
    if group.num_stages == 1 or DEFAULT_ORDER in space.orders:
        return False
    if group.num_stages is None:
        return all(chunks_of(order) > 1 for order in space.orders)
    fewest = layer_counts(problem.workload.model.layers, group.num_stages, space)[0]
    count = group.num_stages, group.micro_batches
    return all(order_problem(order, *count, fewest) for order in space.orders)


def _reorder(problem: Problem, space: SearchSpace, ledger: Ledger) -> None:
    """Predict the best plans found so far again with each other pipeline schedule that they can
    run.
    """
    count = problem.workload.model.layers
    for plan in ledger.best_of(space.engine):
        fewest = min((stage.layers for stage in plan.stages), default=count)
        orders = orders_of(space, plan.num_stages, plan.micro_batches, fewest)
        ledger.predict([replace(plan, order=order) for order in orders if order != plan.order])
