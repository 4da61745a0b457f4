"""How long slots of some kinds take: the shared parts of all sums over the slots of a pass.

Axes: C candidates, S distinct strategies, T types of layers, K kinds of slots, L lengths of a slot;
the four streams first.
"""

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.side_by_side import SlowedBy, Streams, ends_of_streams
from mistlab.cost.tasks import TaskSeconds

Values = NDArray[np.float64]
# Kinds of slots (K, 3), as in ``SLOT_KINDS``: columns for the three layers of a slot.
Kinds = NDArray[np.int64]
LOWER, HERE, UPPER = range(3)
# Lengths (L, K', S) of some kinds of slots, and a mask (K) of these kinds. ``Sums`` turns several
# such tables into one of seconds (L, C).
Lengths = tuple[Values, NDArray[np.bool_]]
Sums = Callable[[Sequence[Lengths]], Values]


def of_layers(of_type: Values, layers: NDArray[np.int64]) -> Values:
    """Seconds (K, S) of layers of given types, from the seconds of all types (T, S)."""
    return np.asarray(with_nothing(of_type)[layers])


def with_nothing(of_type: Values) -> Values:
    """Seconds (T + 1, S) of all types of layers, and of no layer."""
    return np.concatenate([of_type, np.zeros((1, of_type.shape[1]))])


def slot_ends(
    seconds: TaskSeconds,
    alone: Streams,
    is_least: bool,
    chosen: NDArray[np.intp] | slice = slice(None),
) -> Streams:
    """Seconds (4, K, S) until each stream is done in slots of the ``chosen`` strategies, whose
    tasks are ``alone`` (4, K, S)."""
    if seconds.model.template.depth == 0:
        # Tasks run one after another.
        return np.broadcast_to(alone.sum(axis=0), alone.shape)
    slowed = seconds.slowed_by("least" if is_least else "own")
    flat = ends_of_streams(alone.reshape(len(alone), -1), in_slots(slowed, alone, chosen))
    return flat.reshape(alone.shape)


def in_slots(
    slowed: SlowedBy, alone: Streams, chosen: NDArray[np.intp] | slice = slice(None)
) -> SlowedBy:
    """The factors in each slot of the ``chosen`` strategies, one kind of slot after another."""
    first = np.broadcast_to(slowed.first[chosen], alone.shape[1:])
    return SlowedBy(slowed.table, first.reshape(-1), slowed.size)
