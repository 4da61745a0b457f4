"""The arithmetic of one training step, whatever plan carries it out."""

from functools import cache

import sympy

from mistlab.symbolic.graph import LayerGraph
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import constants_of
from mistlab.symbolic.symbols import size_symbol
from mistlab.workload import Workload

PRODUCTS = {"matmul", "attention"}


@cache
def model_flop(workload: Workload) -> float:
    """Operations of the products of a step, forward and backward, nothing computed twice."""
    graph, model = graph_of(workload), workload.model
    times = {"embedding": 1, "block": model.layers, "head": 1}
    sizes = {**constants_of(workload), "b": 1, "tp": 1, "V": model.padded_vocab(1)}
    values = {size_symbol(name): size for name, size in sizes.items()}
    a_sequence = sum(
        count * float(_flop(layer).subs(values))
        for count, layer in zip(times.values(), graph.layers, strict=True)
    )
    return a_sequence * workload.global_batch


def _flop(layer: LayerGraph) -> sympy.Expr:
    return sympy.Add(*(o.flop for o in layer.operators if o.kind in PRODUCTS))
