"""The search in two levels: first candidates for each stage, then pipelines joined from them.

First each group of pipelines gets its best plan with alike stages and coarse ratios; groups are
searched in the order of these plans. A group is left out if its arithmetic alone takes longer than
the best plan so far.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import inf
from typing import Self

from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.values.plan import Plan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.joining.alike import AlikeStages
from searchers.joining.candidates import BESIDE
from searchers.joining.group_tasks import NEAR, GroupTask, Joiner, solved
from searchers.joining.groups import Group, groups_of
from searchers.joining.in_orders import AlikeInOrder
from searchers.joining.in_processes import jobs
from searchers.joining.least_work import LeastWork, work_of
from searchers.joining.programme import join_hastily
from searchers.joining.proof import has_bounds, proven_s
from searchers.ledger import BudgetSpentError, Ledger
from searchers.meshes import Mesh, Pipeline, layer_counts, mesh_of
from searchers.savings import Way, way_of, ways_alike
from searchers.strategy import Ending

# With coarse to fine, a group is left out if its best plan of alike stages takes this many times as
# long as the best plan.
FAR = 1.15

# If stages of unequal sizes may be better, stages of equally many GPUs come first, then a quick
# look at the others: each gets at most this share of the seconds.
FIRST = 0.2


def _shape_of(plan: Plan) -> tuple[int, Mesh]:
    """What tells groups of pipelines of equal meshes apart."""
    return plan.micro_batches, mesh_of(plan.stages[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """A search in two levels. ``work`` is the least work on each mesh, ``least_s`` the least time
    of each group; the groups have all pipelines of the space."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    work: Mapping[Mesh, LeastWork]
    least_s: Mapping[Group, float]
    _alike_s: dict[Pipeline, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, problem: Problem, space: SearchSpace, ledger: Ledger) -> Self:
        """The search of a whole space."""
        groups = list(groups_of(problem, space))
        meshes = sorted({mesh for group in groups for mesh in group.meshes})
        work = work_of(problem, space, ledger, meshes)
        least_s = {group: group.least_of_orders_s(problem, work, space) for group in groups}
        ledger.bounded(min(least_s.values(), default=0.0))
        return cls(
            problem=problem,
            space=space,
            ledger=ledger,
            work=work,
            least_s=least_s,
        )

    def all_alike(self) -> Ending:
        """Look at every plan whose stages are alike, in every order."""
        for group in self.least_s:
            for stages in self._with_formula(group):
                stages.show_all()
        self.show_in_orders(AlikeInOrder.show_all)
        return self._proven()

    def most_alike(self) -> Ending:
        """Find the best plan whose stages are alike, with ratios from coarse to fine; in orders
        without a formula, with coarse ratios alone."""
        for group, alike_s in self._in_order(list(self.least_s)):
            if alike_s <= NEAR * self.ledger.best_s:
                for stages in self._with_formula(group):
                    stages.show_near(BESIDE)
        self.show_in_orders(AlikeInOrder.show_coarse)
        return self._bounded()

    def show_in_orders(self, show: Callable[[AlikeInOrder], None]) -> None:
        """Show the ledger the best plans of pipelines in orders without a formula, the pipelines
        with the least bounds first."""
        if self.space.orders == (DEFAULT_ORDER,):
            return
        left = [(self.bound_s(group), group) for group in self.least_s]
        for least_s, group in sorted(left, key=lambda one: one[0]):
            if least_s >= self.ledger.best_s:
                break
            self.ledger.bounded(least_s)
            for stages in self._alike(group):
                for order in stages.orders:
                    if order != DEFAULT_ORDER:
                        show(AlikeInOrder(stages=stages, order=order))

    def show_alike(self) -> None:
        """Show the ledger the best plans of alike stages with coarse ratios, in the order that has
        a formula."""
        self._in_order(list(self.least_s))

    def joined(self, join: Joiner) -> Ending:
        """Find the best plan among all ways to save memory on its stages."""
        in_order = self._in_order(list(self.least_s))
        self._join([group for group, _ in in_order], join, coarse_to_fine=False)
        return self._proven()

    def joined_alike(self, join: Joiner) -> Ending:
        """Find the best plan whose stages save memory alike and may have unequal blocks: all ways
        to save for all stages, one after another."""
        for group, _ in self._in_order(list(self.least_s)):
            self._join_ways(group, join, self._ways(group))
        return self._proven()

    def near_alike(self, join: Joiner) -> Ending:
        """Look for the best plan whose stages save memory alike: with even blocks first, then with
        unequal blocks for the ways to save that were best."""
        self.most_alike()
        plans = self.ledger.best_of(self.space.engine)
        near = [(_shape_of(plan), way_of(plan)) for plan in plans]
        for group in self.least_s:
            mesh = group.meshes[0]
            ways = [way for key, way in near if key == (group.micro_batches, mesh)]
            self._join_ways(group, join, dict.fromkeys(ways))
        return self._bounded()

    def _join_ways(self, group: Group, join: Joiner, ways: Iterable[Way]) -> None:
        for way in ways:
            self._join([group], join, coarse_to_fine=False, way=way)

    def _ways(self, group: Group) -> Iterator[Way]:
        assert group.num_stages is not None, "stages that are alike have one mesh"
        layers = self.problem.workload.model.layers
        most = layer_counts(layers, group.num_stages, self.space)[-1]
        return ways_alike(self.space, group.meshes[0], most, in_pipeline=group.num_stages > 1)

    def joined_coarse_to_fine(
        self, join: Joiner, *, tolerance: float = 0.0, seconds: float = 0.0
    ) -> Ending:
        """Find the best plan whose stages have equally many GPUs, with ratios from coarse to fine;
        then look for better plans with stages of different sizes.

        Plans with alike stages say little about stages of different sizes.
        """
        sizes = list(groups_of(self.problem, self.space, equal_sizes=True))
        in_order = self._in_order(sizes)
        far_s = FAR * self.ledger.best_s
        near = [group for group, alike_s in in_order if not far_s < alike_s < inf]
        self._join(near, join, coarse_to_fine=True)
        if self.space.unequal_meshes:
            self._join_unequal()
        return self._proven_within(tolerance, seconds)

    def _join_unequal(self) -> None:
        """Look quickly for better plans whose stages have unequal sizes."""
        unequal = [group for group in self.least_s if group.has_unequal_sizes]
        in_order = self._in_order(unequal)
        self._join([group for group, _ in in_order], join_hastily, coarse_to_fine=True)

    def _join(
        self,
        left: Sequence[Group],
        join: Joiner,
        *,
        coarse_to_fine: bool,
        way: Way | None = None,
    ) -> None:
        """Show the ledger the best plan of each group; joblib's context says how many at once."""
        best_s = self.ledger.best_s
        at_once = jobs()
        while left:
            left = [group for group in left if self.bound_s(group) < best_s]
            tasks = [
                GroupTask(
                    problem=self.problem,
                    space=self.space,
                    group=group,
                    work=self.work,
                    join=join,
                    limit_s=best_s,
                    coarse_to_fine=coarse_to_fine,
                    way=way,
                )
                for group in left[:at_once]
            ]
            best_s = min([best_s, *solved(tasks, self.ledger)])
            left = left[at_once:]

    def _in_order(
        self, groups: Sequence[Group], *, is_coarsest: bool = False
    ) -> Sequence[tuple[Group, float]]:
        """The groups that may have the best plan, with the time of each one's best plan of alike
        stages. The ledger has seen these plans."""
        found = []
        for group in sorted(groups, key=self.bound_s):
            if self.bound_s(group) < self.ledger.best_s:
                every = self._with_formula(group)
                alike_s = [self._coarse_s(stages, is_coarsest) for stages in every]
                found.append((group, min(alike_s, default=inf)))
        return sorted(found, key=lambda entry: entry[1])

    def bound_s(self, group: Group) -> float:
        """The least seconds of a group by arithmetic."""
        return group.least_of_orders_s(self.problem, self.work, self.space)

    def _coarse_s(self, stages: AlikeStages, is_coarsest: bool) -> float:
        """The best time of a pipeline of alike stages, worked out once."""
        if stages.pipeline not in self._alike_s:
            self._alike_s[stages.pipeline] = stages.show_coarse(is_coarsest=is_coarsest)
        return self._alike_s[stages.pipeline]

    def _with_formula(self, group: Group) -> Iterator[AlikeStages]:
        """The pipelines of a group that may have the order with a formula."""
        return (stages for stages in self._alike(group) if DEFAULT_ORDER in stages.orders)

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

    @property
    def has_bounds(self) -> bool:
        """Whether stages have bounds over boxes of ratios."""
        return has_bounds(self.ledger, self.space.engine)

    def proven(self, *, tolerance: float, seconds: float) -> Ending:
        """Find the best plan by bounds over boxes of ratios, to a tolerance or for some seconds.

        Plans whose stages are alike come first, then plans whose stages have equally many GPUs,
        then a quick look at plans whose stages have not.
        """
        ends_s = self.ledger.wall_s + seconds
        sizes = list(groups_of(self.problem, self.space, equal_sizes=True))
        with suppress(BudgetSpentError), self.ledger.for_seconds(seconds):
            # Boxes soon find better plans of single stages than a finer grid has.
            self._in_order(sizes, is_coarsest=True)
            if self.space.unequal_meshes:
                equal = {group: self.bound_s(group) for group in sizes}
                self._bound_s(equal, tolerance, FIRST * seconds)
                with suppress(BudgetSpentError), self.ledger.for_seconds(FIRST * seconds):
                    self._join_unequal()
        left_s = ends_s - self.ledger.wall_s
        return self._proven_within(tolerance, max(0.0, left_s))

    def _proven_within(self, tolerance: float, seconds: float) -> Ending:
        """Prove how good the best plan is, or find a better one, for some seconds at most."""
        if not self.has_bounds:
            return self._bounded()
        # Bounds of all groups are bounds of the whole space, and shown as such.
        bound_s = self._bound_s(self.least_s, tolerance, seconds, hear=self.ledger.bounded)
        if self.ledger.best is None:
            return Ending(status="INFEASIBLE" if bound_s == inf else None)
        if self.ledger.is_best(bound_s):
            return self._proven()
        return Ending(status="FEASIBLE", lower_bound_s=bound_s)

    def _bound_s(
        self,
        least_s: Mapping[Group, float],
        tolerance: float,
        seconds: float,
        hear: Callable[[float], object] = float,
    ) -> float:
        return proven_s(
            self.problem,
            self.space,
            self.ledger,
            self.work,
            least_s,
            tolerance=tolerance,
            seconds=seconds,
            hear=hear,
        )
