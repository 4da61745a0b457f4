"""Evaluates each candidate with the graph of its layers: the plain one, the one with sequence
parallelism, or either of them with another way for context-parallel ranks to exchange keys.

Axes: C rows of sizes.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mistlab.symbolic.compiled import Compiled
from mistlab.values.dimensions import DIMENSIONS

Columns = Mapping[str, NDArray[np.float64]]


class GraphChoice(NamedTuple):
    """Which graph a candidate runs: whether it splits tokens, and its ``context_exchange``."""

    splits_tokens: bool
    exchange: int


def splits_tokens(columns: Columns) -> NDArray[np.bool_]:
    """The rows (C) with sequence parallelism; a single tensor-parallel rank splits nothing."""
    chosen = columns.get(DIMENSIONS["sequence_parallel"].symbol)
    if chosen is None:
        return np.zeros(len(columns["tp"]), dtype=bool)
    return np.asarray((chosen == 1) & (columns["tp"] > 1))


def exchanges_of(columns: Columns) -> NDArray[np.int64]:
    """How the ranks of each row (C) exchange keys; a single rank exchanges nothing."""
    chosen = columns.get(DIMENSIONS["context_exchange"].symbol)
    if chosen is None:
        return np.zeros(len(columns["tp"]), dtype=np.int64)
    return np.where(columns["cp"] > 1, chosen, 0).astype(np.int64)


def by_graph(
    plain: Compiled, other: Callable[[GraphChoice], Compiled], columns: Columns
) -> NDArray[np.float64]:
    """The values (names, C) of expressions: those of ``other`` in rows with another graph.

    ``other`` is called only if there are such rows, because compiling takes long.
    """
    splits, exchanges = splits_tokens(columns), exchanges_of(columns)
    if not splits.any() and not exchanges.any():
        return plain(columns)
    pairs = zip(splits.tolist(), exchanges.tolist(), strict=True)
    choices = sorted({GraphChoice(*pair) for pair in pairs})
    if len(choices) == 1:
        return _same_names(other(choices[0]), plain)(columns)
    values = plain(columns)
    for choice in choices:
        if any(choice):
            rows = (splits == choice.splits_tokens) & (exchanges == choice.exchange)
            compiled = _same_names(other(choice), plain)
            values[:, rows] = compiled({name: column[rows] for name, column in columns.items()})
    return values


def _same_names(compiled: Compiled, plain: Compiled) -> Compiled:
    assert compiled.names == plain.names
    return compiled
