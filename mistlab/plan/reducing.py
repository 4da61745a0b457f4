"""The states that an engine keeps under a gradient reduction that communicates less than an
all-reduce in each step.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mistlab.engines.engine import Engine
from mistlab.reduction.compression import VALUE_BYTES
from mistlab.reduction.reduction_costs import Reduction

# The precision with loss scaling, whose steps may be skipped: states of the reduction are kept
# twice, once as they were before the step.
SCALED = "fp16"
# One value for each candidate, an array; this package is imported without NumPy.
Column = Any


@lru_cache(maxsize=256)
def reducing(engine: Engine, how: Reduction) -> Engine:
    """The engine with its memory model extended by a gradient reduction: errors of compressed
    gradients, the outer optimizer's weights and momenta, and a buffer for a layer that arrives from
    a neighbouring rank.
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
    """Columns of candidates in which the data-parallel ranks are as many state replicas as the
    reduction makes of them.
    """
    data = columns["data_parallel"]
    replicas: Column = data if how.replicas is None else 0 * data + how.replicas
    return {**columns, "state_replicas": replicas}
