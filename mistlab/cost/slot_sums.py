"""Sums of the lengths of a stage's slots: each kind of slot as often as the stage has it.

Axes: C candidates, S distinct strategies, J distinct sets of layers, K kinds of slots, L lengths.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.slot_lengths import Lengths
from mistlab.symbolic.distinct import Distinct

Values = NDArray[np.float64]

# With more products of strategies and layers for each candidate than this, candidates are summed
# one by one.
DENSE = 16
ROWS_AT_ONCE = 8192
# Up to so many multiplications, OpenBLAS keeps a product of tables on one thread. Threads for such
# small products mostly wait for one another: beside other work, thirty times as long.
ON_ONE_THREAD = 1 << 18
# Up to so many candidates, as in plans, a candidate's sum does not depend on the others.
FEW_ROWS = 1024


def summed_slots(
    lengths: Sequence[Lengths], counts: Values, strategies: Distinct, stages: Distinct
) -> Values:
    """Seconds (L, C) of each of some lengths of slots, from the counts (K, J) of slots; candidates
    are told by their strategies and their sets of layers."""
    if len(strategies.index) <= FEW_ROWS:
        return _summed_alike(lengths, counts, strategies, stages)
    found = np.empty((sum(len(of_kinds) for of_kinds, _ in lengths), len(strategies.index)))
    sums = iter(found)
    for of_kinds, where in lengths:
        for one in of_kinds:
            _sum_up(next(sums), one, counts[where], strategies, stages)
    return found


def _summed_alike(
    lengths: Sequence[Lengths], counts: Values, strategies: Distinct, stages: Distinct
) -> Values:
    """Seconds (L, C) of each sum, added one kind of slot after another.

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
    found: Values, lengths: Values, counts: Values, strategies: Distinct, stages: Distinct
) -> None:
    """Fill in seconds (C) from lengths of slots (K, S) and their counts (K, J)."""
    rows = len(strategies.index)
    if lengths.shape[1] * counts.shape[1] <= DENSE * rows:
        table = _products(lengths, counts)
        found[:] = table.take(strategies.index * counts.shape[1] + stages.index)
        return
    lengths, counts = np.ascontiguousarray(lengths.T), np.ascontiguousarray(counts.T)
    for start in range(0, rows, ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        of_block = lengths[strategies.index[block]] * counts[stages.index[block]]
        found[block] = of_block.sum(axis=1)


def _products(lengths: Values, counts: Values) -> Values:
    """The sum (S, J) of each strategy's lengths (K, S) with each set of layers' counts (K, J)."""
    if lengths.shape[1] == 1 or counts.shape[1] == 1:
        # OpenBLAS shares products with a single column among threads far sooner.
        return np.asarray(np.einsum("ks,kj->sj", lengths, counts))
    table = np.empty((lengths.shape[1], counts.shape[1]))
    at_once = max(2, ON_ONE_THREAD // max(1, counts.size))
    for start in range(0, len(table), at_once):
        block = slice(min(start, len(table) - 2), start + at_once)
        np.matmul(lengths[:, block].T, counts, out=table[block])
    return table
