"""Finds the core of attention (from queries, keys and values to the output), and makes blocks that
recompute it in the backward pass.
"""

from __future__ import annotations

from dataclasses import replace

from mistlab.graph.graph import LayerGraph, Operator, Peak, SavedTensor
from mistlab.graph.sums import expanded, factors_of, names_in, sympy, total


def core_recomputed(block: LayerGraph) -> LayerGraph:
    """The graph of a block that recomputes the core of its attention (Korthikanti et al. 2022).

    It keeps only the core's inputs and output, not its scores, probabilities, masks and sums.

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
    """Whether a kept tensor holds attention scores or probabilities, judging by its size, which
    depends on heads and positions but not on channels.
    """
    symbols = names_in(tensor.size_bytes)
    return bool(symbols & {"n", "k"}) and not symbols & {"d", "h", "r", "f"}


def _runs_in_core(operator: Operator) -> bool:
    return operator.module == ATTENTION and operator.name != ROTATES


def without(peak: Peak, gone: sympy.Expr) -> Peak:
    """A memory peak without the bytes that are no longer kept.

    It is unchanged if the peak is in the core of attention itself, or before these bytes exist.
    """
    left = expanded(peak.size_bytes - gone)
    had_all = all(share > 0 for share in factors_of(left).values())
    if peak.operator in OF_CORE or not had_all:
        return peak
    return replace(peak, size_bytes=left)


# The name of the module that is the core of attention, and how the names of rotary embedding's
# operators begin, which have that module too but come before the core.
ATTENTION, ROTATES = "attention", "mistlab.rotate_"
# The operators of attention's core, forward and backward; memory may peak while one of them runs.
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
