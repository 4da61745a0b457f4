"""Costs and lower bounds of boxes: a box is a set of memory-saving strategies (ZeRO levels, offload
ratios, recomputed blocks) whose values lie in given ranges.

The corner with the least ratios takes the least time, the corner with the most leaves the most
room. So the time of the one and the fit of the other say what no way inside the box undercuts. A
ratio of zero is an interval of its own: it needs no buffers, and starts no copies. The number of
recomputed blocks is apart from ratios: times are least at one end of its interval or the other.

Axes: R rows, each a box with numbers of treated blocks; D dimensions of ``names_of("savings")``.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product
from typing import Self

import numpy as np

from mistlab.core.arrays import Bools, Column, Floats, Ints, Rows
from mistlab.core.columns import ColumnSet
from mistlab.cost.memory import host_room_at
from mistlab.engines.engine import ENGINES
from mistlab.job.search import Problem
from mistlab.plan.dimensions import DIMENSIONS, RECOMPUTED, counts_of_blocks, names_of
from mistlab.plan.space import SearchSpace
from mistlab.stages.stage_batch import TIMES, StageBatch, StageCosts, StagesInOrder, StageTimes
from searchers.exact.candidates import (
    Options,
    StagePosition,
    least_with,
    savings_columns,
    telling_columns,
)
from searchers.exact.groups import Group, LeastWork
from searchers.exact.order_costs import OrderTraits
from searchers.meshes import Mesh
from searchers.strategy import Ledger

# The allowed values of a stage, in ascending order, for each dimension that saves memory (ZeRO
# level and offload ratios).
Choices = tuple[tuple[float, ...], ...]
# In arrays of boxes, ``low`` and ``high`` (R, D) have for each box and each of these dimensions an
# index into the allowed values.

# The number of times that each box is halved in one round of branch and bound.
HALVED = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes(ColumnSet):
    """Boxes of memory-saving strategies (R): each holds the strategies with values from index
    ``low`` to index ``high`` of each dimension (R, D), and with ``fewest`` to ``most`` recomputed
    blocks (R).
    """

    choices: Choices
    low: Ints
    high: Ints
    fewest: Ints
    most: Ints

    @classmethod
    def whole(cls, choices: Choices) -> Self:
        """Boxes that together hold every combination of allowed values exactly once, without
        recomputed blocks.
        """
        parts = [
            _parts_of_box(values)
            if DIMENSIONS[name].is_ratio
            else [(i, i) for i in range(len(values))]
            for name, values in zip(names_of("savings"), choices, strict=True)
        ]
        bounds = np.array([*product(*parts)], dtype=np.int64)
        none = np.zeros(len(bounds), dtype=np.int64)
        return cls(
            choices=choices, low=bounds[:, :, 0], high=bounds[:, :, 1], fewest=none, most=none
        )

    def with_blocks(self, fewest: Ints, most: Ints) -> Self:
        """A copy of the boxes with these ranges of recomputed blocks."""
        return replace(self, fewest=fewest, most=most)

    def __len__(self) -> int:
        return len(self.low)

    @property
    def are_points(self) -> Bools:
        """Whether each box (R) holds only a single memory-saving strategy."""
        return np.asarray((self.low == self.high).all(axis=1) & (self.fewest == self.most))

    @property
    def codes(self) -> Ints:
        """An integer for each box (R), which is equal exactly for boxes with the same ranges of
        ratios and levels (recomputed blocks aside).
        """
        base = max(map(len, self.choices))
        code = np.zeros(len(self), dtype=np.int64)
        for places in (*self.low.T, *self.high.T):
            code = code * base + places
        return code

    def savings(self, places: Ints) -> Floats:
        """The values of all dimensions (R, D) at these indices into the allowed values."""
        return np.stack(
            [np.array(own)[column] for own, column in zip(self.choices, places.T, strict=True)],
            axis=1,
        )

    def halved(self, times: int = HALVED) -> tuple[Self, Rows]:
        """Split each box in halves along its widest dimension (width times ``box_weight``),
        ``times`` times; returns the parts, and for each part the index of the box that it comes
        from.
        """
        parts, origin = self, np.arange(len(self))
        weights = np.array([*(DIMENSIONS[name].box_weight for name in names_of("savings")), 1])
        for _ in range(times):
            low = np.column_stack([parts.low, parts.fewest])
            high = np.column_stack([parts.high, parts.most])
            width = high - low
            widest = (width * weights).argmax(axis=1)
            rows = np.flatnonzero(width.max(axis=1) > 0)
            along = widest[rows]
            middle = (low[rows, along] + high[rows, along]) // 2
            upper_low, lower_high = low[rows], high.copy()
            upper_low[np.arange(len(rows)), along] = middle + 1
            lower_high[rows, along] = middle
            lower = parts._between(low, lower_high)
            parts = lower.and_also(parts._between(upper_low, high[rows]))
            origin = np.concatenate([origin, origin[rows]])
        return parts, origin

    def _between(self, low: Ints, high: Ints) -> Self:
        """The boxes from ``low`` to ``high``, whose last columns are the numbers of recomputed
        blocks (R, D + 1).
        """
        return type(self)(
            choices=self.choices,
            low=low[:, :-1],
            high=high[:, :-1],
            fewest=low[:, -1],
            most=high[:, -1],
        )


def _parts_of_box(ratios: Sequence[float]) -> list[tuple[int, int]]:
    """The two initial ranges of an offload ratio, each as the indices of its first and last value:
    zero only, and all positive ratios.
    """
    zeros = sum(ratio == 0 for ratio in ratios)
    return [*([(0, zeros - 1)] if zeros else []), *_rest(zeros, len(ratios))]


def _rest(first: int, count: int) -> Iterator[tuple[int, int]]:
    if first < count:
        yield first, count - 1


# Computes the costs and lower bounds of boxes for many stage positions at once. A box holds
# memory-saving strategies with ratios and numbers of recomputed blocks in given ranges. A box with
# several numbers of recomputed blocks is narrowed first, to the fewest blocks that fit in memory
# with the largest offload ratios; its bounds are then evaluated at the fewest and at the most
# blocks only.
#
# Axes: R rows, each a box at a stage position; T ways to run a block (``counts_of_blocks()``).


# The number of boxes at stage positions whose costs are computed in one batch.
TOGETHER = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool(ColumnSet):
    """Candidates for a stage at one position, each with the box of strategies that it is from, and
    whether it is a lower bound of all the box (open) or a single strategy.
    """

    options: Options
    boxes: Boxes
    is_open: Bools


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Asked:
    """Boxes to be evaluated for a stage at one position; ``counts`` (R, T) are the numbers of
    blocks that are recomputed or run in other ways, and each box also has a range of recomputed
    blocks.
    """

    place: StagePosition
    counts: Ints
    boxes: Boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxCosts:
    """Evaluates boxes (sets of memory-saving strategies) for the stages of a group of pipelines."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]

    def pools(self, asked: Sequence[Asked], limit_s: float) -> Iterator[tuple[StagePosition, Pool]]:
        """For each stage position, the candidates that may be part of a pipeline that takes less
        than ``limit_s``.
        """
        for part in _parts(asked):
            yield from self._pools(part, _BoxRows.of(part), limit_s)

    def least(self, asked: Sequence[Asked], limit_s: float) -> Iterator[tuple[Options, Rows]]:
        """For each stage position, candidates that are lower bounds of all candidates in ``pools``,
        with the index of the position of each; columns that only plans need are omitted.
        """
        start = 0
        for part in _parts(asked):
            rows, boxes = self._hopeful(_BoxRows.of(part), limit_s)
            # A box with ranges of ratios needs no candidate with single ratios here, since its
            # lower bound is below all of these.
            alike_rows = rows.chosen(alike := np.flatnonzero(rows.are_alike))
            fitting = alike[
                self._fits(alike_rows, alike_rows.low, alike_rows.most, of_others=False)
            ]
            options, ends, _ = self._with_candidates(rows, boxes, fitting)
            yield options, start + ends.place
            start += len(part)

    def _pools(
        self, asked: Sequence[Asked], rows: "_BoxRows", limit_s: float
    ) -> Iterator[tuple[StagePosition, Pool]]:
        rows, boxes = self._hopeful(rows, limit_s)
        fitting = np.flatnonzero(self._fits(rows, rows.low, rows.most, of_others=False))
        both, ends, are_open = self._with_candidates(rows, boxes, fitting)
        in_order = np.argsort(ends.place, kind="stable")
        bounds = np.searchsorted(ends.place[in_order], np.arange(len(asked) + 1)).tolist()
        for question, (start, end) in zip(asked, pairwise(bounds), strict=True):
            here = in_order[start:end]
            chosen = question.boxes.chosen(ends.row[here])
            chosen = chosen.with_blocks(ends.fewest[here], ends.most[here])
            yield (
                question.place,
                Pool(options=both.chosen(here), boxes=chosen, is_open=are_open[here]),
            )

    def _hopeful(self, rows: "_BoxRows", limit_s: float) -> tuple["_BoxRows", Options]:
        """Prune boxes of which no strategy fits in memory or beats the upper bound; returns the
        other boxes, each with a candidate whose times are lower bounds of all of the box.
        """
        rows = rows.chosen(self._fits(rows, rows.high, rows.most, of_others=True))
        rows = replace(rows, fewest=self._fewest(rows, rows.high, of_others=True))
        boxes = self._bounds(rows)
        may = self._has_host(rows, boxes) & (self._least_s(rows, boxes) < limit_s)
        return rows.chosen(may), boxes.chosen(may)

    def _with_candidates(
        self, rows: "_BoxRows", boxes: Options, fitting: Rows
    ) -> tuple[Options, "_BoxRows", Bools]:
        """The single strategies of boxes that fit in memory with the smallest ratios (``fitting``),
        followed by the boxes that may hold a better strategy; a mask says which candidates are
        boxes.
        """
        sure = rows.chosen(fitting)
        sure = replace(sure, fewest=self._fewest(sure, sure.low, of_others=False))
        true, are_best = self._true(sure)
        has_host = self._has_host(sure, true)
        is_open = ~rows.are_points
        if not self.group.has_formula:
            # In an order of passes other than 1F1B, memory may grow with recomputed blocks, so no
            # number of them is pruned here.
            are_best &= rows.are_points[fitting]
        is_open[fitting[has_host & are_best]] = False
        closed, open_rows = fitting[has_host], np.flatnonzero(is_open)
        both = true.chosen(has_host).and_also(boxes.chosen(open_rows))
        ends = sure.chosen(has_host).closed().and_also(rows.chosen(open_rows))
        return both, ends, np.repeat([False, True], [len(closed), len(open_rows)])

    def _true(self, rows: "_BoxRows") -> tuple[Options, Bools]:
        """The strategy of each box with the smallest ratios and the fewest recomputed blocks as a
        candidate, and whether it dominates all of the box; only boxes without ranges of ratios are
        tested for that.
        """
        if not len(rows):
            return _nothing(rows), np.empty(0, dtype=np.bool_)
        best = rows.are_alike
        several = np.flatnonzero(best & (rows.fewest < rows.most))
        if not self._are_lines:
            best[several] = False
            several = several[:0]
        with_most = rows.chosen(several)
        ends = rows.and_also(replace(with_most, fewest=with_most.most))
        batch = self._batch(ends, ends.low, ends.fewest)
        true = _options(ends, self._costs(batch, self._places(ends)))
        # A time that is no smaller with the most recomputed blocks than with the fewest is no
        # smaller with any number in between.
        times = true.times
        # A pass's time beyond its latency: with cheaper sends, a pass that is longer in all may
        # have a shorter latency.
        lost = (
            times.forward_s - times.through_forward_s,
            times.backward_s - times.through_backward_s,
        )
        columns = [*telling_columns(true, with_host=True), *lost]
        best[several] = np.logical_and.reduce(
            [column[several] <= column[len(rows) :] for column in columns]
        )
        return true.chosen(np.arange(len(rows))), best

    @property
    def _are_lines(self) -> bool:
        """Whether all times in a box lie between those with the fewest and the most recomputed
        blocks. They may not in orders of passes other than 1F1B, and where passes wait for the
        host.
        """
        return self.group.has_formula and ENGINES[self.space.engine].host is None

    def _bounds(self, rows: "_BoxRows") -> Options:
        """For each box, a candidate whose times are lower bounds of all strategies in the box."""
        if not len(rows):
            return _nothing(rows)
        least = self._batch(rows, rows.low, rows.fewest)
        most = self._batch(rows, rows.high, rows.most)
        return _options(rows, self._least_costs(least, most, self._places(rows)))

    def _costs(self, batch: StageBatch, places: StagesInOrder | None) -> StageCosts:
        ledger, engine = self.ledger, self.space.engine
        costs = ledger.stage_costs(batch, engine=engine)
        if self.group.has_formula:
            return costs
        traits = OrderTraits.of(self.group.order, engine, self.group.micro_batches)
        return traits.in_order(
            costs,
            (batch, batch),
            places,
            lambda few, _: ledger.part_seconds(few, engine=engine),
        )

    def _least_costs(
        self, least: StageBatch, most: StageBatch, places: StagesInOrder | None
    ) -> StageCosts:
        ledger, engine = self.ledger, self.space.engine
        costs = ledger.stage_bounds(least, most, engine=engine)
        if self.group.has_formula:
            return costs
        traits = OrderTraits.of(self.group.order, engine, self.group.micro_batches)
        return traits.in_order(
            costs,
            (least, most),
            places,
            lambda *ends: ledger.part_seconds(*ends, engine=engine),
        )

    def _fits(
        self, rows: "_BoxRows", savings: Column, recomputed: Column, *, of_others: bool
    ) -> Bools:
        if not len(rows):
            return np.empty(0, dtype=np.bool_)
        batch = self._batch(rows, savings, recomputed)
        return self.ledger.stage_fits(
            batch, self._places(rows), engine=self.space.engine, of_others=of_others
        )

    def _fewest(self, rows: "_BoxRows", savings: Column, *, of_others: bool) -> Ints:
        """The fewest recomputed blocks (R) with which a strategy of each box fits in memory, given
        that it fits with the most; more recomputed blocks never need more memory.
        """
        fewest, most = rows.fewest.copy(), rows.most.copy()
        batch = self._batch(rows, savings, most)
        asked = fewest.copy()
        while len(left := np.flatnonzero(fewest < most)):
            undecided = batch.chosen(left).with_columns(**{RECOMPUTED: asked[left]})
            fits = self.ledger.stage_fits(
                undecided,
                self._places(rows.chosen(left)),
                engine=self.space.engine,
                of_others=of_others,
            )
            most[left[fits]] = asked[left[fits]]
            fewest[left[~fits]] = asked[left[~fits]] + 1
            asked = (fewest + most) // 2
        return most

    def _has_host(self, rows: "_BoxRows", options: Options) -> Bools:
        cluster = self.problem.cluster
        gpus = np.minimum(rows.of_place("num_gpus"), cluster.gpus_per_node)
        room = host_room_at(cluster, rows.of_place("first_rank"))
        return np.asarray(options.host_bytes * gpus <= room)

    def _least_s(self, rows: "_BoxRows", options: Options) -> Column:
        blocks = rows.of_place("first_block"), rows.of_place("layers")
        in_flight = rows.of_place("in_flight")
        return least_with(self.problem, self.group, self.work, options, blocks, in_flight)

    def _places(self, rows: "_BoxRows") -> StagesInOrder | None:
        return self.group.in_order(rows.of_place("stage"))

    def _batch(self, rows: "_BoxRows", savings: Column, recomputed: Column) -> StageBatch:
        has_head = "has_embedding" if self.group.turns else "has_head"
        counts = dict(zip(counts_of_blocks(), rows.counts.T, strict=True))
        return StageBatch(
            **{name: rows.of_place(name) for name in (*names_of("mesh"), *_POSITIONS)},
            has_head=rows.of_place(has_head),
            **savings_columns(savings),
            **{**counts, RECOMPUTED: recomputed},
            micro_batches=self.group.micro_batches,
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _BoxRows(ColumnSet):
    """Boxes at several stage positions as columns, with a row for each box.

    ``places`` are columns of the places. ``place`` is the number of a row's place, ``row`` its row
    among the boxes of the place; ``low`` and ``high`` (R, 5) are its least and largest values of
    ``names_of("savings")``, and ``fewest`` and ``most`` its numbers of recomputed blocks.
    """

    places: Mapping[str, Ints]
    place: Rows
    row: Rows
    low: Column
    high: Column
    fewest: Column
    most: Column
    counts: Column

    @classmethod
    def of(cls, asked: Sequence[Asked]) -> Self:
        sizes = [len(one.boxes) for one in asked]
        return cls(
            places=_columns_of([one.place for one in asked]),
            place=np.repeat(np.arange(len(asked)), sizes),
            row=np.concatenate([np.arange(size) for size in sizes]),
            low=_values(asked, lambda boxes: boxes.low),
            high=_values(asked, lambda boxes: boxes.high),
            fewest=np.concatenate([one.boxes.fewest for one in asked]),
            most=np.concatenate([one.boxes.most for one in asked]),
            counts=np.concatenate([one.counts for one in asked]),
        )

    def __len__(self) -> int:
        return len(self.place)

    @property
    def are_alike(self) -> Bools:
        """Whether each box (R) has a single value of each ratio and level; numbers of recomputed
        blocks may still differ.
        """
        return np.asarray((self.low == self.high).all(axis=1))

    @property
    def are_points(self) -> Bools:
        """Whether each box (R) holds only a single memory-saving strategy."""
        return np.asarray(self.are_alike & (self.fewest == self.most))

    def closed(self) -> Self:
        """A copy of the boxes, each reduced to its fewest recomputed blocks."""
        return replace(self, most=self.fewest)

    def of_place(self, name: str) -> Ints:
        """A column of the stage positions, repeated for each box of a position."""
        return self.places[name][self.place]

    def _with(self, columns: Mapping[str, Column]) -> Self:
        return type(self)(places=self.places, **columns)


def _values(asked: Sequence[Asked], corner: Callable[[Boxes], Ints]) -> Column:
    """The values (R, 5) of ratios and levels at one corner of each box: all smallest or all
    largest.
    """
    sizes = [len(one.boxes) for one in asked]
    ends = np.cumsum(sizes)
    by_choices: dict[Choices, list[int]] = defaultdict(list)
    for number, question in enumerate(asked):
        by_choices[question.boxes.choices].append(number)
    values = np.empty((ends[-1], len(names_of("savings"))))
    for numbers in by_choices.values():
        rows = np.concatenate([np.arange(ends[i] - sizes[i], ends[i]) for i in numbers])
        places = np.concatenate([corner(asked[i].boxes) for i in numbers])
        values[rows] = asked[numbers[0]].boxes.savings(places)
    return values


def _columns_of(places: Sequence[StagePosition]) -> Mapping[str, Ints]:
    """The columns of candidates that depend only on the stage position, and the number of GPUs at
    each position.
    """
    values = {mesh: mesh.values() for mesh in {place.mesh for place in places}}
    columns = {
        **{name: [values[place.mesh][name] for place in places] for name in names_of("mesh")},
        "layers": [place.layers for place in places],
        "in_flight": [place.in_flight for place in places],
        "has_embedding": [place.is_first for place in places],
        "has_head": [place.is_last for place in places],
        "stage": [place.stage for place in places],
        "first_rank": [place.place_in_node for place in places],
        "first_block": [place.first_block for place in places],
        "num_gpus": [place.mesh.num_gpus for place in places],
    }
    return {name: np.array(column, dtype=np.int64) for name, column in columns.items()}


_POSITIONS = ("layers", "in_flight", "has_embedding", "first_rank", "first_block")


def _options(rows: _BoxRows, costs: StageCosts) -> Options:
    """The boxes as candidates, each with the smallest ratios and the fewest recomputed blocks of
    its box.
    """
    counts = rows.counts.copy()
    counts[:, counts_of_blocks().index(RECOMPUTED)] = rows.fewest
    return Options(
        savings=rows.low,
        counts=counts,
        times=StageTimes.of(costs.seconds, -1),
        host_bytes=costs.host_bytes,
    )


def _nothing(rows: _BoxRows) -> Options:
    """An empty list of candidates, as columns."""
    none = np.empty(0)
    times = StageTimes(**dict.fromkeys(TIMES, none))
    return Options(savings=rows.low, counts=rows.counts, times=times, host_bytes=none)


def _parts(asked: Sequence[Asked]) -> Iterator[Sequence[Asked]]:
    """Split the boxes of stage positions into batches of about ``TOGETHER`` boxes at most."""
    part = np.cumsum([len(one.boxes) for one in asked]) // TOGETHER
    bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(asked)]
    for start, end in pairwise(bounds):
        if end > start:
            yield asked[start:end]
