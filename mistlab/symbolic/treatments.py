"""Treatments: the ways in which a stage may run a block, each a row of a table.

A dimension of a stage counts its blocks with each treatment; the other blocks are plain. Plain
blocks come first, then treated ones in the table's order. The layer graph of a treated block is
made from the graph of the plain block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from mistlab.symbolic.every_second_product import products_recomputed
from mistlab.symbolic.graph import LayerGraph, Operator, Peak, SavedTensor
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.maximum import expanded, factors_of
from mistlab.symbolic.sums import names_in, total

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


def core_recomputed(block: LayerGraph) -> LayerGraph:
    """The block keeps nothing of attention's core (scores, shares, masks, sums) but what enters and
    leaves it, and runs the core forward again (Korthikanti et al. 2022).

    What is dropped is missing at every moment, but those at which the core itself runs.
    """
    dropped = [tensor for tensor in block.saved if _is_of_core(tensor)]
    gone = total((tensor.size_bytes for tensor in dropped), like=block.input_bytes)
    return replace(
        block,
        saved=tuple(tensor for tensor in block.saved if tensor not in dropped),
        again=tuple(operator for operator in block.of_phase("forward") if _runs_in_core(operator)),
        peaks=tuple(_without(peak, gone) for peak in block.peaks),
    )


def _is_of_core(tensor: SavedTensor) -> bool:
    """Whether a tensor has numbers for heads and positions, and none for channels."""
    symbols = names_in(tensor.size_bytes)
    return bool(symbols & {"n", "k"}) and not symbols & {"d", "h", "r", "f"}


def _runs_in_core(operator: Operator) -> bool:
    return operator.module == ATTENTION and operator.name != ROTATES


def _without(peak: Peak, gone: sympy.Expr) -> Peak:
    """A moment without the bytes that are gone, if it had them and is not of the core itself."""
    left = expanded(peak.size_bytes - gone)
    had_all = all(share > 0 for share in factors_of(left).values())
    if peak.operator in OF_CORE or not had_all:
        return peak
    return replace(peak, size_bytes=left)


# The module whose own operators are attention's core, but for one: rotary embedding comes before.
ATTENTION, ROTATES = "attention", "mistlab.rotate_"
# Operators of the core and of its backward pass whose moments may be the fullest.
OF_CORE = frozenset(
    (
        *("aten.clone", "aten.baddbmm", "aten.bmm", "aten.mul", "aten.cat"),
        "aten.new_zeros",
        *("mistlab.causal_softmax", "mistlab.causal_softmax_backward"),
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    )
)

TREATMENTS: dict[str, Treatment] = {
    "recomputed": Treatment(dimension="checkpointed_layers", graph=recomputed, peaks_as_plain=True),
    "core_recomputed": Treatment(dimension="core_recomputed_layers", graph=core_recomputed),
    "products_recomputed": Treatment(
        dimension="products_recomputed_layers", graph=products_recomputed, peaks_as_plain=True
    ),
}
