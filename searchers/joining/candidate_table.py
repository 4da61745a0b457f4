"""Candidates for a stage as columns: the way in which each saves memory, and its times.

Axes: F candidates.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import TIMES, StageTimes
from mistlab.values.dimensions import counts_of_blocks, names_of
from mistlab.values.plan import StagePlan
from searchers.meshes import Mesh
from searchers.savings import stage_of

Column = NDArray[Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grain:
    """How far apart candidates must be to count as different; ``host_bytes`` is None where host
    memory does not matter."""

    steady_s: float = 0.0
    once_s: float = 0.0
    host_bytes: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Options:
    """Candidates for one stage that fit on their GPUs.

    ``savings`` (F, 5) are values of ``names_of("savings")``, ``counts`` (F, 1) of
    ``counts_of_blocks()``; ``host_bytes`` are of one rank.
    """

    savings: Column
    counts: Column
    forward_s: Column
    backward_s: Column
    through_forward_s: Column
    through_backward_s: Column
    delta_forward_s: Column
    delta_backward_s: Column
    within_forward_s: Column
    within_backward_s: Column
    after_first_s: Column
    point_to_point_s: Column
    first_send_late_s: Column
    within_round_s: Column
    left_backward_s: Column
    issued_forward_s: Column
    issued_backward_s: Column
    issued_forward_late_s: Column
    issued_backward_late_s: Column
    issued_end_s: Column
    host_bytes: Column

    def __len__(self) -> int:
        return len(self.host_bytes)

    def chosen(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """The candidates with these numbers."""
        return type(self)(**{name: getattr(self, name)[rows] for name in _COLUMNS})

    def and_also(self, others: Self) -> Self:
        """These candidates and others."""
        return type(self)(
            **{
                name: np.concatenate([getattr(self, name), getattr(others, name)])
                for name in _COLUMNS
            }
        )

    @property
    def stable_s(self) -> Column:
        """Seconds of a steady forward and backward pass."""
        return self.forward_s + self.backward_s

    @property
    def issued_s(self) -> Column:
        """Seconds in which a host issues a forward and a backward pass."""
        return self.issued_forward_s + self.issued_backward_s

    @property
    def once_s(self) -> Column:
        """The seconds that the first and the last micro-batch take beyond steady ones."""
        times = self.times
        within_s = times.within_forward_s + times.after_first_s + times.within_backward_s
        first_s = times.through_forward_s - times.forward_s
        return np.asarray(times.begin_s + first_s + within_s + times.end_s)

    @property
    def times(self) -> StageTimes:
        """All times as columns."""
        return StageTimes(**{name: getattr(self, name) for name in TIMES})

    def stage_plan(self, row: int, mesh: Mesh, layers: int) -> StagePlan:
        """One candidate as a stage of a plan."""
        saving = {
            **dict(zip(names_of("savings"), self.savings[row].tolist(), strict=True)),
            **dict(zip(counts_of_blocks(), self.counts[row].tolist(), strict=True)),
        }
        return stage_of(mesh, layers, saving)


_COLUMNS = tuple(entry.name for entry in fields(Options))


def fastest(options: Options, grain: Grain) -> Options:
    """The candidates that are not dominated: no other candidate is at least as fast in every
    respect and, where host memory counts, takes at most as much of it."""
    times = options.times
    steady = (
        *(times.forward_s, times.backward_s),
        *_of_sends(times),
        *(times.through_forward_s, times.through_backward_s),
    )
    once = (
        *(times.begin_s, times.end_s, times.after_first_s),
        *(times.within_forward_s, times.within_backward_s),
    )
    columns = [
        *(_grains(column, grain.steady_s) for column in steady),
        *(_grains(one, grain.once_s) for one in (*once, *_of_hosts(options), *_of_left(times))),
    ]
    if grain.host_bytes is not None:
        columns.append(_grains(options.host_bytes, grain.host_bytes))
    return options.chosen(undominated(columns))


def telling_columns(options: Options, *, with_host: bool) -> list[Column]:
    """The times that never make a pipeline faster by being longer: what a micro-batch waits for,
    what passes take in all, the last backward pass too, and what is waited for in the first and
    the last pass, without and with work beside them."""
    times = options.times
    first = times.through_forward_s + times.within_forward_s
    last = times.through_backward_s + times.within_backward_s
    columns = [
        *(times.through_forward_s, times.through_backward_s),
        *(times.forward_s, times.backward_s, times.backward_s + times.within_backward_s),
        *(first, last, first + times.begin_s, last + times.end_s, times.after_first_s),
        times.backward_s + times.within_backward_s + times.end_s,
        *_of_hosts(options),
        *_of_left(times),
        *_of_sends(times),
    ]
    return [*columns, options.host_bytes] if with_host else columns


def fastest_alone(options: Options, micro_batches: int, count: int) -> Options:
    """The fastest few candidates, with different strategies, for a stage that is the whole
    pipeline. Here only one time counts."""
    issued_s = micro_batches * options.issued_s + options.issued_end_s
    seconds = np.maximum(micro_batches * options.stable_s + options.once_s, issued_s)
    in_order = np.argsort(seconds, kind="stable")
    first_of_each = np.unique(options.savings[in_order], axis=0, return_index=True)[1]
    return options.chosen(in_order[np.sort(first_of_each)[:count]])


def _of_left(times: StageTimes) -> list[Column]:
    """The times that never make a pipeline faster by being longer where reductions are left of
    backward passes whose gradients have gone back, if there are any."""
    left = times.left_backward_s
    if not left.any():
        return []
    within, through = times.within_backward_s, times.through_backward_s + left
    gone = times.gone_backward_s
    return [through, through + within + times.end_s, gone, gone + within]


def _of_sends(times: StageTimes) -> list[Column]:
    """The times of sends that never make a pipeline faster by being longer, if candidates differ
    in them: copies that are still under way when a pass has ended keep its send waiting."""
    sends = times.point_to_point_s, times.first_send_late_s
    return [column for column in sends if (column != column[:1]).any()]


def _of_hosts(options: Options) -> list[Column]:
    """The times of hosts that never make a pipeline faster by being longer, if any host issues
    passes."""
    forward_s, backward_s = options.issued_forward_s, options.issued_backward_s
    if not backward_s.any():
        return []
    return [
        *(forward_s, forward_s + options.issued_forward_late_s),
        *(backward_s, backward_s + options.issued_backward_late_s),
        backward_s + options.issued_end_s,
    ]


def _grains(column: Column, grain: float) -> Column:
    return np.ceil(column / grain) if grain else column


def undominated(columns: Sequence[Column]) -> NDArray[np.intp]:
    """The rows that are not dominated: no other row is at most as large in all columns. Of equal
    rows the first stays."""
    points = np.stack(columns, axis=1).astype(np.float64)
    # A row that dominates another has a smaller sum, or is the first of equal rows.
    left = np.lexsort((np.arange(len(points)), points.sum(axis=1)))
    kept = []
    while len(left):
        first, left = left[0], left[1:]
        kept.append(first)
        left = left[(points[left] < points[first]).any(axis=1)]
    return np.array(kept, dtype=np.intp)
