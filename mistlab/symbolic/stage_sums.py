"""The sums of a stage's blocks, by treatment; the expressions of stages are made of them.

Where all blocks are of one kind, these are the sums of one block. Where kinds take turns, they are
the sums of an imaginary block that stands for all blocks with one treatment. Its amounts that add
up over blocks are averages; its amounts at one moment are the largest of any block.

Axes: C rows of sizes and stages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import fields

import numpy as np
from numpy.typing import NDArray

from mistlab.symbolic.layer import LayerSums, sum_name
from mistlab.symbolic.layer_types import LayerTypes, type_of
from mistlab.symbolic.treatments import PLAIN

Table = Mapping[str, NDArray[np.float64]]

# The names of the sums of a stage's blocks begin so; those of a treatment add its name.
BLOCKS = "blocks"
# Parameters of the largest block, for which buffers have room.
LARGEST_BLOCK = "largest_block_parameters"
LARGEST_EXPERTS = "largest_block_expert_parameters"

_PEAKS = ("forward_peak_bytes", "backward_peak_bytes")
_AT_ONE_MOMENT = ("output_bytes", "input_bytes")


def sums_of_blocks(types: LayerTypes, sums: Table, stages: Table) -> Table:
    """The sums of blocks (C) from those of each type of layers, for stages of these columns."""
    names = [entry.name for entry in fields(LayerSums)]
    ways = (PLAIN, *types.treatments)
    if len(types.pattern) == 1:
        (kind,) = types.pattern
        found = {
            sum_name(type_of(BLOCKS, way), name): sums[sum_name(type_of(kind, way), name)]
            for way in ways
            for name in names
        }
        return {**found, **_largest(types, sums)}
    counts = _counts(types, stages)
    found = {
        sum_name(type_of(BLOCKS, way), name): _of_kinds(types, sums, counts, way, name)
        for way in ways
        for name in names
    }
    return {**found, **_largest(types, sums)}


def _largest(types: LayerTypes, sums: Table) -> Table:
    """Parameters of the largest block, and of its experts."""
    sizes = np.stack([sums[sum_name(kind, "parameters")] for kind in types.kinds])
    experts = np.stack([sums[sum_name(kind, "expert_parameters")] for kind in types.kinds])
    largest, every = sizes.argmax(axis=0), np.arange(sizes.shape[1])
    return {LARGEST_BLOCK: sizes[largest, every], LARGEST_EXPERTS: experts[largest, every]}


def _of_kinds(
    types: LayerTypes, sums: Table, counts: Table, way: str, name: str
) -> NDArray[np.float64]:
    """One sum (C) of a block that stands for all kinds with a treatment."""

    def of_each(one: str) -> NDArray[np.float64]:
        return np.stack([sums[sum_name(type_of(kind, way), one)] for kind in types.kinds])

    if name in _AT_ONE_MOMENT:
        return np.asarray(of_each(name).max(axis=0))
    if name in _PEAKS:
        saved = of_each("saved_bytes")
        return np.asarray((of_each(name) - saved).max(axis=0) + saved.max(axis=0))
    # The parameters of a stage are those of all its blocks, however it treats them.
    is_state = name in ("parameters", "expert_parameters")
    every = (PLAIN, *types.treatments) if is_state else (way,)
    weights = np.stack([_counted(counts, kind, every) for kind in types.kinds])
    weights = np.where(weights.sum(axis=0) > 0, weights, 1.0)
    return np.asarray((weights * of_each(name)).sum(axis=0) / weights.sum(axis=0))


def _counted(counts: Table, kind: str, ways: Sequence[str]) -> NDArray[np.float64]:
    return np.asarray(np.sum([counts[type_of(kind, way)] for way in ways], axis=0))


def _counts(types: LayerTypes, stages: Table) -> Table:
    """How many layers of each type the stages (C) have."""
    sizes, places = types.runs(stages)
    return {
        name: np.where(places == place, sizes, 0.0).sum(axis=0)
        for place, name in enumerate(types.names)
    }
