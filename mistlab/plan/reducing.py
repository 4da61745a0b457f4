"""The additional states that an engine keeps under a gradient reduction that communicates less than
an all-reduce per step.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Any

from mistlab.engines.engine import Engine
from mistlab.reduction.compression import VALUE_BYTES
from mistlab.reduction.reduction_costs import Reduction

# The precision with loss scaling, which may skip steps. A reduction's own states, such as
# compression errors, are then kept twice: the current ones, and those before the step.
SCALED = "fp16"
# An array with one value for each candidate; typed as ``Any`` since this package is imported
# without NumPy.
Column = Any


@lru_cache(maxsize=256)
def reducing(engine: Engine, how: Reduction) -> Engine:
    """A copy of the engine that also keeps what a gradient reduction needs in memory, such as
    errors of compressed gradients or an outer optimizer's momentum.
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
    """Columns of candidates in which ``state_replicas`` is set to the number of model replicas into
    which a gradient reduction divides the data-parallel ranks.
    """
    data = columns["data_parallel"]
    replicas: Column = data if how.replicas is None else 0 * data + how.replicas
    return {**columns, "state_replicas": replicas}
