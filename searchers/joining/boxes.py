"""Boxes of ways to save memory: each stands for all ways whose ratios, and numbers of recomputed
blocks, lie in some intervals.

The corner with the least ratios takes the least time, the corner with the most leaves the most
room. So the time of the one and the fit of the other say what no way inside the box undercuts. A
ratio of zero is an interval of its own: it needs no buffers, and starts no copies. The number of
recomputed blocks is apart from ratios: times are least at one end of its interval or the other.

Axes: R rows, each a box with numbers of treated blocks; D dimensions of ``names_of("savings")``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from itertools import product
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.values.dimensions import DIMENSIONS, names_of

# The values of each dimension that a stage may choose, smallest first.
Choices = tuple[tuple[float, ...], ...]
# Numbers of choices (R, D).
Places = NDArray[np.int64]

# How often a box is halved at once.
HALVED = 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Boxes:
    """Boxes from the choices numbered ``low`` to those numbered ``high`` (R, D), with ``fewest`` to
    ``most`` recomputed blocks (R)."""

    choices: Choices
    low: Places
    high: Places
    fewest: NDArray[np.int64]
    most: NDArray[np.int64]

    @classmethod
    def whole(cls, choices: Choices) -> Self:
        """The boxes that have every way to save memory once, without recomputed blocks."""
        parts = [
            _parts(own) if DIMENSIONS[name].is_ratio else [(i, i) for i in range(len(own))]
            for name, own in zip(names_of("savings"), choices, strict=True)
        ]
        bounds = np.array([*product(*parts)], dtype=np.int64)
        none = np.zeros(len(bounds), dtype=np.int64)
        return cls(
            choices=choices, low=bounds[:, :, 0], high=bounds[:, :, 1], fewest=none, most=none
        )

    def with_blocks(self, fewest: NDArray[np.int64], most: NDArray[np.int64]) -> Self:
        """The boxes with these numbers of recomputed blocks."""
        return replace(self, fewest=fewest, most=most)

    def __len__(self) -> int:
        return len(self.low)

    @property
    def are_points(self) -> NDArray[np.bool_]:
        """Whether each box has a single way."""
        return np.asarray((self.low == self.high).all(axis=1) & (self.fewest == self.most))

    @property
    def codes(self) -> NDArray[np.int64]:
        """A number for each box; boxes with equal ratios have equal numbers."""
        base = max(map(len, self.choices))
        code = np.zeros(len(self), dtype=np.int64)
        for places in (*self.low.T, *self.high.T):
            code = code * base + places
        return code

    def chosen(self, rows: NDArray[np.bool_] | NDArray[np.intp]) -> Self:
        """The boxes in these rows."""
        return self._with(lambda name: getattr(self, name)[rows])

    def and_also(self, others: Self) -> Self:
        """These boxes and others with the same choices."""
        return self._with(lambda name: np.concatenate([getattr(self, name), getattr(others, name)]))

    def _with(self, column: Callable[[str], NDArray[np.int64]]) -> Self:
        return type(self)(choices=self.choices, **{name: column(name) for name in _COLUMNS})

    def savings(self, places: Places) -> NDArray[np.float64]:
        """The values (R, D) of choices."""
        return np.stack(
            [np.array(own)[column] for own, column in zip(self.choices, places.T, strict=True)],
            axis=1,
        )

    def halved(self, times: int = HALVED) -> tuple[Self, NDArray[np.intp]]:
        """Each box in parts, halved so often along its widest dimension, by ``box_weight``; and
        the box of each part."""
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

    def _between(self, low: Places, high: Places) -> Self:
        """Boxes with the same choices, and their blocks in the last columns (R, D + 1)."""
        return type(self)(
            choices=self.choices,
            low=low[:, :-1],
            high=high[:, :-1],
            fewest=low[:, -1],
            most=high[:, -1],
        )


_COLUMNS = [entry.name for entry in fields(Boxes) if entry.name != "choices"]


def _parts(ratios: Sequence[float]) -> list[tuple[int, int]]:
    """The numbers of the first and the last choice of each part: zero, and all positive ratios."""
    zeros = sum(ratio == 0 for ratio in ratios)
    return [*([(0, zeros - 1)] if zeros else []), *_rest(zeros, len(ratios))]


def _rest(first: int, count: int) -> Iterator[tuple[int, int]]:
    if first < count:
        yield first, count - 1
