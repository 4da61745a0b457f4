"""Distinct rows among columns, so that what they have in common is worked out once.

Axes: C rows, S distinct ones.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

# Odd multipliers that mix a row's bits (Knuth's multiplicative hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distinct:
    """The distinct rows as columns (S each), and for each row which of them it is (C)."""

    columns: tuple[NDArray[Any], ...]
    index: NDArray[np.int64]


def distinct_rows(columns: Sequence[NDArray[Any]]) -> Distinct:
    """The distinct rows of columns of equal length.

    Rows that come in runs, as candidates do when strategies are listed one after another, are found
    by comparing neighbours; the few that remain by sorting.
    """
    rows = len(columns[0])
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
