"""Plans whose stages all save memory in the same way: times of whole iterations, in columns.

Axes: C candidates, S stages.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from itertools import product

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import StageTimes, iteration_s
from mistlab.schedule.orders import in_flight
from mistlab.values.dimensions import counts_of_blocks, names_of
from mistlab.values.plan import Plan
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from mistlab.values.stages import Column, StageBatch, StageCosts
from searchers.joining.candidates import (
    Choices,
    coarse,
    first_step,
    neighbours,
    savings_columns,
    spread,
)
from searchers.ledger import Ledger
from searchers.meshes import Pipeline, even_layers, orders_of
from searchers.savings import (
    CountsRow,
    SavingsRow,
    alike,
    counts_choices,
    savings_choices,
    stage_of,
)

# Stage candidates asked for at once.
TOGETHER = 1 << 19

# Values of ``names_of("savings")``, then of ``counts_of_blocks()`` (C, 6).
Candidates = NDArray[np.float64]


@dataclass(slots=True, kw_only=True)
class AlikeStages:
    """A pipeline of stages with one mesh that all save memory in the same way.

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
        """The orders that the pipeline may have."""
        pipeline = self.pipeline
        return orders_of(self.space, pipeline.num_stages, pipeline.micro_batches, min(self.shares))

    def show_all(self) -> float:
        """Show the ledger the fastest plan that fits, if it beats the ledger's best; its
        seconds."""
        return float(self._show(self.every()).min())

    def show_coarse(self, *, is_coarsest: bool = False) -> float:
        """Show the ledger the fastest plan of a coarse grid of ratios, with treated blocks in
        quarters; its seconds. The coarsest grid is no finer for a stage that is alone."""
        return float(self._show(self.coarse(is_coarsest=is_coarsest)).min())

    def every(self) -> Candidates:
        """Every way to save memory."""
        return _combined(product(*self.choices), self.counts)

    def coarse(self, *, is_coarsest: bool = False) -> Candidates:
        """A coarse grid of ratios, with treated blocks in quarters."""
        quarters = counts_choices(self.space, self.shares[0], lambda counts: spread(counts, 4))
        grid = coarse(self.choices, is_alone=False) if is_coarsest else self._coarse
        return _combined(product(*grid), quarters)

    def show_near(self, count: int) -> None:
        """Begin with the fastest few strategies of coarse ratios, and look for better neighbours in
        ever smaller steps, each with any number of recomputed blocks."""
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
        """The least seconds of each strategy; the ledger sees the fastest plan."""
        seconds = self._show(_combined(strategies, self.counts))
        best = seconds.reshape(len(strategies), len(self.counts)).min(axis=1)
        return dict(zip(strategies, best.tolist(), strict=True))

    def _show(self, candidates: Candidates) -> NDArray[np.float64]:
        """Seconds (C) of an iteration, infinite where a stage does not fit; the ledger sees the
        fastest."""
        at_once = max(1, TOGETHER // self.pipeline.num_stages)
        found = []
        for start in range(0, len(candidates), at_once):
            some = candidates[start : start + at_once]
            costs = self.ledger.stage_costs(self.batch(some), engine=self.space.engine)
            seconds = _iterations(costs, self.pipeline, len(some))
            found.append(seconds)
            for row in np.argsort(seconds, kind="stable"):
                # The stages of a node share its host memory, which only a whole plan shows.
                if seconds[row] >= self.ledger.best_s:
                    break
                if self.ledger.predict([self.plan(some[row])])[0].fits:
                    break
        return np.concatenate([np.empty(0), *found])

    def batch(self, candidates: Candidates) -> StageBatch:
        """All candidates' first stages, then their second stages, and so on."""
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
            micro_batches=pipeline.micro_batches,
        )

    def plan(self, candidate: NDArray[np.float64]) -> Plan:
        """The plan of a candidate."""
        names = (*names_of("savings"), *counts_of_blocks())
        saving = dict(zip(names, candidate.tolist(), strict=True))
        first = stage_of(self.pipeline.meshes[0], self.shares[0], saving)
        return Plan(
            engine=self.space.engine,
            micro_batches=self.pipeline.micro_batches,
            stages=tuple(alike(first, own) for own in self.shares),
        )


def _combined(savings: Iterable[SavingsRow], counts: Sequence[CountsRow]) -> Candidates:
    """Every way to save memory combined with every way to treat blocks."""
    rows = [(*saving, *count) for saving in savings for count in counts]
    return np.array(rows, dtype=np.float64)


def _counts_within(counts: NDArray[np.int64], layers: NDArray[np.int64]) -> dict[str, Column]:
    """The numbers of treated blocks in each stage: as many as asked for, if it has enough
    blocks."""
    columns: dict[str, Column] = {}
    left = layers
    for name, asked in zip(counts_of_blocks(), counts.T, strict=True):
        columns[name] = np.minimum(asked, left)
        left = left - columns[name]
    return columns


def _iterations(costs: StageCosts, pipeline: Pipeline, rows: int) -> NDArray[np.float64]:
    """Seconds (C) of an iteration; infinite where a stage does not fit."""
    times = StageTimes(
        **{
            entry.name: getattr(costs.seconds, entry.name).reshape(-1, rows).T
            for entry in fields(StageTimes)
        }
    )
    seconds = iteration_s(times, np.full(rows, pipeline.micro_batches))
    return np.where(costs.fits.reshape(-1, rows).all(axis=0), seconds, np.inf)
