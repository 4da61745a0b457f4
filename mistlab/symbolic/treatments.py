"""Treatments: the ways in which a stage may run a block, each a row of a table.

A dimension of a stage counts its blocks with each treatment; the other blocks are plain. Plain
blocks come first, then treated ones in the table's order. The layer graph of a treated block is
made from the graph of the plain block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mistlab.symbolic.graph import LayerGraph, Peak, SavedTensor

PLAIN = "plain"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Treatment:
    """One treatment; its key in ``TREATMENTS`` is its name.

    ``dimension`` counts the blocks that have it. ``graph`` makes their layer graph from a plain
    block's graph. With ``peaks_as_plain`` they need at their fullest moments at least as much as
    plain blocks, so the moment at which the last plain block runs is never the fullest.
    """

    dimension: str
    graph: Callable[[LayerGraph], LayerGraph]
    peaks_as_plain: bool = False


def treatments_of(stage: Callable[[str], float]) -> list[str]:
    """How a stage treats its blocks, in order; ``stage`` gives its values of dimensions."""
    found = [PLAIN] * int(stage("layers"))
    end = len(found)
    for name, row in reversed(TREATMENTS.items()):
        count = int(stage(row.dimension))
        found[end - count : end] = [name] * count
        end -= count
    return found


def recomputed(block: LayerGraph) -> LayerGraph:
    """The block keeps its input alone, and runs forward again before its backward pass."""
    kept = SavedTensor(module="", shape=(), dtype="", size_bytes=block.input_bytes, is_input=True)
    again = (
        Peak(phase="backward", operator=p.operator, size_bytes=p.size_bytes + block.output_bytes)
        for p in block.peaks
        if p.phase == "forward"
    )
    return replace(
        block,
        saved=(kept,),
        again=block.of_phase("forward"),
        peaks=(*block.peaks, *again),
    )


TREATMENTS: dict[str, Treatment] = {
    "recomputed": Treatment(dimension="checkpointed_layers", graph=recomputed, peaks_as_plain=True),
}
