"""Finds the distinct rows of columns, so that equal rows are computed once; sums times over pairs
of distinct rows.

Axes: C rows, S distinct rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints

Table = TypeVar("Table")

# Columns with at most this many rows are searched for distinct rows one by one.
FEW = 64

# An odd multiplier that mixes a row's bits (Knuth's multiplicative hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distinct:
    """The distinct rows of some columns (S each), and for each original row (C) the index of its
    distinct row.
    """

    columns: tuple[NDArray[Any], ...]
    index: Ints


@dataclass(slots=True, eq=False)
class Known(Generic[Table]):
    """Caches results for all distinct rows seen so far, in a table.

    If a new row comes, the results of all known rows are computed again, together. This suits
    columns with few distinct rows, which are all known soon.
    """

    _places: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _table: Table | None = None

    def __call__(
        self, columns: Sequence[NDArray[Any]], work: Callable[[Sequence[NDArray[Any]]], Table]
    ) -> tuple[Table, Ints]:
        """The table of results that ``work`` computes for all distinct rows seen so far, and the
        index of each given row's result in that table.
        """
        distinct = distinct_rows(columns)
        keys = list(zip(*(column.tolist() for column in distinct.columns), strict=True))
        for key in keys:
            if key not in self._places:
                self._places[key] = len(self._places)
                self._table = None
        if self._table is None:
            known = zip(*self._places, strict=True)
            self._table = work([np.array(column) for column in known])
        places = np.array([self._places[key] for key in keys], dtype=np.int64)
        return self._table, places[distinct.index]


def distinct_rows(columns: Sequence[NDArray[Any]]) -> Distinct:
    """Find the distinct rows of columns of equal length.

    Runs of equal rows, which are common in columns of candidates, are found by comparing
    neighbours. One row of each run remains, and these rows are sorted.
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
    first, index = _sorted_distinct(heads)
    return Distinct(
        columns=tuple(head[first] for head in heads),
        index=index[np.cumsum(changes) - 1],
    )


def first_of_each(table: Floats) -> Ints:
    """The index of the first row of each set of equal rows in a table, ascending."""
    return np.sort(_sorted_distinct(table.T)[0])


def _distinct_of_few(columns: Sequence[NDArray[Any]]) -> Distinct:
    """The distinct rows of short columns, found one by one, which is faster than sorting there."""
    numbers: dict[tuple[Any, ...], int] = {}
    first: list[int] = []
    index: list[int] = []
    for row, key in enumerate(zip(*[column.tolist() for column in columns], strict=True)):
        number = numbers.setdefault(key, len(numbers))
        if number == len(first):
            first.append(row)
        index.append(number)
    are_all = len(first) == len(index)
    return Distinct(
        columns=tuple(columns if are_all else [column[first] for column in columns]),
        index=np.array(index, dtype=np.int64),
    )


def _sorted_distinct(
    columns: Sequence[NDArray[Any]] | Floats,
) -> tuple[Ints, Ints]:
    """The index of each distinct row of some columns, and for each row the index of its distinct
    row.
    """
    rows = len(columns[0])
    key = np.zeros(rows, dtype=np.uint64)
    for column in columns:
        # Adding 0.0 turns -0.0 into 0.0, so that both have the same bits.
        key = (key ^ (column + 0.0).view(np.uint64)) * _MULTIPLIER
        key ^= key >> np.uint64(29)
    # Each key's low bits are replaced by the index of its row: sorting the keys then also gives the
    # order of the rows, faster than an indirect sort.
    low = np.uint64(rows.bit_length())
    key = key >> low << low | np.arange(rows, dtype=np.uint64)
    key.sort()
    order = (key & ((np.uint64(1) << low) - np.uint64(1))).astype(np.int64)
    begins = np.ones(rows, dtype=bool)
    begins[1:] = np.diff(key >> low) > 0
    first, index = order[begins], np.empty(rows, dtype=np.int64)
    index[order] = np.cumsum(begins) - 1
    if all((column[first][index] == column).all() for column in columns):
        return first, index
    # Two different rows have the same hash key, so the rows themselves are sorted.
    table = np.stack([*columns], axis=1)
    _, first, index = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, index.reshape(-1)


# Sums over the time slots of a pipeline stage: the seconds of each kind of time slot, times the
# number of such slots in the stage.
#
# Axes: C candidates, S distinct strategies, J distinct sets of layers, K kinds of time slots, L
# quantities that are summed, in seconds.


# Quantities in seconds (L) of some kinds of per-layer time slots, for each strategy (L, K', S), and
# a mask of these kinds (K). A function ``Sums`` adds such tables up to the seconds of candidates
# (L, C).
Lengths = tuple[Floats, Bools]
Sums = Callable[[Sequence[Lengths]], Floats]


# If there are more pairs of a strategy and a set of layers than this many times the candidates,
# each candidate is summed on its own, rather than all pairs.
DENSE = 16
ROWS_AT_ONCE = 8192
# Up to this many multiplications, OpenBLAS computes a matrix product on one thread. For such small
# products several threads mostly wait for one another: on a busy machine, thirty times as long.
ON_ONE_THREAD = 1 << 18
# With at most this many candidates, as for whole plans, sums are computed such that a candidate's
# sum does not depend on the other candidates, not even in the last digit.
FEW_ROWS = 1024


def summed_slots(
    lengths: Sequence[Lengths], counts: Floats, strategies: Distinct, stages: Distinct
) -> Floats:
    """The seconds of candidates (L, C): the seconds of per-layer time slots (``lengths``) summed
    over the slots of each candidate (``counts``, K, J); a candidate is a pair of a strategy and a
    set of layers.
    """
    if len(strategies.index) <= FEW_ROWS:
        return _summed_alike(lengths, counts, strategies, stages)
    totals = np.empty((sum(len(of_kinds) for of_kinds, _ in lengths), len(strategies.index)))
    sums = iter(totals)
    for of_kinds, where in lengths:
        for of_kind in of_kinds:
            _sum_up(next(sums), of_kind, counts[where], strategies, stages)
    return totals


def _summed_alike(
    lengths: Sequence[Lengths], counts: Floats, strategies: Distinct, stages: Distinct
) -> Floats:
    """The seconds of candidates (L, C), summed over the kinds of per-layer time slots one kind
    after another.

    So a sum is the same to the last digit, whatever other candidates and kinds of slots there are.
    """
    ends = np.cumsum([len(of_kinds) for of_kinds, _ in lengths])
    every = np.zeros((len(counts), ends[-1], len(strategies.columns[0])))
    for end, (of_kinds, where) in zip(ends.tolist(), lengths, strict=True):
        every[where, end - len(of_kinds) : end] = of_kinds.swapaxes(0, 1)
    terms = every.take(strategies.index, axis=2)
    terms *= counts[:, None, stages.index]
    return np.asarray(terms.sum(axis=0))


def _sum_up(
    total: Floats, lengths: Floats, counts: Floats, strategies: Distinct, stages: Distinct
) -> None:
    """Fill ``total`` with the seconds of candidates (C): the seconds of per-layer time slots (K, S)
    times the numbers of such slots (K, J).
    """
    rows = len(strategies.index)
    if lengths.shape[1] * counts.shape[1] <= DENSE * rows:
        table = _products(lengths, counts)
        total[:] = table.take(strategies.index * counts.shape[1] + stages.index)
        return
    lengths, counts = np.ascontiguousarray(lengths.T), np.ascontiguousarray(counts.T)
    for start in range(0, rows, ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        of_block = lengths[strategies.index[block]] * counts[stages.index[block]]
        total[block] = of_block.sum(axis=1)


def _products(lengths: Floats, counts: Floats) -> Floats:
    """For each strategy and set of layers (S, J), the sum of the seconds of per-layer time slots
    (K, S) times the numbers of such slots (K, J).
    """
    if lengths.shape[1] == 1 or counts.shape[1] == 1:
        # OpenBLAS would split a product with a single column among threads even if it is small,
        # which is slower.
        return np.asarray(np.einsum("ks,kj->sj", lengths, counts))
    table = np.empty((lengths.shape[1], counts.shape[1]))
    at_once = max(2, ON_ONE_THREAD // max(1, counts.size))
    for start in range(0, len(table), at_once):
        block = slice(min(start, len(table) - 2), start + at_once)
        np.matmul(lengths[:, block].T, counts, out=table[block])
    return table
