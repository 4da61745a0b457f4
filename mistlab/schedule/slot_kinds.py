"""How often each kind of slot occurs while a stage passes through its layers.

A stage's layers lie in order, as runs of layers of one type. A slot is a position of the pass: the
layer that computes there, the lower layer ``depth`` before it and the upper one ``depth`` after it;
the first and last ``depth`` positions lie outside, where nothing computes and neighbours are still
fetched or evicted. Slots with the same three types of layers last equally long, so only counts are
needed. The three types change where a run ends, or ``depth`` before or after it; between two such
points all slots are of one kind.

Axes: R runs, J stages, P points, K kinds of slots.
"""

import numpy as np
from numpy.typing import NDArray

# The type of what lies before and after a stage's layers: the last row of a table by types.
NOTHING = -1


def slot_counts(
    sizes: NDArray[np.float64], types: NDArray[np.int64], depth: int
) -> tuple[NDArray[np.int64], NDArray[np.float64]]:
    """The kinds of slots that occur (K, 3), by their types of layers, and how many of each a pass
    of each stage has (K, J).

    ``sizes`` are how many layers the runs have (R, J), ``types`` theirs (R, J or R, 1).
    """
    ends = np.cumsum(sizes, axis=0)
    edges = np.concatenate([np.zeros_like(ends[:1]), ends])
    points = np.sort(np.concatenate([edges - depth, edges, edges + depth]), axis=0)
    lengths, middles = np.diff(points, axis=0), (points[1:] + points[:-1]) / 2
    # Nothing before the layers comes first in the order of kinds, nothing after them last.
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


def _at(
    positions: NDArray[np.float64], edges: NDArray[np.float64], places: NDArray[np.int64]
) -> NDArray[np.int64]:
    """The place of the run at each position (P, J), of places (R + 2, J or R + 2, 1) of runs."""
    run = (positions[:, None] >= edges).sum(axis=1)
    if places.shape[1] == 1:
        return np.asarray(places[run, 0])
    return np.take_along_axis(places, run, axis=0)


def _counted(
    code: NDArray[np.int64],
    lengths: NDArray[np.float64],
    codes: NDArray[np.int64],
    every: int,
) -> NDArray[np.float64]:
    """The lengths (K, J) of all points with one of the codes, of so many that there may be."""
    stages = code.shape[1]
    row = np.full(every, len(codes))
    row[codes] = np.arange(len(codes))
    flat = row[code] * stages + np.arange(stages)
    counted = np.bincount(
        flat.ravel(), weights=lengths.ravel(), minlength=(len(codes) + 1) * stages
    )
    return np.asarray(counted.reshape(-1, stages)[: len(codes)])
