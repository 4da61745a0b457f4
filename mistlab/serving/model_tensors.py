"""The bytes of a model's tensors in each layer, and whether tensor-parallel ranks split a tensor or
hold it whole.
"""

from functools import cache

import numpy as np

from mistlab.graph.compiled import compile_sums
from mistlab.graph.graph import LayerGraph
from mistlab.graph.sums import Sum
from mistlab.graph.symbols import size_names
from mistlab.plan.workload import ModelSpec
from mistlab.serving.resharding import TensorSizes
from mistlab.serving.step_cost import graph_sizes, serving_graph


@cache
def tensor_sizes(
    model: ModelSpec, bytes_each: int, over: int = 1, positions: int = 2048
) -> tuple[TensorSizes, ...]:
    """The bytes of a model's tensors by layer, where the embedding is layer 0 and the head the
    last. The vocabulary is padded for ``over`` ranks; ``positions`` is the number of learned
    positions, if the model has any.
    """
    counts = serving_graph(model).counts
    kinds = serving_graph(model).pattern
    vocab = model.padded_vocab(over)
    given = {"V": float(vocab), "s": float(positions)}
    last = model.layers + 1
    table = vocab * model.hidden if model.tied_embeddings else 0
    layers = [(0, counts.embedding, table), (last, counts.head, table)]
    layers += [
        (block + 1, counts.kinds[kinds[block % len(kinds)]], 0) for block in range(model.layers)
    ]
    sizes = []
    for layer, graph, elsewhere in sorted(layers, key=lambda one: one[0]):
        whole, halves = (_values(graph, model, ranks, given) for ranks in (1, 2))
        split = 2 * (whole - halves)
        sizes.append(
            TensorSizes(
                layers=(layer,),
                split=(split - elsewhere) * bytes_each,
                whole=(whole - split) * bytes_each,
            )
        )
    if table:
        sizes.append(TensorSizes(layers=(0, last), split=table * bytes_each, whole=0))
    return tuple(sizes)


def _values(graph: LayerGraph, model: ModelSpec, ranks: int, given: dict[str, float]) -> int:
    sums = {"all": Sum.total(parameter.count for parameter in graph.parameters)}
    sizes = graph_sizes(model, tp=ranks, expert_tp=ranks) | given
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    return round(float(compile_sums(sums, columns=size_names())(columns)[0][0]))
