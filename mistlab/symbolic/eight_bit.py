"""Layer graphs with 8-bit and 4-bit products, made of graphs in 16 bits.

Products of blocks with weights take operands of 8 bits and give results of 16. Their input and the
gradient of their output are converted, each in two layouts: one for the product along rows, one for
the product along columns, which makes the weight's gradient. The input is kept for the backward
pass in 8 bits. Attention, norms, routers, embedding and head stay in 16 bits. Weights are held in
8 bits in two layouts, which take as many bytes as 16-bit weights do.

The change is made in the text of a graph's file, so that no expression is read.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

from mistlab.engines.engine_parts import BATCHED_PRODUCTS
from mistlab.symbolic.stored_graph import StoredGraph

DTYPE = "float8_e4m3fn"
DTYPE_OF_4 = "float4_e2m1fn_x2"
CAST = "mistlab.cast"
# Modules whose products stay in 16 bits.
IN_16_BITS = ("experts.router",)

_GRADIENT_OF_WEIGHT = "mistlab.grouped_product_of_weight"

Plain = Mapping[str, Any]


def in_precision(stored: StoredGraph, precision: str, *, keeps_wide: bool = False) -> StoredGraph:
    """The graph of a model in a precision, which may keep inputs of products in 16 bits."""
    if precision not in ("fp8", "fp4"):
        return stored
    made = eight_bit(stored, keeps_wide=keeps_wide)
    made = four_bit(made) if precision == "fp4" else made
    # Equal graphs are made once; models whose kinds take turns otherwise have equal graphs.
    return replace(made, turns=stored.turns)


@cache
def four_bit(stored: StoredGraph) -> StoredGraph:
    """The graph with 4-bit products in the blocks of a graph with 8-bit products.

    Operands are read in 4 bits. Conversions take as many bytes as those to 8 bits: values are read
    once more, to be scaled by what is largest. What is kept stays in 8 bits. Products of experts
    stay in 8 bits, as measured runs of both precisions take equally long.
    """
    graph = stored.mapping
    mapping = {**graph, "block": _four_bit_block(graph["block"])}
    if further := graph.get("further_blocks"):
        mapping["further_blocks"] = [_four_bit_block(block) for block in further]
    return replace(StoredGraph.of(mapping, stored.where), turns=stored.turns)


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


@cache
def eight_bit(stored: StoredGraph, *, keeps_wide: bool = False) -> StoredGraph:
    """The graph of a model with 8-bit products in its blocks, which may keep inputs in 16 bits."""
    block_of = _block_with_wide_inputs if keeps_wide else _block
    graph = stored.mapping
    further = [block_of(block) for block in graph.get("further_blocks", ())]
    mapping = {**graph, "block": block_of(graph["block"])}
    if further:
        mapping["further_blocks"] = further
    made = StoredGraph.of(mapping, stored.where)
    return replace(made, turns=stored.turns)


def _block_with_wide_inputs(block: Plain) -> Plain:
    return {**block, "operators": [*_operators(block["operators"])]}


def _block(block: Plain) -> Plain:
    operators = [*_operators(block["operators"])]
    modules = {one["module"] for one in operators if one["dtype"] == DTYPE}
    saved, less = [], []
    for tensor in block["saved"]:
        own = tensor
        if tensor["module"] in modules and tensor["dtype"] == "bfloat16":
            half = f"({tensor['size_bytes']})/2"
            own = {**tensor, "dtype": DTYPE, "size_bytes": half}
            modules.discard(tensor["module"])
            less.append(f"- {half}")
        saved.append(own)
    for operator in operators:
        # The input of this product is kept in 16 bits by another operator too.
        is_product = operator["dtype"] == DTYPE and operator["name"] != CAST
        if is_product and operator["phase"] == "forward" and operator["module"] in modules:
            size = _numel(operator["inputs"][0])
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
                # A gradient is converted once for both products of the backward pass.
                yield _cast(operator)
            yield {**operator, "dtype": DTYPE, "read_bytes": f"({operator['read_bytes']})/2"}


def _makes_weight(operator: Plain) -> bool:
    """Whether a product of a backward pass makes the gradient of a weight."""
    if operator["name"].startswith("mistlab."):
        return bool(operator["name"] == _GRADIENT_OF_WEIGHT)
    return not any("b" in _symbols(size) for size in operator["outputs"][0])


def _cast(operator: Plain) -> Plain:
    shape = operator["inputs"][0]
    size = _numel(shape)
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


def _numel(shape: Sequence[str]) -> str:
    return "*".join(f"({size})" for size in shape)


def _symbols(size: str) -> set[str]:
    return set("".join(c if c.isalpha() else " " for c in size).split())
