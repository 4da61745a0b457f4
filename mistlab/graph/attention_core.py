"""Finds the core of attention (from queries, keys and values to the output), makes blocks that
recompute it in the backward pass, and adds the buffers that exist only while it runs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from mistlab.graph.graph import LayerGraph, Operator, Peak, Phase, SavedTensor
from mistlab.graph.sums import Sum, expanded, factors_of, names_in, sympy, total


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


def with_room(peaks: Sequence[Peak], room: Mapping[Phase, Sum]) -> tuple[Peak, ...]:
    """The memory peaks of a block, in the order of its operators, with buffers of ``room`` bytes
    that exist while its attention runs.

    If torch runs the block, its backward peaks before attention's do not count them, and of its
    forward peaks only the last does: the tensors of attention's own peak still exist then.
    Otherwise every peak counts the buffers, since they may be freed late.
    """
    names = [peak.operator for peak in peaks]
    first = names.index(FLASH_BACKWARD) if FLASH_BACKWARD in names else 0
    forward = sum(peak.phase == "forward" for peak in peaks)
    free = {*range(first)} - {forward - 1}
    return tuple(
        peak if number in free else replace(peak, size_bytes=peak.size_bytes + room[peak.phase])
        for number, peak in enumerate(peaks)
    )


def with_copies(layer: LayerGraph, width: int, *, of_heads: bool) -> tuple[Peak, ...]:
    """The memory peaks of a block whose FlashAttention makes gradients of keys and values for every
    head of the queries, and then adds up those of one head (``dk_expanded``,
    csrc/flash_attn/flash_api.cpp).

    Ranks that split heads (``of_heads``) have at least one head of the keys each.
    """
    keys = [one.inputs[1] for one in layer.operators if one.kind == "attention"]
    if not any("k" in size.names for shape in keys for size in shape):
        return layer.peaks
    b, s, n, d, tp = map(Sum.named, ("b", "s", "n", "d", "tp"))
    kept = Sum.named("numpy.maximum(k, cp)" if of_heads else "k")
    copies = 2 * width * b * s * d / tp * (n + -1 * kept)
    return tuple(
        replace(peak, size_bytes=peak.size_bytes + copies)
        if peak.operator == FLASH_BACKWARD
        else peak
        for peak in layer.peaks
    )


# The name of the module that is the core of attention, and how the names of rotary embedding's
# operators begin, which have that module too but come before the core.
ATTENTION, ROTATES = "attention", "mistlab.rotate_"
# FlashAttention's backward pass, and how the traced operator that stands for it is called.
FLASH_BACKWARD = "flash_attention_backward"
TRACED_BACKWARD = "aten._scaled_dot_product_flash_attention_for_cpu_backward"
# The operators of attention's core, forward and backward; memory may peak while one of them runs.
OF_CORE = frozenset(
    (
        *("aten.clone", "aten.baddbmm", "aten.bmm", "aten.mul", "aten.cat"),
        "aten.new_zeros",
        *("mistlab.causal_softmax", "mistlab.causal_softmax_backward"),
        *("aten._softmax", "aten._softmax_backward_data"),
        "aten._scaled_dot_product_flash_attention_for_cpu",
        *(TRACED_BACKWARD, FLASH_BACKWARD),
    )
)
