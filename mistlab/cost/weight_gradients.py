"""The part of a layer's backward pass that makes gradients of weights, for orders that run it
apart.

This part has the products whose result has no token dimension. The rest stays in the backward pass:
gradients of vectors, the second forward pass of a recomputed block, and the time to launch kernels
beyond computing.

Axes: C candidates, P parts of a model in order, T types of layers, S distinct strategies.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.kernels import class_of, makes_weight_gradient, rule_of
from mistlab.cost.layers import KernelRules, bytes_factor
from mistlab.cost.tasks import TaskModel, TaskSeconds
from mistlab.machine.compute import OperatorClass
from mistlab.symbolic.compiled import Compiled, compile_sums
from mistlab.symbolic.graph import LayerGraph
from mistlab.symbolic.graph_choice import GraphChoice, by_graph
from mistlab.symbolic.kept import kept
from mistlab.symbolic.layer_types import graphs_of
from mistlab.symbolic.library import graph_of, sequence_graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.symbolic.sum_source import Value
from mistlab.symbolic.sums import Sum
from mistlab.symbolic.symbols import layer_columns, size_names
from mistlab.symbolic.treatments import TREATMENTS, Treatment
from mistlab.values.context_ways import RING

Values = NDArray[np.float64]

# The classes of products with weights: of 16 and 8 bits, of dense layers and of experts.
PRODUCTS: tuple[OperatorClass, ...] = (
    *("matmul", "grouped_matmul"),
    *("matmul_8bit", "grouped_matmul_8bit"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sums:
    flop: Sum
    moved_bytes: Sum


def weight_gradients_s(seconds: TaskSeconds) -> Values:
    """Seconds (T, S) of the products that make gradients of weights."""
    model, columns = seconds.model, seconds.columns
    treatments = tuple((name, TREATMENTS[name]) for name in model.types.treatments)

    plain, split = graph_of(model.workload), sequence_graph_of(model.workload)

    def products(choice: GraphChoice) -> Compiled:
        # However ranks exchange keys, the products are the same.
        graph = split if split is not None and choice.splits_tokens else plain
        return _products(graph, model.kernels, treatments)

    compiled = products(GraphChoice(splits_tokens=False, exchange=RING))
    sizes = size_columns(
        model.workload, {symbol: columns[name] for symbol, name in layer_columns().items()}
    )
    values = dict(zip(compiled.names, by_graph(compiled, products, sizes), strict=True))
    alone = np.stack([_seconds(model, values, name) for name in model.types.names])
    whole = np.stack([layer.passes["backward"].compute_s for layer in seconds.of_type])
    return np.minimum(alone, whole)


def _seconds(model: TaskModel, values: dict[str, Values], name: str) -> Values:
    layers = model.layers
    seconds = np.zeros(1)
    for product in PRODUCTS:
        rate = layers.compute.rate(product)
        s_per_flop = rate.s_per_flop * layers.times_slower(product)
        s_per_flop *= layers.slowdown / layers.compute.sustained
        moved_s = values[f"{name} {product} bytes"] * rate.s_per_byte
        seconds = seconds + values[f"{name} {product} flop"] * s_per_flop + moved_s
    return np.asarray(seconds)


@kept
def _products(
    graph: StoredGraph, rules: KernelRules, treatments: tuple[tuple[str, Treatment], ...]
) -> Compiled:
    expressions: dict[str, Value] = {}
    for name, layer in graphs_of(graph.counts, treatments).items():
        for product in PRODUCTS:
            sums = _sums(layer, rules, graph.attention, product)
            expressions[f"{name} {product} flop"] = sums.flop
            expressions[f"{name} {product} bytes"] = sums.moved_bytes
    return compile_sums(expressions, columns=size_names())


def _sums(layer: LayerGraph, rules: KernelRules, attention: str, product: OperatorClass) -> _Sums:
    flop = moved = Sum.of(0)
    for operator in layer.of_phase("backward"):
        if makes_weight_gradient(operator) and class_of(operator) == product:
            rule = rule_of(operator, layer, rules, attention)
            if not rule.runs:
                continue
            flop += operator.flop
            factor = bytes_factor(rule)
            moved += (operator.read_bytes + operator.written_bytes) * factor
    return _Sums(flop=flop, moved_bytes=moved)
