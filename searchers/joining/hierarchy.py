"""The search in two levels: what each stage may be, and how stages are joined to pipelines.

Groups of pipelines come in the order of their best plan with alike stages and coarse ratios. Those
are left out that even without anything but arithmetic take longer than the best plan.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import inf
from typing import Self

from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.joining.alike import AlikeStages
from searchers.joining.candidates import BESIDE
from searchers.joining.group_tasks import NEAR, GroupTask, Joiner, solved
from searchers.joining.groups import Group, groups_of
from searchers.joining.in_processes import jobs
from searchers.joining.least_work import LeastWork, work_of
from searchers.joining.programme import join_hastily
from searchers.ledger import Ledger
from searchers.meshes import Mesh, Pipeline
from searchers.strategy import Ending

# Coarse to fine, groups are left out whose plans of alike stages take so many times the best.
FAR = 1.15


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """A search in two levels. ``work`` is what meshes take at least, ``least_s`` what each group of
    pipelines does, all of them the whole space."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    work: Mapping[Mesh, LeastWork]
    least_s: Mapping[Group, float]
    _alike_s: dict[Pipeline, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, problem: Problem, space: SearchSpace, ledger: Ledger) -> Self:
        """All pipelines of a space."""
        groups = list(groups_of(problem, space))
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
        for group, alike_s in self._in_order(list(self.least_s)):
            if alike_s <= NEAR * self.ledger.best_s:
                for stages in self._alike(group):
                    stages.show_near(BESIDE)
        return self._bounded()

    def joined(self, join: Joiner) -> Ending:
        """The best plan, every way to save memory on its stages looked at."""
        in_order = self._in_order(list(self.least_s))
        self._join([group for group, _ in in_order], join, coarse_to_fine=False)
        return self._proven()

    def joined_coarse_to_fine(self, join: Joiner) -> Ending:
        """The best plan whose stages have meshes of one size, ratios coarse to fine, and what is
        better than that with meshes of several, which alike stages tell little of."""
        sizes = list(groups_of(self.problem, self.space, equal_sizes=True))
        in_order = self._in_order(sizes)
        far_s = FAR * self.ledger.best_s
        near = [group for group, alike_s in in_order if not far_s < alike_s < inf]
        self._join(near, join, coarse_to_fine=True)
        if self.space.unequal_meshes:
            unequal = [group for group in self.least_s if group.has_unequal_sizes]
            in_order = self._in_order(unequal)
            self._join([group for group, _ in in_order], join_hastily, coarse_to_fine=True)
        return self._bounded()

    def _join(self, left: Sequence[Group], join: Joiner, *, coarse_to_fine: bool) -> None:
        """Let the ledger see the best plan of each group, as many groups at once as joblib's
        context has jobs."""
        best_s = self.ledger.best_s
        at_once = jobs()
        while left:
            left = [group for group in left if self._least_s(group) < best_s]
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
                for group in left[:at_once]
            ]
            best_s = min([best_s, *solved(tasks, self.ledger)])
            left = left[at_once:]

    def _in_order(self, groups: Sequence[Group]) -> Sequence[tuple[Group, float]]:
        """The groups that may have the best plan, with their best of alike stages; the ledger has
        seen those."""
        found = []
        for group in sorted(groups, key=self._least_s):
            if self._least_s(group) < self.ledger.best_s:
                alike_s = [self._coarse_s(stages) for stages in self._alike(group)]
                found.append((group, min(alike_s, default=inf)))
        return sorted(found, key=lambda entry: entry[1])

    def _least_s(self, group: Group) -> float:
        return group.least_s(self.problem, self.work)

    def _coarse_s(self, stages: AlikeStages) -> float:
        """The best of a pipeline of alike stages, which is looked at once."""
        if stages.pipeline not in self._alike_s:
            self._alike_s[stages.pipeline] = stages.show_coarse()
        return self._alike_s[stages.pipeline]

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
