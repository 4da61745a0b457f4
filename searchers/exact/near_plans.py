"""Lists the single-stage plans whose predicted times are too close to the best plan's to tell them
apart, by branch and bound over boxes (sets of memory-saving strategies with ratios in ranges).

No strategy dominates another here, since the one that is predicted to be slower may be the faster
when played: boxes are pruned by their lower bounds alone.

Axes: R boxes (rows).
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import inf
from typing import Self

import numpy as np

from mistlab.core.arrays import Column, Floats
from mistlab.core.columns import ColumnSet
from mistlab.cost.pipeline import no_stages, prepended
from mistlab.job.search import MOST_NEAR, TOLD_APART, Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.exact.box_costs import Boxes, BoxQuery
from searchers.exact.box_menus import ALONE, BoxMenus, halvings
from searchers.exact.candidates import Options, StagePosition
from searchers.exact.groups import Group, LeastWork
from searchers.exact.proof import has_bounds
from searchers.meshes import Mesh
from searchers.strategy import BudgetSpentError, Ledger

# The share of what is left of a budget that the list may take, and the most stage candidates.
SHARE = 0.5
MOST_CANDIDATES = 1 << 17
# Strategies wait until there are this many, since a large batch takes less time for each.
TOGETHER = 1 << 10


@dataclass(slots=True, kw_only=True)
class NearPlans:
    """The single-stage plans of a search space that take less than ``TOLD_APART`` longer than the
    best plan: at most ``MOST_NEAR``, the fastest ones.

    ``least_s`` has the lower bounds of all groups of pipelines. ``limit_s`` falls to the slowest
    plan's time once the list is full; the list ends at ``most`` stage candidates of the search.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    work: Mapping[Mesh, LeastWork]
    least_s: Mapping[Group, float]
    limit_s: float = inf
    most: int = 0
    _fastest: list[tuple[float, Plan]] = field(default_factory=list, init=False)

    @classmethod
    def of(
        cls,
        problem: Problem,
        space: SearchSpace,
        ledger: Ledger,
        work: Mapping[Mesh, LeastWork],
        least_s: Mapping[Group, float],
    ) -> Self:
        """No plans yet of these groups of pipelines, which have these lower bounds."""
        return cls(problem=problem, space=space, ledger=ledger, work=work, least_s=least_s)

    def listed(self) -> dict[Group, float]:
        """List the plans, and predict the fastest. Returns lower bounds in seconds of the groups of
        single-stage pipelines; none if the list was too long to end it.
        """
        ledger = self.ledger
        if ledger.best is None or not has_bounds(ledger, self.space):
            return {}
        self.limit_s = ledger.best_s * (1 + TOLD_APART)
        self.most = ledger.stage_evaluations + MOST_CANDIDATES
        has_ended = False
        with suppress(BudgetSpentError), ledger.for_share(SHARE):
            for group in sorted(self.least_s, key=lambda group: self.least_s[group]):
                if group.num_stages in (None, 1) and self.least_s[group] < self.limit_s:
                    self._add_group(group)
            has_ended = ledger.stage_evaluations < self.most
        ledger.predict([plan for _, plan in self._fastest[:1]])
        if not has_ended:
            return {}
        bound_s = min([self.limit_s, *(seconds for seconds, _ in self._fastest[:1])])
        alone = [group for group in self.least_s if group.num_stages == 1]
        return {group: max(bound_s, self.least_s[group]) for group in alone}

    def show(self) -> None:
        """Predict all plans of the list, as far as the budget allows; the ledger keeps them as
        rivals of the best plan.
        """
        limit_s = min(self.limit_s, self.ledger.best_s * (1 + TOLD_APART))
        with suppress(BudgetSpentError):
            self.ledger.predict([plan for seconds, plan in self._fastest if seconds <= limit_s])

    def _add_group(self, group: Group) -> None:
        menus = BoxMenus(
            problem=self.problem, space=self.space, ledger=self.ledger, group=group, work=self.work
        )
        for position in menus.alone:
            self._add(menus, position)

    def _add(self, menus: BoxMenus, position: StagePosition) -> None:
        """Cut boxes in half, those with the smallest lower bounds first, until none is left whose
        bound is below the limit.
        """
        whole = menus.whole(position)
        none = np.zeros(len(whole.boxes))
        parts = _Left(counts=whole.counts, boxes=whole.boxes, least_s=none)
        left = waiting = parts.chosen(slice(0, 0))
        while len(parts) and self.ledger.stage_evaluations < self.most:
            are_points = parts.boxes.are_points
            waiting = waiting.and_also(parts.chosen(are_points))
            left = left.and_also(self._bounded(menus, position, parts.chosen(~are_points)))
            left = left.chosen(left.least_s < self.limit_s)
            if len(waiting) and (len(waiting) >= TOGETHER or not len(left)):
                self._add_plans(menus, position, waiting)
                waiting = waiting.chosen(slice(0, 0))
            left = left.chosen(np.argsort(left.least_s, kind="stable"))
            parts, left = left.chosen(slice(0, ALONE)), left.chosen(slice(ALONE, None))
            boxes, origin = parts.boxes.halved(halvings(len(parts)))
            parts = replace(parts.chosen(origin), boxes=boxes)
        if len(waiting):
            self._add_plans(menus, position, waiting)

    def _bounded(self, menus: BoxMenus, position: StagePosition, parts: "_Left") -> "_Left":
        if not len(parts):
            return parts
        asked = BoxQuery(place=position, counts=parts.counts, boxes=parts.boxes)
        kept, options = menus.costs.bounded(asked, self.limit_s)
        return _Left(counts=kept.counts, boxes=kept.boxes, least_s=_whole_s(menus, options))

    def _add_plans(self, menus: BoxMenus, position: StagePosition, points: "_Left") -> None:
        """Add the plans of boxes that hold a single strategy each."""
        asked = BoxQuery(place=position, counts=points.counts, boxes=points.boxes)
        options = menus.costs.strategies(asked)
        seconds = _whole_s(menus, options)
        for row in np.flatnonzero(seconds < self.limit_s).tolist():
            stage = options.stage_plan(row, position.mesh, position.layers)
            group, engine = menus.group, menus.space.engine
            plan = Plan(engine=engine, micro_batches=group.micro_batches, stages=(stage,))
            self._fastest.append((float(seconds[row]), plan))
        self._fastest = sorted(self._fastest, key=lambda entry: entry[0])[: MOST_NEAR + 1]
        if len(self._fastest) > MOST_NEAR:
            self.limit_s = self._fastest[-1][0]
        best_s = min((seconds for seconds, _ in self._fastest[:1]), default=inf)
        self.limit_s = min(self.limit_s, best_s * (1 + TOLD_APART))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Left(ColumnSet):
    """Boxes of strategies of a stage that are not examined yet, with lower bounds of the iteration
    times of their plans.
    """

    counts: Column
    boxes: Boxes
    least_s: Column

    def __len__(self) -> int:
        return len(self.least_s)


def _whole_s(menus: BoxMenus, options: Options) -> Floats:
    """The iteration times of pipelines of a single stage, for each candidate."""
    nothing = no_stages(len(options))
    return prepended(options.times, nothing, menus.group.micro_batches, 1).whole
