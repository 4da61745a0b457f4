"""Layer graphs with what torch keeps for the backward pass of blocks without kernels of their own.

``eager`` torch runs a block's operators one by one. RMSNorm works on a 32-bit copy of its input,
which it keeps in place of the input, and keeps its 16-bit result from before the weights too. The
gate's activation keeps its result beside its input. ``compiled`` blocks keep none of these, as what
is cheap is computed again. Both copy keys and values to as many heads as there are queries, and
keep the copies. Inputs of 8-bit products are kept in 16 bits (torchao's ``float8_linear.py``).

The change is made in the text of a graph's file, so that no expression is read. Bytes that kernels
move are rules of engines (``mistlab.engines.engine_parts``).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mistlab.symbolic.stored_graph import StoredGraph

EAGER = "eager"

Plain = Mapping[str, Any]

# Bytes for each number of the result: a 32-bit input and a 16-bit result, less the 16-bit input.
_OF_NORM = 4
# The activation's 16-bit result, which is as wide as the gate's.
_OF_GATE = 2


@cache
def kept_by_torch(stored: StoredGraph, kept_by: str) -> StoredGraph:
    """The graph of a model whose blocks keep what torch keeps of them."""
    graph = stored.mapping
    mapping = {**graph, "block": _keeping(graph["block"], kept_by)}
    if further := graph.get("further_blocks"):
        mapping["further_blocks"] = [_keeping(block, kept_by) for block in further]
    return replace(StoredGraph.of(mapping, stored.where), turns=stored.turns)


def _keeping(layer: Plain, kept_by: str) -> Plain:
    """A layer that keeps some tensors more."""
    forward = [one for one in layer["operators"] if one["phase"] == "forward"]
    kept = [tensor for one in forward for tensor in _kept(one, kept_by)]
    if not kept:
        return layer
    more = " + ".join(tensor["size_bytes"] for tensor in kept)
    peaks = [{**one, "size_bytes": f"{one['size_bytes']} + {more}"} for one in layer["peaks"]]
    return {**layer, "saved": [*layer["saved"], *kept], "peaks": peaks}


def _kept(operator: Plain, kept_by: str) -> Iterator[Plain]:
    """The tensors that an operator of a forward pass keeps beyond those of its graph."""
    if kept_by == EAGER and operator["name"] == "mistlab.rms_norm":
        yield _tensor(operator, operator["outputs"][0], _OF_NORM)
    if kept_by == EAGER and operator["name"] == "mistlab.swiglu":
        yield _tensor(operator, operator["outputs"][0], _OF_GATE)
    if operator["kind"] == "attention":
        queries, *others = operator["inputs"][:3]
        for own in others:
            if own != queries:
                yield _tensor(operator, queries, 2, less=own)


def _tensor(operator: Plain, shape: Sequence[str], width: int, less: Sequence[str] = ()) -> Plain:
    size = f"{width}*{_numel(shape)}" + (f" - {width}*{_numel(less)}" if less else "")
    return {
        "module": operator["module"],
        "shape": [*shape],
        "dtype": "bfloat16",
        "size_bytes": size,
        "is_input": False,
    }


def _numel(shape: Sequence[str]) -> str:
    return "*".join(f"({size})" for size in shape)
