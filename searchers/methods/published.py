"""The published search of Mist (EuroSys 2025): weighted sums, and the published objective.

``mist`` differs by two choices, which can be taken one by one: true frontiers in place of weighted
sums, and the longest chain of passes in place of the published objective.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf, prod

import numpy as np

from mistlab.job.search import Problem
from mistlab.plan.dimensions import names_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.exact.candidates import Menus
from searchers.exact.groups import Group, LeastWork, groups_of, work_of
from searchers.exact.programme import join_hastily, places_by_stage
from searchers.exact.published_programme import best_by_weights, join_by_objective
from searchers.meshes import Mesh, even_layers, layer_counts
from searchers.savings import Way, ways_alike
from searchers.strategy import BudgetSpentError, Ending, Ledger, NeedsStageCosts, Strategy

# With more ways to save memory than this, ratios are tried from coarse to fine.
FEW = 256
NONE_FITS = (
    "no pipeline fits whose stages have equally many GPUs and equal shares of their host's memory; "
    "others are not tried"
)
# A group is looked at closely if its time with coarse ratios is at most this many times the best.
NEAR = 1.1


def published(*, weighted: bool = True, by_chains: bool = False) -> Strategy:
    """The strategy: with candidates by ``weighted`` sums or from true frontiers, and pipelines
    compared by the published objective or ``by_chains``."""

    def search(
        problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
    ) -> Ending:
        return _Search(
            problem=problem, space=space, ledger=ledger, weighted=weighted, by_chains=by_chains
        ).run()

    return NeedsStageCosts(search)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Search:
    problem: Problem
    space: SearchSpace
    ledger: Ledger
    weighted: bool
    by_chains: bool

    def run(self) -> Ending:
        """Take every group of pipelines coarsely, then those near the best closely; predict only
        the plan that is best by the objective."""
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
        best: tuple[float, Plan | None] = (inf, None)
        try:
            for found in self._found(groups, work, least_s):
                best = min(best, found, key=lambda one: one[0])
        except BudgetSpentError:
            if best[1] is None or self.ledger.evaluations_left == 0:
                raise
        if best[1] is None:
            # Stages of unequal sizes may fit, and hosts whose stages take unequal shares.
            return Ending(reason=NONE_FITS)
        self.ledger.predict([best[1]])
        return Ending(status="FEASIBLE", lower_bound_s=min(least_s.values()))

    def _found(
        self, groups: list[Group], work: dict[Mesh, LeastWork], least_s: dict[Group, float]
    ) -> Iterator[tuple[float, Plan]]:
        """The best plans of groups, each with its time by the objective."""
        best_s = inf
        coarse_s: dict[Group, float] = {}
        for group in sorted(groups, key=lambda group: least_s[group]):
            if least_s[group] >= best_s:
                break
            for menus in self._menus(group, work):
                found = self._joined(menus, NEAR * best_s, closely=False)
                if found is not None:
                    coarse_s[group] = min(found[0], coarse_s.get(group, inf))
                    best_s = min(best_s, found[0])
                    yield found
        if self._is_small:
            return
        for group in sorted(coarse_s, key=lambda group: coarse_s[group]):
            if coarse_s[group] <= NEAR * best_s:
                for menus in self._menus(group, work):
                    found = self._joined(menus, best_s, closely=True)
                    if found is not None:
                        best_s = min(best_s, found[0])
                        yield found

    def _menus(self, group: Group, work: dict[Mesh, LeastWork]) -> Iterator[Menus]:
        for way in self._ways(group):
            yield Menus(
                problem=self.problem,
                space=self.space,
                ledger=self.ledger,
                group=group,
                work=work,
                coarse_to_fine=not self._is_small,
                way=way,
                even_hosts=True,
                pick=best_by_weights if self.weighted else None,
            )

    def _ways(self, group: Group) -> Iterator[Way | None]:
        """The ways to save memory that all stages share; None where each chooses for itself."""
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

    def _joined(self, menus: Menus, limit_s: float, *, closely: bool) -> tuple[float, Plan] | None:
        join = join_hastily if self.by_chains else join_by_objective
        if closely:
            stages = places_by_stage(menus, limit_s)
            menus.refine({place for places in stages for place in places}, limit_s)
        return join(menus, limit_s)

    @property
    def _is_small(self) -> bool:
        return prod(len(self.space.listed(name) or ()) for name in names_of("savings")) <= FEW
