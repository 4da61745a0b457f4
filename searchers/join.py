"""Stages joined to the best pipeline by a dynamic programme, from the last stage to the first.

A partial pipeline is known by its stages, blocks and GPUs, and by the chains that these mean to
stages in front of them (``mistlab.cost.pipeline``). Chains only grow with those behind them, so a
partial pipeline that is nowhere better than another one can be left out, and so can one that no
completion brings below what is known already.

Axes: K partial pipelines.
"""

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import Chains, StageTimes, no_stages, prepended
from mistlab.plan import Plan, StagePlan
from searchers.menu import Menus, Place
from searchers.meshes import layer_counts, lies_well
from searchers.options import undominated

# Blocks and GPUs that the stages of a partial pipeline have taken.
Taken = tuple[int, int]
Rows = NDArray[np.intp]

# How many partial pipelines that have taken the same go on in haste.
BEAM = 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partial:
    """Partial pipelines that end alike: the chains of each, and which stage was put in front of
    which other partial pipeline (K).

    ``host_bytes`` are those on the node of the foremost stage, as long as it has GPUs left.
    """

    chains: Chains
    host_bytes: NDArray[np.float64]
    # Of each, what it was made of: a stage, its row on the menu, the partial pipeline behind it.
    places: tuple[Place, ...]
    place: Rows
    option: Rows
    behind: "tuple[Partial, ...]"
    row_behind: Rows

    def __len__(self) -> int:
        return len(self.place)

    def chosen(self, rows: Rows | NDArray[np.bool_]) -> Self:
        """Some of them."""
        return replace(
            self,
            chains=_taken(self.chains, rows),
            host_bytes=self.host_bytes[rows],
            place=self.place[rows],
            option=self.option[rows],
            row_behind=self.row_behind[rows],
        )


def join(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """The fastest pipeline of a group that takes less than a limit, if there is one, and its time
    as the chains have it."""
    return _Join(menus=menus).fastest(limit_s)


def join_hastily(menus: Menus, limit_s: float) -> tuple[float, Plan] | None:
    """The same with a few of the partial pipelines alone, which is mostly as good."""
    return _Join(menus=menus, beam=BEAM).fastest(limit_s)


def places_by_stage(menus: Menus, limit_s: float) -> list[list[Place]]:
    """What each stage of the pipelines of a group may be, the last stage first; their number must
    be given. Menus are prepared for all of them."""
    stages = _Join(menus=menus).places_by_stage(limit_s)
    menus.prepare([place for places in stages for place in places], limit_s)
    return stages


@dataclass(frozen=True, slots=True, kw_only=True)
class _Join:
    menus: Menus
    beam: int | None = None

    def fastest(self, limit_s: float) -> tuple[float, Plan] | None:
        places = [place for stage in self.places_by_stage(limit_s) for place in stage]
        self.menus.prepare(places, limit_s)
        best: tuple[float, Partial, int] | None = None
        partials: dict[Taken, Partial] = {(0, 0): _nothing()}
        for after in range(self._most_stages):
            extended = self._extended(partials, after, limit_s)
            partials = {}
            for taken, parts in extended.items():
                self.menus.ledger.check_time()
                merged = _merged(parts)
                if taken == self._all:
                    row = int(np.argmin(merged.chains.whole))
                    seconds = float(merged.chains.whole[row])
                    if seconds < limit_s:
                        best, limit_s = (seconds, merged, row), seconds
                    continue
                left = self._worth(merged, self._least_s(merged.chains, taken), limit_s)
                if len(left):
                    partials[taken] = left
            if not partials:
                break
        return None if best is None else (best[0], self._plan(best[1], best[2]))

    def _worth(self, partial: Partial, least_s: NDArray[np.float64], limit_s: float) -> Partial:
        """Those that may be part of the fastest pipeline."""
        rows = np.flatnonzero(least_s < limit_s)
        if self.beam is not None:
            rows = rows[np.argsort(least_s[rows], kind="stable")[: self.beam]]
        left = partial.chosen(rows)
        return left.chosen(_undominated(left))

    def places_by_stage(self, limit_s: float) -> list[list[Place]]:
        """What each stage may be, the last stage first."""
        taken: Iterable[Taken] = [(0, 0)]
        stages = []
        for after in range(self._most_stages):
            steps = list(self._steps(taken, after, limit_s))
            stages.append(sorted({place for _, place in steps}))
            taken = {_with(before, place) for before, place in steps}
        return stages

    @property
    def _all(self) -> Taken:
        problem = self.menus.problem
        return problem.workload.model.layers, problem.cluster.num_gpus

    @property
    def _most_stages(self) -> int:
        layers, gpus = self._all
        smallest = min(mesh.num_gpus for mesh in self.menus.group.meshes)
        return self.menus.group.num_stages or min(layers, gpus // smallest)

    def _extended(
        self, partials: Mapping[Taken, Partial], after: int, limit_s: float
    ) -> dict[Taken, list[Partial]]:
        """Each partial pipeline with each possible stage in front of it."""
        extended: dict[Taken, list[Partial]] = defaultdict(list)
        for taken, place in self._steps(partials, after, limit_s):
            part = self._in_front(place, taken, partials[taken], after, limit_s)
            if len(part):
                extended[_with(taken, place)].append(part)
        return extended

    def _steps(
        self, partials: Iterable[Taken], after: int, limit_s: float
    ) -> Iterator[tuple[Taken, Place]]:
        """What has taken so much, with each stage in front of it that is not too slow and leaves
        the others no more than they can do."""
        group, work, (layers, gpus) = self.menus.group, self.menus.work, self._all
        each_s = limit_s / group.micro_batches
        for taken in partials:
            self.menus.ledger.check_time()
            for place in self._places(taken, after):
                done = _with(taken, place)
                left = gpus - done[1]
                others_s = group.least_gpu_s(work, layers - done[0]) / left if left else 0.0
                if max(place.layers * work[place.mesh].block_s, others_s) < each_s:
                    yield taken, place

    def _places(self, taken: Taken, after: int) -> Iterator[Place]:
        """The stages that can stand in front of what has taken so much."""
        (layers, gpus), cluster = self._all, self.menus.problem.cluster
        for mesh in self.menus.group.meshes:
            first_rank = gpus - taken[1] - mesh.num_gpus
            if first_rank < 0 or not lies_well(first_rank, mesh.num_gpus, cluster):
                continue
            if self.menus.group.num_stages is not None and (first_rank == 0) != (
                after == self.menus.group.num_stages - 1
            ):
                continue
            for count in self._layer_counts(layers - taken[0], after, is_first=first_rank == 0):
                yield Place(
                    mesh=mesh,
                    layers=count,
                    in_flight=min(self.menus.group.micro_batches, after + 1),
                    place_in_node=first_rank % cluster.gpus_per_node,
                    is_first=first_rank == 0,
                    is_last=after == 0,
                )

    def _layer_counts(self, left: int, after: int, *, is_first: bool) -> Sequence[int]:
        if self.menus.group.num_stages is None:
            return [left] if is_first else range(1, left)
        counts = layer_counts(self._all[0], self.menus.group.num_stages, self.menus.space)
        others = self.menus.group.num_stages - after - 1
        return [
            count for count in counts if others * counts[0] <= left - count <= others * counts[-1]
        ]

    def _in_front(
        self, place: Place, taken: Taken, behind: Partial, after: int, limit_s: float
    ) -> Partial:
        """Each of the partial pipelines of so many stages with each candidate for one in front."""
        self.menus.ledger.check_time()
        options = self.menus[place]
        worth = self.menus.group.micro_batches * options.stable_s < limit_s
        rows, others = np.flatnonzero(worth), np.arange(len(behind))
        option, row_behind = np.repeat(rows, len(others)), np.tile(others, len(rows))
        times = options.times
        chains = prepended(
            StageTimes(**{e.name: getattr(times, e.name)[option] for e in fields(StageTimes)}),
            _taken(behind.chains, row_behind),
            np.full(len(option), self.menus.group.micro_batches),
            after + 1,
        )
        partial = Partial(
            chains=chains,
            host_bytes=np.zeros(len(option)),
            places=(place,),
            place=np.zeros(len(option), dtype=np.intp),
            option=option,
            behind=(behind,),
            row_behind=row_behind,
        )
        if not self.menus.with_host:
            return partial
        return self._with_host(partial, place, taken, options.host_bytes[option])

    def _with_host(
        self, partial: Partial, place: Place, taken: Taken, host_bytes: NDArray[np.float64]
    ) -> Partial:
        """Those whose stages on one node leave its host memory enough."""
        cluster = self.menus.problem.cluster
        gpus = cluster.gpus_per_node
        held = host_bytes * min(place.mesh.num_gpus, gpus)
        if (place.place_in_node + place.mesh.num_gpus) % gpus and taken[1]:
            held = held + partial.behind[0].host_bytes[partial.row_behind]
        goes_on = place.place_in_node > 0
        partial = replace(partial, host_bytes=held * goes_on)
        return partial.chosen(held <= cluster.host_memory_bytes)

    def _least_s(self, chains: Chains, taken: Taken) -> NDArray[np.float64]:
        """What no completion falls below (K): the slowest stage that is left takes an even share of
        the blocks, and hides at most half its passes ahead of those behind it."""
        layers, gpus = (of_all - own for of_all, own in zip(self._all, taken, strict=True))
        group, work = self.menus.group, self.menus.work
        slowest_s = group.least_gpu_s(work, layers) / gpus
        ahead = min(group.micro_batches, self._most_stages) - 1
        behind = np.maximum(chains.around_first - ahead / 2 * slowest_s, 0.0)
        return np.asarray(
            np.maximum.reduce(
                [
                    chains.through + group.least_stages_s(work, layers),
                    chains.whole,
                    group.micro_batches * slowest_s + behind,
                ]
            )
        )

    def _plan(self, partial: Partial, row: int) -> Plan:
        stages: list[StagePlan] = []
        while partial.places:
            number = int(partial.place[row])
            place = partial.places[number]
            stages.append(
                self.menus[place].stage_plan(int(partial.option[row]), place.mesh, place.layers)
            )
            partial, row = partial.behind[number], int(partial.row_behind[row])
        return Plan(
            engine=self.menus.space.engine,
            micro_batches=self.menus.group.micro_batches,
            stages=tuple(stages),
        )


def _nothing() -> Partial:
    none = np.zeros(1, dtype=np.intp)
    return Partial(
        chains=no_stages(1),
        host_bytes=np.zeros(1),
        places=(),
        place=none,
        option=none,
        behind=(),
        row_behind=none,
    )


def _with(taken: Taken, place: Place) -> Taken:
    return taken[0] + place.layers, taken[1] + place.mesh.num_gpus


def _taken(chains: Chains, rows: Rows | NDArray[np.bool_]) -> Chains:
    return Chains(**{e.name: getattr(chains, e.name)[rows] for e in fields(Chains)})


def _merged(parts: Sequence[Partial]) -> Partial:
    """Partial pipelines, each with its own stage in front, as one."""
    sizes = [len(part) for part in parts]
    return Partial(
        chains=Chains(
            **{
                e.name: np.concatenate([getattr(part.chains, e.name) for part in parts])
                for e in fields(Chains)
            }
        ),
        host_bytes=np.concatenate([part.host_bytes for part in parts]),
        places=tuple(part.places[0] for part in parts),
        place=np.repeat(np.arange(len(parts)), sizes),
        option=np.concatenate([part.option for part in parts]),
        behind=tuple(part.behind[0] for part in parts),
        row_behind=np.concatenate([part.row_behind for part in parts]),
    )


def _undominated(partial: Partial) -> Rows:
    chains = partial.chains
    columns = [getattr(chains, entry.name) for entry in fields(Chains)]
    return undominated([*columns, partial.host_bytes])
