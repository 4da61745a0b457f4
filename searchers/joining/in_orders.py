"""Pipelines of stages that save memory alike, in orders of passes without a formula.

Each candidate has a bound that holds in the order. The candidates with the least bounds are
predicted first, until no bound is below the best plan's time.

Axes: R candidates, S stages, P parts.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.order_bound import order_bound_s
from mistlab.cost.pipeline import TIMES, StageTimes
from mistlab.engines.table import ENGINES
from mistlab.schedule.orders import SPLIT, TURNING, chunks_of
from mistlab.schedule.placement import loop, turning
from mistlab.values.parts import parts_of_stages, with_ends
from mistlab.values.stages_in_order import StagesInOrder
from searchers.joining.alike import AlikeStages, Candidates

# Plans that are predicted together, with bounds below the best time before them.
TOGETHER = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class AlikeInOrder:
    """A pipeline of stages that save memory alike, in an order that it can run."""

    stages: AlikeStages
    order: str

    def show_all(self) -> None:
        """Show the ledger the fastest plan, if it beats the ledger's best."""
        self._show(self.stages.every())

    def show_coarse(self) -> None:
        """Show the ledger the fastest plan of a coarse grid, if it beats the ledger's best."""
        self._show(self.stages.coarse())

    def _show(self, candidates: Candidates) -> None:
        least_s = self.least_s(candidates)
        ledger = self.stages.ledger
        in_turn = np.argsort(least_s, kind="stable")
        for start in range(0, len(in_turn), TOGETHER):
            rows = in_turn[start : start + TOGETHER]
            rows = rows[least_s[rows] < ledger.best_s]
            if not len(rows):
                break
            plans = [self.stages.plan(candidates[row]) for row in rows]
            ledger.predict([replace(plan, order=self.order) for plan in plans])

    def least_s(self, candidates: Candidates) -> NDArray[np.float64]:
        """Seconds (R) that no candidate undercuts; infinite where one that may beat the ledger's
        best cannot fit."""
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
            )
            batch = with_ends(self.stages.batch(candidates[hopeful]), places.placement)
            fits = ledger.stage_fits(batch, places, engine=self.stages.space.engine)
            least_s[hopeful[~fits.reshape(count, -1).all(axis=0)]] = np.inf
        return least_s

    def _bounds_s(self, candidates: Candidates) -> NDArray[np.float64]:
        """Seconds (R) that no candidate undercuts, whether it fits or not."""
        engine, pipeline = self.stages.space.engine, self.stages.pipeline
        count = pipeline.num_stages
        placement = turning(count) if self.order in TURNING else loop(count, chunks_of(self.order))
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
