"""The parameters of adapters, and the bytes of their weights, gradients and optimizer state."""

from collections.abc import Callable
from typing import Any

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.engines.engine import EngineMemory
from mistlab.plan.dimensions import ranks_of
from mistlab.plan.workload import ModelSpec, Workload


def adapter_parameters(model: ModelSpec, rank: int, targets: str) -> int:
    """The parameters that adapters of a rank add to a block: rank x (inputs + outputs) for each
    product that has them. Blocks of hybrid models count as attention and a network.

    >>> from mistlab import catalog
    >>> 32 * adapter_parameters(catalog.model("llama3-8b"), 16, "all")
    41943040
    """
    inner, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden = model.hidden
    products = [(hidden, inner), (hidden, keys), (hidden, keys), (inner, hidden)]
    if targets == "all":
        gates = 2 if model.mlp_type == "gated_mlp" else 1
        experts = model.experts
        widths = [model.ffn] if experts is None else [experts.ffn] * experts.count
        if experts is not None and experts.shared_ffn:
            widths.append(experts.shared_ffn)
        products += [(hidden, width) for width in widths for _ in range(gates + 1)]
    return rank * sum(rows + columns for rows, columns in products)


def adapter_bytes(
    workload: Workload, value: Callable[[str], Any], memory: EngineMemory
) -> tuple[Floats, Floats, Floats]:
    """Bytes (C) on a rank of adapters' weights, gradients and optimizer state, for columns of
    stages; ``memory`` is the engine's as it trains all weights."""
    of_block = adapter_parameters(workload.model, workload.rank, workload.adapter_targets)
    local = of_block * np.asarray(value("layers"), dtype=float) / value("tensor_parallel")
    ranks, level = ranks_of("gather", value), value("zero")
    kept = (memory.weight, memory.gradient, memory.optimizer)
    parts = [
        each * local / np.where(level >= sharded, ranks, 1)
        for each, sharded in zip(kept, (3, 2, 1), strict=True)
    ]
    return parts[0], parts[1], parts[2]
