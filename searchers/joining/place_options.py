"""The candidates of several places of pipelines, side by side.

Axes: P places, O options of all places.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.pipeline import TIMES, StageTimes
from searchers.joining.candidate_table import Options
from searchers.joining.candidates import StagePosition
from searchers.joining.groups import Group
from searchers.joining.partials import Rows


class _Menus(Protocol):
    group: Group

    def __getitem__(self, place: StagePosition) -> Options: ...


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaceOptions:
    """The candidates of several places (P), one place after another (O). The candidates of a place
    begin at its ``starts``, and ``counts`` says how many there are; ``row`` is a candidate's row on
    the menu of its place."""

    places: tuple[StagePosition, ...]
    layers: Rows
    gpus: Rows
    starts: Rows
    counts: Rows
    times: StageTimes
    host_bytes: NDArray[np.float64]
    place: Rows
    row: Rows

    @classmethod
    def of(cls, menus: _Menus, places: Sequence[StagePosition], limit_s: float) -> Self:
        """The candidates for pipelines that take less than a limit."""
        found = [menus[place] for place in places]
        rows = [
            np.flatnonzero(menus.group.micro_batches * options.stable_s < limit_s)
            for options in found
        ]
        counts = np.array([len(some) for some in rows], dtype=np.intp)

        def column(name: str) -> NDArray[np.float64]:
            parts = [getattr(own, name)[some] for own, some in zip(found, rows, strict=True)]
            return np.concatenate([np.empty(0), *parts])

        return cls(
            places=tuple(places),
            layers=np.array([place.layers for place in places], dtype=np.intp),
            gpus=np.array([place.mesh.num_gpus for place in places], dtype=np.intp),
            starts=np.cumsum(counts) - counts,
            counts=counts,
            times=StageTimes(**{name: column(name) for name in TIMES}),
            host_bytes=column("host_bytes"),
            place=np.repeat(np.arange(len(places)), counts),
            row=np.concatenate([np.empty(0, dtype=np.intp), *rows]),
        )
