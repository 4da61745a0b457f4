"""The two-level search: finds candidates for each stage, then combines stages into pipelines.

Axes: C candidates, S stages.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields, replace
from itertools import product
from math import inf
from typing import Self

import numpy as np

from mistlab.core.arrays import Column, Floats, Ints
from mistlab.cost.order_path import order_bound_s
from mistlab.cost.pipeline import iteration_s
from mistlab.engines.engine import ENGINES
from mistlab.job.search import Problem
from mistlab.plan.dimensions import counts_of_blocks, names_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER, SPLIT, TURNING, chunks_of, in_flight
from mistlab.schedule.placement import Placement, loop, turning
from mistlab.stages.stage_batch import (
    TIMES,
    StageBatch,
    StageCosts,
    StagesInOrder,
    StageTimes,
    parts_of_stages,
)
from searchers.exact.candidates import (
    BESIDE,
    Choices,
    coarse,
    first_step,
    neighbours,
    savings_columns,
    spread,
)
from searchers.exact.group_tasks import NEAR, GroupTask, Joiner, jobs, solved
from searchers.exact.groups import Group, LeastWork, groups_of, with_ends, work_of
from searchers.exact.near_plans import NearPlans
from searchers.exact.programme import join_hastily
from searchers.exact.proof import has_bounds, proven_s
from searchers.meshes import Mesh, Pipeline, even_layers, layer_counts, mesh_of, orders_of
from searchers.savings import (
    CountsRow,
    SavingsRow,
    Way,
    alike,
    counts_choices,
    savings_choices,
    stage_of,
    way_of,
    ways_alike,
)
from searchers.strategy import BudgetSpentError, Ending, Ledger

# Computes iteration times of many uniform plans (all stages save memory in the same way).


# How many candidates for stages one call of the predictor evaluates at most.
TOGETHER = 1 << 19
# Where sends of stages wait for one another, this many further plans of a pipeline are predicted.
MOST_WAITING = 3

# A candidate is a row of values: ZeRO level and offload ratios (``names_of("savings")``), then
# numbers of recomputed and of other treated blocks (``counts_of_blocks()``).


@dataclass(slots=True, kw_only=True)
class AlikeStages:
    """A pipeline with equal meshes, for plans whose stages all save memory in the same way.

    ``choices`` are the allowed values of each of ``names_of("savings")``, ``counts`` the allowed
    numbers of the first stage's blocks with each treatment.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    pipeline: Pipeline
    shares: tuple[int, ...] = field(init=False)
    choices: Choices = field(init=False)
    counts: list[CountsRow] = field(init=False)

    def __post_init__(self) -> None:
        self.shares = even_layers(self.problem.workload.model.layers, self.pipeline.num_stages)
        self.choices = savings_choices(
            self.space, self.pipeline.meshes[0], in_pipeline=not self._is_alone
        )
        self.counts = counts_choices(self.space, self.shares[0])

    @property
    def orders(self) -> tuple[str, ...]:
        """The schedules (such as 1F1B) of the search space that the pipeline can run."""
        pipeline = self.pipeline
        return orders_of(self.space, pipeline.num_stages, pipeline.micro_batches, min(self.shares))

    def show_all(self) -> float:
        """Evaluate all ways to save memory, and predict the fastest plan that fits. Returns that
        plan's seconds.
        """
        return float(self._show(self.every(), most_waiting=inf).min())

    def show_coarse(self, *, is_coarsest: bool = False) -> float:
        """Evaluate a coarse grid of ratios, with 0, 1/4, ... of the blocks recomputed, and predict
        the fastest plan. Returns its seconds. A single stage never uses the coarsest grid.
        """
        return float(self._show(self.coarse(is_coarsest=is_coarsest)).min())

    def every(self) -> Floats:
        """Every way to save memory that all stages may share, one per row."""
        return _combined(product(*self.choices), self.counts)

    def coarse(self, *, is_coarsest: bool = False) -> Floats:
        """A coarse grid: a few ratios, with 0, 1/4, ... of the blocks recomputed."""
        quarters = counts_choices(self.space, self.shares[0], lambda counts: spread(counts, 4))
        grid = coarse(self.choices, is_alone=False) if is_coarsest else self._coarse
        return _combined(product(*grid), quarters)

    def show_near(self, count: int) -> None:
        """Search around the few fastest strategies of the coarse grid: ratios in ever smaller
        steps, each with every number of recomputed blocks.
        """
        new = set(product(*self._coarse))
        best_s: dict[SavingsRow, float] = {}
        step = first_step(self.choices)
        while step:
            best_s |= self._show_strategies(sorted(new))
            best = sorted(best_s, key=lambda strategy: (best_s[strategy], strategy))[:count]
            near = {other for one in best for other in neighbours(one, self.choices, step)}
            new = near - best_s.keys()
            if not new:
                step //= 2

    @property
    def _is_alone(self) -> bool:
        return self.pipeline.num_stages == 1

    @property
    def _coarse(self) -> Choices:
        return coarse(self.choices, is_alone=self._is_alone)

    def _show_strategies(self, strategies: Sequence[SavingsRow]) -> dict[SavingsRow, float]:
        """Predict the fastest of the plans with these strategies; returns each one's seconds."""
        seconds = self._show(_combined(strategies, self.counts))
        best = seconds.reshape(len(strategies), len(self.counts)).min(axis=1)
        return dict(zip(strategies, best.tolist(), strict=True))

    def _show(self, candidates: Floats, most_waiting: float = MOST_WAITING) -> Floats:
        """The iteration time of each candidate, infinite where it does not fit in memory; the plan
        of the fastest is predicted. If its sends wait for one another, slower candidates may beat
        it: up to ``most_waiting`` of these are predicted, too.
        """
        at_once = max(1, TOGETHER // self.pipeline.num_stages)
        parts = []
        for start in range(0, len(candidates), at_once):
            part = candidates[start : start + at_once]
            costs = self.ledger.stage_costs(self.batch(part), engine=self.space.engine)
            seconds = _iterations(costs, self.pipeline, len(part))
            parts.append(seconds)
            order = np.argsort(seconds, kind="stable")
            fastest = ((float(seconds[row]), self.plan(part[row])) for row in order)
            self.ledger.predict_fastest(fastest, most_waiting=most_waiting)
        return np.concatenate([np.empty(0), *parts])

    def batch(self, candidates: Floats) -> StageBatch:
        """All candidates' stages in one batch: the first stage of each, then the second, ..."""
        pipeline, rows = self.pipeline, len(candidates)
        stages, mesh = pipeline.num_stages, pipeline.meshes[0]
        savings, counts = np.split(candidates, [len(self.choices)], axis=1)
        layers, number = np.repeat(self.shares, rows), np.arange(stages)
        held = [in_flight(stage, stages, pipeline.micro_batches) for stage in range(stages)]
        cluster = self.problem.cluster
        ranks = [cluster.like_rank(rank, mesh.num_gpus) for rank in pipeline.first_ranks()]
        return StageBatch(
            layers=layers,
            **mesh.values(),
            **savings_columns(np.tile(savings, (stages, 1))),
            **_counts_within(np.tile(counts.astype(np.int64), (stages, 1)), layers),
            in_flight=np.repeat(held, rows),
            has_embedding=np.repeat((number == 0).astype(np.int64), rows),
            has_head=np.repeat((number == stages - 1).astype(np.int64), rows),
            first_rank=np.repeat(ranks, rows),
            first_block=np.repeat(np.cumsum(self.shares) - self.shares, rows),
            micro_batches=pipeline.micro_batches,
        )

    def plan(self, candidate: Floats) -> Plan:
        """The plan of the candidate at this index."""
        names = (*names_of("savings"), *counts_of_blocks())
        saving = dict(zip(names, candidate.tolist(), strict=True))
        first = stage_of(self.pipeline.meshes[0], self.shares[0], saving)
        return Plan(
            engine=self.space.engine,
            micro_batches=self.pipeline.micro_batches,
            stages=tuple(alike(first, own) for own in self.shares),
        )


def _combined(savings: Iterable[SavingsRow], counts: Sequence[CountsRow]) -> Floats:
    """Combines all ratios and ZeRO levels with all choices of how many blocks are recomputed."""
    rows = [(*saving, *count) for saving in savings for count in counts]
    return np.array(rows, dtype=np.float64)


def _counts_within(counts: Ints, layers: Ints) -> dict[str, Column]:
    """Each candidate's numbers of recomputed blocks, limited by each stage's number of blocks."""
    columns: dict[str, Column] = {}
    left = layers
    for name, asked in zip(counts_of_blocks(), counts.T, strict=True):
        columns[name] = np.minimum(asked, left)
        left = left - columns[name]
    return columns


def _iterations(costs: StageCosts, pipeline: Pipeline, rows: int) -> Floats:
    """The iteration time of each candidate, infinite if a stage does not fit in memory."""
    times = StageTimes(
        **{
            entry.name: getattr(costs.seconds, entry.name).reshape(-1, rows).T
            for entry in fields(StageTimes)
        }
    )
    seconds = iteration_s(times, np.full(rows, pipeline.micro_batches))
    return np.where(costs.fits.reshape(-1, rows).all(axis=0), seconds, np.inf)


# Searches uniform plans (all stages save memory in the same way) with schedules other than 1F1B.
#
# Each candidate has a lower bound that holds for the schedule. Candidates are predicted by
# ascending bounds, until no bound is below the best plan's time.
#
# Axes of arrays: R candidates, S stages, P parts of the model.


# How many plans are predicted at once, the ones with the smallest lower bounds first.
ORDERS_AT_ONCE = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeInOrder:
    """A pipeline whose stages all save memory in the same way, with a schedule it can run."""

    stages: AlikeStages
    order: str

    def show_all(self) -> None:
        """Predict all strategies' plans whose lower bounds are below the best plan's time."""
        self._show(self.stages.every())

    def show_coarse(self) -> None:
        """Predict a coarse grid's plans whose lower bounds are below the best plan's time."""
        self._show(self.stages.coarse())

    def _show(self, candidates: Floats) -> None:
        least_s = self.least_s(candidates)
        ledger = self.stages.ledger
        in_turn = np.argsort(least_s, kind="stable")
        for start in range(0, len(in_turn), ORDERS_AT_ONCE):
            rows = in_turn[start : start + ORDERS_AT_ONCE]
            rows = rows[least_s[rows] < ledger.best_s]
            if not len(rows):
                break
            plans = [self.stages.plan(candidates[row]) for row in rows]
            ledger.predict([replace(plan, order=self.order) for plan in plans])

    def least_s(self, candidates: Floats) -> Floats:
        """The lower bound in seconds of each candidate; infinite for those that would beat the best
        plan but cannot fit in memory.
        """
        ledger, pipeline = self.stages.ledger, self.stages.pipeline
        least_s = self._bounds_s(candidates)
        hopeful = np.flatnonzero(least_s < ledger.best_s)
        if len(hopeful):
            count = pipeline.num_stages
            places = StagesInOrder(
                order=self.order,
                num_stages=count,
                micro_batches=pipeline.micro_batches,
                stage=np.repeat(np.arange(count), len(hopeful)),
                first_blocks=self._first_blocks,
            )
            batch = with_ends(self.stages.batch(candidates[hopeful]), places.placement)
            fits = ledger.stage_fits(batch, places, engine=self.stages.space.engine)
            least_s[hopeful[~fits.reshape(count, -1).all(axis=0)]] = np.inf
        return least_s

    @property
    def _placement(self) -> Placement:
        count = self.stages.pipeline.num_stages
        return turning(count) if self.order in TURNING else loop(count, chunks_of(self.order))

    @property
    def _first_blocks(self) -> Ints:
        """The index of the first block in each chunk (part of the model) of each stage."""
        placement, first = self._placement, 0
        blocks = np.zeros((placement.num_stages, placement.chunks), dtype=np.int64)
        for stage, chunk in placement.places:
            blocks[stage, chunk] = first
            first += placement.shares_of_blocks(self.stages.shares[stage], stage)[chunk]
        return blocks

    def _bounds_s(self, candidates: Floats) -> Floats:
        """The lower bound in seconds of each candidate, whether or not it fits in memory."""
        engine, pipeline, placement = (
            self.stages.space.engine,
            self.stages.pipeline,
            self._placement,
        )
        parts = parts_of_stages(with_ends(self.stages.batch(candidates), placement), placement)
        seconds = self.stages.ledger.part_seconds(parts, engine=engine)
        columns = {
            name: getattr(seconds, name).reshape(-1, len(candidates)).T
            for name in (*TIMES, "issued_s")
        }
        return order_bound_s(
            StageTimes(**{name: columns[name] for name in TIMES}),
            placement,
            pipeline.micro_batches,
            issued_s=columns["issued_s"],
            splits=self.order in SPLIT,
            steps_apart=ENGINES[engine].steps_apart,
        )


# For each group of pipelines, the best plan with uniform stages and coarse ratios is found first.
# Groups are searched in the order of these plans' times, and pruned if the lower bound from the
# least times of blocks is no better than the best plan.


# When ratios are tried from coarse to fine, a group of pipelines is dropped if its best plan with
# uniform stages takes at least this factor times the best plan's time.
FAR = 1.15

# The largest share of the time for stages of equal sizes, and for beam search of unequal ones.
FIRST = 0.2


def _shape_of(plan: Plan) -> tuple[int, Mesh]:
    """A plan's number of micro-batches and mesh, which identify its group if that has one mesh."""
    return plan.micro_batches, mesh_of(plan.stages[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class Hierarchy:
    """The two-level search of a search space. ``work`` has the least times of blocks on each mesh;
    ``least_s`` has all groups of pipelines of the space, each with its lower bound in seconds.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    work: Mapping[Mesh, LeastWork]
    least_s: Mapping[Group, float]
    _alike_s: dict[Pipeline, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, problem: Problem, space: SearchSpace, ledger: Ledger) -> Self:
        """The two-level search of a space, with a lower bound of each group of pipelines."""
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
        """Evaluate every plan whose stages save memory alike, with each of the schedules."""
        for group in self.least_s:
            for stages in self._with_formula(group):
                stages.show_all()
        self.show_in_orders(AlikeInOrder.show_all)
        return self._proven()

    def most_alike(self) -> Ending:
        """Search for the best uniform plan (all stages save memory in the same way), with ratios
        from coarse to fine; for schedules other than 1F1B, with coarse ratios only.
        """
        for group, alike_s in self._in_order(list(self.least_s)):
            if alike_s <= NEAR * self.ledger.best_s:
                for stages in self._with_formula(group):
                    stages.show_near(BESIDE)
        self.show_in_orders(AlikeInOrder.show_coarse)
        return self._bounded()

    def show_in_orders(self, show: Callable[[AlikeInOrder], None]) -> None:
        """Predict the best plans with schedules other than 1F1B, by ascending lower bounds."""
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
        """Predict the best plans whose stages save memory alike (coarse ratios, 1F1B)."""
        self._in_order(list(self.least_s))

    def joined(self, join: Joiner) -> Ending:
        """Find the best plan in which each stage may save memory in its own way."""
        in_order = self._in_order(list(self.least_s))
        bound_s = self._join([group for group, _ in in_order], join, coarse_to_fine=False)
        return self._proven(bound_s)

    def joined_alike(self, join: Joiner) -> Ending:
        """Try all divisions of the blocks for each memory-saving strategy shared by all stages."""
        groups = [group for group, _ in self._in_order(list(self.least_s))]
        bounds = [self._join_ways(group, join, self._ways(group)) for group in groups]
        return self._proven(min(bounds, default=inf))

    def near_alike(self, join: Joiner) -> Ending:
        """Find the best plan with one strategy for all stages: equal stages first, then unequal."""
        self.most_alike()
        plans = self.ledger.best_of(self.space.engine)
        near = [(_shape_of(plan), way_of(plan)) for plan in plans]
        for group in self.least_s:
            mesh = group.meshes[0]
            ways = [way for key, way in near if key == (group.micro_batches, mesh)]
            self._join_ways(group, join, dict.fromkeys(ways))
        return self._bounded()

    def _join_ways(self, group: Group, join: Joiner, ways: Iterable[Way]) -> float:
        bounds = [self._join([group], join, coarse_to_fine=False, way=way) for way in ways]
        return min(bounds, default=inf)

    def _ways(self, group: Group) -> Iterator[Way]:
        assert group.num_stages is not None, "stages that are alike have one mesh"
        layers = self.problem.workload.model.layers
        most = layer_counts(layers, group.num_stages, self.space)[-1]
        return ways_alike(self.space, group.meshes[0], most, in_pipeline=group.num_stages > 1)

    def joined_coarse_to_fine(
        self, join: Joiner, *, tolerance: float = 0.0, seconds: float = 0.0
    ) -> Ending:
        """Find the best plan of stages with equally many GPUs, with ratios from coarse to fine;
        then search for better plans of stages with unequal numbers of GPUs.

        Uniform plans say little about how good stages of different sizes are.
        """
        sizes = list(groups_of(self.problem, self.space, equal_sizes=True))
        in_order = self._in_order(sizes)
        far_s = FAR * self.ledger.best_s
        near = [group for group, alike_s in in_order if not far_s < alike_s < inf]
        self._join(near, join, coarse_to_fine=True)
        if self.space.unequal_meshes:
            self._join_unequal()
        return self._proven_within(tolerance, seconds, self.least_s)

    def _join_unequal(self) -> None:
        """Search by beam search for better plans whose stages have unequal numbers of GPUs."""
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
    ) -> float:
        """Find the best plan of each group of pipelines, in parallel if joblib is set up for it.
        Returns a lower bound of the seconds of all their plans, at most the best plan's.
        """
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
        return best_s

    def _in_order(
        self, groups: Sequence[Group], *, is_coarsest: bool = False
    ) -> Sequence[tuple[Group, float]]:
        """The groups of pipelines that may have the best plan, fastest first, each with the time of
        its best uniform plan.
        """
        timed = []
        for group in sorted(groups, key=self.bound_s):
            if self.bound_s(group) < self.ledger.best_s:
                every = self._with_formula(group)
                alike_s = [self._coarse_s(stages, is_coarsest) for stages in every]
                timed.append((group, min(alike_s, default=inf)))
        return sorted(timed, key=lambda entry: entry[1])

    def bound_s(self, group: Group) -> float:
        """The lower bound in seconds of a group of pipelines, from the least times of blocks."""
        return group.least_of_orders_s(self.problem, self.work, self.space)

    def _coarse_s(self, stages: AlikeStages, is_coarsest: bool) -> float:
        """The time of the group's best uniform plan with coarse ratios and equal meshes; cached."""
        if stages.pipeline not in self._alike_s:
            self._alike_s[stages.pipeline] = stages.show_coarse(is_coarsest=is_coarsest)
        return self._alike_s[stages.pipeline]

    def _with_formula(self, group: Group) -> Iterator[AlikeStages]:
        """The pipelines of a group whose stages have equal meshes, with schedule 1F1B."""
        return (stages for stages in self._alike(group) if DEFAULT_ORDER in stages.orders)

    def _alike(self, group: Group) -> Iterator[AlikeStages]:
        for pipeline in group.equal_pipelines(self.problem):
            yield AlikeStages(
                problem=self.problem, space=self.space, ledger=self.ledger, pipeline=pipeline
            )

    def _proven(self, bound_s: float = inf) -> Ending:
        return Ending.of(self.ledger, min(bound_s, self.ledger.best_s))

    def _bounded(self) -> Ending:
        if self.ledger.best is None:
            return Ending(status="INFEASIBLE")
        return Ending(status="FEASIBLE", lower_bound_s=min(self.least_s.values()))

    @property
    def has_bounds(self) -> bool:
        """Whether the predictor gives lower bounds for ranges of memory-saving strategies."""
        return has_bounds(self.ledger, self.space)

    def proven(self, *, tolerance: float, seconds: float) -> Ending:
        """Find the best plan by branch and bound over boxes (sets of memory-saving strategies with
        ratios in ranges), until it is proven within a tolerance or a time limit is reached. Uniform
        plans come first, then all single-stage plans near the best, then plans whose stages have
        equally many GPUs, then, briefly, plans of stages with unequal numbers of GPUs.
        """
        ends_s = self.ledger.wall_s + seconds
        sizes = list(groups_of(self.problem, self.space, equal_sizes=True))
        least_s = dict(self.least_s)
        near = NearPlans.of(self.problem, self.space, self.ledger, self.work, self.least_s)
        with suppress(BudgetSpentError), self.ledger.for_seconds(seconds):
            # Splitting boxes soon finds better single-stage plans than a finer grid would.
            self._in_order(sizes, is_coarsest=True)
            least_s |= near.listed()
            if self.space.unequal_meshes:
                equal = {group: least_s.get(group, self.bound_s(group)) for group in sizes}
                self._bound_s(equal, tolerance, FIRST * seconds)
                with suppress(BudgetSpentError), self.ledger.for_seconds(FIRST * seconds):
                    self._join_unequal()
        left_s = ends_s - self.ledger.wall_s
        ending = self._proven_within(tolerance, max(0.0, left_s), least_s)
        if ending.status == "OPTIMAL":
            near.show()
        return ending

    def _proven_within(
        self, tolerance: float, seconds: float, least_s: Mapping[Group, float]
    ) -> Ending:
        """Prove how close to optimal the best plan is within a time limit, or find a better one."""
        if not self.has_bounds:
            return self._bounded()
        # The smallest lower bound of all groups is a lower bound of the whole space.
        bound_s = self._bound_s(least_s, tolerance, seconds, hear=self.ledger.bounded)
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
        groups = self.problem, self.space, self.ledger, self.work, least_s
        return proven_s(*groups, tolerance=tolerance, seconds=seconds, hear=hear)
