"""The search in two levels: what each stage may be, and how stages are joined to pipelines.

Groups of pipelines come in the order of their best plan with alike stages and coarse ratios. Those
are left out that even without anything but arithmetic take longer than the best plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Self

from joblib import effective_n_jobs

from mistlab.search import Problem
from mistlab.space import SearchSpace
from searchers.alike import AlikeStages
from searchers.bounds import Work, work_of
from searchers.groups import Group, groups_of
from searchers.ledger import Ledger
from searchers.menu import BESIDE
from searchers.meshes import Mesh
from searchers.strategy import Ending
from searchers.tasks import NEAR, GroupTask, Joiner, solved

# Coarse to fine, groups are left out whose plans of alike stages take so many times the best.
FAR = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """A search in two levels. ``least_s`` is what each group takes at least, ``lower_bound_s`` what
    any plan of the space does; ``is_whole`` says whether the groups are all of the space."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    work: Mapping[Mesh, Work]
    least_s: Mapping[Group, float]
    lower_bound_s: float
    is_whole: bool

    @classmethod
    def of(
        cls, problem: Problem, space: SearchSpace, ledger: Ledger, *, equal_sizes: bool = False
    ) -> Self:
        """All pipelines of a space, or those whose stages have equally many GPUs."""
        every = list(groups_of(problem, space))
        meshes = sorted({mesh for group in every for mesh in group.meshes})
        work = work_of(problem, space, ledger, meshes)
        is_whole = not (equal_sizes and space.unequal_meshes)
        groups = every if is_whole else list(groups_of(problem, space, equal_sizes=True))
        return cls(
            problem=problem,
            space=space,
            ledger=ledger,
            work=work,
            least_s={group: group.least_s(problem, work) for group in groups},
            lower_bound_s=min(group.least_s(problem, work) for group in every),
            is_whole=is_whole,
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
            if alike_s <= NEAR * self.ledger.best_s:
                for stages in self._alike(group):
                    stages.show_near(BESIDE)
        return self._bounded()

    def joined(self, join: Joiner) -> Ending:
        """The best plan, every way to save memory on its stages looked at."""
        self._join(join, coarse_to_fine=False)
        return self._proven()

    def joined_coarse_to_fine(self, join: Joiner) -> Ending:
        """The best plan, ratios coarse to fine."""
        self._join(join, coarse_to_fine=True)
        return self._bounded()

    def _join(self, join: Joiner, *, coarse_to_fine: bool) -> None:
        """Let the ledger see the best plan of each group, as many groups at once as joblib's
        context has jobs."""
        in_order = self._in_order()
        best_s = self.ledger.best_s
        if coarse_to_fine:
            in_order = [entry for entry in in_order if not FAR * best_s < entry[1] < inf]
        groups = [group for group, _ in in_order]
        at_once = effective_n_jobs(None)
        while groups:
            groups = [group for group in groups if self.least_s[group] < best_s]
            tasks = [
                GroupTask(
                    problem=self.problem,
                    space=self.space,
                    group=group,
                    work=self.work,
                    join=join,
                    limit_s=best_s,
                    coarse_to_fine=coarse_to_fine,
                )
                for group in groups[:at_once]
            ]
            best_s = min([best_s, *solved(tasks, self.ledger)])
            groups = groups[at_once:]

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
        if self.ledger.best is not None:
            return Ending(status="FEASIBLE", lower_bound_s=self.lower_bound_s)
        if self.is_whole:
            return Ending(status="INFEASIBLE")
        return Ending(reason="no plan fits whose stages have equally many GPUs")
