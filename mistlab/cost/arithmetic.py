"""The arithmetic of one training step, whatever plan carries it out."""

from functools import cache

import numpy as np

from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.graph import LAYERS
from mistlab.symbolic.kept import kept
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import constants_of
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.symbolic.symbols import size_names, sizes_of_candidates
from mistlab.values.plan import Plan
from mistlab.values.workload import Workload

PRODUCTS = {"matmul", "attention"}


def model_flop(workload: Workload) -> float:
    """Operations of the products of a step, forward and backward, nothing computed twice."""
    return _step_flop(workload, (1, workload.model.layers, 1))


def stage_flop(workload: Workload, plan: Plan, stage: int) -> float:
    """Of these, what the layers of one of a plan's stages do."""
    is_first, is_last = stage == 0, stage == plan.num_stages - 1
    return _step_flop(workload, (int(is_first), plan.stages[stage].layers, int(is_last)))


def _step_flop(workload: Workload, counts: tuple[int, int, int]) -> float:
    """Operations of a step in so many embeddings, blocks and heads."""
    pairs = zip(counts, _sequence_flop(workload), strict=True)
    return sum(count * flop for count, flop in pairs) * workload.global_batch


@cache
def _sequence_flop(workload: Workload) -> tuple[float, ...]:
    """Operations of a sequence in the embedding, a block and the head."""
    ones = dict.fromkeys(sizes_of_candidates(), 1)
    sizes = {**constants_of(workload), **ones, "V": workload.model.padded_vocab(1)}
    columns = {name: np.array([float(size)]) for name, size in sizes.items()}
    return tuple(float(flop) for (flop,) in _flop(graph_of(workload))(columns))


@kept
def _flop(graph: StoredGraph) -> Compiled:
    """Operations of the products of the embedding, a block and the head."""
    flop = {
        name: sympy.Add(*(o.flop for o in layer.operators if o.kind in PRODUCTS))
        for name, layer in zip(LAYERS, graph.layers, strict=True)
    }
    return compile_expressions(flop, columns=size_names(), constants={})
