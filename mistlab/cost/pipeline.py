"""The time of an iteration of a 1F1B pipeline, from the times of its stages.

The recurrence over stages is in ``mistlab.cost.chains``.

Axes: C candidates, S stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.algebra import Algebra, Columns, Length, Numbers
from mistlab.cost.chains import ISSUED, PASSES, SENDS, Chains, Counts, PassLengths, Whole, chained
from mistlab.values.stages import StageSeconds

Table = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of one stage (C), or of several (C, S), as in ``StageSeconds``."""

    forward_s: Table
    backward_s: Table
    through_forward_s: Table
    through_backward_s: Table
    delta_forward_s: Table
    delta_backward_s: Table
    within_forward_s: Table
    within_backward_s: Table
    after_first_s: Table
    point_to_point_s: Table
    first_send_late_s: Table
    within_round_s: Table
    left_backward_s: Table
    issued_forward_s: Table
    issued_backward_s: Table
    issued_forward_late_s: Table
    issued_backward_late_s: Table
    issued_end_s: Table

    def __post_init__(self) -> None:
        shapes = {getattr(self, name).shape for name in TIMES}
        assert len(shapes) == 1, f"tables of unlike shapes: {shapes}"

    @classmethod
    def of(cls, seconds: StageSeconds, *shape: int) -> Self:
        """The tables of such a shape, from the times of stages: pipeline by pipeline, each in the
        order of its stages."""
        return cls(**{name: getattr(seconds, name).reshape(shape) for name in TIMES})

    @property
    def begin_s(self) -> Table:
        """Work before the first micro-batch passes through, whenever it arrives."""
        first_s = self.forward_s + self.delta_forward_s - self.after_first_s
        return np.asarray(np.maximum(first_s - self.through_forward_s - self.within_forward_s, 0.0))

    @property
    def end_s(self) -> Table:
        """Work after the last backward, which delays no other stage."""
        return np.asarray(np.maximum(self.delta_backward_s - self.within_backward_s, 0.0))

    @property
    def gone_backward_s(self) -> Table:
        """A backward pass until its gradient can go back."""
        return np.asarray(self.backward_s - self.left_backward_s)

    def of_stage(self, stage: int) -> Self:
        """One stage of several (C)."""
        return type(self)(**{name: getattr(self, name)[:, stage] for name in TIMES})

    @property
    def passes(self) -> "PassLengths[Table]":
        """The times that the recurrence uses."""
        return PassLengths(**{name: getattr(self, name) for name in self.of_passes})

    @property
    def of_passes(self) -> Sequence[str]:
        """The names of the times that the recurrence uses: those of hosts if there is any."""
        if self.issued_backward_s.any():
            return PASSES
        return _WITHOUT_HOST


_WITHOUT_HOST = tuple(name for name in PASSES if name not in ISSUED)
TIMES = tuple(entry.name for entry in fields(StageTimes))


def iteration_s(times: StageTimes, micro_batches: Whole) -> Table:
    """Seconds (C) of one iteration with ``micro_batches`` (C)."""
    candidates = len(times.forward_s)
    tables = {name: np.ascontiguousarray(getattr(times, name).T) for name in times.of_passes}
    # The last stage sends nothing on.
    for name in SENDS:
        tables[name] = tables[name].copy()
        tables[name][-1] = 0.0
    if candidates == 1:
        numbers = {name: table[:, 0].tolist() for name, table in tables.items()}
        return np.array([_whole_s(Numbers(), numbers, int(micro_batches[0]))])
    are_alike = bool((micro_batches == micro_batches[0]).all()) if candidates else False
    counted = int(micro_batches[0]) if are_alike else micro_batches
    columns = {name: list(table) for name, table in tables.items()}
    return _whole_s(Columns(candidates), columns, counted)


def _whole_s(
    algebra: Algebra[Length], tables: Mapping[str, Sequence[Length]], micro_batches: int | Whole
) -> Length:
    """The length of the whole chain; each table has an entry for each stage."""
    stages = len(tables["forward_s"])
    chains = Chains.of_nothing(algebra.nothing)
    for after in range(stages):
        own = {name: table[stages - 1 - after] for name, table in tables.items()}
        chains = chained(algebra, PassLengths(**own), chains, Counts.of(micro_batches, after + 1))
    return chains.whole


def no_stages(candidates: int) -> Chains[Table]:
    """The chains after the last stage, all of length zero."""
    return Chains.of_nothing(np.zeros(candidates))


def prepended(
    stage: StageTimes, after: Chains[Table], micro_batches: int | Whole, stages: int
) -> Chains[Table]:
    """The chains (C) of a stage and the stages after it, ``stages`` in all."""
    columns = Columns(len(stage.forward_s))
    return chained(columns, stage.passes, after, Counts.of(micro_batches, stages))
