"""Attention's core, from queries, keys and values to what they make, and its recomputation."""

from __future__ import annotations

from dataclasses import replace

from mistlab.graph.graph import LayerGraph, Operator, Peak, SavedTensor
from mistlab.graph.sums import expanded, factors_of, names_in, sympy, total


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
        peaks=tuple(without(peak, gone) for peak in block.peaks),
    )


def _is_of_core(tensor: SavedTensor) -> bool:
    """Whether a tensor has numbers for heads and positions, and none for channels."""
    symbols = names_in(tensor.size_bytes)
    return bool(symbols & {"n", "k"}) and not symbols & {"d", "h", "r", "f"}


def _runs_in_core(operator: Operator) -> bool:
    return operator.module == ATTENTION and operator.name != ROTATES


def without(peak: Peak, gone: sympy.Expr) -> Peak:
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
        *("aten._softmax", "aten._softmax_backward_data"),
        "aten._scaled_dot_product_flash_attention_for_cpu",
        "aten._scaled_dot_product_flash_attention_for_cpu_backward",
    )
)
