"""Makes blocks whose operators keep fewer bytes for the backward pass, after Tempo (Andoorveedu et
al. 2022); they are called lean.

GELU keeps its output and a byte a value, LayerNorm its output and one deviation a row, attention's
core its shares and mask but not the shares after dropout, dropout after products nothing. What is
kept in place of an input is kept by the next product anyway.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mistlab.graph.attention_core import ATTENTION, without
from mistlab.graph.graph import LayerGraph, Operator, Peak, Phase, SavedTensor
from mistlab.graph.sums import expanded, factors_of, names_in, product, total
from mistlab.plan.lean_sets import KINDS

if TYPE_CHECKING:
    import sympy

# The number of channels whose normalised values a lean LayerNorm keeps: it keeps its output instead
# of its input, and these determine the input where a channel's gain is almost 0.
KEPT_CHANNELS = 8

GELU, NORM, DROPOUT = "aten.gelu", "aten.native_layer_norm", "aten.native_dropout"
_LEAN = {
    GELU: "mistlab.lean_gelu",
    NORM: "mistlab.lean_layer_norm",
    DROPOUT: "mistlab.lean_dropout",
}
DROP_AGAIN = "mistlab.drop_again"
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
_BYTE = "bool"


def lean(block: LayerGraph, kinds: Collection[str] = KINDS) -> LayerGraph:
    """The graph of a block with lean operators, which keep fewer bytes, of these kinds (GELU,
    norms, attention core, dropout).
    """
    for kind in KINDS:
        if kind in kinds:
            block = _OF_KIND[kind](block)
    return block


def _changed(
    block: LayerGraph,
    *,
    operators: Iterable[Operator],
    saved: Iterable[SavedTensor],
    peak: Callable[[Peak], Peak],
    more: Iterable[Peak] = (),
) -> LayerGraph:
    peaks = (*(peak(one) for one in block.peaks), *more)
    return replace(block, operators=tuple(operators), saved=tuple(saved), peaks=peaks)


def _lean_gelu(block: LayerGraph) -> LayerGraph:
    """The graph of a block whose GELU keeps its output and a byte per value instead of its
    input.
    """
    forward = _named(block, GELU, "forward")
    if forward is None:
        return block
    values = product(forward.outputs[0])
    width = _WIDTHS[forward.dtype]

    def saved(tensor: SavedTensor) -> SavedTensor:
        is_input = tensor.module == forward.module and tensor.size_bytes == values * width
        return replace(tensor, dtype=_BYTE, size_bytes=values) if is_input else tensor

    def operator(operator: Operator) -> Operator:
        if operator.module != forward.module or not operator.name.startswith(GELU):
            return operator
        renamed = _renamed(operator, GELU)
        if operator.phase == "forward":
            return replace(
                renamed,
                outputs=(*operator.outputs, operator.outputs[0]),
                written_bytes=operator.written_bytes + values,
            )
        # The backward pass of a lean GELU reads GELU's output and a byte per value instead of its
        # input.
        inputs = (*operator.inputs, operator.inputs[-1])
        return replace(renamed, inputs=inputs, read_bytes=operator.read_bytes + values)

    gone = values * (width - 1)
    changed = [saved(tensor) for tensor in block.saved]
    kept = total((one.size_bytes for one in changed), like=values)
    # At the forward peak, GELU's input still exists beside its output and the byte per value. At
    # the backward peak, GELU's output still exists if the gradient of its input has a tensor of its
    # own.
    is_behind = _ends_with_norm(block.of_phase("forward"))
    moments = (
        Peak(phase="forward", operator=_LEAN[GELU], size_bytes=kept + values * width),
        Peak(
            phase="backward",
            operator=f"{_LEAN[GELU]}_backward",
            size_bytes=kept + 2 * width * values + (1 + is_behind) * block.output_bytes,
        ),
    )
    return _changed(
        block,
        operators=map(operator, block.operators),
        saved=changed,
        peak=lambda one: _less(one, gone) if _has_all(one, block) else one,
        more=moments,
    )


def _lean_norms(block: LayerGraph) -> LayerGraph:
    """The graph of a block whose norms keep their outputs instead of their inputs.

    GEMMs keep the outputs anyway. Norms also keep the normalised values of a few channels, whose
    gains are almost 0, and no means.
    """
    for operator in block.of_phase("forward"):
        # No GEMM keeps the output of a norm at the end of half a block, so such a norm is not made
        # lean.
        if operator.name == NORM and not operator.module.endswith("post_norm"):
            block = _lean_norm(block, operator)
    return block


def _lean_norm(block: LayerGraph, norm: Operator) -> LayerGraph:
    width = _WIDTHS[norm.dtype]
    values, rows = product(norm.outputs[0]), product(norm.outputs[1])
    channels = values * 0 + KEPT_CHANNELS
    kept = SavedTensor(
        module=norm.module,
        shape=(rows, channels),
        dtype=norm.dtype,
        size_bytes=rows * KEPT_CHANNELS * width,
        is_input=False,
    )
    # A lean norm keeps the standard deviation of each token, not its mean.
    sizes = [values * width, rows * width]
    saved_by_norm = [
        one for one in block.saved if one.module == norm.module and one.size_bytes in sizes
    ]
    dropped = [next(one for one in saved_by_norm if one.size_bytes == size) for size in sizes]
    saved = [one for one in block.saved if not any(one is other for other in dropped)]
    moved = kept.size_bytes - rows * width

    def operator(operator: Operator) -> Operator:
        if operator.module != norm.module or not operator.name.startswith(NORM):
            return operator
        renamed = _renamed(operator, NORM)
        if operator.phase == "forward":
            made = (*operator.outputs[:2], kept.shape)
            return replace(renamed, outputs=made, written_bytes=operator.written_bytes + moved)
        gradient, x, _, deviation, *vectors = operator.inputs
        shapes = (gradient, x, deviation, kept.shape, *vectors)
        return replace(renamed, inputs=shapes, read_bytes=operator.read_bytes + moved)

    gone = (values - rows * (KEPT_CHANNELS - 1)) * width
    forward = block.of_phase("forward")
    position = [one.module for one in forward].index(norm.module)
    network, attention = _ends(forward)
    is_behind = _ends_with_norm(forward)

    def changed(peak: Peak) -> Peak:
        has_all = _has_all(peak, block)
        # In the forward pass, the residual stream still holds a norm's input, so a lean norm adds
        # only the channels that it keeps to the memory peak. In post-norm blocks the residual
        # stream does not hold that input, except for the last norm while it runs.
        if peak.phase == "forward" and not (has_all and is_behind and position < len(forward) - 1):
            return _less(peak, -moved)
        if has_all:
            return _less(peak, gone)
        names = names_in(peak.size_bytes)
        is_before = position < (network if "f" in names else attention)
        # While a lean norm itself runs backward, only the channels that it keeps are added to the
        # memory peak, since its output takes the place of its input.
        if peak.operator.startswith(NORM) and ("n" not in names or not is_before):
            return _less(peak, -moved)
        return _less(peak, gone) if is_before else peak

    return _changed(
        block, operators=map(operator, block.operators), saved=(*saved, kept), peak=changed
    )


def _lean_core(block: LayerGraph) -> LayerGraph:
    """The graph of a block that recomputes attention probabilities after dropout from those before
    dropout and the mask.
    """
    forward = _named(block, DROPOUT, "forward", module=ATTENTION)
    if forward is None:
        return block
    # The size of a rank's attention scores is derived from their bytes, since traced shapes lack
    # the keys of other context-parallel ranks.
    width = _WIDTHS[forward.dtype]
    dropped = expanded(forward.written_bytes / (width + 1) * width)
    saved, is_gone = [], False
    for tensor in block.saved:
        if not is_gone and tensor.module == ATTENTION and tensor.size_bytes == dropped:
            is_gone = True
        else:
            saved.append(tensor)
    operators: list[Operator] = []
    for operator in block.operators:
        is_core = operator.phase == "backward" and operator.module == ATTENTION
        if is_core and operator.kind == "matmul" and operators[-1].kind == "copy":
            operators.append(
                replace(
                    forward,
                    name=DROP_AGAIN,
                    phase="backward",
                    inputs=forward.outputs,
                    outputs=(forward.outputs[0],),
                    read_bytes=forward.written_bytes,
                    written_bytes=dropped,
                )
            )
        operators.append(operator)
    return _changed(block, operators=operators, saved=saved, peak=lambda one: without(one, dropped))


def _lean_dropout(block: LayerGraph) -> LayerGraph:
    """The graph of a block that makes the dropout masks after its GEMMs again from their random
    seeds.
    """
    forward = _named(block, DROPOUT, "forward", module="dropout")
    if forward is None:
        return block
    mask = product(forward.outputs[0])
    masks = [one for one in block.saved if one.module == "dropout" and one.size_bytes == mask]

    def operator(operator: Operator) -> Operator:
        if operator.module != "dropout" or not operator.name.startswith(DROPOUT):
            return operator
        renamed = _renamed(operator, DROPOUT)
        if operator.phase == "forward":
            return replace(
                renamed, outputs=operator.outputs[:1], written_bytes=operator.written_bytes - mask
            )
        return replace(renamed, inputs=operator.inputs[:1], read_bytes=operator.read_bytes - mask)

    def less(peak: Peak) -> Peak:
        if not _has_all(peak, block):
            return peak
        # In the backward pass the last dropout frees its mask first, so only the masks of earlier
        # dropouts still exist.
        is_last = peak.phase == "backward" and not peak.operator.startswith(DROPOUT)
        return _less(peak, mask * (len(masks) - is_last))

    kept = (one for one in block.saved if one not in masks)
    return _changed(block, operators=map(operator, block.operators), saved=kept, peak=less)


_OF_KIND = {
    "gelu": _lean_gelu,
    "norms": _lean_norms,
    "core": _lean_core,
    "dropout": _lean_dropout,
}


def _named(block: LayerGraph, name: str, phase: Phase, *, module: str = "") -> Operator | None:
    """The first operator of a pass with this name, in this module if one is given."""
    return next(
        (o for o in block.of_phase(phase) if o.name == name and module in ("", o.module)), None
    )


def _renamed(operator: Operator, plain: str) -> Operator:
    """The operator under the name of its lean version, which keeps fewer bytes."""
    return replace(operator, name=operator.name.replace(plain, _LEAN[plain]))


def _ends(forward: Sequence[Operator]) -> tuple[int, int]:
    """The indices of the forward operators with which a block's feed-forward network and its
    attention begin.
    """
    network = next((n for n, one in enumerate(forward) if one.module.startswith("mlp.")), 0)
    attention = next((n for n, one in enumerate(forward) if one.module.startswith("attention.")), 0)
    return network, attention


def _ends_with_norm(forward: Sequence[Operator]) -> bool:
    """Whether the norms of a block follow its residual additions (post-norm)."""
    return forward[-1].kind == "normalization"


def _has_all(peak: Peak, block: LayerGraph) -> bool:
    """Whether all tensors that a block keeps exist at a memory peak, judging by the sizes of
    both.
    """
    left = expanded(peak.size_bytes - block.saved_bytes)
    return all(share > 0 for share in factors_of(left).values())


def _less(peak: Peak, gone: sympy.Expr) -> Peak:
    return replace(peak, size_bytes=expanded(peak.size_bytes - gone))
