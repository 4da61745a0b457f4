"""Partial pipelines (the last stages of pipelines) as columns: the blocks and GPUs that they use,
and their chains of passes, from which iteration times follow.

A partial pipeline has the last stages of a pipeline. Axes: K partial pipelines.
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
# The number of partial pipelines, approximately, that are made in one batch at most.
TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partials:
    """Partial pipelines (K) with equally many stages, sorted by the blocks and GPUs that they use.
    Each is a stage in front of one of the shorter partial pipelines ``behind``.

    ``host_bytes`` are the bytes on the node of the first stage, if the node has GPUs left.
    """

    layers: Rows
    gpus: Rows
    chains: Chains[Floats]
    host_bytes: Floats
    # How each partial pipeline was made: the position of its first stage, the index of that stage's
    # candidate, and the index of the partial pipeline behind it.
    places: tuple[StagePosition, ...]
    place: Rows
    option: Rows
    behind: "Partials | None"
    row_behind: Rows

    @classmethod
    def nothing(cls) -> Self:
        """A single partial pipeline that has no stages."""
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
        """For each pair of numbers of blocks and GPUs that partial pipelines use, the pair and the
        slice of these partial pipelines.
        """
        changes = (self.layers[1:] != self.layers[:-1]) | (self.gpus[1:] != self.gpus[:-1])
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self)]
        for start, end in pairwise(bounds):
            if end > start:
                yield (int(self.layers[start]), int(self.gpus[start])), slice(start, end)

    def undominated(self, rows: Rows) -> Rows:
        """Those of the partial pipelines ``rows`` that no other of them dominates; all must use the
        same blocks and GPUs.
        """
        chains = [getattr(self.chains, name)[rows] for name in CHAINS]
        columns = np.stack([*chains, self.host_bytes[rows]], axis=1)
        # Of equal partial pipelines the first is enough; rounded times make many equal.
        different = first_of_each(columns)
        return rows[different[undominated([*columns[different].T])]]

    def first_with_each_places(self, rows: Rows) -> Rows:
        """Of the partial pipelines ``rows``, the first one with each distinct sequence of stage
        positions.
        """
        chosen, partials, of_row = [], self, rows
        while partials.behind is not None:
            chosen.append(partials.place[of_row])
            of_row, partials = partials.row_behind[of_row], partials.behind
        paths = np.stack(chosen, axis=1)
        return rows[first_of_each(paths.astype(np.float64))]

    def stages(self, row: int) -> Iterator[tuple[StagePosition, int]]:
        """The stages of one partial pipeline, first stage first: each stage's position, and the
        index of its candidate.
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
    """The chains of passes of the partial pipelines with these indices."""
    return Chains(**{name: getattr(chains, name)[rows] for name in CHAINS})


def rounded_down(chains: Chains[Floats], grain_s: float) -> Chains[Floats]:
    """The chains of passes with times rounded down to multiples of ``grain_s``, so that fewer of
    them differ.
    """
    return Chains(**{name: np.floor(getattr(chains, name) / grain_s) * grain_s for name in CHAINS})


def in_parts(sizes: Rows) -> Iterator[Rows]:
    """Divide steps (each puts a stage in front of partial pipelines) into batches of limited size;
    ``sizes`` are the numbers of partial pipelines that steps make.
    """
    part = np.cumsum(sizes) // TOGETHER
    yield from np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(part)) + 1)


def each_of(numbers: Rows, sizes: Rows) -> tuple[Rows, Rows]:
    """Each of ``numbers`` repeated as many times as its size says, and a count from 0 within each
    repetition.
    """
    before = np.cumsum(sizes) - sizes
    return np.repeat(numbers, sizes), np.arange(sizes.sum()) - np.repeat(before, sizes)


# Lower bounds of all ways to complete a partial pipeline, from the candidates for the stages in
# front of it. Used for groups whose stages have equally many GPUs, where the numbers of stages and
# blocks still missing determine the possible stage positions.
#
# Axes: S stages, last first; L numbers of blocks; K partial pipelines.


class _Menus(Protocol):
    def __getitem__(self, position: StagePosition) -> Options: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Completions:
    """Lower bounds for the stages still to be put in front of a partial pipeline, by its number of
    stages and by the number of blocks left (S + 1, L).

    ``through_s`` is the time in which a micro-batch passes all of them, there and back.
    ``slowest_s`` is the time of the slowest of them for each micro-batch, ``own_s`` the least
    passage of one.
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
        """The lower bounds for a group of pipelines; ``stages`` lists the possible positions of
        each stage. If kinds of blocks alternate, ``like`` maps a range of blocks to the first block
        that stage positions name (``like_blocks``).
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
        """A lower bound in seconds of the pipelines that partial pipelines (K) with ``stages``
        stages can become.
        """
        chains, left = partials.chains, self.layers - partials.layers
        count, most = self.micro_batches, len(self.own_s) - 1
        through_s = self.through_s[stages, left]
        can_end = np.isfinite(through_s)
        # Infinity times zero would not be a number.
        slowest_s = np.where(can_end, self.slowest_s[stages, left], 0.0)
        ahead = min(count, most) - 1
        # The slowest of the stages still to be put in front waits for the first or for the last
        # micro-batch to come back; the shorter of the two waits is a lower bound.
        around = np.minimum(chains.around_first, chains.around_last)
        ways = [
            chains.through + through_s,
            chains.whole,
            count * slowest_s + np.maximum(around - ahead / 2 * slowest_s, 0.0),
        ]
        if stages < most and count > ahead + 1:
            # Alternatively, the slowest of the stages still to be put in front waits for both the
            # first and the last micro-batch to come back.
            both = chains.around_first + chains.around_last + self.own_s[stages]
            # A backward pass that stalled counts for less than its whole time, since at least a
            # forward pass is left.
            ways.append((count - ahead - 2) * slowest_s + both)
        return np.asarray(np.where(can_end, np.maximum.reduce(ways), np.inf))


def _each_s(options: Options, *, micro_batches: int, num_stages: int) -> Floats:
    """The steady time of stages for one micro-batch, or slightly less: the first forward and the
    last backward pass may be shorter than steady ones, since no fetch comes before the one and no
    offload after the other.

    Where a stage waits for a micro-batch, all micro-batches but that one and half of those that it
    runs ahead count, so this difference is shared out to so many.
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
    """For each number of blocks, the least seconds of a stage that begins at block 0, 1, 2, ..."""
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


# The candidates for several stage positions in one list.
#
# Axes: P positions, O candidates of all positions.


class _PlaceMenus(Protocol):
    group: Group

    def __getitem__(self, position: StagePosition) -> Options: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceOptions:
    """The candidates for several stage positions (P) in one list. Those for a position begin at
    index ``starts`` and number ``counts``; ``row`` is a candidate's index in its own position's
    list.
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
        """The candidates for these stage positions that may be in pipelines that take less than
        ``limit_s``.
        """
        menus_of_positions = [menus[position] for position in positions]
        rows = [
            np.flatnonzero(menus.group.micro_batches * options.stable_s < limit_s)
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
