"""Partial pipelines in columns: the blocks and GPUs of each, its chains, and its parts.

A partial pipeline has the last stages of a pipeline. Axes: K partial pipelines.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.chains import CHAINS, Chains
from mistlab.cost.pipeline import Table, no_stages
from mistlab.symbolic.distinct import first_of_each
from searchers.joining.candidate_table import undominated
from searchers.joining.candidates import StagePosition

# Blocks and GPUs that a partial pipeline has.
Taken = tuple[int, int]
Rows = NDArray[np.intp]
# Partial pipelines that are put together at once.
TOGETHER = 1 << 16


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Partials:
    """Partial pipelines with equally many stages. Those with the same blocks and GPUs are side by
    side. Each is a stage in front of one of the pipelines in ``behind`` (K).

    ``host_bytes`` are the bytes on the node of the first stage, if the node has GPUs left.
    """

    layers: Rows
    gpus: Rows
    chains: Chains[Table]
    host_bytes: NDArray[np.float64]
    # The parts of each: a stage, its row on the menu, and the partial pipeline behind it.
    places: tuple[StagePosition, ...]
    place: Rows
    option: Rows
    behind: "Partials | None"
    row_behind: Rows

    @classmethod
    def nothing(cls) -> Self:
        """The partial pipeline without stages."""
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

    def chosen(self, rows: Rows | NDArray[np.bool_]) -> Self:
        """The partial pipelines in these rows."""
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
        """The partial pipelines with the same blocks and GPUs side by side."""
        return self.chosen(np.lexsort((self.gpus, self.layers)))

    def by_taken(self) -> Iterator[tuple[Taken, slice]]:
        """The blocks and GPUs of pipelines that have the same, and the place of these pipelines."""
        changes = (self.layers[1:] != self.layers[:-1]) | (self.gpus[1:] != self.gpus[:-1])
        bounds = [0, *(np.flatnonzero(changes) + 1).tolist(), len(self)]
        for start, end in pairwise(bounds):
            if end > start:
                yield (int(self.layers[start]), int(self.gpus[start])), slice(start, end)

    def undominated(self, rows: Rows) -> Rows:
        """Of rows with the same blocks and GPUs, the rows that no other row is at least as good
        as."""
        chains = [getattr(self.chains, name)[rows] for name in CHAINS]
        columns = np.stack([*chains, self.host_bytes[rows]], axis=1)
        # Of equal ones the first is enough; there are many once times are rounded.
        different = first_of_each(columns)
        return rows[different[undominated([*columns[different].T])]]

    def first_with_each_places(self, rows: Rows) -> Rows:
        """Of some rows, the first one with each choice of places for all stages, in order."""
        chosen, partials, of_row = [], self, rows
        while partials.behind is not None:
            chosen.append(partials.place[of_row])
            of_row, partials = partials.row_behind[of_row], partials.behind
        paths = np.stack(chosen, axis=1)
        return rows[first_of_each(paths.astype(np.float64))]

    def stages(self, row: int) -> Iterator[tuple[StagePosition, int]]:
        """The stages of one pipeline, the first stage first, each with its row on the menu."""
        if self.behind is not None:
            yield self.places[int(self.place[row])], int(self.option[row])
            yield from self.behind.stages(int(self.row_behind[row]))


def joined(parts: Sequence[Partials]) -> Partials:
    """One table from its parts, in order."""
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


def chosen_chains(chains: Chains[Table], rows: Rows | NDArray[np.bool_]) -> Chains[Table]:
    """The chains in these rows."""
    return Chains(**{name: getattr(chains, name)[rows] for name in CHAINS})


def rounded_down(chains: Chains[Table], grain_s: float) -> Chains[Table]:
    """The chains in whole grains."""
    return Chains(**{name: np.floor(getattr(chains, name) / grain_s) * grain_s for name in CHAINS})


def in_parts(sizes: Rows) -> Iterator[Rows]:
    """The numbers of the steps in parts that make few enough partial pipelines at a time; at least
    one part."""
    part = np.cumsum(sizes) // TOGETHER
    yield from np.split(np.arange(len(sizes)), np.flatnonzero(np.diff(part)) + 1)


def each_of(numbers: Rows, sizes: Rows) -> tuple[Rows, Rows]:
    """Repeat each number as often as its size says; also, how often it has come before."""
    before = np.cumsum(sizes) - sizes
    return np.repeat(numbers, sizes), np.arange(sizes.sum()) - np.repeat(before, sizes)
