"""The states that an engine keeps when its data-parallel ranks communicate less."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mistlab.engines.engine import Engine
from mistlab.reduction.compression import VALUE_BYTES
from mistlab.reduction.reduction_costs import Reduction

# The precision whose loss is scaled: what ranks remember is kept twice, once as before a step that
# may be skipped.
SCALED = "fp16"
# Values of candidates, an array; this package is imported without NumPy.
Column = Any


@lru_cache(maxsize=256)
def reducing(engine: Engine, how: Reduction) -> Engine:
    """The engine's memory model under a reduction: errors of compressed gradients, the outer
    optimizer's weights and momenta, and a buffer for a neighbour's layer.
    """
    if how.is_plain:
        return engine
    memory = {
        name: replace(
            row,
            remembered=VALUE_BYTES * how.vectors_kept() * (2 if name == SCALED else 1),
            outer=VALUE_BYTES * how.outer_vectors,
            arriving=VALUE_BYTES if how.kind == "gossip" or how.trimmed else 0,
        )
        for name, row in engine.memory.items()
    }
    return replace(engine, memory=memory)


def replicated(columns: Mapping[str, Column], how: Reduction) -> Mapping[str, Column]:
    """Columns of candidates, with the state replicas that a reduction makes of data-parallel
    ranks.
    """
    data = columns["data_parallel"]
    replicas: Column = data if how.replicas is None else 0 * data + how.replicas
    return {**columns, "state_replicas": replicas}
