"""The content of a traced model's file, as JSON and in words."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mistlab.graph.graph import ModelGraph
from mistlab.graph.layer_types import expressions_of
from mistlab.plan.workload import ModelSpec


def summary_of(spec: ModelSpec, graphs: Sequence[ModelGraph], out: Path) -> dict[str, Any]:
    """What a model and its graphs hold, as JSON values."""
    first = graphs[0]
    embedding, block, head = (layer.parameter_count for layer in first.layers)
    return {
        "model": str(out),
        "name": spec.name,
        "layers": spec.layers,
        "parameters": {"embedding": str(embedding), "block": str(block), "head": str(head)},
        "tensor_parallel_degrees": spec.tensor_parallel_degrees,
        "graphs": [_graph_summary(graph) for graph in graphs],
    }


def _graph_summary(graph: ModelGraph) -> dict[str, Any]:
    block = expressions_of(graph.block)
    return {
        "attention": graph.attention,
        "precision": graph.precision,
        "block": {
            "forward_flop": str(block.flop("forward")),
            "backward_flop": str(block.flop("backward")),
            "saved_bytes": str(block.saved_bytes),
            "checkpointed_bytes": str(block.input_bytes),
        },
        "conditions": [f"{c.size} divides by {c.divisor}" for c in graph.conditions],
        "assumptions": list(graph.assumptions),
        "counted_by_element": sorted(
            {o.name for layer in graph.layers for o in layer.operators if o.kind == "other"}
        ),
    }


def tell(summary: dict[str, Any]) -> None:
    """Print a summary for people."""
    print(f"{summary['name']}: {summary['layers']} blocks")
    for layer, count in summary["parameters"].items():
        print(f"  parameters of the {layer}: {count}")
    if summary["tensor_parallel_degrees"] is not None:
        degrees = ", ".join(map(str, summary["tensor_parallel_degrees"]))
        print(f"  tensor-parallel degrees: {degrees}")
    for graph in summary["graphs"]:
        print(f"  attention {graph['attention']}, {graph['precision']} precision, a block:")
        for name, expression in graph["block"].items():
            print(f"    {name.replace('_', ' ')}: {expression}")
        for text in graph["assumptions"]:
            print(f"    holds only where {text}")
        if graph["counted_by_element"]:
            names = ", ".join(graph["counted_by_element"])
            print(f"    counted as one operation an element: {names}")
    print(f"written: {summary['model']} (name it as `model:` in a plan file)")
