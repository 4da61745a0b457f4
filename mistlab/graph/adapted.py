"""Changes traced layer graphs to ways of training that were not traced: low-rank adapters, a
recomputed loss, multi-token prediction, and blocks run by eager or compiled torch.

A GEMM with a frozen weight does not keep its input for the backward pass, unless it has an adapter,
which needs it. An adapter also keeps the thin tensor between its two matrices. The embedding, whose
table is frozen, keeps nothing. The operators of frozen GEMMs stay in the graph: those for gradients
of frozen weights are left out later, by rules of engines.

Changes are made in the text of a graph's file, so that no expression is parsed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from mistlab.graph.attention_core import FLASH_BACKWARD, TRACED_BACKWARD
from mistlab.graph.stored_graph import DTYPE, DTYPE_OF_4, Plain, StoredGraph, made_once, numel
from mistlab.graph.sums import Sum, sum_from

# The symbol of an adapter's rank. Below it, the modules of a block whose GEMMs may have low-rank
# adapters (LoRA).
RANK = "x"
ATTENTION, NETWORKS = "attention.", ("mlp.", "shared.", "experts.")
# The names of GEMMs that compute several matrices at once: queries, keys and values; or gate and
# values of the feed-forward network. Tensor-parallel ranks split each of these matrices.
_QUERIES, _FIRST = ("attention.qkv", 3), ".up"
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
# The bytes and the data type of a value in each precision of a traced graph.
_TYPES = {"half": (2, "bfloat16"), "single": (4, "float32")}
# Adapters compute in 16 bits even where their GEMMs compute in 8 or 4 bits.
_OF_FEW_BITS, _OF_ADAPTERS = (DTYPE, DTYPE_OF_4), "bfloat16"


@made_once
def with_adapters(
    stored: StoredGraph, targets: str, *, is_gated: bool, kept_inputs: int = 0
) -> StoredGraph:
    """The layer graph of a model with low-rank adapters beside the GEMMs of its blocks: all GEMMs,
    or only those of ``attention``.

    ``kept_inputs`` is the number of micro-batches whose inputs even frozen GEMMs keep.
    """
    graph = stored.mapping
    parts = (ATTENTION,) if targets == "attention" else (ATTENTION, *NETWORKS)
    gates = 2 if is_gated else 1
    mapping = {
        **graph,
        "embedding": {**graph["embedding"], "saved": []},
        "block": _adapted(graph["block"], parts, kept_inputs, gates),
        "head": {**graph["head"], "saved": [*_kept(graph["head"], ())]},
    }
    if further := graph.get("further_blocks"):
        mapping["further_blocks"] = [
            _adapted(block, parts, kept_inputs, gates) for block in further
        ]
    return StoredGraph.of(mapping, stored.where)


@made_once
def with_loss_again(stored: StoredGraph) -> StoredGraph:
    """The layer graph of a model whose head (logits and loss) recomputes its forward pass before
    its backward pass.
    """
    graph = stored.mapping
    again = [
        {**operator, "phase": "backward"}
        for operator in graph["head"]["operators"]
        if operator["phase"] == "forward"
    ]
    head = {**graph["head"], "operators": [*graph["head"]["operators"], *again]}
    return StoredGraph.of({**graph, "head": head}, stored.where)


def _adapted(block: Plain, parts: tuple[str, ...], kept_inputs: int, gates: int) -> Plain:
    """A block's layer graph with adapters beside the GEMMs of the modules ``parts``.

    All GEMMs also keep the inputs of ``kept_inputs`` micro-batches.
    """
    keeping = (ATTENTION, *NETWORKS) if kept_inputs else parts
    before = [{**one, "is_input": False} for one in _inputs(block)] * max(0, kept_inputs - 1)
    more = [*_thin(block, parts, gates), *before]
    sizes = " + ".join(one["size_bytes"] for one in more)
    peaks = [{**one, "size_bytes": f"{one['size_bytes']} + {sizes}"} for one in block["peaks"]]
    operators = [*block["operators"], *_beside(block, parts, gates)]
    return {
        **block,
        "operators": operators,
        "saved": [*_kept(block, keeping), *more],
        "peaks": peaks if more else block["peaks"],
    }


# For each pass, how often a GEMM's adapter reads and writes a tensor as large as the GEMM's input,
# then one as large as its output. Forward: read the input, write the adapter's output, scale it,
# add it to the GEMM's. Backward: scale the gradient, read it for both low-rank matrices, read the
# input, add to the input's gradient.
_ADAPTER_MOVES = {"forward": ((1, 0), (2, 4)), "backward": ((4, 1), (3, 1))}
ADAPTER = "mistlab.adapter"


def _beside(block: Plain, parts: tuple[str, ...], gates: int) -> Iterator[Plain]:
    """The operators of a block's adapters, one in each pass for each GEMM that has an adapter.

    They count the bytes moved and no FLOP, since memory bandwidth limits the thin GEMMs of
    adapters.
    """
    for product, side_by_side in _adapted_products(block, parts, gates):
        wide, result = (
            next(shape for shape in product["inputs"] if len(shape) > 1),
            product["outputs"][0],
        )
        for phase, moves in _ADAPTER_MOVES.items():
            read, written = (
                f"{2 * side_by_side * of_input}*{numel(wide)} + {2 * of_result}*{numel(result)}"
                for of_input, of_result in zip(*moves, strict=True)
            )
            yield {
                "name": ADAPTER,
                "kind": "elementwise",
                "phase": phase,
                "module": product["module"],
                "dtype": _OF_ADAPTERS,
                "inputs": [wide],
                "outputs": [result],
                "flop": "0",
                "read_bytes": read,
                "written_bytes": written,
            }


def _adapted_products(
    block: Plain, parts: tuple[str, ...], gates: int
) -> Iterator[tuple[Plain, int]]:
    """The forward GEMMs of a block that have adapters, each with the number of matrices that it
    computes at once.
    """
    matrices = {
        one["name"].removesuffix(".weight") for one in block["parameters"] if len(one["shape"]) > 1
    }
    for operator in block["operators"]:
        module = operator["module"]
        is_product = (
            operator["phase"] == "forward" and operator["kind"] == "matmul" and module in matrices
        )
        if is_product and module.startswith(parts) and not module.endswith(".router"):
            splits_rows = module.endswith((_QUERIES[0], _FIRST))
            yield operator, _QUERIES[1] if module == _QUERIES[0] else gates if splits_rows else 1


def _kept(layer: Plain, parts: tuple[str, ...]) -> Iterator[Plain]:
    """The tensors that a layer with adapters keeps for its backward pass.

    A frozen GEMM without an adapter need not keep its input.
    """
    inputs = [*_inputs(layer)]
    for tensor in layer["saved"]:
        if tensor["module"].startswith(parts) or tensor not in inputs:
            yield tensor


def _inputs(layer: Plain) -> Iterator[Plain]:
    """The tensors that a layer's GEMMs keep as inputs, except those of routers, which are trained
    even where GEMMs are frozen.
    """
    matrices = {
        one["name"].removesuffix(".weight") for one in layer["parameters"] if len(one["shape"]) > 1
    }
    for tensor in layer["saved"]:
        module = tensor["module"]
        is_of_product = module in matrices and tensor["dtype"] in (*_WIDTHS, *_OF_FEW_BITS)
        if is_of_product and not module.endswith(".router"):
            yield tensor


def _thin(block: Plain, parts: tuple[str, ...], gates: int) -> Iterator[Plain]:
    """The outputs of the down projections of a block's adapters, which are kept for the backward
    pass.
    """
    own_tokens = next(one["shape"][:-1] for one in block["saved"] if one["is_input"])
    for product, side_by_side in _adapted_products(block, parts, gates):
        module = product["module"]
        # A GEMM with a bias lists the bias, a vector, before its input, a matrix.
        rows = next(shape[0] for shape in product["inputs"] if len(shape) > 1)
        splits_rows = module.endswith((_QUERIES[0], _FIRST))
        leading = [*own_tokens] if splits_rows and not module.startswith("experts.") else [rows]
        shape = [*leading, f"{side_by_side}*{RANK}" if side_by_side > 1 else RANK]
        dtype = _OF_ADAPTERS if product["dtype"] in _OF_FEW_BITS else product["dtype"]
        yield {
            "module": module,
            "shape": shape,
            "dtype": dtype,
            "size_bytes": f"{_WIDTHS[dtype]}*{numel(shape)}",
            "is_input": False,
        }


# Adds the tensors that torch keeps for the backward pass where it runs a block without fused
# kernels.


EAGER = "eager"
AUTOCAST = "autocast"
TILED = "tiled"
# Pairs of tensor sizes as text: activations of all tokens, and those of one tile of tokens, which
# replace them; first in the feed-forward network, then in experts.
_TILES = (("b*f*s", "f*h"), ("A*b*j*s", "A*j*h"))

# The further bytes per value that eager RMSNorm keeps: for a 32-bit input and a 16-bit result,
# instead of a 16-bit input. In 32 bits its result, as the input is kept anyway.
_OF_NORM = 4
# The further bytes per value that RMSNorm keeps under autocast: for a 32-bit input, a 32-bit
# result, and on average half a 16-bit copy of the result (each GEMM after the first makes one).
_OF_CAST_NORM = 9


@made_once
def kept_by_torch(stored: StoredGraph, kept_by: str) -> StoredGraph:
    """The layer graph of a model whose blocks keep the tensors that torch keeps if it runs in the
    way ``kept_by`` (eager, compiled, autocast or tiled).

    ``eager`` torch runs a block's operators one by one. RMSNorm works on a 32-bit copy of its
    input, which it keeps instead of the input, and also keeps its 16-bit result before scaling. The
    gate's activation keeps its result beside its input. ``compiled`` blocks keep none of these,
    since cheap operators are recomputed. Both repeat keys and values to as many heads as there are
    queries, and keep the copies. Inputs of 8-bit GEMMs are kept in 16 bits (torchao's
    ``float8_linear.py``).

    Under ``autocast`` (32-bit weights, GEMMs in 16 bits) blocks pass on 32-bit activations, as
    norms do: each GEMM casts its own copy.

    FlashAttention's backward pass sums the gradients of queries in 32 bits beside them
    (``dq_accum``, csrc/flash_attn/flash_api.cpp).

    ``tiled`` blocks run their feed-forward network on a tile of tokens at a time, as many tokens as
    the model is wide (Snowflake's TiledMLP), so that only one tile of the network's wide tensors
    exists at any moment.

    The text of the graph's file is changed, so that no expression is parsed. Bytes that kernels
    move are rules of engines (``mistlab.engines.engine``).
    """
    graph = stored.mapping
    value = _TYPES[graph["precision"]]
    mapping = {**graph, "block": _changed(graph["block"], kept_by, value)}
    if further := graph.get("further_blocks"):
        mapping["further_blocks"] = [_changed(block, kept_by, value) for block in further]
    return StoredGraph.of(mapping, stored.where)


def _changed(block: Plain, kept_by: str, value: tuple[int, str]) -> Plain:
    block = _summing(block)
    return _tiled(block) if kept_by == TILED else _keeping(block, kept_by, value)


def _summing(layer: Plain) -> Plain:
    """A layer's graph in whose backward pass attention sums the gradients of queries in 32 bits."""
    queries = next(
        (one["inputs"][0] for one in layer["operators"] if one["kind"] == "attention"), ()
    )

    def summing(peak: Plain) -> Plain:
        if peak["operator"] != TRACED_BACKWARD:
            return peak
        size = f"{peak['size_bytes']} + 4*{numel(queries)}"
        return {**peak, "operator": FLASH_BACKWARD, "size_bytes": size}

    return {**layer, "peaks": [summing(peak) for peak in layer["peaks"]]}


def _keeping(layer: Plain, kept_by: str, value: tuple[int, str]) -> Plain:
    """A layer's graph with the further tensors that eager, compiled or autocast torch keeps for the
    backward pass.
    """
    forward = [one for one in layer["operators"] if one["phase"] == "forward"]
    kept = [tensor for one in forward for tensor in _kept_more(one, kept_by, *value)]
    if kept_by == AUTOCAST:
        layer = {**layer, "input_bytes": f"2*({layer['input_bytes']})"}
    if not kept:
        return layer
    more = " + ".join(tensor["size_bytes"] for tensor in kept)
    peaks = [{**one, "size_bytes": f"{one['size_bytes']} + {more}"} for one in layer["peaks"]]
    return {**layer, "saved": [*layer["saved"], *kept], "peaks": peaks}


def _tiled(layer: Plain) -> Plain:
    """A layer's graph whose feed-forward network runs on one tile of tokens after the other."""

    def tile(tensor: Plain) -> Plain:
        size = tensor["size_bytes"]
        for whole, part in _TILES:
            size = size.replace(whole, part)
        return {**tensor, "size_bytes": size}

    return {**layer, **{name: [tile(one) for one in layer[name]] for name in ("saved", "peaks")}}


def _kept_more(operator: Plain, kept_by: str, width: int, dtype: str) -> Iterator[Plain]:
    """The further tensors that torch keeps for a forward operator, beyond those of the layer graph,
    whose values have ``width`` bytes.
    """

    def tensor(shape: Sequence[str], width: int, less: Sequence[str] = ()) -> Plain:
        size = f"{width}*{numel(shape)}" + (f" - {width}*{numel(less)}" if less else "")
        return {
            "module": operator["module"],
            "shape": [*shape],
            "dtype": dtype,
            "size_bytes": size,
            "is_input": False,
        }

    is_eager = kept_by in (EAGER, AUTOCAST)
    if is_eager and operator["name"] == "mistlab.rms_norm":
        of_norm = _OF_CAST_NORM if kept_by == AUTOCAST else _OF_NORM
        yield tensor(operator["outputs"][0], of_norm)
    if is_eager and operator["name"] == "mistlab.swiglu":
        yield tensor(operator["outputs"][0], width)
    if operator["kind"] == "attention":
        queries, *others = operator["inputs"][:3]
        for other in others:
            if other != queries:
                yield tensor(queries, width, less=other)


# Adds multi-token prediction to a model's head, as in DeepSeek V3 (arXiv 2412.19437).


MODULE = "head.further"


def with_further_tokens(stored: StoredGraph, tokens: int, *, tied: bool) -> StoredGraph:
    """The layer graph of a model whose head also predicts ``tokens`` tokens after the next one
    (multi-token prediction).

    Each further token is predicted in five steps: a norm of the last block's output, and a norm of
    the previous token's embedding; a GEMM that joins both; a block of the last block's kind; a
    further norm; logits, and a loss. The tables of embedding and head are the model's own; the last
    stage of a pipeline has a copy of the embedding table.

    All of this becomes part of the head's graph, so it is on the last stage, is kept for one
    micro-batch, and is never recomputed. The text of the graph's file is changed.

    With ``tied`` embeddings the head has the embedding's table already.
    """
    return _made(stored, tokens, tied) if tokens else stored


@made_once
def _made(stored: StoredGraph, tokens: int, tied: bool) -> StoredGraph:
    graph = stored.mapping
    head, block, embedding = graph["head"], graph["block"], graph["embedding"]
    joint = _joint(graph)
    norms = [one for one in head["parameters"] if not _is_table(one)]
    copied = [] if tied else [one for one in embedding["parameters"] if _is_table(one)]
    of_head: dict[str, list[Plain]] = {
        "operators": [
            *(*joint["operators"], *embedding["operators"]),
            *(*block["operators"], *head["operators"]),
        ],
        "saved": [_no_input(one) for part in (joint, block, head) for one in part["saved"]],
        "parameters": [*joint["parameters"], *block["parameters"], *norms],
    }
    further = {name: [*head[name], *some * tokens] for name, some in of_head.items()}
    further["parameters"] += copied
    further["peaks"] = [*head["peaks"], *_peaks(head, block, joint, tokens)]
    name = f"{graph['name']}-further{tokens}"
    return StoredGraph.of({**graph, "name": name, "head": {**head, **further}}, stored.where)


def _peaks(head: Plain, block: Plain, joint: Plain, tokens: int) -> Iterator[Plain]:
    """The bytes in use at the moments at which multi-token prediction may make the head's memory
    peak.

    That is during the last further token, when the tensors of all others are kept.
    """
    of_further = _kept_bytes(joint) + _kept_bytes(block) + _kept_bytes(head)
    before = _kept_bytes(head) + of_further * (tokens - 1) + _kept_bytes(joint)
    yield from (_larger(peak, before) for peak in block["peaks"])
    yield from (_larger(peak, before + _kept_bytes(block)) for peak in head["peaks"])


def _kept_bytes(layer: Plain) -> Sum:
    return Sum.total(sum_from(one["size_bytes"]) for one in layer["saved"])


def _larger(peak: Plain, more: Sum) -> Plain:
    return {**peak, "size_bytes": str(sum_from(peak["size_bytes"]) + more)}


def _no_input(tensor: Plain) -> Plain:
    return {**tensor, "is_input": False}


def _is_table(parameter: Plain) -> bool:
    return "V" in parameter["shape"][0]


def _joint(graph: Plain) -> Plain:
    """The operators with which multi-token prediction begins: norms of the last block's output and
    of the embedding, and the GEMM that joins both.
    """
    norms = [one for one in graph["head"]["operators"] if one["module"] == "head.norm"]
    of_norm = [one for one in graph["head"]["parameters"] if one["name"].startswith("head.norm")]
    weight = {"name": f"{MODULE}.weight", "shape": ["h/tp", "2*h"]}
    tokens = graph["head"]["operators"][0]["outputs"][0][1]
    width, dtype = _TYPES[graph["precision"]]
    # Kept for the backward pass are the embedding, which its norm reads, and the joined results of
    # the norms of the embedding and of the last block's output, which the joining GEMM reads.
    saved = [
        {
            "module": MODULE,
            "shape": ["b", tokens, channels],
            "dtype": dtype,
            "size_bytes": f"{width}*b*({tokens})*{channels}",
            "is_input": False,
        }
        for channels in ("h", "2*h")
    ]
    return {
        "operators": [*norms, *norms, *_product(tokens != "s", width, dtype)],
        "saved": saved,
        "parameters": [*of_norm, *of_norm, weight],
    }


def _product(splits: bool, width: int, dtype: str) -> Iterator[Plain]:
    """The operators of the GEMM that maps the joined vectors of 2h channels to h channels.

    Tensor-parallel ranks split its output columns, and all-gather the result.
    """
    rows, wide, part, weight = "b*s", "2*h", "h/tp", ["h/tp", "2*h"]
    flop, whole = "4*b*s*h**2/tp", f"2*{width}*b*s*h"
    held, made = f"2*{width}*h**2/tp", f"{width}*b*s*h/tp"
    half = f"{width}*b*s*h"

    def one(name: str, kind: str, phase: str, **others: Any) -> Plain:
        plain = {"name": name, "kind": kind, "phase": phase, "module": MODULE, "dtype": dtype}
        return {**plain, **others}

    def product(phase: str, inputs: list[list[str]], output: list[str], *sizes: str) -> Plain:
        read, written = " + ".join(sizes[:-1]), sizes[-1]
        moved = {"read_bytes": read, "written_bytes": written}
        shapes = {"inputs": inputs, "outputs": [output]}
        return one("aten.mm", "matmul", phase, **shapes, flop=flop, **moved)

    def message(name: str, phase: str, size: str, channels: str) -> Plain:
        shape = [["b", "s", channels]]
        moved = {"flop": "0", "read_bytes": size, "written_bytes": size}
        return one(f"mistlab.{name}", "collective", phase, inputs=shape, outputs=shape, **moved)

    if splits:
        yield message("gather_tokens", "forward", whole, wide)
    yield product("forward", [[rows, wide], [wide, part]], [rows, part], whole, held, made)
    yield message("gather_tokens", "forward", half, "h")
    if splits:
        yield message("gather_tokens", "backward", half, "h")
        yield message("gather_again", "backward", whole, wide)
    yield product("backward", [[rows, part], weight], [rows, wide], made, held, whole)
    name = "scatter_gradient" if splits else "all_reduce_"
    yield message(name, "backward", whole, wide)
    yield product("backward", [[part, rows], [rows, wide]], weight, made, whole, held)
    yield one(
        *("aten.add_", "accumulate", "backward"),
        inputs=[weight, weight],
        outputs=[weight],
        flop="2*h**2/tp",
        read_bytes=f"2*({held})",
        written_bytes=held,
    )
