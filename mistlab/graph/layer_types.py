"""Makes the layer graphs of all types of layers of a model, and sums over their operators."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cache
from typing import Any, Self, TypeVar

import numpy as np

from mistlab.core.arrays import Floats, Ints
from mistlab.graph.attention_core import with_copies, with_room
from mistlab.graph.graph import (
    JOINS,
    PHASES,
    Kind,
    LayerGraph,
    ModelGraph,
    Operator,
    Peak,
    Phase,
    SavedTensor,
)
from mistlab.graph.sums import Sum, largest, sympy, total, where
from mistlab.graph.treatments import PLAIN, TREATMENTS, Treatment, treatments_of
from mistlab.plan.lean_sets import ALL
from mistlab.schedule.context_ways import GATHER, HEADS, RING

# Derives the layer graphs of a context-parallel rank from those of a rank with whole sequences.


Part = TypeVar("Part", Operator, SavedTensor, Peak)

RING_KEYS = "mistlab.ring_keys"
# The bytes per value in the precisions of traced layer graphs.
_WIDTHS = {"half": 2, "single": 4}


def split_over_context(graph: ModelGraph, exchange: int = RING) -> ModelGraph:
    """The layer graphs of a context-parallel rank, which has only its part of each sequence.

    A rank has s of the s cp tokens, and exchanges keys in the way ``exchange``
    (``mistlab.schedule.context_ways``); only attention needs other ranks' tokens. Of a causal
    sequence each rank takes one part of the first half and one of the second, which balances work.
    With one rank (cp is 1) only FlashAttention's backward pass, if torch runs it, is given what it
    holds under any number of ranks (``with_copies``).
    """
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
    """Whether a block has attention, instead of a state-space scan or nothing."""
    has_mixer = any(one.module.startswith("attention") for one in layer.operators)
    return has_mixer and not any(one.kind == "scan" for one in layer.operators)


def _with_whole_tables(layer: LayerGraph) -> LayerGraph:
    """A layer with a whole table of learned positions, which context parallelism never splits."""
    parameters = (
        replace(parameter, shape=tuple(_of_all_tokens(size) for size in parameter.shape))
        for parameter in layer.parameters
    )
    return replace(layer, parameters=tuple(parameters))


def _with_wide_scores(layer: LayerGraph) -> LayerGraph:
    """A layer whose attention scores include the keys of all context-parallel ranks."""
    return replace(
        layer,
        operators=tuple(_widened(one, _OF_OPERATORS) for one in layer.operators),
        saved=tuple(_widened(one, _OF_TENSORS) for one in layer.saved),
        peaks=tuple(_widened(one, _OF_TENSORS) for one in layer.peaks),
    )


_OF_OPERATORS = ("flop", "read_bytes", "written_bytes")
_OF_TENSORS = ("size_bytes",)


def _widened(part: Part, names: Sequence[str]) -> Part:
    """An operator, saved tensor or memory peak of attention that has gathered the keys of all
    context-parallel ranks.
    """
    sizes = {name: getattr(part, name) for name in names}
    wide: dict[str, Any] = {name: _wide(size) for name, size in sizes.items()}
    return part if wide == sizes else replace(part, **wide)


@cache
def _of_all_tokens(size: Sum) -> Sum:
    """The size that a rank's size becomes with the tokens of all context-parallel ranks."""
    return _with_more(size, lambda power: power)


@cache
def _wide(size: Sum) -> Sum:
    """A size quadratic in a rank's tokens s, with the keys of all context-parallel ranks."""
    return _with_more(size, lambda power: int(power == 2))


def _with_more(size: Sum, ranks: Callable[[int], int]) -> Sum:
    """Multiply each term of a sum by a power of cp, given by ``ranks`` for its power of s."""
    if "s" not in size.names:
        return size
    cp = Sum.named("cp")
    return Sum.total(
        Sum({powers: number}) * cp ** ranks(dict(powers).get("s", 0))
        for powers, number in size.terms.items()
    )


def _with_exchange(layer: LayerGraph, width: int, exchange: int) -> LayerGraph:
    """A block with the operators and buffers for exchanging keys in context parallelism."""
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
        peaks=with_room(with_copies(layer, width, of_heads=exchange == HEADS), room),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Way:
    """What one way to exchange keys between context-parallel ranks adds to a block."""

    messages: tuple[tuple[str, Phase, Sum], ...]
    joined: Mapping[Phase, Sum]
    room: Mapping[Phase, Sum]


def _own_bytes(width: int) -> tuple[Sum, Sum]:
    """The bytes of a rank's own queries, and those of its own keys and values together."""
    b, s, n, k, d, tp = map(Sum.named, ("b", "s", "n", "k", "d", "tp"))
    return width * b * s * n * d / tp, 2 * width * b * s * k * d / tp


def _round(width: int) -> _Way:
    """What context parallelism by a ring adds to a block: keys and values go round the ring of
    ranks, in the backward pass with their gradients.

    A rank has two buffers: for the part of the keys that it attends to, and for the part that
    arrives. It runs attention once for each part. Each run reads all queries of the rank, and
    writes an output as large as them; outputs and gradients of the runs are then added, one part
    after another. The result is that of the last rank, which adds the most: all of its queries
    attend to the first half of each other rank's keys.
    """
    queries, keys = _own_bytes(width)
    sums, further = _log_sums_bytes(), Sum.named("cp") + Sum.of(-1)
    every = keys * Sum.named("cp")
    half = Sum.of(Fraction(1, 2)) * keys
    # Attention to one part of the keys reads queries and writes output; backward it also reads the
    # output and its gradient, and writes the gradient of queries. Adding two results reads two
    # tensors and writes one.
    forward = 2 * keys + 2 * queries + 2 * sums + further * (2 * queries + 3 * queries + 3 * sums)
    backward = 2 * keys + 2 * queries + 5 * half + further * (4 * queries + 3 * queries + 3 * half)
    return _Way(
        messages=((RING_KEYS, "forward", every), *((RING_KEYS, "backward", every),) * 2),
        joined={"forward": forward, "backward": backward},
        room={"forward": 2 * keys, "backward": 2 * keys},
    )


def _gathered(width: int) -> _Way:
    """What context parallelism by all-gathers adds to a block: a rank gathers all keys and values
    before attention, and reduce-scatters their gradients (Llama 3).

    Gathered keys are copied into the order of tokens. Attention runs once for each half of a rank's
    queries, and its outputs are copied. Backward, gradients of all keys start as zeros, those of
    each half are added, and the sum is copied back into the order of ranks.
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
    """What context parallelism by heads adds to a block: ranks exchange queries, keys and values of
    their tokens for those of a part of the heads (Jacobs et al. 2023).

    The output is exchanged back. Send and receive buffers are separate. Each of the four tensors is
    copied three times: packed before, unpacked after, and put into token order.
    """
    queries, keys = _own_bytes(width)
    each = (queries, keys / 2, keys / 2, queries)
    phases: tuple[Phase, ...] = ("forward", "backward")
    return _Way(
        messages=tuple(("mistlab.exchange_heads", phase, one) for phase in phases for one in each),
        joined=dict.fromkeys(phases, 6 * (2 * queries + keys)),
        room=dict.fromkeys(phases, queries + keys),
    )


def _log_sums_bytes() -> Sum:
    """The bytes of the 32-bit log-sum-exp of a rank's attention scores, one per query and head."""
    b, s, n, tp = map(Sum.named, ("b", "s", "n", "tp"))
    return 4 * b * s * n / tp


_WAYS: Mapping[int, Callable[[int], _Way]] = {RING: _round, GATHER: _gathered, HEADS: _of_heads}


def _join(name: str, phase: Phase, moved: Sum, width: int) -> Operator:
    """An operator for all kernels that context parallelism adds around attention."""
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


# Lists the types of a model's layers: embedding, head, and blocks by the way to run them.


EMBEDDING, HEAD = "embedding", "head"


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerTypes:
    """The types of a model's layers: embedding, head, and blocks by kind and way to run them.

    The model repeats a ``pattern`` of kinds of blocks. Layers of one type take equally long and
    keep equally many bytes.

    >>> LayerTypes(pattern=("block",), treatments=("recomputed",)).names
    ('embedding', 'block', 'block_recomputed', 'head')
    """

    pattern: tuple[str, ...]
    treatments: tuple[str, ...]

    @classmethod
    def of(cls, pattern: Sequence[str]) -> LayerTypes:
        """The types of a model's layers, with all ways to run a block that ``TREATMENTS`` lists."""
        return cls(pattern=tuple(pattern), treatments=tuple(TREATMENTS))

    @property
    def kinds(self) -> tuple[str, ...]:
        """The distinct kinds of blocks of the model, such as dense and with experts."""
        return tuple(dict.fromkeys(self.pattern))

    @property
    def names(self) -> tuple[str, ...]:
        """The names of all types of layers: embedding, blocks by kind and way to run them, head."""
        return (EMBEDDING, *self.of_blocks, HEAD)

    @property
    def of_blocks(self) -> tuple[str, ...]:
        """The types of layers that are blocks, the plain one of each kind first."""
        ways = (PLAIN, *self.treatments)
        return tuple(type_of(kind, way) for kind in self.kinds for way in ways)

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the columns of candidates from which a stage's layers follow."""
        counts = tuple(TREATMENTS[name].dimension for name in self.treatments)
        names = ("layers", *counts, "has_embedding", "has_head")
        return (*names, "first_block") if len(self.pattern) > 1 else names

    def runs(self, columns: Mapping[str, Floats]) -> tuple[Floats, Ints]:
        """The numbers of equal layers in a row in each stage, and their types.

        J stages have R runs: each run's length is (R, J), the index of its type among ``names`` (R,
        J or R, 1).
        """
        if len(self.pattern) > 1:
            return self._runs_of_patterns(columns)
        counts = [columns[TREATMENTS[name].dimension] for name in self.treatments]
        plain = columns["layers"] - sum(counts) if counts else columns["layers"]
        runs = [columns["has_embedding"], plain, *counts, columns["has_head"]]
        return np.stack(runs).astype(np.float64), np.arange(len(runs))[:, None]

    def counts(self, columns: Mapping[str, Floats]) -> Floats:
        """The number of layers of each type in the stages that these columns describe."""
        sizes, places = self.runs(columns)
        places = np.broadcast_to(places, sizes.shape)
        types = range(len(self.names))
        return np.stack([np.where(places == one, sizes, 0.0).sum(axis=0) for one in types])

    def _runs_of_patterns(self, columns: Mapping[str, Floats]) -> tuple[Floats, Ints]:
        """The numbers of equal layers in a row in stages whose kinds of blocks alternate."""
        names = ("first_block", "layers", "has_embedding", "has_head")
        first, layers, begins, ends = (columns[name].astype(np.int64) for name in names)
        position = np.arange((begins + layers + ends).max())[:, None]
        block, is_layer = position - begins, position < begins + layers + ends
        ways, end = np.zeros(block.shape, dtype=np.int64), layers
        for way, name in reversed([*enumerate(self.treatments, 1)]):
            start = end - columns[TREATMENTS[name].dimension].astype(np.int64)
            ways[(block >= start) & (block < end)], end = way, start
        kinds = np.array([self.kinds.index(kind) for kind in self.pattern])
        types = 1 + kinds[(first + block) % len(kinds)] * (1 + len(self.treatments)) + ways
        types = np.where(block < 0, 0, np.where(block < layers, types, len(self.names) - 1))
        begin = is_layer.copy()
        begin[1:] &= types[1:] != types[:-1]
        run, stage = np.cumsum(begin, axis=0) - 1, np.arange(len(first)) + 0 * position
        sizes, of_run = np.zeros(types.shape), np.zeros(types.shape, dtype=np.int64)
        np.add.at(sizes, (run, stage), is_layer)
        of_run[run[begin], stage[begin]] = types[begin]
        return sizes[: run.max() + 1], of_run[: run.max() + 1]

    def of_stages(self, column: Callable[[str], Floats]) -> list[list[int]]:
        """The types of the layers of several stages, in order."""
        rows = zip(*(column(name).tolist() for name in self.columns), strict=True)
        return [self.of_stage(dict(zip(self.columns, row, strict=True))) for row in rows]

    def of_stage(self, values: Mapping[str, float]) -> list[int]:
        """The type of each layer of one stage, in order, as an index into ``names``."""
        first = int(values.get("first_block", 0))
        types = [
            type_of(self.pattern[(first + number) % len(self.pattern)], way)
            for number, way in enumerate(treatments_of(values.__getitem__))
        ]
        types_of_stage = [EMBEDDING] * bool(values["has_embedding"]) + types
        places = {name: place for place, name in enumerate(self.names)}
        return [places[name] for name in types_of_stage + [HEAD] * bool(values["has_head"])]


def type_of(kind: str, treatment: str) -> str:
    """The type of layer of a kind of block run in some way, such as ``block_recomputed``."""
    return kind if treatment == PLAIN else f"{kind}_{treatment}"


def graphs_of(
    graph: ModelGraph,
    treatments: Sequence[tuple[str, Treatment]],
    exchange: int = RING,
    lean: int = ALL,
) -> dict[str, LayerGraph]:
    """The layer graph of each type of layer, in the order of ``LayerTypes.names``.

    ``exchange`` is how context-parallel ranks exchange keys, ``lean`` the operators of lean blocks.
    """
    graph = split_over_context(graph, exchange)
    graphs = {EMBEDDING: graph.embedding}
    for kind in dict.fromkeys(graph.pattern):
        block = graph.kinds[kind]
        graphs[kind] = block
        graphs |= {type_of(kind, name): row.of(block, lean) for name, row in treatments}
    return {**graphs, HEAD: graph.head}


# Sums up a layer graph: operations and bytes by operator class, and memory.


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """The operations and bytes of one class of operators in one pass of a layer."""

    operators: int
    flop: sympy.Expr
    moved_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerMemory:
    """The bytes that a layer saves, takes in and puts out, and those at its memory peaks.

    ``saved_bytes`` are kept for the backward pass; the bytes at peaks include them.
    """

    parameters: sympy.Expr
    expert_parameters: sympy.Expr
    saved_bytes: sympy.Expr
    input_bytes: sympy.Expr
    forward_peak_bytes: sympy.Expr
    backward_peak_bytes: sympy.Expr
    output_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExpressions(LayerMemory):
    """The operations, bytes and memory of a layer; recomputation counts as backward."""

    work: Mapping[tuple[Phase, Kind], OperatorWork]

    def flop(self, phase: Phase) -> sympy.Expr:
        """The floating-point operations of the layer in a pass, over all operator classes."""
        return self._total(work.flop for (p, _), work in self.work.items() if p == phase)

    def moved_bytes(self, phase: Phase) -> sympy.Expr:
        """The bytes that the layer's kernels read and write in a pass, without collectives."""
        return self._total(
            w.moved_bytes for (p, k), w in self.work.items() if p == phase and k != "collective"
        )

    def collective_bytes(self, phase: Phase) -> sympy.Expr:
        """The bytes of the messages of the layer's tensor-parallel collectives in a pass."""
        work = self.work.get((phase, "collective"))
        return self._total(()) if work is None else work.moved_bytes

    def _total(self, parts: Iterable[sympy.Expr]) -> sympy.Expr:
        return total(parts, like=self.input_bytes)


def expressions_of(graph: LayerGraph) -> LayerExpressions:
    """The work and memory of a layer, summed over its operators and tensors."""
    grouped: dict[tuple[Phase, Kind], list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        grouped[operator.phase, operator.kind].append(operator)
    for operator in graph.again:
        grouped["backward", operator.kind].append(operator)
    peaks = {phase: [p.size_bytes for p in graph.peaks if p.phase == phase] for phase in PHASES}
    return LayerExpressions(
        work={key: _work(operators) for key, operators in grouped.items()},
        parameters=graph.parameter_count,
        expert_parameters=graph.expert_parameter_count,
        saved_bytes=graph.saved_bytes,
        input_bytes=graph.input_bytes,
        forward_peak_bytes=largest(peaks["forward"]),
        backward_peak_bytes=largest(peaks["backward"]),
        output_bytes=graph.output_bytes,
    )


def _work(operators: list[Operator]) -> OperatorWork:
    # A collective works in place, so its message counts once, not as bytes both read and written.
    moved = [
        o.read_bytes if o.kind == "collective" else o.read_bytes + o.written_bytes
        for o in operators
    ]
    return OperatorWork(
        operators=len(operators),
        flop=total((o.flop for o in operators), like=operators[0].flop),
        moved_bytes=total(moved, like=moved[0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSums(LayerMemory):
    """The operations, bytes and parameters of one layer, for the expressions of stages."""

    forward_flop: sympy.Expr
    backward_flop: sympy.Expr
    forward_moved_bytes: sympy.Expr
    backward_moved_bytes: sympy.Expr
    forward_collective_bytes: sympy.Expr
    backward_collective_bytes: sympy.Expr

    @classmethod
    def of(cls, graph: LayerGraph) -> Self:
        """Sum up a layer's bytes, operations and parameters over its graph."""
        layer = expressions_of(graph)
        plain = {entry.name: getattr(layer, entry.name) for entry in fields(LayerMemory)}
        phases: dict[str, sympy.Expr] = {}
        for phase in PHASES:
            phases |= {
                f"{phase}_flop": layer.flop(phase),
                f"{phase}_moved_bytes": layer.moved_bytes(phase),
                f"{phase}_collective_bytes": layer.collective_bytes(phase),
            }
        return cls(**plain, **phases)

    @classmethod
    def symbols(cls, layer: str) -> Self:
        """Symbols for the sums over a layer, which get values later."""
        return cls(
            **{
                entry.name: sympy.Symbol(sum_name(layer, entry.name), nonnegative=True)
                for entry in fields(cls)
            }
        )


def sum_name(layer: str, name: str) -> str:
    """The name of the symbol for a sum over a layer, such as its number of parameters."""
    return f"{layer}_{name}"


# Sums up a stage's blocks that are run in the same way, such as recomputed.


Table = Mapping[str, Floats]

# The names of sums over a stage's blocks begin with this word and end with the way to run the
# blocks.
BLOCKS = "blocks"
# The names of the number of parameters in a stage's largest block, and below of those in its
# experts; the size of buffers depends on them.
LARGEST_BLOCK = "largest_block_parameters"
LARGEST_EXPERTS = "largest_block_expert_parameters"

_PEAKS = ("forward_peak_bytes", "backward_peak_bytes")
_AT_ONE_MOMENT = ("output_bytes", "input_bytes")


def sums_of_blocks(types: LayerTypes, sums: Table, stages: Table) -> Table:
    """Sums (such as bytes) over the blocks of each stage that are run in one way, for each way.

    Where kinds of blocks alternate, totals are averaged over the blocks that are run in one way,
    and peaks are the maximum over any block of the stage.
    """
    names = [entry.name for entry in fields(LayerSums)]
    ways = (PLAIN, *types.treatments)
    if len(types.pattern) == 1:
        (kind,) = types.pattern
        of_blocks = {
            sum_name(type_of(BLOCKS, way), name): sums[sum_name(type_of(kind, way), name)]
            for way in ways
            for name in names
        }
        return {**of_blocks, **_largest(types, sums, np.ones((1, 1)))}
    counts = _counts(types, stages)
    every = np.stack([_counted(counts, kind, ways) for kind in types.kinds])
    of_blocks = {
        sum_name(type_of(BLOCKS, way), name): _of_kinds(types, sums, counts, way, name)
        for way in ways
        for name in names
    }
    return {**of_blocks, **_largest(types, sums, every)}


def _largest(types: LayerTypes, sums: Table, counts: Floats) -> Table:
    """The number of parameters of a stage's largest block, and that of the block's experts."""
    sizes = np.stack([sums[sum_name(kind, "parameters")] for kind in types.kinds]) * (counts > 0)
    experts = np.stack([sums[sum_name(kind, "expert_parameters")] for kind in types.kinds])
    largest, every = sizes.argmax(axis=0), np.arange(sizes.shape[1])
    return {LARGEST_BLOCK: sizes[largest, every], LARGEST_EXPERTS: experts[largest, every]}


def _of_kinds(types: LayerTypes, sums: Table, counts: Table, way: str, name: str) -> Floats:
    """A sum over the blocks run in one way: a mean over kinds or, for peaks, the maximum."""

    def of_each(sum_key: str) -> Floats:
        return np.stack([sums[sum_name(type_of(kind, way), sum_key)] for kind in types.kinds])

    if name in _AT_ONE_MOMENT:
        return np.asarray(of_each(name).max(axis=0))
    if name in _PEAKS:
        of_way = np.stack([_counted(counts, kind, (way,)) for kind in types.kinds]) > 0
        saved = of_each("saved_bytes") * of_way
        return np.asarray(((of_each(name) - saved) * of_way).max(axis=0) + saved.max(axis=0))
    # A stage has the same parameters in whichever way its blocks are run.
    is_state = name in ("parameters", "expert_parameters")
    every = (PLAIN, *types.treatments) if is_state else (way,)
    weights = np.stack([_counted(counts, kind, every) for kind in types.kinds])
    weights = np.where(weights.sum(axis=0) > 0, weights, 1.0)
    return np.asarray((weights * of_each(name)).sum(axis=0) / weights.sum(axis=0))


def _counted(counts: Table, kind: str, ways: Sequence[str]) -> Floats:
    return np.asarray(np.sum([counts[type_of(kind, way)] for way in ways], axis=0))


def _counts(types: LayerTypes, stages: Table) -> Table:
    """The number of layers of each type in each candidate's stage."""
    sizes, places = types.runs(stages)
    return {
        name: np.where(places == number, sizes, 0.0).sum(axis=0)
        for number, name in enumerate(types.names)
    }
