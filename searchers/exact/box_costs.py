"""Costs and lower bounds of boxes: a box is a set of memory-saving strategies (ZeRO levels, offload
ratios, recomputed blocks) whose values lie in given ranges.

In a box, the smallest ratios take the least time, and the largest ratios leave the most memory
free. So the times at the smallest ratios are lower bounds for the box, and if the largest ratios do
not fit in memory, nothing in the box does. A ratio of zero is a box of its own, because it needs no
buffers and starts no copies. Recomputed blocks are treated separately: times are least with the
fewest or with the most of them.

Axes: R rows, each a box with the number of blocks for each way to keep fewer activations; D
dimensions of ``names_of("savings")``.
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
    compared_columns,
    least_with,
    savings_columns,
)
from searchers.exact.groups import Group, LeastWork
from searchers.exact.order_costs import OrderTraits
from searchers.meshes import Mesh
from searchers.strategy import Ledger

# For each dimension that saves memory (ZeRO level and offload ratios), the values that a stage may
# have, in ascending order.
Choices = tuple[tuple[float, ...], ...]
# ``low`` and ``high`` of ``Boxes`` have a row for each box and a column for each dimension that
# saves memory; an entry is an index into the dimension's allowed values.

# How many times each box is cut in half in one round of branch and bound.
HALVED = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes(ColumnSet):
    """Boxes of memory-saving strategies, one per row. A box holds every strategy whose values have
    indices from ``low`` to ``high`` and which recomputes ``fewest`` to ``most`` blocks.
    """

    choices: Choices
    low: Ints
    high: Ints
    fewest: Ints
    most: Ints

    @classmethod
    def whole(cls, choices: Choices) -> Self:
        """Boxes that together hold every combination of the allowed values exactly once, and
        recompute no blocks.
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
        """A copy of the boxes in which box i recomputes between ``fewest[i]`` and ``most[i]``
        blocks.
        """
        return replace(self, fewest=fewest, most=most)

    def __len__(self) -> int:
        return len(self.low)

    @property
    def are_points(self) -> Bools:
        """For each box, whether it holds only a single memory-saving strategy."""
        return np.asarray((self.low == self.high).all(axis=1) & (self.fewest == self.most))

    @property
    def codes(self) -> Ints:
        """An integer for each box; boxes get the same integer exactly if they have the same ranges
        of ZeRO level and offload ratios.
        """
        base = max(map(len, self.choices))
        code = np.zeros(len(self), dtype=np.int64)
        for places in (*self.low.T, *self.high.T):
            code = code * base + places
        return code

    def savings(self, places: Ints) -> Floats:
        """Converts indices into the allowed values to the values themselves: a row for each box, a
        column for each dimension.
        """
        return np.stack(
            [np.array(own)[column] for own, column in zip(self.choices, places.T, strict=True)],
            axis=1,
        )

    def halved(self, times: int = HALVED) -> tuple[Self, Rows]:
        """Cut each box in half along its widest dimension, ``times`` times; returns the smaller
        boxes, and for each of them the index of the original box.
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
        """The boxes with these smallest and largest indices; the last column of each array is a
        number of recomputed blocks.
        """
        return type(self)(
            choices=self.choices,
            low=low[:, :-1],
            high=high[:, :-1],
            fewest=low[:, -1],
            most=high[:, -1],
        )


def _parts_of_box(ratios: Sequence[float]) -> list[tuple[int, int]]:
    """Splits the values of an offload ratio into zero alone and all positive ratios; each part is a
    pair of indices, of its first and its last value.
    """
    zeros = sum(ratio == 0 for ratio in ratios)
    return [*([(0, zeros - 1)] if zeros else []), *_rest(zeros, len(ratios))]


def _rest(first: int, count: int) -> Iterator[tuple[int, int]]:
    if first < count:
        yield first, count - 1


# Computes costs of boxes, and lower bounds of these costs, for many stages at once.
#
# If a box has a range of recomputed blocks, the range is narrowed first, to begin at the fewest
# blocks with which the stage fits in memory at the largest offload ratios. Lower bounds are
# evaluated at the two ends of the range only.
#
# Axes of arrays: R rows, each a box for one stage; T ways to keep fewer activations of a block
# (``counts_of_blocks()``).


# The number of boxes whose costs are computed in one batch, counted once for each stage that may
# use the box.
TOGETHER = 1 << 17


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pool(ColumnSet):
    """Candidates for one stage, each with the box of strategies that it comes from. Where
    ``is_open``, a candidate's times are lower bounds of the whole box; elsewhere the candidate is a
    single strategy.
    """

    options: Options
    boxes: Boxes
    is_open: Bools


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BoxQuery:
    """Boxes of strategies to evaluate for one stage. Row i of ``counts`` says in how many of the
    stage's blocks box i uses each way to keep fewer activations, such as recomputation.
    """

    place: StagePosition
    counts: Ints
    boxes: Boxes


@dataclass(frozen=True, slots=True, kw_only=True)
class BoxCosts:
    """Computes costs and lower bounds of boxes (sets of memory-saving strategies) for the stages of
    a group of pipelines.
    """

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]

    def pools(
        self, asked: Sequence[BoxQuery], limit_s: float
    ) -> Iterator[tuple[StagePosition, Pool]]:
        """For each stage, the candidates that may be in a pipeline faster than ``limit_s``."""
        for part in _parts(asked):
            yield from self._pools(part, _BoxRows.of(part), limit_s)

    def least(self, asked: Sequence[BoxQuery], limit_s: float) -> Iterator[tuple[Options, Rows]]:
        """For each stage, lower bounds of all the candidates that ``pools`` would return, and for
        each bound the index of its stage. Columns that only a plan needs are left out. A stage may
        be at any place of a pipeline where it has at least its micro-batches in flight.
        """
        start = 0
        for part in _parts(asked):
            rows, boxes = self._hopeful(_BoxRows.of(part), limit_s, anywhere=True)
            # Only boxes with a single value of each ratio are evaluated as strategies here. For any
            # other box the lower bound suffices, since it is below the times of all strategies in
            # the box.
            alike_rows = rows.chosen(alike := np.flatnonzero(rows.are_alike))
            fitting = alike[
                self._fits(alike_rows, alike_rows.low, alike_rows.most, of_others=False)
            ]
            options, ends, _ = self._with_candidates(rows, boxes, fitting)
            yield options, start + ends.place
            start += len(part)

    def bounded(self, asked: BoxQuery, limit_s: float) -> tuple[BoxQuery, Options]:
        """The boxes of a stage that may hold a strategy of a pipeline faster than ``limit_s``, with
        lower bounds of their times; numbers of recomputed blocks that cannot fit are left out.
        """
        rows, options = self._hopeful(_BoxRows.of([asked]), limit_s)
        boxes = asked.boxes.chosen(rows.row).with_blocks(rows.fewest, rows.most)
        return replace(asked, counts=asked.counts[rows.row], boxes=boxes), options

    def strategies(self, asked: BoxQuery) -> Options:
        """The strategies that fit in memory, of boxes that hold a single strategy each."""
        rows = _BoxRows.of([asked])
        rows = rows.chosen(self._fits(rows, rows.low, rows.fewest, of_others=False))
        if not len(rows):
            return _nothing(rows)
        batch = self._batch(rows, rows.low, rows.fewest)
        options = _options(rows, self._costs(batch, self._places(rows)))
        return options.chosen(self._has_host(rows, options))

    def _pools(
        self, asked: Sequence[BoxQuery], rows: "_BoxRows", limit_s: float
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

    def _hopeful(
        self, rows: "_BoxRows", limit_s: float, *, anywhere: bool = False
    ) -> tuple["_BoxRows", Options]:
        """Prunes boxes in which no strategy fits in memory or can beat the upper bound; returns the
        other boxes, and for each a candidate with lower bounds of its times. ``anywhere``: stages
        may have more micro-batches in flight, which overlap with further stages.
        """
        rows = rows.chosen(self._fits(rows, rows.high, rows.most, of_others=True))
        rows = replace(rows, fewest=self._fewest(rows, rows.high, of_others=True))
        boxes = self._bounds(rows)
        in_flight = self._most_in_flight(rows) if anywhere else rows.of_place("in_flight")
        least_s = self._least_s(rows, boxes, in_flight)
        may = self._has_host(rows, boxes) & (least_s < limit_s)
        return rows.chosen(may), boxes.chosen(may)

    def _with_candidates(
        self, rows: "_BoxRows", boxes: Options, fitting: Rows
    ) -> tuple[Options, "_BoxRows", Bools]:
        """Two kinds of candidates in one list: first the strategy with the smallest ratios of each
        box in ``fitting``, then each box that may hold a better strategy. A mask marks the boxes.
        """
        sure = rows.chosen(fitting)
        sure = replace(sure, fewest=self._fewest(sure, sure.low, of_others=False))
        true, are_best = self._smallest_strategies(sure)
        has_host = self._has_host(sure, true)
        is_open = ~rows.are_points
        if not self.group.has_formula:
            # In schedules other than 1F1B, recomputing more blocks may take more memory, so boxes
            # with several numbers of recomputed blocks are kept.
            are_best &= rows.are_points[fitting]
        is_open[fitting[has_host & are_best]] = False
        closed, open_rows = fitting[has_host], np.flatnonzero(is_open)
        both = true.chosen(has_host).and_also(boxes.chosen(open_rows))
        ends = sure.chosen(has_host).closed().and_also(rows.chosen(open_rows))
        return both, ends, np.repeat([False, True], [len(closed), len(open_rows)])

    def _smallest_strategies(self, rows: "_BoxRows") -> tuple[Options, Bools]:
        """For each box, the strategy with the smallest ratios and the fewest recomputed blocks, and
        whether it dominates the whole box. A box with several values of a ratio is never reported
        as dominated.
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
        # If a time is at least as long with the most recomputed blocks as with the fewest, it is at
        # least as long with any number in between.
        times = true.times
        # The part of a pass for which the next stage does not wait. It is compared too, because
        # with cheaper sends a longer pass may hand on its result earlier.
        lost = (
            times.forward_s - times.through_forward_s,
            times.backward_s - times.through_backward_s,
        )
        columns = [*compared_columns(true, with_host=True), *lost]
        best[several] = np.logical_and.reduce(
            [column[several] <= column[len(rows) :] for column in columns]
        )
        return true.chosen(np.arange(len(rows))), best

    @property
    def _are_lines(self) -> bool:
        """Whether all times in a box lie between its times with the fewest and with the most
        recomputed blocks. False for schedules other than 1F1B, and for engines whose passes may
        wait for the host.
        """
        return self.group.has_formula and ENGINES[self.space.engine].host is None

    def _bounds(self, rows: "_BoxRows") -> Options:
        """For each box, a candidate whose times are lower bounds of the times of every strategy in
        the box.
        """
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
        """For each box, the fewest recomputed blocks with which one of its strategies fits in
        memory. Assumes that such a strategy fits with the most recomputed blocks, and that more
        recomputed blocks never need more memory.
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

    def _most_in_flight(self, rows: "_BoxRows") -> Ints:
        """The most micro-batches that each stage has in flight in a pipeline of the group: one for
        itself and one for each stage behind it, which needs a block and a mesh of GPUs.
        """
        cluster, layers = self.problem.cluster, self.problem.workload.model.layers
        smallest = min(mesh.num_gpus for mesh in self.group.meshes)
        gpus = (cluster.num_gpus - rows.of_place("num_gpus")) // smallest
        behind = np.minimum(gpus, layers - rows.of_place("layers"))
        behind = np.where(rows.of_place("has_head"), 0, behind)
        return np.asarray(np.minimum(1 + behind, self.group.micro_batches))

    def _least_s(self, rows: "_BoxRows", options: Options, in_flight: Ints) -> Column:
        blocks = rows.of_place("first_block"), rows.of_place("layers")
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
    """Boxes of strategies for several stages (places), with a row for each box.

    ``places`` are columns with a value per stage. ``place`` is the index of a row's stage, ``row``
    the row's index among the boxes of this stage. ``low`` and ``high`` (R, 5) are its smallest and
    largest values of ``names_of("savings")``, ``fewest`` and ``most`` its numbers of recomputed
    blocks.
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
    def of(cls, asked: Sequence[BoxQuery]) -> Self:
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
        """For each box, whether it has a single ZeRO level and a single value of each offload
        ratio; its number of recomputed blocks may still vary.
        """
        return np.asarray((self.low == self.high).all(axis=1))

    @property
    def are_points(self) -> Bools:
        """For each box, whether it holds only a single memory-saving strategy."""
        return np.asarray(self.are_alike & (self.fewest == self.most))

    def closed(self) -> Self:
        """A copy of the boxes in which each recomputes only its smallest number of blocks."""
        return replace(self, most=self.fewest)

    def of_place(self, name: str) -> Ints:
        """The column ``name`` of the stages, with each stage's value repeated for each of its
        boxes.
        """
        return self.places[name][self.place]

    def _with(self, columns: Mapping[str, Column]) -> Self:
        return type(self)(places=self.places, **columns)


def _values(asked: Sequence[BoxQuery], corner: Callable[[Boxes], Ints]) -> Column:
    """The ZeRO level and offload ratios at one corner of each box: its smallest values or its
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
    """The columns of candidates that are equal for all boxes of a stage, such as its parallel
    degrees; and the stage's number of GPUs.
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
    """The boxes as candidates for stages: each with the smallest ratios and the fewest recomputed
    blocks of its box.
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
    """A list of candidates with no rows."""
    none = np.empty(0)
    times = StageTimes(**dict.fromkeys(TIMES, none))
    return Options(savings=rows.low, counts=rows.counts, times=times, host_bytes=none)


def _parts(asked: Sequence[BoxQuery]) -> Iterator[Sequence[BoxQuery]]:
    """Divides the stages and their boxes into batches of about ``TOGETHER`` boxes at most."""
    part = np.cumsum([len(one.boxes) for one in asked]) // TOGETHER
    bounds = [0, *(np.flatnonzero(np.diff(part)) + 1).tolist(), len(asked)]
    for start, end in pairwise(bounds):
        if end > start:
            yield asked[start:end]
