"""What stages cost in orders of passes without a formula, for bounds.

A stage has all passes of its chunks, and what only passes through it passes its first chunk. A box
of numbers of recomputed blocks is one for each chunk; where slots are not of the same kinds, the
numbers of a chunk are told apart, and each time is the least of all.

Axes: C candidates.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.chains import Chains
from mistlab.cost.order_bound import in_front_s
from mistlab.cost.pipeline import StageTimes, Table, prepended
from mistlab.engines.table import ENGINES
from mistlab.schedule.orders import INTERLEAVED, SPLIT
from mistlab.values.dimensions import RECOMPUTED
from mistlab.values.parts import chunk_of_stages
from mistlab.values.search import FEWEST_ALIKE
from mistlab.values.stages import StageBatch, StageCosts, StageSeconds
from searchers.joining.groups import Group

Column = NDArray[np.float64]
# Seconds of stages whose ratios and recomputed blocks lie between those of two columns.
Bounds = Callable[[StageBatch, StageBatch], StageSeconds]

# The times of a stage that a bound adds up, each of which makes no pipeline faster by being longer.
ADDED = (
    *("forward_s", "backward_s", "through_forward_s", "through_backward_s"),
    *("within_forward_s", "within_backward_s", "begin_s", "end_s", "point_to_point_s"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderTraits:
    """What bounds need to know of an order on an engine."""

    chunks: int
    splits: bool
    steps_apart: bool

    @classmethod
    def of(cls, order: str, engine: str) -> "OrderTraits":
        """The traits of a named order."""
        return cls(
            chunks=INTERLEAVED.get(order, 1),
            splits=order in SPLIT,
            steps_apart=ENGINES[engine].steps_apart,
        )

    @property
    def goes_back(self) -> bool:
        """Whether a stage is over only when its last gradient has gone back to the first stage."""
        return not (self.splits or self.steps_apart)

    def in_order(
        self, costs: StageCosts, least: StageBatch, most: StageBatch, bounds: Bounds
    ) -> StageCosts:
        """The costs of stages, with times that no stage of this order undercuts."""
        chunks = [
            _least_of(chunk_of_stages(least, chunk, self.chunks), most, chunk, self.chunks, bounds)
            for chunk in range(self.chunks)
        ]
        first = chunks[0]
        forward_s, backward_s = (
            np.sum([own[name] for own in chunks], axis=0) for name in ("forward_s", "backward_s")
        )
        first_s = first["through_forward_s"] + first["within_forward_s"]
        back_s = first["through_backward_s"] if self.goes_back else 0 * backward_s
        seconds = replace(
            costs.seconds,
            forward_s=forward_s,
            backward_s=backward_s,
            through_forward_s=first["through_forward_s"],
            through_backward_s=back_s,
            within_forward_s=first["within_forward_s"],
            within_backward_s=first["within_backward_s"],
            delta_forward_s=first["begin_s"] + first_s - forward_s,
            delta_backward_s=first["within_backward_s"] + first["end_s"],
            after_first_s=0 * backward_s,
            point_to_point_s=first["point_to_point_s"],
            first_send_late_s=0 * backward_s,
        )
        return replace(costs, seconds=seconds)


def chains_in_front(
    group: Group, engine: str, stage: StageTimes, behind: Chains[Table], after: int
) -> Chains[Table]:
    """The chains of stages (C) of a group and of the ``after`` stages behind them; bounds of them
    in an order without a formula."""
    if group.has_formula:
        return prepended(stage, behind, group.micro_batches, after + 1)
    traits = OrderTraits.of(group.order, engine)
    return in_front_s(
        stage,
        behind,
        group.micro_batches,
        is_last=after == 0,
        splits=traits.splits,
        steps_apart=traits.steps_apart,
    )


def _least_of(
    least: StageBatch, most: StageBatch, chunk: int, chunks: int, bounds: Bounds
) -> dict[str, Column]:
    """The least times of a chunk, which has the blocks of ``least``."""
    largest = chunk_of_stages(most, chunk, chunks)
    found = {name: np.full(len(least), np.inf) for name in ADDED}
    for fewest, at_most in _runs(least.layers):
        low = np.maximum(least.value(RECOMPUTED), fewest)
        high = np.minimum(largest.value(RECOMPUTED), at_most)
        rows = np.flatnonzero(low <= high)
        if not len(rows):
            continue
        seconds = bounds(
            least.with_columns(**{RECOMPUTED: low}).chosen(rows),
            largest.with_columns(**{RECOMPUTED: high}).chosen(rows),
        )
        times = StageTimes(**{e.name: getattr(seconds, e.name) for e in fields(StageTimes)})
        for name, column in found.items():
            column[rows] = np.minimum(column[rows], getattr(times, name))
    return found


def _runs(blocks: NDArray[np.int64]) -> Iterator[tuple[NDArray[np.int64], NDArray[np.int64]]]:
    """The fewest and the most recomputed blocks of stages whose slots are of the same kinds."""
    for few in range(FEWEST_ALIKE):
        yield np.full(len(blocks), few), np.full(len(blocks), few)
    yield np.full(len(blocks), FEWEST_ALIKE), blocks - 1
    yield np.maximum(blocks, FEWEST_ALIKE), blocks
