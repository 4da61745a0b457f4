"""How often each kind of slot occurs while a stage passes through its layers.

A stage's layers in order are its embedding, plain blocks, checkpointed blocks and its head, as far
as it has them. A slot is a position of the pass: the layer that computes there, the lower layer
``depth`` before it and the upper one ``depth`` after it; the first and last ``depth`` positions lie
outside, where nothing computes and neighbours are still fetched or evicted. Slots with the same
three types of layers last equally long, so only counts are needed, and those are lengths of
intersections of intervals.

Axes: C candidates, K kinds of slots.
"""

from itertools import combinations_with_replacement
from typing import Any

import numpy as np
from numpy.typing import NDArray

LAYER_TYPES = ("embedding", "block", "checkpointed", "head")
NOTHING = len(LAYER_TYPES)

Column = NDArray[Any]
SlotKind = tuple[int, int, int]

# Types in order of position, with what lies before and after the stage's layers.
_BEFORE, *_LAYERS, _AFTER = range(-1, NOTHING + 1)


def _named(place: int) -> int:
    return NOTHING if place == _BEFORE else place


_ORDERED = tuple(
    places
    for places in combinations_with_replacement((_BEFORE, *_LAYERS, _AFTER), 3)
    if any(place in _LAYERS for place in places)
)

# The lower place, the one that computes and the upper one (3, K), counted from ``_BEFORE``.
_PLACES = np.array(_ORDERED).T - _BEFORE

# Types of the lower layer, the one that computes and the upper one; ``NOTHING`` where none is.
SLOT_KINDS: tuple[SlotKind, ...] = tuple(
    (_named(lower), _named(here), _named(upper)) for lower, here, upper in _ORDERED
)


def slot_counts(
    *, layers: Column, checkpointed: Column, embedding: Column, head: Column, depth: int
) -> NDArray[np.float64]:
    """How many slots (K, C) of each of ``SLOT_KINDS`` a pass of each candidate has."""
    sizes = np.stack([embedding, layers - checkpointed, checkpointed, head]).astype(np.float64)
    ends = np.cumsum(sizes, axis=0)
    nothing, total = np.zeros_like(ends[:1]), ends[-1:]
    beyond = 2 * depth + 1
    # Where each type begins and ends, what lies before and after the layers first and last.
    begins = np.concatenate([nothing - beyond, ends - sizes, total])
    finishes = np.concatenate([nothing, ends, total + beyond])
    lower, here, upper = _PLACES
    first = np.maximum(np.maximum(begins[lower] + depth, begins[here]), begins[upper] - depth)
    last = np.minimum(np.minimum(finishes[lower] + depth, finishes[here]), finishes[upper] - depth)
    return np.asarray(np.maximum(last - first, 0.0))
