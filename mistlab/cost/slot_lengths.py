"""How long slots of some kinds take: the shared parts of all sums over the slots of a pass.

Axes: C candidates, S distinct strategies, T types of layers, K kinds of slots; the four streams
last.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import overlapped
from mistlab.cost.tasks import TaskSeconds
from mistlab.machine.slowdowns import STREAMS

Values = NDArray[np.float64]
# Kinds of slots (K, 3), as in ``SLOT_KINDS``: columns for the three layers of a slot.
Kinds = NDArray[np.int64]
LOWER, HERE, UPPER = range(3)
# Lengths (K', S) of some kinds of slots, and a mask (K) of these kinds. ``Sums`` turns several of
# them into seconds (C) each.
Lengths = tuple[Values, NDArray[np.bool_]]
Sums = Callable[[Sequence[Lengths]], Sequence[Values]]


def of_layers(of_type: Values, layers: NDArray[np.int64]) -> Values:
    """Seconds (K, S) of layers of given types, from the seconds of all types (T, S)."""
    return np.asarray(with_nothing(of_type)[layers])


def with_nothing(of_type: Values) -> Values:
    """Seconds (T + 1, S) of all types of layers, and of no layer."""
    return np.concatenate([of_type, np.zeros((1, of_type.shape[1]))])


def slot_seconds(
    seconds: TaskSeconds,
    alone: Values,
    awaited: Sequence[str],
    is_least: bool,
    chosen: NDArray[np.intp] | slice = slice(None),
) -> Values:
    """Seconds (K, S) of slots of the ``chosen`` strategies, until the ``awaited`` streams are
    done."""
    if seconds.model.template.depth == 0:
        return np.asarray(alone.sum(axis=-1))
    lengths = np.empty(alone.shape[:2])
    for of_group, factors in seconds.factors("least" if is_least else "own"):
        rows = of_group[chosen]
        part = alone[:, rows]
        flat = overlapped(part.reshape(-1, len(STREAMS)), factors, awaited)
        lengths[:, rows] = flat.reshape(part.shape[:2])
    return lengths
