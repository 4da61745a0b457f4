"""The search in two levels: what each stage may be, and how stages are joined to pipelines.

Groups of pipelines are taken in the order of what arithmetic alone makes them take at least; once
that is longer than the best plan, no other needs to be looked at.
"""

from collections.abc import Callable

import numpy as np

from mistlab.plan import Plan
from mistlab.search import Problem
from mistlab.space import SearchSpace
from searchers.alike import every_candidate, show_fastest
from searchers.bounds import work_of
from searchers.groups import Group, groups_of
from searchers.join import join as dynamic
from searchers.ledger import Ledger
from searchers.menu import Menus
from searchers.meshes import even_layers
from searchers.strategy import Ending

# How much slower than the best plan a group may be, with ratios in halves, to be looked at closely.
NEAR = 1.05

# Joins the stages of a group to the fastest pipeline that takes less than a limit: its time as the
# chains have it, and the plan.
Joiner = Callable[[Menus, float], tuple[float, Plan] | None]


def all_alike(problem: Problem, space: SearchSpace, ledger: Ledger) -> Ending:
    """Every plan of a space whose stages are alike."""
    for group in groups_of(problem, space):
        _show_alike(problem, space, ledger, group, coarsely=False)
    return _proven(ledger)


def in_two_levels(
    problem: Problem, space: SearchSpace, ledger: Ledger, join: Joiner, *, coarse_to_fine: bool
) -> Ending:
    """The best plan of a space whose stages may differ; the best of some with equal stages is where
    it starts. Without ``coarse_to_fine`` and with an exact joiner it is proven."""
    groups = list(groups_of(problem, space, equal_sizes=coarse_to_fine))
    every_mesh = sorted({mesh for group in groups for mesh in group.meshes})
    work = work_of(problem, space, ledger, every_mesh)
    least_s = {group: group.least_s(problem, work) for group in groups}
    alike_s = {
        group: _show_alike(problem, space, ledger, group, coarsely=True)
        for group in sorted(groups, key=lambda group: least_s[group])
        if least_s[group] < ledger.best_s
    }
    best_s = ledger.best_s
    for group in sorted(alike_s, key=lambda group: alike_s[group]):
        if least_s[group] >= best_s:
            continue
        for with_host in (False, True):
            menus = Menus(
                problem=problem,
                space=space,
                ledger=ledger,
                group=group,
                work=work,
                with_host=with_host,
                coarse_to_fine=coarse_to_fine,
            )
            if coarse_to_fine:
                if dynamic(menus, NEAR * best_s) is None:
                    break
                menus.refine(best_s)
            found = join(menus, best_s)
            if found is None:
                break
            seconds, plan = found
            if ledger.predict([plan])[0].fits:
                best_s = seconds
                break
            # Stages of one node share its host memory: where it is short, it has to be followed.
    if not coarse_to_fine or ledger.best is None:
        return _proven(ledger)
    return Ending(status="FEASIBLE", lower_bound_s=min(least_s.values()))


def _show_alike(
    problem: Problem, space: SearchSpace, ledger: Ledger, group: Group, *, coarsely: bool
) -> float:
    """The fastest of a group whose stages are alike, and its seconds."""
    layers = problem.workload.model.layers
    fastest_s = np.inf
    for pipeline in group.equal_pipelines(problem):
        most = even_layers(layers, pipeline.num_stages)[0]
        candidates = every_candidate(space, pipeline, most, coarsely=coarsely)
        seconds = show_fastest(problem, space, ledger, pipeline, candidates)
        fastest_s = min(fastest_s, seconds)
    return fastest_s


def _proven(ledger: Ledger) -> Ending:
    if ledger.best is None:
        return Ending(status="INFEASIBLE")
    return Ending(status="OPTIMAL", lower_bound_s=ledger.best_s)
