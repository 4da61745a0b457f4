"""Candidates for stages that stand for boxes of ways to save memory, finer where it matters.

Of each box the candidate has the least times. Where the least ratios fit, they are a candidate of
their own, with their true times. So a pipeline of such candidates is never slower than the
pipelines that it stands for, and if it has no boxes it is one of them.

Axes: R rows of a place.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.memory import host_room_at
from mistlab.cost.pipeline import StageTimes
from mistlab.values.dimensions import counts_of_blocks, names_of
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from mistlab.values.stages import StageBatch, StageSeconds
from searchers.joining.boxes import Boxes
from searchers.joining.candidate_table import Options, undominated
from searchers.joining.candidates import StagePosition, hopeful_s, savings_columns
from searchers.joining.groups import Group
from searchers.joining.least_work import LeastWork
from searchers.ledger import Ledger
from searchers.meshes import Mesh
from searchers.savings import counts_choices, savings_choices

Mask = NDArray[np.bool_]

# Boxes that are halved at once for a stage that is a whole pipeline.
ALONE = 32


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Pool:
    """The rows of a place: candidates, their boxes, and whether each stands for a box."""

    options: Options
    boxes: Boxes
    is_open: Mask

    def chosen(self, rows: Mask | NDArray[np.intp]) -> "_Pool":
        return _Pool(
            options=self.options.chosen(rows),
            boxes=self.boxes.chosen(rows),
            is_open=self.is_open[rows],
        )

    def and_also(self, other: "_Pool") -> "_Pool":
        return _Pool(
            options=self.options.and_also(other.options),
            boxes=self.boxes.and_also(other.boxes),
            is_open=np.concatenate([self.is_open, other.is_open]),
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Asked:
    """Boxes to look at for a place, each with its numbers of treated blocks (R, 1)."""

    place: StagePosition
    counts: NDArray[np.int64]
    boxes: Boxes


@dataclass(slots=True, kw_only=True)
class BoxMenus:
    """The candidates for the stages of a group of pipelines, as boxes; in the joining programme
    they take the place of ``Menus``."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    group: Group
    work: Mapping[Mesh, LeastWork]
    with_host: bool = False
    _pools: dict[StagePosition, _Pool] = field(default_factory=dict, init=False)
    # The rows of a place's pool that no other row is at least as good as.
    _best: dict[StagePosition, tuple[Options, NDArray[np.intp]]] = field(
        default_factory=dict, init=False
    )

    def __getitem__(self, place: StagePosition) -> Options:
        """The candidates for a place that was prepared."""
        if place not in self._best:
            pool = self._pools[place]
            rows = undominated(_columns(pool.options, with_host=self.with_host))
            self._best[place] = pool.options.chosen(rows), rows
        return self._best[place][0]

    def prepare(self, places: Iterable[StagePosition], limit_s: float) -> None:
        """Look at places in pipelines that take less than a limit, with the largest boxes."""
        asked = []
        for place in sorted(set(places) - self._pools.keys()):
            choices = savings_choices(self.space, place.mesh, in_pipeline=not place.is_alone)
            whole = Boxes.whole(tuple(tuple(sorted(own)) for own in choices))
            counts = np.array(counts_choices(self.space, place.layers), dtype=np.int64)
            rows = np.tile(np.arange(len(whole)), len(counts))
            asked.append(
                _Asked(
                    place=place,
                    counts=np.repeat(counts, len(whole), axis=0),
                    boxes=whole.chosen(rows),
                )
            )
        for one, pool in zip(asked, self._looked_at(asked, limit_s), strict=True):
            self._pools[one.place] = self._tidied(pool)

    def is_open(self, place: StagePosition, row: int) -> bool:
        """Whether a row of a place's menu stands for a box."""
        return bool(self._pools[place].is_open[self._best[place][1][row]])

    def split(self, stages: Iterable[tuple[StagePosition, int]], limit_s: float) -> None:
        """Halve the boxes of some rows of menus, wherever else equal boxes are."""
        codes: dict[tuple[Mesh, bool], set[int]] = {}
        for place, row in stages:
            rows = self._best[place][1][[row]]
            pool = self._pools[place]
            if place.is_alone:
                # No other place has boxes to halve at the same time.
                least_s = self._least_s(place, pool.options)
                rows = np.argsort(np.where(pool.is_open, least_s, np.inf), kind="stable")[:ALONE]
            boxes = pool.boxes.chosen(rows[pool.is_open[rows]])
            codes.setdefault((place.mesh, place.is_alone), set()).update(boxes.codes.tolist())
        asked = []
        for place, pool in self._pools.items():
            own = codes.get((place.mesh, place.is_alone))
            if not own or not len(pool.is_open):
                continue
            chosen = pool.is_open & np.isin(pool.boxes.codes, [*own])
            if chosen.any():
                boxes, origin = pool.boxes.chosen(chosen).halved()
                counts = pool.options.counts[chosen][origin]
                asked.append(_Asked(place=place, counts=counts, boxes=boxes))
                self._pools[place] = pool.chosen(~chosen)
        for one, new in zip(asked, self._looked_at(asked, limit_s), strict=True):
            both = self._pools[one.place].and_also(new)
            self._pools[one.place] = self._tidied(both)
            self._best.pop(one.place, None)

    def certain(self) -> "BoxMenus":
        """The same menus without boxes: every pipeline of their candidates is a plan."""
        menus = replace(self)
        menus._pools = {place: pool.chosen(~pool.is_open) for place, pool in self._pools.items()}
        return menus

    def fall_to(self, limit_s: float) -> None:
        """Forget candidates of pipelines that take no less than a limit."""
        for place, pool in self._pools.items():
            hopeful = self._is_hopeful(place, pool.options, limit_s)
            if not hopeful.all():
                self._pools[place] = pool.chosen(hopeful)
                self._best.pop(place, None)

    def heed_hosts(self) -> None:
        """From now on, stages of a node share its host memory."""
        self.with_host = True
        self._best.clear()

    def _looked_at(self, asked: Sequence[_Asked], limit_s: float) -> list[_Pool]:
        """The rows of each place that may be part of a pipeline that takes less than a limit."""
        if not asked:
            return []
        engine, cluster = self.space.engine, self.problem.cluster
        least = StageBatch.joined([self._batch(one, one.boxes.low) for one in asked])
        most = StageBatch.joined([self._batch(one, one.boxes.high) for one in asked])
        bounds = self.ledger.stage_bounds(least, most, engine=engine)
        gpus = np.concatenate(
            [
                np.full(len(one.boxes), min(one.place.mesh.num_gpus, cluster.gpus_per_node))
                for one in asked
            ]
        )
        room = host_room_at(cluster, least.first_rank)
        may = bounds.fits & (bounds.host_bytes * gpus <= room)
        ends = np.cumsum([len(one.boxes) for one in asked])
        hopeful = []
        for one, end in zip(asked, ends, strict=True):
            rows = slice(end - len(one.boxes), end)
            options = _options(one, bounds.seconds, bounds.host_bytes, rows)
            may[rows] &= self._is_hopeful(one.place, options, limit_s)
            hopeful.append(options)
        where = np.flatnonzero(may)
        if not len(where):
            nothing = np.empty(0, dtype=np.intp)
            return [
                _Pool(
                    options=options.chosen(nothing),
                    boxes=one.boxes.chosen(nothing),
                    is_open=np.empty(0, dtype=np.bool_),
                )
                for one, options in zip(asked, hopeful, strict=True)
            ]
        costs = self.ledger.stage_costs(least.chosen(where), engine=engine)
        fits = np.zeros(len(may), dtype=np.bool_)
        fits[where] = costs.fits
        nth = np.cumsum(may) - 1
        pools = []
        for one, options, end in zip(asked, hopeful, ends, strict=True):
            rows = slice(end - len(one.boxes), end)
            fitting = np.flatnonzero(fits[rows])
            at = nth[rows][fitting]
            true = Options(
                savings=options.savings[fitting],
                counts=options.counts[fitting],
                **{e.name: getattr(costs.seconds, e.name)[at] for e in fields(StageTimes)},
                host_bytes=costs.host_bytes[at],
            )
            is_box = np.flatnonzero(may[rows] & ~one.boxes.are_points)
            pools.append(
                _Pool(
                    options=true.and_also(options.chosen(is_box)),
                    boxes=one.boxes.chosen(np.concatenate([fitting, is_box])),
                    is_open=np.repeat([False, True], [len(fitting), len(is_box)]),
                )
            )
        return pools

    def _batch(self, asked: _Asked, corner: NDArray[np.int64]) -> StageBatch:
        place = asked.place
        numbers: dict[str, Any] = dict(zip(counts_of_blocks(), asked.counts.T, strict=True))
        return StageBatch(
            layers=place.layers,
            **{name: place.mesh.value(name) for name in names_of("mesh")},
            **savings_columns(asked.boxes.savings(corner)),
            **numbers,
            in_flight=place.in_flight,
            has_embedding=int(place.is_first),
            has_head=int(place.is_last),
            first_rank=place.place_in_node,
            micro_batches=self.group.micro_batches,
        )

    def _is_hopeful(self, place: StagePosition, options: Options, limit_s: float) -> Mask:
        return np.asarray(self._least_s(place, options) < limit_s)

    def _least_s(self, place: StagePosition, options: Options) -> NDArray[np.float64]:
        return hopeful_s(self.problem, self.group, self.work, place, options)

    def _tidied(self, pool: _Pool) -> _Pool:
        """The rows without boxes that a single candidate is at least as good as."""
        columns = np.stack(_columns(pool.options, with_host=True), axis=1)
        left = np.flatnonzero(pool.is_open)
        closed = np.flatnonzero(~pool.is_open)
        closed = closed[undominated([*columns[closed].T])] if len(closed) else closed
        for row in closed:
            left = left[(columns[left] < columns[row]).any(axis=1)]
        return pool.chosen(np.sort(np.concatenate([closed, left])))


def _options(
    asked: _Asked, seconds: StageSeconds, host_bytes: NDArray[np.float64], rows: slice
) -> Options:
    return Options(
        savings=asked.boxes.savings(asked.boxes.low),
        counts=asked.counts,
        **{e.name: getattr(seconds, e.name)[rows] for e in fields(StageTimes)},
        host_bytes=host_bytes[rows],
    )


def _columns(options: Options, *, with_host: bool) -> list[NDArray[np.float64]]:
    """The parts of times that never make a pipeline faster by being longer: what a micro-batch
    waits for, what a pass takes beyond this, and the first and the last pass without and with work
    beside them."""
    times = options.times
    first = times.through_forward_s + times.within_forward_s
    last = times.through_backward_s + times.within_backward_s
    columns = [
        *(times.through_forward_s, times.through_backward_s),
        *(times.forward_s - times.through_forward_s, times.backward_s - times.through_backward_s),
        *(first, last, first + times.begin_s, last + times.end_s),
    ]
    return [*columns, options.host_bytes] if with_host else columns
