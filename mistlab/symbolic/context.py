"""Splits sequences over context-parallel ranks: makes the layer graphs that they run.

A rank has s tokens of each sequence, of s cp. Attention alone looks at other ranks' tokens: keys
and values go round a ring of the ranks while each rank attends to those that it has (Liu et al.
2023). Of a causal sequence each rank takes one part of the first half and one of the second, so
that all have as much to do.

With one rank (cp is 1) the graphs count what they counted before.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Literal

from mistlab.symbolic.graph import LayerGraph, ModelGraph, Operator, Phase
from mistlab.symbolic.sums import Sum, where

RING = "mistlab.ring_keys"
# Bytes of a number in each precision of graphs.
_WIDTHS = {"half": 2, "single": 4}


def split_over_context(graph: ModelGraph) -> ModelGraph:
    """The graphs of a rank that has s tokens of each sequence, of s cp; sizes are sums."""
    width = _WIDTHS[graph.precision]

    def split(layer: LayerGraph) -> LayerGraph:
        wide = _with_wide_scores(layer)
        return _with_ring(wide, width) if _attends(layer) else wide

    return replace(
        graph,
        embedding=_with_whole_tables(graph.embedding),
        block=split(graph.block),
        further_blocks=tuple(map(split, graph.further_blocks)),
        head=split(_with_whole_tables(graph.head)),
    )


def _attends(layer: LayerGraph) -> bool:
    """Whether a block has attention: neither a scan nor nothing in its place."""
    has_mixer = any(one.module.startswith("attention") for one in layer.operators)
    return has_mixer and not any(one.kind == "scan" for one in layer.operators)


def _with_whole_tables(layer: LayerGraph) -> LayerGraph:
    """Every rank has the whole table of learned positions."""
    parameters = (
        replace(one, shape=tuple(_of_all_tokens(size) for size in one.shape))
        for one in layer.parameters
    )
    return replace(layer, parameters=tuple(parameters))


def _with_wide_scores(layer: LayerGraph) -> LayerGraph:
    """Scores are of a rank's queries with all keys, so they grow with s times s cp."""
    return replace(
        layer,
        operators=tuple(
            replace(
                one,
                flop=_wide(one.flop),
                read_bytes=_wide(one.read_bytes),
                written_bytes=_wide(one.written_bytes),
            )
            for one in layer.operators
        ),
        saved=tuple(replace(one, size_bytes=_wide(one.size_bytes)) for one in layer.saved),
        peaks=tuple(replace(one, size_bytes=_wide(one.size_bytes)) for one in layer.peaks),
    )


@cache
def _of_all_tokens(size: Sum) -> Sum:
    """A size of s cp tokens."""
    return _with_more(size, lambda power: power)


@cache
def _wide(size: Sum) -> Sum:
    """A size that grows with s times s cp, if it grows with s times s."""
    return _with_more(size, lambda power: int(power == 2))


def _with_more(size: Sum, ranks: Callable[[int], int]) -> Sum:
    """A sum whose products have ``ranks`` powers of cp more for each power of s."""
    if "s" not in size.names:
        return size
    cp = Sum.named("cp")
    return Sum.total(
        Sum({powers: number}) * cp ** ranks(dict(powers).get("s", 0))
        for powers, number in size.terms.items()
    )


def _with_ring(layer: LayerGraph, width: int) -> LayerGraph:
    """Keys and values go round, and in the backward pass again with their gradients. A rank has
    room for those that it attends to and for those that come."""
    b, s, k, d, tp, cp = map(Sum.named, ("b", "s", "k", "d", "tp", "cp"))
    own_bytes = where("numpy.greater(cp, 1)") * (2 * width * b * s * k * d / tp)
    room, message = 2 * own_bytes, own_bytes * cp

    def ring(phase: Phase) -> Operator:
        return Operator(
            name=RING,
            kind="collective",
            phase=phase,
            module="attention",
            dtype="bfloat16" if width == _WIDTHS["half"] else "float32",
            inputs=((b, s, k / tp, d),),
            outputs=((b, s, k / tp, d),),
            flop=Sum.of(0),
            read_bytes=message,
            written_bytes=message,
        )

    rounds: tuple[Literal["forward", "backward"], ...] = ("forward", "backward", "backward")
    return replace(
        layer,
        operators=(*layer.operators, *map(ring, rounds)),
        peaks=tuple(replace(one, size_bytes=one.size_bytes + room) for one in layer.peaks),
    )
