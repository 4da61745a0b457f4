"""Holds layer graphs as the text of their files, and derives other layer graphs from them."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache, wraps
from statistics import mean
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, cast

from mistlab.engines.engine import BATCHED_PRODUCTS
from mistlab.graph.sums import sum_from

if TYPE_CHECKING:
    from mistlab.graph.graph import Condition, LayerGraph, ModelGraph

P = ParamSpec("P")

# The number of kernels that a host launches for some operators of a layer graph; for all others it
# is one.

ISSUED: Mapping[str, int] = {
    # Conversions to 8 bits are partly fused into other kernels, so their launches do not count.
    "mistlab.cast": 0,
    "mistlab.delta_rule": 26,
    "mistlab.delta_rule_backward": 28,
}


# Holds a layer graph as the text of its file; its expressions are parsed only if needed.


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredGraph:
    """The layer graphs of a model as the text of their file; ``where`` names the file in errors.

    Parsing expressions imports SymPy. Two graphs are compared by a digest of their texts, so
    expressions compiled earlier from the same text are found in the cache without SymPy.

    ``turns`` are the kinds of a model's blocks, if they are not in the file. Expressions do not
    depend on how often kinds take turns.
    """

    digest: str
    where: str = field(compare=False)
    mapping: Mapping[str, Any] = field(compare=False, repr=False)
    turns: tuple[str, ...] = field(default=(), compare=False)

    @classmethod
    def of(cls, mapping: Mapping[str, Any], where: str) -> StoredGraph:
        """Take the layer graphs from a file's mapping; refuses a mapping without layer graphs."""
        if not _has_texts(mapping):
            _from_mapping(mapping, where)
        text = json.dumps(mapping, sort_keys=True)
        return cls(digest=hashlib.sha256(text.encode()).hexdigest(), where=where, mapping=mapping)

    @property
    def graph(self) -> ModelGraph:
        """The layer graphs, with their expressions parsed by SymPy."""
        return _read(self)

    @property
    def counts(self) -> ModelGraph:
        """The layer graphs with sums of products of sizes as expressions, without SymPy."""
        return _counted(self)

    @property
    def attention(self) -> str:
        """The name of the attention kernel with which the model was traced."""
        return str(self.mapping["attention"])

    @property
    def precision(self) -> str:
        """The traced model's precision: ``half`` (two bytes a value) or ``single`` (four)."""
        return str(self.mapping["precision"])

    @property
    def assumptions(self) -> tuple[str, ...]:
        """The comparisons of sizes on which the traced code branched."""
        return tuple(self.mapping["assumptions"])

    @property
    def pattern(self) -> tuple[str, ...]:
        """The repeating pattern of the model's kinds of blocks."""
        return self.turns or tuple(self.mapping.get("pattern", ("block",)))

    @property
    def block_operators(self) -> float:
        """The number of operators in a block's passes, a mean over kinds of blocks; 8-bit casts do
        not count.
        """
        of_kind = {kind: sum(self.operators_of(kind).values()) for kind in {*self.pattern}}
        return mean(of_kind[kind] for kind in self.pattern)

    def operators_of(self, kind: str) -> Mapping[str, int]:
        """The number of operators that a host issues for a kind of block in each pass.

        Megatron's ``GatedDeltaNet`` issues a delta rule forward as copies of axes (8), norms (2),
        repetition for more heads (2), decays and rates (7), chunks (6) and a norm (1); backward as
        chunks (9), decays and rates (9), sums over heads (2), norms (3), copies (3), joins (2).
        """
        further = {one["name"]: one for one in self.mapping.get("further_blocks", ())}
        operators = further.get(kind, self.mapping["block"])["operators"]
        issued: Counter[str] = Counter()
        for operator in operators:
            issued[operator["phase"]] += ISSUED.get(operator["name"], 1)
        return issued

    @property
    def conditions(self) -> tuple[Condition, ...]:
        """The conditions on sizes (one divides another) under which the layer graphs are valid."""
        return self.graph.conditions

    @property
    def embedding(self) -> LayerGraph:
        """The layer graph of the embedding."""
        return self.graph.embedding

    @property
    def block(self) -> LayerGraph:
        """The layer graph of one block."""
        return self.graph.block

    @property
    def head(self) -> LayerGraph:
        """The layer graph of the head with the loss."""
        return self.graph.head

    @property
    def layers(self) -> tuple[LayerGraph, LayerGraph, LayerGraph]:
        """The layer graphs of embedding, block and head."""
        return self.graph.layers


def made_once(
    change: Callable[Concatenate[StoredGraph, P], StoredGraph],
) -> Callable[Concatenate[StoredGraph, P], StoredGraph]:
    """Decorator for functions that derive a layer graph from another: caches their results."""
    made = cast("Callable[Concatenate[StoredGraph, P], StoredGraph]", cache(change))

    @wraps(change)
    def changed(stored: StoredGraph, /, *args: P.args, **options: P.kwargs) -> StoredGraph:
        return replace(made(stored, *args, **options), turns=stored.turns)

    return changed


def _has_texts(mapping: object) -> bool:
    """Whether a mapping has the fields that ``StoredGraph`` reads as text."""
    if not isinstance(mapping, Mapping):
        return False
    assumptions = mapping.get("assumptions")
    texts = [mapping.get("attention"), mapping.get("precision")]
    texts += assumptions if isinstance(assumptions, list) else [None]
    return all(isinstance(text, str) for text in texts)


@cache
def _read(stored: StoredGraph) -> ModelGraph:
    return _from_mapping(stored.mapping, stored.where)


@cache
def _counted(stored: StoredGraph) -> ModelGraph:
    from mistlab.graph import graph_text as graphfile  # noqa: PLC0415 (needs SymPy)

    return graphfile.from_mapping(stored.mapping, stored.where, read=sum_from)


def _from_mapping(mapping: Mapping[str, Any], where: str) -> ModelGraph:
    from mistlab.graph import graph_text as graphfile  # noqa: PLC0415 (needs SymPy)

    return graphfile.from_mapping(mapping, where)


# Derives layer graphs with 8-bit and 4-bit GEMMs from 16-bit graphs.

DTYPE = "float8_e4m3fn"
DTYPE_OF_4 = "float4_e2m1fn_x2"
CAST = "mistlab.cast"
# The GEMMs of these modules stay in 16 bits where the model's other GEMMs have 8-bit operands.
IN_16_BITS = ("experts.router",)

_GRADIENT_OF_WEIGHT = "mistlab.grouped_product_of_weight"

Plain = Mapping[str, Any]


def in_precision(stored: StoredGraph, precision: str, *, keeps_wide: bool = False) -> StoredGraph:
    """The layer graphs in a training precision; ``keeps_wide`` GEMMs keep 16-bit inputs.

    GEMMs of blocks with weights take 8-bit operands and give 16-bit results. Their input and the
    gradient of their output are converted, each in two layouts: one for the GEMM along rows, one
    for the GEMM along columns, which computes the weight gradient. The input is kept for the
    backward pass in 8 bits. Attention, norms, routers, embedding and head stay in 16 bits. Weights
    are held in 8 bits in two layouts, which take as many bytes as 16-bit weights.
    """
    if precision not in ("fp8", "fp4"):
        return stored
    made = eight_bit(stored, keeps_wide=keeps_wide)
    return four_bit(made) if precision == "fp4" else made


@made_once
def four_bit(stored: StoredGraph) -> StoredGraph:
    """The layer graphs with 4-bit GEMMs in blocks, derived from those with 8-bit GEMMs.

    Operands are read in 4 bits. Conversions take as many bytes as those to 8 bits: values are read
    once more, to be scaled by what is largest. What is kept stays in 8 bits. Products of experts
    stay in 8 bits, as measured runs of both precisions take equally long.
    """
    graph = stored.mapping
    mapping = {**graph, "block": _four_bit_block(graph["block"])}
    if further := graph.get("further_blocks"):
        mapping["further_blocks"] = [_four_bit_block(block) for block in further]
    return StoredGraph.of(mapping, stored.where)


def _four_bit_block(block: Plain) -> Plain:
    operators = []
    for operator in block["operators"]:
        is_product = operator["dtype"] == DTYPE and operator["name"] != CAST
        if is_product and not operator["name"].startswith("mistlab."):
            half = f"({operator['read_bytes']})/2"
            operators.append({**operator, "dtype": DTYPE_OF_4, "read_bytes": half})
        else:
            operators.append(operator)
    return {**block, "operators": operators}


@made_once
def eight_bit(stored: StoredGraph, *, keeps_wide: bool = False) -> StoredGraph:
    """The graph of a model with 8-bit GEMMs in its blocks; with ``keeps_wide`` they keep their
    inputs in 16 bits.
    """
    block_of = _block_with_wide_inputs if keeps_wide else _block
    graph = stored.mapping
    further = [block_of(block) for block in graph.get("further_blocks", ())]
    mapping = {**graph, "block": block_of(graph["block"])}
    if further:
        mapping["further_blocks"] = further
    return StoredGraph.of(mapping, stored.where)


def _block_with_wide_inputs(block: Plain) -> Plain:
    return {**block, "operators": [*_operators(block["operators"])]}


def _block(block: Plain) -> Plain:
    operators = [*_operators(block["operators"])]
    modules = {one["module"] for one in operators if one["dtype"] == DTYPE}
    saved, less = [], []
    for tensor in block["saved"]:
        kept_tensor = tensor
        if tensor["module"] in modules and tensor["dtype"] == "bfloat16":
            half = f"({tensor['size_bytes']})/2"
            kept_tensor = {**tensor, "dtype": DTYPE, "size_bytes": half}
            modules.discard(tensor["module"])
            less.append(f"- {half}")
        saved.append(kept_tensor)
    for operator in operators:
        # Where another operator keeps a GEMM's input in 16 bits anyway, the GEMM's 8-bit copy is
        # kept too.
        is_product = operator["dtype"] == DTYPE and operator["name"] != CAST
        if is_product and operator["phase"] == "forward" and operator["module"] in modules:
            size = numel(operator["inputs"][0])
            saved.append(_saved(operator, size))
            less.append(f"+ {size}")
    peaks = [
        {**peak, "size_bytes": " ".join([peak["size_bytes"], *less])} for peak in block["peaks"]
    ]
    return {**block, "operators": operators, "saved": saved, "peaks": peaks}


def _operators(operators: Sequence[Plain]) -> Iterator[Plain]:
    for operator in operators:
        is_product = operator["kind"] == "matmul" and operator["module"] not in IN_16_BITS
        if not is_product or operator["name"] in BATCHED_PRODUCTS:
            yield operator
        else:
            if operator["phase"] == "forward" or not _makes_weight(operator):
                # The gradient of a GEMM's output is converted once, for both GEMMs of the backward
                # pass that read it.
                yield _cast(operator)
            yield {**operator, "dtype": DTYPE, "read_bytes": f"({operator['read_bytes']})/2"}


def _makes_weight(operator: Plain) -> bool:
    """Whether a GEMM of a backward pass computes the gradient of a weight."""
    if operator["name"].startswith("mistlab."):
        return bool(operator["name"] == _GRADIENT_OF_WEIGHT)
    return not any("b" in _symbols(size) for size in operator["outputs"][0])


def _cast(operator: Plain) -> Plain:
    shape = operator["inputs"][0]
    size = numel(shape)
    return {
        **operator,
        "name": CAST,
        "kind": "elementwise",
        "dtype": DTYPE,
        "inputs": [shape],
        "outputs": [shape, shape],
        "flop": size,
        "read_bytes": f"2*{size}",
        "written_bytes": f"2*{size}",
    }


def _saved(operator: Plain, size: str) -> Plain:
    return {
        "module": operator["module"],
        "shape": operator["inputs"][0],
        "dtype": DTYPE,
        "size_bytes": size,
        "is_input": False,
    }


def numel(shape: Sequence[str]) -> str:
    """The number of elements in a tensor of this shape, as the text of an expression."""
    return "*".join(f"({size})" for size in shape)


def _symbols(size: str) -> set[str]:
    return set("".join(c if c.isalpha() else " " for c in size).split())


# Derives the layer graphs of models with dropout, unfused attention or attention windows from
# graphs without.

_SCORES = ("b", "n/tp", "s", "s")
_WIDTHS = {"half": (2, "bfloat16"), "single": (4, "float32")}


@made_once
def with_dropout(
    stored: StoredGraph, *, sums: int = 2, drops_shares: bool = True, sequence_parallel: bool
) -> StoredGraph:
    """The layer graphs of a model with dropout, derived from those without.

    A mask is kept for each of a block's residual additions (``sums``), one for the embedding and,
    if ``drops_shares``, one for attention probabilities.
    """
    graph = stored.mapping
    tokens = ("b", "s/tp" if sequence_parallel else "s", "h")
    of_block = [_mask("dropout", tokens)] * sums
    if graph["attention"] == "math" and drops_shares:
        width, dtype = _WIDTHS[graph["precision"]]
        of_block += [_kept_tensor("attention", _SCORES, dtype, width), _mask("attention", _SCORES)]
    further = [_keeping(block, of_block) for block in graph.get("further_blocks", ())]
    mapping = {
        **graph,
        "name": f"{graph['name']}-dropout",
        "embedding": _keeping(graph["embedding"], [_mask("embedding.dropout", tokens)]),
        "block": _keeping(graph["block"], of_block),
    }
    return StoredGraph.of(_with_further(mapping, further), stored.where)


@made_once
def with_scores(stored: StoredGraph) -> StoredGraph:
    """The graph of a model with unfused attention, derived from its graph with fused attention.

    Unfused attention keeps its scores; with dropout also the dropped scores and their mask. Scores
    have one kernel that writes them and one that reads them.
    """
    graph = stored.mapping
    width, dtype = _WIDTHS[graph["precision"]]
    kept = [_kept_tensor("attention", _SCORES, dtype, width)]
    further = [_keeping(block, kept) for block in graph.get("further_blocks", ())]
    mapping = {
        **graph,
        "name": f"{graph['name']}-scores",
        "attention": "math",
        "block": _keeping(graph["block"], kept),
    }
    return StoredGraph.of(_with_further(mapping, further), stored.where)


@made_once
def with_window(stored: StoredGraph) -> StoredGraph:
    """The graph of a model with an attention window, derived from its graph without.

    A window has a kernel with fewer operations, which moves and keeps the bytes of fused attention.
    """
    graph = stored.mapping
    further = [_windowed(block) for block in graph.get("further_blocks", ())]
    mapping = {**graph, "name": f"{graph['name']}-window", "block": _windowed(graph["block"])}
    return StoredGraph.of(_with_further(mapping, further), stored.where)


# The names of PyTorch's fused attention and of attention with a window, and the operations of the
# latter.
_FUSED = "aten._scaled_dot_product_flash_attention_for_cpu"
_WIDE = "mistlab.attention"
_SEEN_BY_PHASE = {
    "forward": "4*b*d*n*s*w/tp - 2*b*d*n*w**2/tp",
    "backward": "10*b*d*n*s*w/tp - 5*b*d*n*w**2/tp",
}


def _windowed(layer: Plain) -> Plain:
    """A layer whose fused attention is limited to a window of the last tokens."""
    operators = [
        {
            **operator,
            "name": operator["name"].replace(_FUSED, _WIDE),
            "flop": _SEEN_BY_PHASE[operator["phase"]],
        }
        if operator["name"].startswith(_FUSED)
        else operator
        for operator in layer["operators"]
    ]
    peaks = [{**one, "operator": one["operator"].replace(_FUSED, _WIDE)} for one in layer["peaks"]]
    return {**layer, "operators": operators, "peaks": peaks}


def _with_further(mapping: Plain, further: Sequence[Plain]) -> Plain:
    return {**mapping, "further_blocks": [*further]} if further else mapping


def _keeping(layer: Plain, kept: Sequence[Plain]) -> Plain:
    """A layer that keeps further tensors, each written in one pass and read in the other."""
    more = " + ".join(tensor["size_bytes"] for tensor in kept)
    operators = [_moving(tensor, phase) for phase in ("forward", "backward") for tensor in kept]
    peaks = [{**one, "size_bytes": f"{one['size_bytes']} + {more}"} for one in layer["peaks"]]
    return {
        **layer,
        "operators": [*layer["operators"], *operators],
        "saved": [*layer["saved"], *kept],
        "peaks": peaks,
    }


def _moving(tensor: Plain, phase: str) -> Plain:
    """The kernel that writes a kept tensor (forward pass) or reads it (backward pass)."""
    is_forward, size = phase == "forward", tensor["size_bytes"]
    return {
        "name": "mistlab.keep" if is_forward else "mistlab.use_kept",
        "kind": "elementwise",
        "phase": phase,
        "module": tensor["module"],
        "dtype": tensor["dtype"],
        "inputs": [] if is_forward else [tensor["shape"]],
        "outputs": [tensor["shape"]] if is_forward else [],
        "flop": "*".join(f"({one})" for one in tensor["shape"]),
        "read_bytes": "0" if is_forward else size,
        "written_bytes": size if is_forward else "0",
    }


def _mask(module: str, shape: Sequence[str]) -> Plain:
    return _kept_tensor(module, shape, "bool", 1)


def _kept_tensor(module: str, shape: Sequence[str], dtype: str, width: int) -> Plain:
    size = "*".join((str(width), *(f"({one})" for one in shape)))
    return {
        "module": module,
        "shape": [*shape],
        "dtype": dtype,
        "size_bytes": size,
        "is_input": False,
    }


# Replaces the loss of a head by a cross entropy that reads the logits once in each direction, in
# place.

_SUMS, _GRADIENT, _REDUCTION = "mistlab.sum_rows", "mistlab.to_gradient_", "mistlab.all_reduce_"


@made_once
def with_fused_loss(stored: StoredGraph) -> StoredGraph:
    """The graph of a model whose loss reads the logits only once in each direction.

    Torch's operators, which traced models use, have two tensors of the logits' size at once.
    ``runtime.models.operators`` reads the logits once for all statistics, and overwrites them with
    their gradient. Sums over tensor-parallel ranks share one collective.
    """
    graph = stored.mapping
    head, width = graph["head"], _WIDTHS[graph["precision"]][0]
    made = _two_passes(head["operators"], width)
    if made is None:
        return stored
    changed = {
        "operators": made,
        "saved": [*_saved_by_loss(head)],
        "peaks": _without_second(head, width),
    }
    mapping = {**graph, "head": {**head, **changed}}
    return StoredGraph.of(mapping, stored.where)


def _two_passes(operators: Sequence[Plain], width: int) -> list[Plain] | None:
    """The head's operators with a loss that reads the logits once; None if that is impossible."""
    names = [(one["phase"], one["name"]) if one["module"] == "head" else None for one in operators]
    places = [
        ("forward", "aten.amax"),
        ("forward", "aten.sub_"),
        ("backward", "aten.bitwise_not"),
        ("backward", "aten.mul_"),
    ]
    if any(names.count(one) != 1 for one in places):
        return None
    begin, end, back, done = map(names.index, places)
    logits, reduced = operators[begin], operators[begin + 1]
    return [
        *operators[:begin],
        *_forward(logits, reduced, width),
        *operators[end + 1 : back],
        _backward(operators[done], width),
        *operators[done + 1 :],
    ]


def _forward(logits: Plain, reduced: Plain, width: int) -> list[Plain]:
    """The loss's forward operators: reading logits, maximum and sums over ranks, the losses."""
    ((rows, columns),) = logits["inputs"]
    size = f"{width}*({rows})*({columns})"
    sums = {**logits, "name": _SUMS, "dtype": "float32"}
    sums |= {"inputs": [[rows, columns], [rows]], "outputs": [["3", rows]]}
    sums |= {"read_bytes": f"{size} + 8*{rows}", "written_bytes": f"12*{rows}"}
    collectives = [
        {
            **reduced,
            "dtype": "float32",
            "inputs": [shape],
            "outputs": [shape],
            "read_bytes": f"{moved}*{rows}",
            "written_bytes": f"{moved}*{rows}",
        }
        for shape, moved in (([rows], 4), (["2", rows], 8))
    ]
    # These kernels have one value per token; with several tensor-parallel ranks, four more rescale
    # the values.
    vectors = [
        {
            **logits,
            "name": name,
            "kind": "elementwise",
            "dtype": "float32",
            "inputs": [[rows]] * operands,
            "outputs": [[rows]],
            "flop": rows,
            "read_bytes": f"{4 * operands}*{rows}",
            "written_bytes": f"4*{rows}",
        }
        for name, operands in (("aten.log", 1), ("aten.add_", 2), ("aten.sub", 2))
    ]
    return [sums, *collectives, *vectors]


def _backward(last: Plain, width: int) -> Plain:
    rows, columns = last["inputs"][0]
    size = f"{width}*({rows})*({columns})"
    return {
        **last,
        "name": _GRADIENT,
        "inputs": [[rows, columns], [rows], [rows], [rows]],
        "read_bytes": f"{size} + 16*{rows}",
        "written_bytes": size,
    }


def _saved_by_loss(head: Plain) -> Iterator[Plain]:
    """The tensors that the loss keeps for the backward pass: a sum of exponentials per token."""
    masks = [one for one in head["saved"] if one["module"] == "head" and one["dtype"] == "bool"]
    for tensor in head["saved"]:
        if masks and tensor is masks[0]:
            (rows,) = tensor["shape"]
            yield {**tensor, "dtype": "float32", "size_bytes": f"4*{rows}"}
        else:
            yield tensor


def _without_second(head: Plain, width: int) -> list[Plain]:
    """The head's memory peaks without a second tensor as large as the logits."""
    (forward, *_) = (one for one in head["peaks"] if _has(one, f"{2 * width}*V*b*s/tp"))
    return [
        {
            **moment,
            "operator": _SUMS,
            "size_bytes": f"{moment['size_bytes']} - {width}*V*b*s/tp",
        }
        if moment is forward
        else moment
        for moment in head["peaks"]
    ]


def _has(peak: Plain, product: str) -> bool:
    return bool(peak["phase"] == "forward" and peak["size_bytes"].startswith(f"{product} "))
