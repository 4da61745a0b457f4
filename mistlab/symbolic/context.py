"""Splits sequences over context-parallel ranks: makes the layer graphs that they run.

A rank has s tokens of each sequence, of s cp. Attention alone looks at other ranks' tokens: keys
and values go round a ring of the ranks while each rank attends to those that it has (Liu et al.
2023), or each rank gathers them all, or ranks exchange tokens for heads. Of a causal sequence each
rank takes one part of the first half and one of the second, so that all have as much to do.

With one rank (cp is 1) the graphs count what they counted before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import cache
from typing import Any, TypeVar

from mistlab.symbolic.exchanges import JOINS
from mistlab.symbolic.graph import LayerGraph, ModelGraph, Operator, Peak, Phase, SavedTensor
from mistlab.symbolic.sums import Sum, where
from mistlab.values.context_ways import GATHER, HEADS, RING

Part = TypeVar("Part", Operator, SavedTensor, Peak)

RING_KEYS = "mistlab.ring_keys"
# Bytes of a number in each precision of graphs.
_WIDTHS = {"half": 2, "single": 4}


def split_over_context(graph: ModelGraph, exchange: int = RING) -> ModelGraph:
    """The graphs of a rank that has s tokens of each sequence, of s cp, and that exchanges keys in
    this way (``mistlab.values.context_ways``); sizes are sums."""
    width = _WIDTHS[graph.precision]

    def split(layer: LayerGraph) -> LayerGraph:
        wide = _with_wide_scores(layer)
        return _with_exchange(wide, width, exchange) if _attends(layer) else wide

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
        operators=tuple(_widened(one, _OF_OPERATORS) for one in layer.operators),
        saved=tuple(_widened(one, _OF_TENSORS) for one in layer.saved),
        peaks=tuple(_widened(one, _OF_TENSORS) for one in layer.peaks),
    )


_OF_OPERATORS = ("flop", "read_bytes", "written_bytes")
_OF_TENSORS = ("size_bytes",)


def _widened(one: Part, names: Sequence[str]) -> Part:
    """An operator, tensor or moment with wide sizes; most of them have none."""
    sizes = {name: getattr(one, name) for name in names}
    wide: dict[str, Any] = {name: _wide(size) for name, size in sizes.items()}
    return one if wide == sizes else replace(one, **wide)


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


def _with_exchange(layer: LayerGraph, width: int, exchange: int) -> LayerGraph:
    """A block whose ranks exchange keys in this way, if there are several; attention then takes
    more room."""
    is_split = where("numpy.greater(cp, 1)")
    way = _WAYS[exchange](width)
    name = next(name for name, of_way in JOINS.items() if of_way == exchange)
    operators = (
        *(_collective(name, phase, is_split * size, width) for name, phase, size in way.messages),
        *(_join(name, phase, is_split * size, width) for phase, size in way.joined.items()),
    )
    room = {phase: is_split * size for phase, size in way.room.items()}
    return replace(
        layer,
        operators=(*layer.operators, *operators),
        peaks=tuple(
            replace(one, size_bytes=one.size_bytes + room[one.phase]) for one in layer.peaks
        ),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """A way to exchange keys: the collectives of a block with their phases and bytes, the bytes
    that kernels around attention read and write in each phase, and those beside which attention
    runs."""

    messages: tuple[tuple[str, Phase, Sum], ...]
    joined: Mapping[Phase, Sum]
    room: Mapping[Phase, Sum]


def _own_bytes(width: int) -> tuple[Sum, Sum]:
    """Bytes of a rank's own queries, and those of its own keys and values."""
    b, s, n, k, d, tp = map(Sum.named, ("b", "s", "n", "k", "d", "tp"))
    return width * b * s * n * d / tp, 2 * width * b * s * k * d / tp


def _round(width: int) -> _Way:
    """Keys and values go round the ring; in the backward pass they go round again, with their
    gradients. A rank has room for two parts: the one that it attends to, and the one that comes.

    Each part has an attention of its own, which reads all queries and writes an outcome as large;
    outcomes and gradients are then joined, one part after another. Counted is the last rank, which
    has most to join: all of its queries meet the first halves of the other ranks' keys.
    """
    queries, keys = _own_bytes(width)
    sums, further = _log_sums_bytes(), Sum.named("cp") + Sum.of(-1)
    every = keys * Sum.named("cp")
    half = Sum.of(Fraction(1, 2)) * keys
    # Read and written by attention: queries and outcome; backward also the outcome and its
    # gradient, and the gradient of queries. Adding reads two tensors and writes one.
    forward = 2 * keys + 2 * queries + 2 * sums + further * (2 * queries + 3 * queries + 3 * sums)
    backward = 2 * keys + 2 * queries + 5 * half + further * (4 * queries + 3 * queries + 3 * half)
    return _Way(
        messages=((RING_KEYS, "forward", every), *((RING_KEYS, "backward", every),) * 2),
        joined={"forward": forward, "backward": backward},
        room={"forward": 2 * keys, "backward": 2 * keys},
    )


def _gathered(width: int) -> _Way:
    """A rank gathers all keys and values before it attends, again before the backward pass, and
    then scatters their gradients (Llama 3). It keeps its own alone.

    Gathered keys are put into the order of tokens. The two halves of a rank's queries have an
    attention each, and copy their outcomes. Backward, gradients of all keys begin as zeros; those
    of each half are added, and put back into the order of ranks.
    """
    queries, keys = _own_bytes(width)
    every = keys * Sum.named("cp")
    return _Way(
        messages=(
            ("mistlab.gather_keys", "forward", every),
            ("mistlab.gather_keys", "backward", every),
            ("mistlab.scatter_keys", "backward", every),
        ),
        joined={
            "forward": 2 * every + 2 * queries,
            "backward": 2 * every + 2 * queries + every + 3 * every + 2 * every,
        },
        room={"forward": every, "backward": 2 * every},
    )


def _of_heads(width: int) -> _Way:
    """Ranks exchange queries, keys and values for a share of the heads of all tokens, and the
    outcome back (Jacobs et al. 2023). An exchange has room for what comes in beside what goes
    out. Each of the four tensors is copied three times: put together before, put together after,
    and put into the order of tokens."""
    queries, keys = _own_bytes(width)
    each = (queries, keys / 2, keys / 2, queries)
    phases: tuple[Phase, ...] = ("forward", "backward")
    return _Way(
        messages=tuple(("mistlab.exchange_heads", phase, one) for phase in phases for one in each),
        joined=dict.fromkeys(phases, 6 * (2 * queries + keys)),
        room=dict.fromkeys(phases, queries + keys),
    )


def _log_sums_bytes() -> Sum:
    """Bytes of the 32-bit logarithms of a rank's sums of scores."""
    b, s, n, tp = map(Sum.named, ("b", "s", "n", "tp"))
    return 4 * b * s * n / tp


_WAYS: Mapping[int, Callable[[int], _Way]] = {RING: _round, GATHER: _gathered, HEADS: _of_heads}


def _join(name: str, phase: Phase, moved: Sum, width: int) -> Operator:
    """The kernels around attention that several ranks need, as one operator; its bytes are those
    that are read and written."""
    half = Sum.of(Fraction(1, 2)) * moved
    return replace(
        _collective(name, phase, half, width),
        kind="elementwise",
        read_bytes=half,
        written_bytes=half,
    )


def _collective(name: str, phase: Phase, message: Sum, width: int) -> Operator:
    b, s, k, d, tp = map(Sum.named, ("b", "s", "k", "d", "tp"))
    return Operator(
        name=name,
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
