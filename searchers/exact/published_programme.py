"""Joins stages as Mist (EuroSys 2025) publishes it: fewer candidates, and a simpler objective.

Of the candidates for a stage only those stay that are best by a weighted sum of their steady time t
and their extra time d, for thirty weights. Pipelines are compared by the published objective
(``mistlab.cost.pipeline``). Everything else is as in ``mist``, so that the two can be
told apart by these choices alone. Each rank may use its even share of its node's host memory.

Axes: F candidates, K partial pipelines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats, Rows
from mistlab.cost.chains import ColumnAlgebra
from mistlab.cost.pipeline import Published, extra_s, in_front, passes_of, steady_s
from mistlab.plan.plan import Plan
from searchers.exact.candidates import Menus, Options, StagePosition, undominated
from searchers.exact.programme import places_by_stage

# How many weights of t against d are tried.
WEIGHTS = 30
# Partial pipelines with equally many blocks that go on.
BEAM = 128


def best_by_weights(options: Options) -> Options:
    """The candidates that are best by a weighted sum of their steady and their extra time."""
    if not len(options):
        return options
    passes = passes_of(options.times)
    weights = np.linspace(0, 1, WEIGHTS)[:, None]
    sums = weights * steady_s(passes) + (1 - weights) * extra_s(passes)
    return options.chosen(np.unique(sums.argmin(axis=1)))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Partials:
    """Partial pipelines (K) with equally many stages: their blocks, what the objective needs of
    them, and of which candidate and which shorter pipeline each is made."""

    layers: Rows
    length: Published[Floats]
    place: Rows
    option: Rows
    row_behind: Rows
    behind: "_Partials | None"

    @classmethod
    def nothing(cls) -> Self:
        none = np.zeros(1, dtype=np.intp)
        length = Published.of_nothing(np.zeros(1))
        return cls(
            layers=none, length=length, place=none, option=none, row_behind=none, behind=None
        )

    def chosen(self, rows: Rows) -> Self:
        return replace(
            self,
            layers=self.layers[rows],
            length=_chosen(self.length, rows),
            place=self.place[rows],
            option=self.option[rows],
            row_behind=self.row_behind[rows],
        )

    def stages(self, row: int) -> Iterator[tuple[int, int]]:
        """The place and the candidate of each stage, the first stage first."""
        if self.behind is not None:
            yield int(self.place[row]), int(self.option[row])
            yield from self.behind.stages(int(self.row_behind[row]))


def join_by_objective(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """The pipeline of a group that is best by the published objective, and its time by it, if that
    is less than a limit. The menus are prepared, for stages of equally many GPUs."""
    micro_batches = menus.group.micro_batches
    partials = _Partials.nothing()
    every = places_by_stage(menus, limit_s)
    for places in every:
        menus.ledger.check_time()
        parts = [*_in_front(menus, partials, places, limit_s)]
        if not parts:
            return None
        partials = _worth(_joined(parts), micro_batches)
    is_whole = partials.layers == menus.problem.workload.model.layers
    whole = partials.chosen(np.flatnonzero(is_whole))
    seconds = whole.length.whole(micro_batches)
    if not len(seconds) or seconds.min() >= limit_s:
        return None
    row = int(seconds.argmin())
    chosen = zip(reversed(every), whole.stages(row), strict=True)
    stages = tuple(
        menus[places[place]].stage_plan(option, places[place].mesh, places[place].layers)
        for places, (place, option) in chosen
    )
    plan = Plan(engine=menus.space.engine, micro_batches=micro_batches, stages=stages)
    return float(seconds[row]), plan


def _in_front(
    menus: Menus, behind: _Partials, places: Sequence[StagePosition], limit_s: float
) -> Iterator[_Partials]:
    """Every candidate of every place in front of every partial pipeline."""
    count = len(behind.layers)
    for number, place in enumerate(places):
        options = menus[place]
        passes = passes_of(options.times)
        rows = np.tile(np.arange(count), len(options))
        option = np.repeat(np.arange(len(options)), count)
        length = in_front(
            ColumnAlgebra(len(rows)),
            steady_s(passes)[option],
            extra_s(passes)[option],
            _chosen(behind.length, rows),
        )
        layers = behind.layers[rows] + place.layers
        part = _Partials(
            layers=layers,
            length=length,
            place=np.full(len(rows), number),
            option=option,
            row_behind=rows,
            behind=behind,
        )
        fits = layers <= menus.problem.workload.model.layers
        yield part.chosen(
            np.flatnonzero(fits & (length.whole(menus.group.micro_batches) < limit_s))
        )


def _worth(partials: _Partials, micro_batches: int) -> _Partials:
    """The most promising partial pipelines with each number of blocks, of which none is nowhere
    better than another."""
    kept = []
    length = partials.length
    seconds = length.whole(micro_batches)
    for layers in np.unique(partials.layers):
        rows = np.flatnonzero(partials.layers == layers)
        rows = rows[np.argsort(seconds[rows], kind="stable")[: 4 * BEAM]]
        columns = [part[rows] for part in (length.slowest, length.together, length.unhidden)]
        kept.append(rows[undominated(columns)][:BEAM])
    return partials.chosen(np.concatenate([np.empty(0, dtype=np.intp), *kept]))


def _joined(parts: Sequence[_Partials]) -> _Partials:
    def column(name: str) -> Rows:
        return np.concatenate([getattr(part, name) for part in parts])

    def lengths(name: str) -> Floats:
        return np.concatenate([getattr(part.length, name) for part in parts])

    return _Partials(
        layers=column("layers"),
        length=Published(
            slowest=lengths("slowest"),
            together=lengths("together"),
            unhidden=lengths("unhidden"),
        ),
        place=column("place"),
        option=column("option"),
        row_behind=column("row_behind"),
        behind=parts[0].behind,
    )


def _chosen(length: Published[Floats], rows: Rows) -> Published[Floats]:
    return Published(
        slowest=length.slowest[rows],
        together=length.together[rows],
        unhidden=length.unhidden[rows],
    )
