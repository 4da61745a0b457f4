"""Where candidates for stages stand in pipelines whose passes run in a named order.

Axes: C candidates.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.schedule.held_moments import HeldMoments, moments_in
from mistlab.schedule.placement import Placement

Rows = NDArray[np.intp]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StagesInOrder:
    """Pipelines of ``num_stages`` stages, in one of which each candidate is stage number ``stage``
    (C), counted from 0."""

    order: str
    num_stages: int
    micro_batches: int
    stage: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.stage)

    def chosen(self, rows: NDArray[np.bool_] | Rows) -> Self:
        """The candidates that a mask or numbers choose."""
        return replace(self, stage=self.stage[rows])

    @property
    def columns(self) -> Mapping[str, NDArray[np.int64]]:
        """The numbers of stages, by a name that tells pipelines apart."""
        return {f"{self.order} {self.num_stages} {self.micro_batches}": self.stage}

    @property
    def placement(self) -> Placement:
        """Where the parts of the pipelines lie."""
        return self._moments[0].placement

    @property
    def splits_backward(self) -> bool:
        """Whether gradients of weights have passes of their own."""
        return any(one.splits_backward for one in self._moments)

    def by_stage(self) -> Iterator[tuple[HeldMoments, Rows]]:
        """For each stage that has candidates, what it holds in this order, and their rows."""
        for stage in np.unique(self.stage).tolist():
            yield self._moments[stage], np.flatnonzero(self.stage == stage)

    @property
    def _moments(self) -> tuple[HeldMoments, ...]:
        return moments_in(self.order, self.num_stages, self.micro_batches)
