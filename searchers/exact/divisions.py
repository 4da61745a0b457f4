"""Divisions of a model's blocks among stages, for models with several kinds of blocks, where a
stage's cost depends on which blocks it has.

A stage has a range of consecutive blocks. Ranges with the same kinds of blocks in the same order
cost the same, so costs are computed once per sequence of kinds.

Axes: R different ranges, C candidates, T thresholds, D divisions, S stages, F first blocks.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.cost.order_path import least_sends_of
from mistlab.cost.pipeline import iteration_s
from mistlab.graph.library import graph_of
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import TIMES, StageTimes
from searchers.meshes import even_layers, layer_counts

# The largest number of divisions of the blocks that are enumerated.
MOST_DIVISIONS = 200_000
# The number of thresholds at which a pipeline's longest stall (the time by which waiting at one
# stage delays it) is bounded, to compute a lower bound over all divisions of the blocks.
THRESHOLDS = 24
# The placeholder in arrays of range indices, where a stage cannot have such a range of blocks.
NONE = -1


def takes_turns(workload: Workload) -> bool:
    """Whether the blocks of a model are of several kinds that alternate."""
    return len(graph_of(workload).pattern) > 1


@lru_cache(maxsize=64)
def like_blocks(pattern: tuple[str, ...], layers: int) -> Ints:
    """For each first block and each number of blocks, the first block of the earliest range with
    the same sequence of kinds of blocks, and so the same cost.
    """
    number: dict[tuple[str, ...], int] = {}
    first_of_like = np.zeros((layers, layers + 1), dtype=np.int64)
    every = tuple(pattern[block % len(pattern)] for block in range(layers))
    for first in range(layers):
        for count in range(1, layers - first + 1):
            first_of_like[first, count] = number.setdefault(every[first : first + count], first)
    return first_of_like


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Divisions:
    """All divisions of a model's blocks among a given number of stages that a search space allows.

    ``asked`` (R, 3) has the ranges that differ in cost: the number of the stage, the beginning of
    the first range with the same kinds of blocks, and the number of blocks. ``place`` (S, F, N) has
    the index of stage s's range if it has ``counts[n]`` blocks from block f on.
    """

    num_stages: int
    layers: int
    counts: tuple[int, ...]
    asked: Ints
    place: Ints

    @classmethod
    def of(cls, pattern: tuple[str, ...], layers: int, num_stages: int, space: SearchSpace) -> Self:
        """The divisions of the blocks that a space allows for this number of stages."""
        even = even_layers(layers, num_stages)
        is_even = space.layers_off_balance == 0
        counts = tuple(sorted({*even} if is_even else {*layer_counts(layers, num_stages, space)}))
        like = like_blocks(pattern, layers)
        index = np.full((num_stages, layers + 1, len(counts)), NONE)
        number: dict[tuple[int, int, int], int] = {}
        begins = np.cumsum(even) - even
        for stage in range(num_stages):
            after = num_stages - 1 - stage
            for column, count in enumerate(counts):
                for first in range(stage * counts[0], min(stage * counts[-1], layers - count) + 1):
                    left = layers - first - count
                    if is_even and (first, count) != (begins[stage], even[stage]):
                        continue
                    if after * counts[0] <= left <= after * counts[-1]:
                        key = stage, int(like[first, count]), count
                        index[stage, first, column] = number.setdefault(key, len(number))
        asked = np.array([*number], dtype=np.int64).reshape(-1, 3)
        return cls(num_stages=num_stages, layers=layers, counts=counts, asked=asked, place=index)

    @property
    def even(self) -> Ints:
        """The index of each stage's range of blocks if all stages have equally many blocks."""
        return self.ranges_of(np.array([even_layers(self.layers, self.num_stages)]))

    def steps(self, stage: int) -> Iterator[tuple[Rows, Rows, Rows]]:
        """For each number of blocks that a stage may have: its possible first blocks, the range
        that begins at each, and the first block of the next stage.
        """
        for column, count in enumerate(self.counts):
            ranges = self.place[stage, :, column]
            first = np.flatnonzero(ranges != NONE)
            yield first, ranges[first], first + count

    def ranges_of(self, shares: Ints) -> Ints:
        """The index of each stage's range of blocks, a row for each division, from the stages'
        numbers of blocks.
        """
        first = np.cumsum(shares, axis=1) - shares
        column = np.searchsorted(self.counts, shares)
        return np.asarray(self.place[np.arange(self.num_stages), first, column])

    def every(self) -> Ints | None:
        """The stages' numbers of blocks in every division, one division per row; None if there are
        too many to list.
        """
        if (self.place != NONE).sum() == self.num_stages:
            return np.array([even_layers(self.layers, self.num_stages)])
        counts = np.array(self.counts)
        every = np.zeros((1, 0), dtype=np.int64)
        for after in reversed(range(self.num_stages)):
            rows = np.repeat(every, len(counts), axis=0)
            rows = np.column_stack([rows, np.tile(counts, len(every))])
            left = self.layers - rows.sum(axis=1)
            every = rows[(left >= after * counts[0]) & (left <= after * counts[-1])]
            if len(every) > MOST_DIVISIONS:
                return None
        return every


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class RangeTimes:
    """The times of a stage for each range of blocks (columns) and each candidate strategy (rows);
    ``passed_s`` is infinite where the stage does not fit in memory.

    For one division, a lower bound of the iteration time is the sum of the stages' ``passed_s``,
    plus the longest of their ``waits_s`` (``searchers.exact.relaxed``), plus the work of the first
    stage before its first pass and after its last.
    """

    divisions: Divisions
    micro_batches: Ints
    times: StageTimes
    fits: Bools

    @property
    def passed_s(self) -> Floats:
        """The latency of a micro-batch forward and back through each range of blocks, with its
        sends, for each candidate. For the first stage it includes the work before its first pass
        and after its last.
        """
        times, stage = self.times, self.divisions.asked[:, 0]
        inside_s = times.through_forward_s + times.within_forward_s + times.through_backward_s
        sent_s = (stage < self.divisions.num_stages - 1) * sum(least_sends_of(times))
        beside_s = (stage == 0) * (times.begin_s + times.end_s)
        return np.where(self.fits, inside_s + sent_s + beside_s, np.inf)

    @property
    def waits_s(self) -> Floats:
        """The time that a pipeline takes beyond its latency if it stalls at a stage with this range
        of blocks, for each candidate.
        """
        times, count = self.times, self.micro_batches[:, None]
        ahead = np.minimum(count, self.divisions.num_stages - self.divisions.asked[:, 0]) - 1
        each_s = times.forward_s + times.backward_s
        return np.maximum((count - 1) * each_s - ahead * times.forward_s, 0.0)

    def chosen(self, rows: Rows | Bools) -> Self:
        """The times of only those candidates that have these indices."""
        return type(self)(
            divisions=self.divisions,
            micro_batches=self.micro_batches[rows],
            times=self.times.chosen(rows),
            fits=self.fits[rows],
        )

    def seconds_of(self, ranges: Ints) -> Floats:
        """The iteration time of each division of the blocks with the first candidate strategy,
        infinite if a stage does not fit in memory. Row d of ``ranges`` has the index of each
        stage's range of blocks.
        """
        of_divisions = {name: getattr(self.times, name)[0][ranges] for name in TIMES}
        seconds = iteration_s(
            StageTimes(**of_divisions), np.full(len(ranges), self.micro_batches[0])
        )
        return np.where(self.fits[0][ranges].all(axis=1), seconds, np.inf)

    def even_s(self) -> Floats:
        """The iteration time with each candidate strategy if all stages have equally many
        blocks.
        """
        ranges = self.divisions.even[0]
        times = StageTimes(**{name: getattr(self.times, name)[:, ranges] for name in TIMES})
        seconds = iteration_s(times, self.micro_batches)
        return np.where(self.fits[:, ranges].all(axis=1), seconds, np.inf)

    def least_s(self, limit_s: float) -> Floats:
        """For each candidate strategy, a lower bound in seconds of the iteration times over all
        divisions of the blocks, at most ``limit_s``.
        """
        edges = self.edges(limit_s)
        *_, (passed_s, _) = self.within_by_stage(edges[:, 1:])
        # A division whose longest stall lies between two thresholds takes at least as long as if
        # the stall were the lower threshold.
        return np.asarray(np.minimum((edges[:, :-1] + passed_s[..., -1]).min(axis=1), limit_s))

    def edges(self, limit_s: float) -> Floats:
        """Ascending thresholds of a pipeline's longest stall, for each candidate: from its minimum
        over all divisions to its maximum in divisions that take less than ``limit_s``.
        """
        waits_s, passed_s = self.waits_s, self.passed_s
        least_s = self.joined_by_stage(np.where(self.fits, waits_s, np.inf), np.maximum)[-1, :, -1]
        through_s = self.joined_by_stage(passed_s, np.add)[-1, :, -1]
        most_s = np.where(self.fits, waits_s, 0.0).max(axis=1)
        can = np.isfinite(least_s)
        # Where no division fits in memory, the minimum is infinite, and zero takes its place.
        lowest = np.where(can, least_s, 0.0)
        highest = np.minimum(limit_s - np.where(can, through_s, 0.0), most_s)
        widths = np.maximum(highest - lowest, 0.0)
        return np.asarray(lowest[:, None] + widths[:, None] * np.linspace(0.0, 1.0, THRESHOLDS + 1))

    def near_best(self, limit_s: float) -> Ints:
        """For the first candidate strategy, the stages' numbers of blocks in the divisions with the
        smallest lower bounds.
        """
        stages = [*self.within_by_stage(self.edges(limit_s))]
        rows = np.flatnonzero(np.isfinite(stages[-1][0][0, :, -1]))
        left, shares = np.full(len(rows), self.divisions.layers), []
        for _, which in reversed(stages):
            shares.append(np.array(self.divisions.counts)[which[0, rows, left]])
            left = left - shares[-1]
        return np.unique(np.stack(shares[::-1], axis=1), axis=0)

    def joined_by_stage(self, seconds: Floats, join: np.ufunc) -> Floats:
        """For each stage, candidate and number of blocks in front of the stage, the least total (or
        maximum, as ``join`` says) of ``seconds`` over the stages in front.
        """
        least_s = np.full(
            (self.divisions.num_stages + 1, len(seconds), self.divisions.layers + 1), np.inf
        )
        least_s[0, :, 0] = 0.0
        for stage in range(self.divisions.num_stages):
            before, further = least_s[stage], least_s[stage + 1]
            for first, ranges, after in self.divisions.steps(stage):
                both = join(before[:, first], seconds[:, ranges])
                further[:, after] = np.minimum(further[:, after], both)
        return least_s

    def within_by_stage(self, edges: Floats) -> Iterator[tuple[Floats, Ints]]:
        """For each stage, candidate and threshold in ``edges``, the smallest latency of this stage
        and all stages in front of it if no stall exceeds the threshold, by the block that follows
        the stage. Also the index in ``counts`` of the stage's number of blocks that gives this
        latency.
        """
        passed_s, waits_s = self.passed_s, self.waits_s
        size = *edges.shape, self.divisions.layers + 1
        least_s = np.full(size, np.inf)
        least_s[..., 0] = 0.0
        for stage in range(self.divisions.num_stages):
            further, which = np.full(size, np.inf), np.zeros(size, dtype=np.int8)
            for column, (first, ranges, after) in enumerate(self.divisions.steps(stage)):
                may = waits_s[:, None, ranges] <= edges[..., None] * (1 + 1e-12)
                both = np.where(may, least_s[..., first] + passed_s[:, None, ranges], np.inf)
                which[..., after] = np.where(both < further[..., after], column, which[..., after])
                further[..., after] = np.minimum(further[..., after], both)
            yield further, which
            least_s = further
