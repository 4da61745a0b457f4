"""Layer graphs of variants that nobody traced, made of graphs that were traced.

Dropout keeps a mask of what each of a block's two halves adds, and one of the embedding. Attention
that is written out keeps its scores; with dropout it keeps the scores that were let through and
their mask as well. Scores have one kernel that writes them and one that reads them. With a window,
attention is another kernel, with fewer operations; it reads, writes and keeps what fused attention
does. Products and other kernels are those of the traced graph.

The change is made in the text of a graph's file, so that no expression is read.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from mistlab.symbolic.stored_graph import StoredGraph

Plain = Mapping[str, Any]

_SCORES = ("b", "n/tp", "s", "s")
_WIDTHS = {"half": (2, "bfloat16"), "single": (4, "float32")}


@cache
def with_dropout(stored: StoredGraph, *, sequence_parallel: bool) -> StoredGraph:
    """The graph of a model with dropout, from that of the same model without."""
    graph = stored.mapping
    tokens = ("b", "s/tp" if sequence_parallel else "s", "h")
    of_block = [_mask("dropout", tokens)] * 2
    if graph["attention"] == "math":
        width, dtype = _WIDTHS[graph["precision"]]
        of_block += [_kept("attention", _SCORES, dtype, width), _mask("attention", _SCORES)]
    further = [_keeping(block, of_block) for block in graph.get("further_blocks", ())]
    mapping = {
        **graph,
        "name": f"{graph['name']}-dropout",
        "embedding": _keeping(graph["embedding"], [_mask("embedding.dropout", tokens)]),
        "block": _keeping(graph["block"], of_block),
    }
    return StoredGraph.of(_with_further(mapping, further), stored.where)


@cache
def with_scores(stored: StoredGraph) -> StoredGraph:
    """The graph of a model that writes attention out, from that of the same model with fused
    attention."""
    graph = stored.mapping
    width, dtype = _WIDTHS[graph["precision"]]
    kept = [_kept("attention", _SCORES, dtype, width)]
    further = [_keeping(block, kept) for block in graph.get("further_blocks", ())]
    mapping = {
        **graph,
        "name": f"{graph['name']}-scores",
        "attention": "math",
        "block": _keeping(graph["block"], kept),
    }
    return StoredGraph.of(_with_further(mapping, further), stored.where)


@cache
def with_window(stored: StoredGraph) -> StoredGraph:
    """The graph of a model whose blocks have windows, from that of the same model without."""
    graph = stored.mapping
    further = [_windowed(block) for block in graph.get("further_blocks", ())]
    mapping = {**graph, "name": f"{graph['name']}-window", "block": _windowed(graph["block"])}
    return StoredGraph.of(_with_further(mapping, further), stored.where)


# Fused attention by PyTorch, the kernel that has a window, and its operations: a token sees at most
# w tokens, and each of the first w those before it.
_FUSED = "aten._scaled_dot_product_flash_attention_for_cpu"
_WIDE = "mistlab.attention"
_SEEN_BY_PHASE = {
    "forward": "4*b*d*n*s*w/tp - 2*b*d*n*w**2/tp",
    "backward": "10*b*d*n*s*w/tp - 5*b*d*n*w**2/tp",
}


def _windowed(layer: Plain) -> Plain:
    """A layer whose fused attention sees a window alone."""
    operators = [
        {**one, "name": one["name"].replace(_FUSED, _WIDE), "flop": _SEEN_BY_PHASE[one["phase"]]}
        if one["name"].startswith(_FUSED)
        else one
        for one in layer["operators"]
    ]
    peaks = [{**one, "operator": one["operator"].replace(_FUSED, _WIDE)} for one in layer["peaks"]]
    return {**layer, "operators": operators, "peaks": peaks}


def _with_further(mapping: Plain, further: Sequence[Plain]) -> Plain:
    return {**mapping, "further_blocks": [*further]} if further else mapping


def _keeping(layer: Plain, kept: Sequence[Plain]) -> Plain:
    """A layer that keeps some tensors more; it writes them once and reads them once."""
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
    """The kernel that writes (forward) or reads (backward) a tensor that is kept."""
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
    return _kept(module, shape, "bool", 1)


def _kept(module: str, shape: Sequence[str], dtype: str, width: int) -> Plain:
    size = "*".join((str(width), *(f"({one})" for one in shape)))
    return {
        "module": module,
        "shape": [*shape],
        "dtype": dtype,
        "size_bytes": size,
        "is_input": False,
    }
