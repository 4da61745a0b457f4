"""Distinct rows among columns, so that what they have in common is worked out once.

Axes: C rows, S distinct ones.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Table = TypeVar("Table")

# Up to so many rows are looked up one by one.
FEW = 64

# Odd multipliers that mix a row's bits (Knuth's multiplicative hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distinct:
    """The distinct rows as columns (S each), and for each row which of them it is (C)."""

    columns: tuple[NDArray[Any], ...]
    index: NDArray[np.int64]


@dataclass(slots=True, eq=False)
class Known(Generic[Table]):
    """What was worked out for distinct rows, kept for when they come again.

    Whenever rows come that are new, all that are known are worked out together: right for what has
    few distinct rows, which soon are all known.
    """

    _places: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _table: Table | None = None

    def __call__(
        self, columns: Sequence[NDArray[Any]], work: Callable[[Sequence[NDArray[Any]]], Table]
    ) -> tuple[Table, NDArray[np.int64]]:
        """A table of all known rows by ``work``, and which of them each given row is (C)."""
        found = distinct_rows(columns)
        keys = list(zip(*(column.tolist() for column in found.columns), strict=True))
        for key in keys:
            if key not in self._places:
                self._places[key] = len(self._places)
                self._table = None
        if self._table is None:
            known = zip(*self._places, strict=True)
            self._table = work([np.array(column) for column in known])
        places = np.array([self._places[key] for key in keys], dtype=np.int64)
        return self._table, places[found.index]


def distinct_rows(columns: Sequence[NDArray[Any]]) -> Distinct:
    """The distinct rows of columns of equal length.

    Rows that come in runs, as candidates do when strategies are listed one after another, are found
    by comparing neighbours; the few that remain by sorting.
    """
    rows = len(columns[0])
    if rows <= FEW:
        return _distinct_of_few(columns)
    changes = np.zeros(rows, dtype=bool)
    changes[:1] = True
    for column in columns:
        changes[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(changes)
    heads = [column[starts] for column in columns]
    table = np.stack([head.astype(np.float64) for head in heads], axis=1)
    first, index = _sorted_distinct(table)
    return Distinct(
        columns=tuple(head[first] for head in heads),
        index=index[np.cumsum(changes) - 1],
    )


def _distinct_of_few(columns: Sequence[NDArray[Any]]) -> Distinct:
    """The same for few rows, which are quicker looked up one by one."""
    found: dict[tuple[Any, ...], int] = {}
    first: list[int] = []
    index: list[int] = []
    for row, key in enumerate(zip(*(column.tolist() for column in columns), strict=True)):
        place = found.setdefault(key, len(found))
        if place == len(first):
            first.append(row)
        index.append(place)
    return Distinct(
        columns=tuple(column[first] for column in columns), index=np.array(index, dtype=np.int64)
    )


def _sorted_distinct(table: NDArray[np.float64]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Places of the distinct rows of a table, and for each row which of them it is."""
    # Adding zero makes both zeros the same bits.
    bits = np.ascontiguousarray(table + 0.0).view(np.uint64)
    key = np.zeros(len(table), dtype=np.uint64)
    for column in bits.T:
        key = (key ^ column) * _MULTIPLIER
        key ^= key >> np.uint64(29)
    _, first, index = np.unique(key, return_index=True, return_inverse=True)
    if (table[first[index]] == table).all():
        return first, index
    # Two rows that differ have the same key: sort the rows themselves.
    _, first, index = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, index.reshape(-1)
