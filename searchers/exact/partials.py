"""Partial pipelines (the last stages of pipelines) as columns: how many blocks and GPUs they use,
and the times of their passes, from which the iteration time of a whole pipeline follows.

Axes: K partial pipelines.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from typing import Protocol, Self

import numpy as np

from mistlab.core.arrays import Bools, Floats, Ints, Rows
from mistlab.core.distinct import first_of_each
from mistlab.cost.chains import CHAINS, Chains
from mistlab.cost.pipeline import no_stages
from mistlab.stages.stage_batch import TIMES, StageTimes
from searchers.exact.candidates import Options, StagePosition, undominated
from searchers.exact.groups import Group

# The number of blocks and the number of GPUs that a partial pipeline uses.
Taken = tuple[int, int]
# The approximate limit on the number of partial pipelines that are made in one batch.
TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partials:
    """Partial pipelines with equally many stages, one per row, sorted by the blocks and GPUs that
    they use. Each consists of a first stage and one of the shorter partial pipelines in ``behind``.

    ``host_bytes`` is the host memory in use on the node of the first stage; 0 if this stage begins
    at the node's first GPU, so that no further stage shares the node.
    """

    layers: Rows
    gpus: Rows
    chains: Chains[Floats]
    host_bytes: Floats
    # The stages that may be the first of a partial pipeline.
    places: tuple[StagePosition, ...]
    # For each partial pipeline, the index of its first stage in ``places``.
    place: Rows
    # For each partial pipeline, the index of the candidate for its first stage.
    option: Rows
    # The partial pipelines that are shorter by the first stage; None if there is no stage.
    behind: "Partials | None"
    # For each partial pipeline, the row in ``behind`` of the same pipeline without its first stage.
    row_behind: Rows

    @classmethod
    def nothing(cls) -> Self:
        """The partial pipeline that has no stages, as a single row."""
        none = np.zeros(1, dtype=np.intp)
        return cls(
            layers=none,
            gpus=none,
            chains=no_stages(1),
            host_bytes=np.zeros(1),
            places=(),
            place=none,
            option=none,
            behind=None,
            row_behind=none,
        )

    def __len__(self) -> int:
        return len(self.layers)

    def chosen(self, rows: Rows | Bools) -> Self:
        """The partial pipelines that a mask or indices select."""
        return replace(
            self,
            layers=self.layers[rows],
            gpus=self.gpus[rows],
            chains=chosen_chains(self.chains, rows),
            host_bytes=self.host_bytes[rows],
            place=self.place[rows],
            option=self.option[rows],
            row_behind=self.row_behind[rows],
        )

    def in_order(self) -> Self:
        """The partial pipelines sorted by the blocks and GPUs that they use."""
        return self.chosen(np.lexsort((self.gpus, self.layers)))

    def by_taken(self) -> Iterator[tuple[Taken, slice]]:
        """For each pair of a number of blocks and a number of GPUs in use, the slice of the partial
        pipelines that use these numbers.
        """
        changes = (self.layers[1:] != self.layers[:-1]) | (self.gpus[1:] != self.gpus[:-1])
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self)]
        for start, end in pairwise(bounds):
            if end > start:
                yield (int(self.layers[start]), int(self.gpus[start])), slice(start, end)

    def undominated(self, rows: Rows) -> Rows:
        """Those of the partial pipelines with indices ``rows`` that no other of them dominates; all
        of them must use the same numbers of blocks and GPUs.
        """
        chains = [getattr(self.chains, name)[rows] for name in CHAINS]
        columns = np.stack([*chains, self.host_bytes[rows]], axis=1)
        # Of equal partial pipelines only the first is kept; when times are rounded, many are equal.
        different = first_of_each(columns)
        return rows[different[undominated([*columns[different].T])]]

    def first_with_each_places(self, rows: Rows) -> Rows:
        """Of the partial pipelines with indices ``rows``, the first for each distinct sequence of
        stages, memory-saving strategies aside.
        """
        chosen, partials, of_row = [], self, rows
        while partials.behind is not None:
            chosen.append(partials.place[of_row])
            of_row, partials = partials.row_behind[of_row], partials.behind
        paths = np.stack(chosen, axis=1)
        return rows[first_of_each(paths.astype(np.float64))]

    def stages(self, row: int) -> Iterator[tuple[StagePosition, int]]:
        """The stages of one partial pipeline, from first to last, each with the index of its
        candidate.
        """
        if self.behind is not None:
            yield self.places[int(self.place[row])], int(self.option[row])
            yield from self.behind.stages(int(self.row_behind[row]))


def joined(parts: Sequence[Partials]) -> Partials:
    """Concatenate several sets of partial pipelines that have equally many stages."""
    if len(parts) == 1:
        return parts[0]
    chains = [part.chains for part in parts]
    return Partials(
        layers=np.concatenate([part.layers for part in parts]),
        gpus=np.concatenate([part.gpus for part in parts]),
        chains=Chains(
            **{name: np.concatenate([getattr(c, name) for c in chains]) for name in CHAINS}
        ),
        host_bytes=np.concatenate([part.host_bytes for part in parts]),
        places=parts[0].places,
        place=np.concatenate([part.place for part in parts]),
        option=np.concatenate([part.option for part in parts]),
        behind=parts[0].behind,
        row_behind=np.concatenate([part.row_behind for part in parts]),
    )


def chosen_chains(chains: Chains[Floats], rows: Rows | Bools) -> Chains[Floats]:
    """The pass times of the partial pipelines with these indices."""
    return Chains(**{name: getattr(chains, name)[rows] for name in CHAINS})


def rounded_down(chains: Chains[Floats], grain_s: float) -> Chains[Floats]:
    """Pass times of partial pipelines, rounded down to multiples of ``grain_s``, so that more of
    them are equal.
    """
    return Chains(**{name: np.floor(getattr(chains, name) / grain_s) * grain_s for name in CHAINS})


def in_parts(sizes: Rows) -> Iterator[Rows]:
    """Divides a list of extensions (each puts one stage in front of partial pipelines) into batches
    of limited size; ``sizes`` says how many partial pipelines each extension makes.
    """
    part = np.cumsum(sizes) // TOGETHER
    yield from np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(part)) + 1)


def each_of(numbers: Rows, sizes: Rows) -> tuple[Rows, Rows]:
    """Repeats each element of ``numbers`` as often as its entry in ``sizes``; also returns a
    counter that restarts from 0 for each element.
    """
    before = np.cumsum(sizes) - sizes
    return np.repeat(numbers, sizes), np.arange(sizes.sum()) - np.repeat(before, sizes)


# Lower bounds of all whole pipelines that a partial pipeline can become, from the candidates for
# the stages in front of it. Used for pipelines whose stages have equally many GPUs: the numbers of
# stages and blocks still missing then determine which stages are possible.
#
# Axes of arrays: S stages, last first; L numbers of blocks; K partial pipelines.


class _Menus(Protocol):
    def __getitem__(self, position: StagePosition) -> Options: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Lower bounds for the stages that a partial pipeline still needs in front of it, by how many
    stages it has and how many blocks are left.

    ``through_s`` is the latency of a micro-batch through all missing stages and back, ``slowest_s``
    the steady time per micro-batch of the slowest of them, ``own_s`` the smallest latency of one of
    them.
    """

    micro_batches: int
    layers: int
    through_s: Floats
    slowest_s: Floats
    own_s: Floats

    @classmethod
    def of(
        cls,
        menus: _Menus,
        stages: Sequence[Sequence[StagePosition]],
        micro_batches: int,
        layers: int,
        like: Ints | None = None,
    ) -> Self:
        """The lower bounds for a group of pipelines; ``stages`` lists the possible choices for each
        stage. If kinds of blocks alternate, ``like`` maps a range of blocks to the first block of
        the earliest equal range (``like_blocks``).
        """
        shape = len(stages) + 1, layers + 1
        through, slowest, alone = (np.full(shape, np.inf) for _ in range(3))
        through[-1, 0] = slowest[-1, 0] = 0.0
        each_s = partial(_each_s, micro_batches=micro_batches, num_stages=len(stages))
        for after in reversed(range(len(stages))):
            passes = _least_by_layers(menus, stages[after], _passage_s, layers, like)
            steady = _least_by_layers(menus, stages[after], each_s, layers, like)
            alone[after] = min([*alone[after + 1, :1], *(one.min() for one in passes.values())])
            for count, least_s in passes.items():
                rest = slice(0, layers + 1 - count)
                here = through[after, count:]
                np.minimum(here, through[after + 1, rest] + least_s, out=here)
            for count, least_s in steady.items():
                rest = slice(0, layers + 1 - count)
                here = slowest[after, count:]
                np.minimum(here, np.maximum(slowest[after + 1, rest], least_s), out=here)
        return cls(
            micro_batches=micro_batches,
            layers=layers,
            through_s=through,
            slowest_s=slowest,
            own_s=alone[:, 0],
        )

    def least_s(self, partials: Partials, stages: int) -> Floats:
        """For each partial pipeline of ``stages`` stages, a lower bound in seconds of the pipelines
        that it can become.
        """
        chains, left = partials.chains, self.layers - partials.layers
        count, most = self.micro_batches, len(self.own_s) - 1
        through_s = self.through_s[stages, left]
        can_end = np.isfinite(through_s)
        # Where no stages can use up the blocks, zero replaces infinity, since zero micro-batches
        # times infinity would not be a number.
        slowest_s = np.where(can_end, self.slowest_s[stages, left], 0.0)
        ahead = min(count, most) - 1
        # The slowest stage still missing waits until its first or its last micro-batch comes back
        # from the stages behind it; the shorter wait is a lower bound.
        around = np.minimum(chains.around_first, chains.around_last)
        ways = [
            chains.through + through_s,
            chains.whole,
            count * slowest_s + np.maximum(around - ahead / 2 * slowest_s, 0.0),
        ]
        if stages < most and count > ahead + 1:
            # Another bound: the slowest stage still missing waits until both its first and its last
            # micro-batch come back from the stages behind it.
            both = chains.around_first + chains.around_last + self.own_s[stages]
            # Micro-batches whose passes may overlap with the two waits are not counted.
            ways.append((count - ahead - 2) * slowest_s + both)
        return np.asarray(np.where(can_end, np.maximum.reduce(ways), np.inf))


def _each_s(options: Options, *, micro_batches: int, num_stages: int) -> Floats:
    """A lower bound of a stage's steady time for one micro-batch. The first forward and the last
    backward pass may be shorter than steady ones, since no fetch precedes the first and no offload
    follows the last.

    In bounds, this steady time is multiplied by at least the number of micro-batches minus half of
    those that the stage runs ahead. So the seconds that the first and last pass save are divided by
    this number.
    """
    ahead = min(micro_batches, num_stages) - 1
    shorter_s = np.maximum(options.stable_s - _passage_s(options), 0.0)
    return np.asarray(options.stable_s - shorter_s / (micro_batches - ahead / 2))


def _passage_s(options: Options) -> Floats:
    times = options.times
    first = times.through_forward_s + times.within_forward_s
    last = times.through_backward_s + times.within_backward_s
    return np.asarray(first + last)


def _least_by_layers(
    menus: _Menus,
    places: Sequence[StagePosition],
    seconds: Callable[[Options], Floats],
    layers: int,
    like: Ints | None,
) -> Mapping[int, Floats]:
    """For each number of blocks, the least seconds of a stage with this number of blocks, by the
    block at which the stage begins.
    """
    least_of_count: dict[int, Floats] = {}
    for position in places:
        count = position.layers
        here = least_of_count.setdefault(count, np.full(layers + 1 - count, np.inf))
        least_s = float(seconds(menus[position]).min(initial=np.inf))
        if like is None:
            np.minimum(here, least_s, out=here)
        else:
            begins = like[: len(here), count] == position.first_block
            here[begins] = np.minimum(here[begins], least_s)
    return least_of_count


# The candidates for several stages in one list.
#
# Axes of arrays: P stages, O candidates of all stages together.


class _PlaceMenus(Protocol):
    group: Group

    def __getitem__(self, position: StagePosition) -> Options: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceOptions:
    """The candidates for several stages in one list. Those for stage p begin at index ``starts[p]``
    and number ``counts[p]``; ``row`` is a candidate's index in its own stage's list.
    """

    places: tuple[StagePosition, ...]
    layers: Rows
    gpus: Rows
    starts: Rows
    counts: Rows
    times: StageTimes
    host_bytes: Floats
    place: Rows
    row: Rows

    @classmethod
    def of(cls, menus: _PlaceMenus, positions: Sequence[StagePosition], limit_s: float) -> Self:
        """Those candidates for these stages that may be in a pipeline faster than ``limit_s``."""
        menus_of_positions = [menus[position] for position in positions]
        # First passes may be shorter than steady ones, which wait for the host longer.
        rows = [
            np.flatnonzero(
                menus.group.micro_batches * options.stable_s + np.minimum(options.once_s, 0.0)
                < limit_s
            )
            for options in menus_of_positions
        ]
        counts = np.array([len(chosen) for chosen in rows], dtype=np.intp)

        host_bytes = [
            options.host_bytes[chosen]
            for options, chosen in zip(menus_of_positions, rows, strict=True)
        ]

        def column(name: str) -> Floats:
            parts = [
                getattr(options.times, name)[chosen]
                for options, chosen in zip(menus_of_positions, rows, strict=True)
            ]
            return np.concatenate([np.empty(0), *parts])

        return cls(
            places=tuple(positions),
            layers=np.array([position.layers for position in positions], dtype=np.intp),
            gpus=np.array([position.mesh.num_gpus for position in positions], dtype=np.intp),
            starts=np.cumsum(counts) - counts,
            counts=counts,
            times=StageTimes(**{name: column(name) for name in TIMES}),
            host_bytes=np.concatenate([np.empty(0), *host_bytes]),
            place=np.repeat(np.arange(len(positions)), counts),
            row=np.concatenate([np.empty(0, dtype=np.intp), *rows]),
        )
