"""Evaluates each candidate with the graph of its layers: the plain one, or the one with sequence
parallelism.

Axes: C rows of sizes.
"""

from collections.abc import Callable, Mapping

import numpy as np
from numpy.typing import NDArray

from mistlab.symbolic.compiled import Compiled
from mistlab.values.dimensions import DIMENSIONS

Columns = Mapping[str, NDArray[np.float64]]


def splits_tokens(columns: Columns) -> NDArray[np.bool_]:
    """The rows (C) with sequence parallelism; a single tensor-parallel rank splits nothing."""
    chosen = columns.get(DIMENSIONS["sequence_parallel"].symbol)
    if chosen is None:
        return np.zeros(len(columns["tp"]), dtype=bool)
    return np.asarray((chosen == 1) & (columns["tp"] > 1))


def by_graph(
    plain: Compiled, split: Callable[[], Compiled] | None, columns: Columns
) -> NDArray[np.float64]:
    """The values (names, C) of expressions: those of ``split`` in rows with sequence parallelism.

    ``split`` is called only if there are such rows, because compiling takes long.
    """
    rows = splits_tokens(columns)
    if split is not None and rows.all():
        other = split()
        assert other.names == plain.names
        return other(columns)
    values = plain(columns)
    if split is not None and rows.any():
        other = split()
        assert other.names == plain.names
        values[:, rows] = other({name: column[rows] for name, column in columns.items()})
    return values
