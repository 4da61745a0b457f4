"""Finds the distinct rows of columns, so that equal rows are computed once, and adds up times over
pairs of distinct rows.

Axes: C rows, candidates or cases, S distinct rows, J sets of layers, R rows of equal layers, K
kinds of layers, L sums in seconds.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Self, TypeVar

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints, Rows

Table = TypeVar("Table")

# Columns with at most this many rows are searched for distinct rows one by one.
FEW = 64

# Multiplying by this odd number mixes a row's bits (Knuth's multiplicative hashing).
_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Distinct:
    """The distinct rows of some columns, and for each original row the index of its distinct row.

    There are S distinct rows of C.
    """

    columns: tuple[NDArray[Any], ...]
    index: Ints


@dataclass(slots=True, eq=False)
class Known(Generic[Table]):
    """Caches the results for all distinct rows seen so far.

    If a new row comes, the results of all known rows are computed again, together. This suits
    columns with few distinct rows, which are all known soon.
    """

    _places: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _table: Table | None = None

    def __call__(
        self, columns: Sequence[NDArray[Any]], work: Callable[[Sequence[NDArray[Any]]], Table]
    ) -> tuple[Table, Ints]:
        """Look up the results of some rows, and let ``work`` compute those of rows that are new.

        Returns the table of all results so far, and the index of each given row in it.
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


def numbered(codes: Ints) -> tuple[Ints, Ints]:
    """The index of the first of each set of equal codes, in ascending order of the codes, and for
    each code the number of its set.
    """
    order = codes.argsort(kind="stable")
    in_order = codes[order]
    begins = np.ones(len(codes), dtype=bool)
    begins[1:] = in_order[1:] != in_order[:-1]
    index = np.empty_like(order)
    index[order] = begins.cumsum() - 1
    return order[begins], index


def first_of_each(table: Floats) -> Ints:
    """The index of the first of each set of equal rows in a table, in ascending order."""
    return np.sort(_sorted_distinct(table.T)[0])


def _distinct_of_few(columns: Sequence[NDArray[Any]]) -> Distinct:
    """The distinct rows of short columns, compared one by one, which is faster than sorting
    there.
    """
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
    """The index of the first of each set of equal rows, and for each row the number of its set."""
    rows = len(columns[0])
    key = np.zeros(rows, dtype=np.uint64)
    for column in columns:
        # Adding 0.0 turns -0.0 into 0.0, so that both have the same bits.
        key = (key ^ (column + 0.0).view(np.uint64)) * _MULTIPLIER
        key ^= key >> np.uint64(29)
    # The low bits of each key are replaced by its row's index, so that sorting the keys sorts the
    # rows, which is faster than an indirect sort.
    low = np.uint64(rows.bit_length())
    key = key >> low << low | np.arange(rows, dtype=np.uint64)
    key.sort()
    order = (key & ((np.uint64(1) << low) - np.uint64(1))).astype(np.int64)
    begins = np.ones(rows, dtype=bool)
    begins[1:] = np.diff(key >> low) > 0
    first, index = order[begins], np.empty(rows, dtype=np.int64)
    index[order] = np.cumsum(begins) - 1
    if all(np.logical_and.reduce(column[first][index] == column) for column in columns):
        return first, index
    # Here two different rows have the same hash, so the rows themselves are sorted.
    table = np.stack([*columns], axis=1)
    _, first, index = np.unique(table, axis=0, return_index=True, return_inverse=True)
    return first, index.reshape(-1)


# Finds the distinct pairs of a strategy and the layers of a stage.


@dataclass(frozen=True, slots=True, eq=False)
class Cases:
    """The distinct pairs (C) of a strategy and a stage's layers.

    Of its rows of equal layers (R) a ``stage`` (C) of J has ``sizes`` (R, J) layers of these
    ``types`` (R, J or R, 1). For each candidate, ``index`` is its case.
    """

    strategy: Rows
    stage: Rows
    types: Ints
    sizes: Ints
    index: Rows

    @classmethod
    def of(cls, runs: tuple[Floats, Ints], strategy: Rows, stage: Rows) -> Self:
        """Find the cases of candidates, each with a ``strategy`` and a ``stage`` (indices of
        ``runs``).
        """
        sizes, types = runs
        sizes = sizes.astype(np.int64)
        of_stages = [*sizes] if types.shape[1] == 1 else [*sizes, *types]
        alike = distinct_rows(of_stages)
        table = np.array(alike.columns)
        code, index = np.unique(strategy * table.shape[1] + alike.index[stage], return_inverse=True)
        of_strategy, of_stage = np.divmod(code, table.shape[1])
        return cls(
            of_strategy,
            of_stage,
            types if types.shape[1] == 1 else table[len(sizes) :],
            table[: len(sizes)],
            index,
        )

    @property
    def rows(self) -> Ints:
        """The number of layers in each row of each case (R, C)."""
        return self.sizes[:, self.stage]

    @property
    def layers(self) -> Ints:
        """The number of layers of each case."""
        return np.asarray(self.sizes.sum(axis=0)[self.stage])

    def chosen(self, rows: Rows) -> Self:
        """Select the cases with these indices."""
        return replace(self, strategy=self.strategy[rows], stage=self.stage[rows])

    def kinds(self, nothing: int) -> Ints:
        """The type of each layer (layers L, C); ``nothing`` after a case's last layer."""
        ends = self.rows.cumsum(axis=0)
        position = np.arange(int(ends[-1].max()))[:, None, None]
        run = (position >= ends).sum(axis=1)
        types = np.broadcast_to(self.types, self.sizes.shape)[:, self.stage]
        return np.take_along_axis(np.concatenate([types, np.full_like(ends[:1], nothing)]), run, 0)


# Adds up the seconds of a pipeline stage's layers: the seconds of each kind of layer, times the
# number of such layers in the stage.


# Seconds of some kinds of layers for each strategy, and a mask of these kinds; a function of type
# ``Sums`` adds such tables up to the seconds of candidates.
Lengths = tuple[Floats, Bools]
Sums = Callable[[Sequence[Lengths]], Floats]


# Each candidate is summed on its own if there are this many times more pairs of a strategy and a
# set of layers than candidates; otherwise all pairs are.
DENSE = 16
ROWS_AT_ONCE = 8192
# OpenBLAS computes products of up to this many multiplications on one thread. Several threads would
# mostly wait for one another, and take thirty times as long on a busy machine.
ON_ONE_THREAD = 1 << 18
# If at most this many candidates are summed together, a candidate's sum does not depend on which
# other candidates there are, not even in the last digit.
FEW_ROWS = 1024


def summed_slots(
    lengths: Sequence[Lengths], counts: Floats, strategies: Distinct, stages: Distinct
) -> Floats:
    """Add up the seconds of each candidate over the layers of its stage.

    ``lengths`` are the seconds of each kind of layer, ``counts`` (K, J) the numbers of such layers;
    a candidate is a pair of a strategy and a set of layers. The result is (L, C).
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
    """Add up the seconds of each candidate over the kinds of layers, one kind after another, so
    that rounding is always the same.

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
    """Write to ``total`` the seconds of each candidate, summed over kinds of layers.

    The seconds of kinds are (K, S), the numbers of such layers (K, J).
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
    """The sum over kinds of layers of seconds times numbers of layers, for each pair of a strategy
    and a set of layers.
    """
    if lengths.shape[1] == 1 or counts.shape[1] == 1:
        # OpenBLAS would split a product with a single column among threads, which is slower, so
        # this one is computed without it.
        return np.asarray(np.einsum("ks,kj->sj", lengths, counts))
    table = np.empty((lengths.shape[1], counts.shape[1]))
    at_once = max(2, ON_ONE_THREAD // max(1, counts.size))
    for start in range(0, len(table), at_once):
        block = slice(min(start, len(table) - 2), start + at_once)
        np.matmul(lengths[:, block].T, counts, out=table[block])
    return table


# Counts the layers of stages, which are rows of equal layers, by their kind and their neighbours'.


# The type of an absent layer, before the first layer of a stage or after the last one.
NOTHING = -1


def slot_counts(sizes: Floats, types: Ints, depth: int) -> tuple[Ints, Floats]:
    """Count the layers of each stage by their type and the types of the layers before and after,
    whose weights are fetched or offloaded at the same time.

    The kinds (K, 3) are the combinations of three types that occur; the counts are (K, J). A
    stage's layers are runs of equal layers. A time slot has three layers: the one that computes,
    the lower one ``depth`` before it and the upper one ``depth`` after it, which are fetched or
    offloaded meanwhile. The first and last ``depth`` slots lie outside the pass, where no layer
    computes. The three types change where a run ends, or ``depth`` before or after it; between two
    such points all time slots are of one kind.

    ``sizes`` (R, J) are the numbers of layers in the runs, ``types`` (R, J or R, 1) the types of
    these layers.
    """
    ends = np.cumsum(sizes, axis=0)
    edges = np.concatenate([np.zeros_like(ends[:1]), ends])
    points = np.sort(np.concatenate([edges - depth, edges, edges + depth]), axis=0)
    lengths, middles = np.diff(points, axis=0), (points[1:] + points[:-1]) / 2
    # The absent layers before a stage get the lowest code, those after it the highest.
    after = int(types.max()) + 2
    nothing = np.zeros_like(types[:1])
    places = np.concatenate([nothing, types + 1, nothing + after])
    code = np.zeros(lengths.shape, dtype=np.int64)
    for shift in (-depth, 0, depth):
        code = code * (after + 1) + _at(middles + shift, edges, places)
    occurs = np.zeros((after + 1) ** 3, dtype=bool)
    occurs[code[lengths > 0]] = True
    codes = np.flatnonzero(occurs)
    kinds = np.stack(np.unravel_index(codes, (after + 1,) * 3), axis=1)
    is_layer = (kinds > 0) & (kinds < after)
    is_slot = is_layer.any(axis=1)
    counts = _counted(code, lengths, codes[is_slot], len(occurs))
    return np.where(is_layer, kinds - 1, NOTHING)[is_slot], counts


def _at(positions: Floats, edges: Floats, places: Ints) -> Ints:
    """The type of the layer at each position in each stage.

    Runs of equal layers begin at ``edges`` and have the types ``places``.
    """
    run = (positions[:, None] >= edges).sum(axis=1)
    if places.shape[1] == 1:
        return np.asarray(places[run, 0])
    return np.take_along_axis(places, run, axis=0)


def _counted(
    code: Ints,
    lengths: Floats,
    codes: Ints,
    every: int,
) -> Floats:
    """Add up the numbers of layers that have the same code of three layer types."""
    stages = code.shape[1]
    row = np.full(every, len(codes))
    row[codes] = np.arange(len(codes))
    flat = row[code] * stages + np.arange(stages)
    counted = np.bincount(
        flat.ravel(), weights=lengths.ravel(), minlength=(len(codes) + 1) * stages
    )
    return np.asarray(counted.reshape(-1, stages)[: len(codes)])


def joined_rows(sizes: Ints, kinds: Ints) -> tuple[Ints, Ints]:
    """The numbers of layers in rows of equal layers, and their kinds (R, C); a row without layers,
    and one before more of the same kind, is joined to the next.
    """
    sizes, kinds = sizes.copy(), np.where(sizes > 0, kinds, NOTHING)
    for row in range(1, len(sizes)):
        joins = (sizes[row] == 0) | (kinds[row] == kinds[row - 1])
        kinds[row] = np.where(joins, kinds[row - 1], kinds[row])
        sizes[row] += sizes[row - 1] * joins
        sizes[row - 1, joins], kinds[row - 1, joins] = 0, NOTHING
    return sizes, kinds
