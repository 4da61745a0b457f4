"""The search that Mist's authors published (EuroSys 2025): samples of the stages' Pareto frontiers,
joined by a mixed-integer linear programme.

For each mesh and number of micro-batches it tries every memory-saving strategy on every stage,
keeps samples of the Pareto frontier, and joins stages by the published objective
(``searchers.exact.published_programme``). Offload ratios are those of the published grid. The
result is the plan that is best by the objective; only this plan is predicted, at the end. Two of
the published choices can be undone separately: samples, for true Pareto frontiers, and the
published objective, for the closed-form iteration time.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from math import inf, prod

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.dimensions import names_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers.exact.candidates import Menus
from searchers.exact.groups import Group, LeastWork, groups_of, work_of
from searchers.exact.programme import join_hastily, places_by_stage
from searchers.exact.published_programme import (
    WEIGHTS,
    best_by_weights,
    join_by_objective,
    samples_of,
    true_frontier,
)
from searchers.meshes import Mesh, even_layers, layer_counts
from searchers.savings import Way, ways_alike
from searchers.strategy import (
    STAGES_A_PLAN,
    STAGES_AT_ONCE,
    BudgetSpentError,
    Ending,
    Ledger,
    NeedsStageCosts,
    Strategy,
)

# With more memory-saving strategies per stage than this, offload ratios are first tried on a coarse
# grid; a space in which all stages save memory in the same way is then refused.
FEW = 256
NONE_FITS = (
    "no pipeline fits whose stages have equally many GPUs and equal shares of their host's memory; "
    "others are not tried"
)
# The offload ratios of the published search. If a search space allows all of these and more, only
# these are tried.
_WEIGHTS = (0.0, 0.25, 0.375, 0.5, 0.75, 1.0)
_STATES = (0.0, 0.25, 0.375, 0.5, 0.625, 0.75, 0.875, 1.0)
RATIOS = OffloadRatios(weights=_WEIGHTS, gradients=_WEIGHTS, optimizer=_STATES, activations=_STATES)
# LEFT: the share of a budget's seconds that is kept for predicting the plan that the search
# returns. EVALUATIONS_LEFT: the number of evaluations that are kept for this prediction, at most
# half of the budget's evaluations.
LEFT = 0.02
EVALUATIONS_LEFT = 2 * STAGES_AT_ONCE / STAGES_A_PLAN


def published(
    *, weighted: bool = True, by_chains: bool = False, weights: int = WEIGHTS
) -> Strategy:
    """The published strategy. Pareto frontiers are sampled by ``weighted`` sums, or kept whole;
    pipelines are compared by the published objective or, with ``by_chains``, by the closed-form
    iteration time.

    With one weight (``weights`` = 1) steady and extra time of a stage count the same, so the search
    cannot trade one for the other. This is the published variant that is unaware of imbalance.
    """

    def search(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        return _Search(
            problem=problem,
            space=with_published_ratios(space),
            ledger=ledger,
            weighted=weighted,
            by_chains=by_chains,
            weights=weights,
        ).run()

    return NeedsStageCosts(search)


def with_published_ratios(space: SearchSpace) -> SearchSpace:
    """The part of the search space with the published offload ratios. A kind of state keeps its own
    ratios if the space lacks some of the published ones.
    """
    kept = {
        entry.name: getattr(RATIOS, entry.name)
        for entry in fields(OffloadRatios)
        if {*getattr(RATIOS, entry.name)} <= {*getattr(space.offload, entry.name)}
    }
    return replace(space, offload=replace(space.offload, **kept))


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    problem: Problem
    space: SearchSpace
    ledger: Ledger
    weighted: bool
    by_chains: bool
    weights: int

    def run(self) -> Ending:
        """Search every group of pipelines that may beat the best pipeline so far; only the plan
        with the best value of the objective is predicted.
        """
        if not self.space.unequal_stages and not self._is_small:
            reason = (
                f"tries every way to save memory that all stages may share, and space "
                f"{self.space.name} has more than {FEW}: give a space with unequal stages"
            )
            return Ending(status="REFUSED", reason=reason)
        groups = list(groups_of(self.problem, self.space, equal_sizes=True))
        if not groups:
            reason = f"joins stages of equally many GPUs, and space {self.space.name} has none"
            return Ending(status="REFUSED", reason=reason)
        every = list(groups_of(self.problem, self.space))
        meshes = sorted({mesh for group in every for mesh in group.meshes})
        work = work_of(self.problem, self.space, self.ledger, meshes)
        least_s = {group: group.least_s(self.problem, work) for group in {*groups, *every}}
        best: list[Plan] = []
        try:
            with self.ledger.for_share(self._share):
                for better in self._better(groups, work, least_s):
                    best = [better[1]]
        except BudgetSpentError:
            if self.ledger.seconds_left > 0:
                self.ledger.predict(best)
            raise
        # No pipeline fits with equally many GPUs and an equal share of host memory for each stage,
        # but one may fit with unequal ones.
        if not best:
            return Ending(reason=NONE_FITS)
        self.ledger.predict(best)
        return Ending(status="FEASIBLE", lower_bound_s=min(least_s.values()))

    @property
    def _share(self) -> float:
        """The share of the budget that is spent on the search itself; the rest is for predicting
        its plan.
        """
        evaluations = self.ledger.evaluations_left
        left = LEFT if not evaluations else max(LEFT, EVALUATIONS_LEFT / evaluations)
        return 1 - min(left, 0.5)

    def _better(
        self, groups: list[Group], work: dict[Mesh, LeastWork], least_s: dict[Group, float]
    ) -> Iterator[tuple[float, Plan]]:
        """Yields plans, each with a better value of the objective than the previous one.

        Samples of a coarse grid of ratios come first: their best plan rules out most groups of
        pipelines, and is the result if the budget ends early. All ratios of the published grid
        follow.
        """
        best_s = inf
        for is_coarse in (True, False) if not self._is_small else (False,):
            for group in sorted(groups, key=lambda group: least_s[group]):
                if least_s[group] >= best_s:
                    break
                for menus in self._menus(group, work, is_coarse=is_coarse):
                    better = self._joined(menus, best_s)
                    if better is not None and better[0] < best_s:
                        best_s = better[0]
                        yield better

    def _menus(
        self, group: Group, work: dict[Mesh, LeastWork], *, is_coarse: bool
    ) -> Iterator[Menus]:
        """The candidates for the stages of a group of pipelines: a single set or, if all stages
        must save memory in the same way, one set for each memory-saving strategy.
        """
        pick = samples_of(group.micro_batches, self.weights) if self.weighted else true_frontier
        for way in self._ways(group):
            yield Menus(
                problem=self.problem,
                space=self.space,
                ledger=self.ledger,
                group=group,
                work=work,
                coarse_to_fine=is_coarse,
                way=way,
                even_hosts=True,
                pick=pick if self.weighted or not self.by_chains else None,
            )

    def _ways(self, group: Group) -> Iterator[Way | None]:
        """The memory-saving strategies that all stages of a group may share; a single None if each
        stage may choose its own strategy.
        """
        if self.space.unequal_stages:
            yield None
            return
        assert group.num_stages is not None
        layers = self.problem.workload.model.layers
        if self.space.layers_off_balance == 0:
            most = even_layers(layers, group.num_stages)[0]
        else:
            most = layer_counts(layers, group.num_stages, self.space)[-1]
        yield from ways_alike(self.space, group.meshes[0], most, in_pipeline=group.num_stages > 1)

    def _joined(self, menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
        if not self.weighted:
            return (join_hastily if self.by_chains else join_by_objective)(menus, limit_s)
        places_by_stage(menus, limit_s)
        samples = menus.only(lambda _, options: best_by_weights(options, weights=self.weights))
        return (join_hastily if self.by_chains else join_by_objective)(samples, limit_s)

    @property
    def _is_small(self) -> bool:
        return prod(len(self.space.listed(name) or ()) for name in names_of("savings")) <= FEW
