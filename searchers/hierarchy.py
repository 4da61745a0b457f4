"""The search in two levels: what each stage may be, and how stages are joined to pipelines.

Groups of pipelines come in the order of their best plan with alike stages and coarse ratios. Those
are left out that even without anything but arithmetic take longer than the best plan.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from mistlab.plan import Plan
from mistlab.search import Problem
from mistlab.space import SearchSpace
from searchers.alike import AlikeStages
from searchers.bounds import Work, work_of
from searchers.groups import Group, groups_of
from searchers.join import join as join_exactly
from searchers.ledger import Ledger
from searchers.menu import Menus
from searchers.meshes import Mesh
from searchers.strategy import Ending

# Joins the stages of a group to the fastest pipeline that takes less than a limit: its time as the
# chains have it, and the plan.
Joiner = Callable[[Menus, float], tuple[float, Plan] | None]

# How much slower than the best plan a group may be, with coarse ratios, to be looked at closely.
NEAR = 1.05
# Near how many candidates better ones are looked for where stages are alike.
BESIDE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """A search in two levels. ``least_s`` is what each group takes at least."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    work: Mapping[Mesh, Work]
    least_s: Mapping[Group, float]

    @classmethod
    def of(
        cls, problem: Problem, space: SearchSpace, ledger: Ledger, *, equal_sizes: bool = False
    ) -> Self:
        """All pipelines of a space, or those whose stages have equally many GPUs."""
        groups = list(groups_of(problem, space, equal_sizes=equal_sizes))
        meshes = sorted({mesh for group in groups for mesh in group.meshes})
        work = work_of(problem, space, ledger, meshes)
        return cls(
            problem=problem,
            space=space,
            ledger=ledger,
            work=work,
            least_s={group: group.least_s(problem, work) for group in groups},
        )

    def all_alike(self) -> Ending:
        """Every plan whose stages are alike."""
        for group in self.least_s:
            for stages in self._alike(group):
                stages.show_all()
        return self._proven()

    def most_alike(self) -> Ending:
        """The best plan whose stages are alike, ratios coarse to fine."""
        for group, alike_s in self._in_order():
            if alike_s < NEAR * self.ledger.best_s:
                for stages in self._alike(group):
                    stages.show_near(BESIDE)
        return self._bounded()

    def joined(self, join: Joiner) -> Ending:
        """The best plan, every way to save memory on its stages looked at."""
        best_s = self.ledger.best_s
        for group, _ in self._in_order():
            if self.least_s[group] < best_s:
                best_s = self._join(group, join, best_s, coarse_to_fine=False)
        return self._proven()

    def joined_coarse_to_fine(self, join: Joiner) -> Ending:
        """The best plan, ratios coarse to fine."""
        best_s = self.ledger.best_s
        for group, _ in self._in_order():
            if self.least_s[group] < best_s:
                best_s = self._join(group, join, best_s, coarse_to_fine=True)
        return self._bounded()

    def _join(self, group: Group, join: Joiner, best_s: float, *, coarse_to_fine: bool) -> float:
        """The best time of a group's plans that fit, or the one before if none is faster."""
        # Stages of one node share its host memory: it is followed once a plan does not fit for it.
        for with_host in (False, True):
            menus = Menus(
                problem=self.problem,
                space=self.space,
                ledger=self.ledger,
                group=group,
                work=self.work,
                with_host=with_host,
                coarse_to_fine=coarse_to_fine,
            )
            if coarse_to_fine:
                if join_exactly(menus, NEAR * best_s) is None:
                    break
                menus.refine(best_s)
            found = join(menus, best_s)
            if found is None:
                break
            seconds, plan = found
            if self.ledger.predict([plan])[0].fits:
                return seconds
        return best_s

    def _in_order(self) -> Sequence[tuple[Group, float]]:
        """The groups that may have the best plan, with their best of alike stages; the ledger has
        seen those."""
        found = []
        for group in sorted(self.least_s, key=lambda group: self.least_s[group]):
            if self.least_s[group] < self.ledger.best_s:
                alike_s = [stages.show_coarse() for stages in self._alike(group)]
                found.append((group, min(alike_s, default=float("inf"))))
        return sorted(found, key=lambda entry: entry[1])

    def _alike(self, group: Group) -> Iterator[AlikeStages]:
        for pipeline in group.equal_pipelines(self.problem):
            yield AlikeStages(
                problem=self.problem, space=self.space, ledger=self.ledger, pipeline=pipeline
            )

    def _proven(self) -> Ending:
        if self.ledger.best is None:
            return Ending(status="INFEASIBLE")
        return Ending(status="OPTIMAL", lower_bound_s=self.ledger.best_s)

    def _bounded(self) -> Ending:
        if self.ledger.best is None:
            return Ending(status="INFEASIBLE")
        return Ending(status="FEASIBLE", lower_bound_s=min(self.least_s.values()))
