"""Pipelines of stages that save memory alike, in orders of passes without a formula.

Each candidate has a bound that holds in the order. The candidates with the least bounds are
predicted first, until no bound is below the best plan's time.

Axes: R candidates, S stages, P parts.
"""

from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.order_bound import order_bound_s
from mistlab.cost.pipeline import StageTimes
from mistlab.engines.table import ENGINES
from mistlab.schedule.orders import SPLIT
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
        """Seconds (R) that no candidate undercuts; infinite where one cannot fit."""
        own, ledger, pipeline = self.stages, self.stages.ledger, self.stages.pipeline
        engine, count = own.space.engine, pipeline.num_stages
        places = StagesInOrder(
            order=self.order,
            num_stages=count,
            micro_batches=pipeline.micro_batches,
            stage=np.repeat(np.arange(count), len(candidates)),
        )
        placement = places.placement
        batch = with_ends(own.batch(candidates), placement)
        fits = ledger.stage_fits(batch, places, engine=engine).reshape(count, -1).all(axis=0)
        found = np.full(len(candidates), np.inf)
        rows = np.flatnonzero(fits)
        if len(rows):
            few = with_ends(own.batch(candidates[rows]), placement)
            parts = parts_of_stages(few, placement)
            seconds = ledger.stage_costs(parts, engine=engine).seconds
            names = (entry.name for entry in fields(StageTimes))
            times = {name: getattr(seconds, name).reshape(-1, len(rows)).T for name in names}
            found[rows] = order_bound_s(
                StageTimes(**times),
                placement,
                pipeline.micro_batches,
                splits=self.order in SPLIT,
                steps_apart=ENGINES[engine].steps_apart,
            )
        return found
