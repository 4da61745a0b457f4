"""Layer graphs of models whose adapters are trained beside frozen weights: what layers then keep.

A product with a frozen weight keeps nothing of its input, but where an adapter does, which keeps
the thin product in between too. The embedding has no backward pass. Work stays that of the whole
graph: rules of engines leave out products that make gradients of frozen weights.

The change is made in the text of a graph's file, so that no expression is read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cache

from mistlab.graph.stored_graph import DTYPE, DTYPE_OF_4, Plain, StoredGraph, numel

# The symbol of an adapter's rank, and the parts of a block whose products may have adapters.
RANK = "x"
ATTENTION, NETWORKS = "attention.", ("mlp.", "shared.", "experts.")
# Products of rows that ranks split, side by side: queries, keys and values; gates and values.
_QUERIES, _FIRST = ("attention.qkv", 3), ".up"
_WIDTHS = {"bfloat16": 2, "float16": 2, "float32": 4}
# Products of 8 or 4 bits have adapters of 16.
_OF_FEW_BITS, _OF_ADAPTERS = (DTYPE, DTYPE_OF_4), "bfloat16"


@cache
def with_adapters(stored: StoredGraph, targets: str, *, is_gated: bool) -> StoredGraph:
    """The graph of a model whose blocks' products have adapters: all, or those of ``attention``."""
    graph = stored.mapping
    parts = (ATTENTION,) if targets == "attention" else (ATTENTION, *NETWORKS)
    gates = 2 if is_gated else 1
    mapping = {
        **graph,
        "embedding": {**graph["embedding"], "saved": []},
        "block": _adapted(graph["block"], parts, gates),
        "head": {**graph["head"], "saved": [*_kept(graph["head"], ())]},
    }
    if further := graph.get("further_blocks"):
        mapping["further_blocks"] = [_adapted(block, parts, gates) for block in further]
    return replace(StoredGraph.of(mapping, stored.where), turns=stored.turns)


@cache
def with_loss_again(stored: StoredGraph) -> StoredGraph:
    """The graph of a model whose head runs its forward pass again before its backward pass."""
    graph = stored.mapping
    again = [
        {**one, "phase": "backward"}
        for one in graph["head"]["operators"]
        if one["phase"] == "forward"
    ]
    head = {**graph["head"], "operators": [*graph["head"]["operators"], *again]}
    return replace(StoredGraph.of({**graph, "head": head}, stored.where), turns=stored.turns)


def _adapted(block: Plain, parts: tuple[str, ...], gates: int) -> Plain:
    """A block with adapters beside the products of these parts."""
    more = [*_thin(block, parts, gates)]
    sizes = " + ".join(one["size_bytes"] for one in more)
    peaks = [{**one, "size_bytes": f"{one['size_bytes']} + {sizes}"} for one in block["peaks"]]
    return {
        **block,
        "saved": [*_kept(block, parts), *more],
        "peaks": peaks if more else block["peaks"],
    }


def _kept(layer: Plain, parts: tuple[str, ...]) -> Iterator[Plain]:
    """What a layer keeps but for inputs of frozen products without adapters."""
    matrices = {
        one["name"].removesuffix(".weight") for one in layer["parameters"] if len(one["shape"]) > 1
    }
    for tensor in layer["saved"]:
        module = tensor["module"]
        is_of_product = module in matrices and tensor["dtype"] in (*_WIDTHS, *_OF_FEW_BITS)
        if module.startswith(parts) or not is_of_product or module.endswith(".router"):
            yield tensor


def _thin(block: Plain, parts: tuple[str, ...], gates: int) -> Iterator[Plain]:
    """The thin products that adapters keep."""
    matrices = {
        one["name"].removesuffix(".weight") for one in block["parameters"] if len(one["shape"]) > 1
    }
    own_tokens = next(one["shape"][:-1] for one in block["saved"] if one["is_input"])
    for one in block["operators"]:
        module = one["module"]
        is_product = one["phase"] == "forward" and one["kind"] == "matmul" and module in matrices
        if not (is_product and module.startswith(parts)) or module.endswith(".router"):
            continue
        # A bias comes first.
        rows = next(shape[0] for shape in one["inputs"] if len(shape) > 1)
        splits_rows = module.endswith((_QUERIES[0], _FIRST))
        side_by_side = _QUERIES[1] if module == _QUERIES[0] else gates if splits_rows else 1
        own = [*own_tokens] if splits_rows and not module.startswith("experts.") else [rows]
        shape = [*own, f"{side_by_side}*{RANK}" if side_by_side > 1 else RANK]
        dtype = _OF_ADAPTERS if one["dtype"] in _OF_FEW_BITS else one["dtype"]
        yield {
            "module": module,
            "shape": shape,
            "dtype": dtype,
            "size_bytes": f"{_WIDTHS[dtype]}*{numel(shape)}",
            "is_input": False,
        }
