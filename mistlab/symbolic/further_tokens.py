"""Heads that predict further tokens (multi-token prediction, as in DeepSeek V3, arXiv 2412.19437).

A model predicts each token after the next in five steps. A norm of the output of its last block,
and a norm of the embedding of the token before. A product that joins both. A block of the same kind
as the last block. A further norm. Logits, and a loss. The tables of embedding and head are the
model's own; the last stage of a pipeline has a copy of the embedding's table.

All of it becomes part of the head's graph, so it lies on the last stage, is kept for one
micro-batch, and never runs again.

The change is made in the text of a graph's file.
"""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.symbolic.sums import Sum, sum_from

Plain = Mapping[str, Any]

MODULE = "head.further"
_WIDTHS = {"half": (2, "bfloat16"), "single": (4, "float32")}


def with_further_tokens(stored: StoredGraph, tokens: int, *, tied: bool) -> StoredGraph:
    """The graph of a model whose head predicts so many tokens after the next.

    With ``tied`` embeddings the head has the embedding's table already.
    """
    made = _made(stored, tokens, tied) if tokens else stored
    return replace(made, turns=stored.turns)


@cache
def _made(stored: StoredGraph, tokens: int, tied: bool) -> StoredGraph:
    graph = stored.mapping
    head, block, embedding = graph["head"], graph["block"], graph["embedding"]
    joint = _joint(graph)
    norms = [one for one in head["parameters"] if not _is_table(one)]
    copied = [] if tied else [one for one in embedding["parameters"] if _is_table(one)]
    own: dict[str, list[Plain]] = {
        "operators": [
            *(*joint["operators"], *embedding["operators"]),
            *(*block["operators"], *head["operators"]),
        ],
        "saved": [_no_input(one) for part in (joint, block, head) for one in part["saved"]],
        "parameters": [*joint["parameters"], *block["parameters"], *norms],
    }
    further = {name: [*head[name], *some * tokens] for name, some in own.items()}
    further["parameters"] += copied
    further["peaks"] = [*head["peaks"], *_peaks(head, block, joint, tokens)]
    name = f"{graph['name']}-further{tokens}"
    return StoredGraph.of({**graph, "name": name, "head": {**head, **further}}, stored.where)


def _peaks(head: Plain, block: Plain, joint: Plain, tokens: int) -> Iterator[Plain]:
    """The fullest moments: of the last further token, when all others are kept."""
    own = _kept(joint) + _kept(block) + _kept(head)
    before = _kept(head) + own * (tokens - 1) + _kept(joint)
    yield from (_larger(peak, before) for peak in block["peaks"])
    yield from (_larger(peak, before + _kept(block)) for peak in head["peaks"])


def _kept(layer: Plain) -> Sum:
    return Sum.total(sum_from(one["size_bytes"]) for one in layer["saved"])


def _larger(peak: Plain, more: Sum) -> Plain:
    return {**peak, "size_bytes": str(sum_from(peak["size_bytes"]) + more)}


def _no_input(tensor: Plain) -> Plain:
    return {**tensor, "is_input": False}


def _is_table(parameter: Plain) -> bool:
    return "V" in parameter["shape"][0]


def _joint(graph: Plain) -> Plain:
    """The norms of the last block's result and of the embedding, and the product of both."""
    norms = [one for one in graph["head"]["operators"] if one["module"] == "head.norm"]
    of_norm = [one for one in graph["head"]["parameters"] if one["name"].startswith("head.norm")]
    weight = {"name": f"{MODULE}.weight", "shape": ["h/tp", "2*h"]}
    tokens = graph["head"]["operators"][0]["outputs"][0][1]
    width, dtype = _WIDTHS[graph["precision"]]
    # The embedding, which its norm keeps, and both norms' results, which the product keeps.
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
    """The product that halves the channels, split by its results, which all ranks gather."""
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
