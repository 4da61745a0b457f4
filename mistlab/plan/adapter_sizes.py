"""The parameters of low-rank adapters (LoRA), and the bytes of their weights, gradients and
optimizer states.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.engines.engine import EngineMemory
from mistlab.plan.dimensions import ranks_of
from mistlab.plan.workload import ModelSpec, Workload


def adapter_parameters(model: ModelSpec, rank: int, targets: str, tensor_parallel: Any = 1) -> Any:
    """The number of parameters that low-rank adapters of rank ``rank`` add to one transformer
    block, on one of ``tensor_parallel`` ranks: for each GEMM with an adapter, ``rank`` times its
    input width plus its output width. Of these two widths, a tensor-parallel rank holds its share
    of the one that it splits in the GEMM. In hybrid models every block counts as attention and a
    feed-forward network.

    >>> from mistlab import catalog
    >>> 32 * adapter_parameters(catalog.model("llama3-8b"), 16, "all")
    41943040
    """
    inner, keys = model.heads * model.head_dim, model.kv_heads * model.head_dim
    hidden = model.hidden
    # For each GEMM with an adapter: its width (input or output) that tensor-parallel ranks keep
    # whole, and its width that they split.
    products = [(hidden, inner), (hidden, keys), (hidden, keys), (hidden, inner)]
    if targets == "all":
        gates = 2 if model.mlp_type == "gated_mlp" else 1
        experts = model.experts
        widths = [model.ffn] if experts is None else [experts.ffn] * experts.count
        if experts is not None and experts.shared_ffn:
            widths.append(experts.shared_ffn)
        products += [(hidden, width) for width in widths for _ in range(gates + 1)]
    whole, split = (sum(sides) for sides in zip(*products, strict=True))
    if isinstance(tensor_parallel, int) and tensor_parallel == 1:
        return rank * (whole + split)
    return rank * (whole + split / np.asarray(tensor_parallel))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterBytes:
    """The bytes that low-rank adapters take on a rank, for each candidate (C): weights, gradients
    and optimizer states on the GPU, ring buffers for offloaded weights and gradients, the GPU's
    buffer for offloaded optimizer states, and bytes in host memory.
    """

    weights: Floats
    gradients: Floats
    optimizer: Floats
    buffers: Floats
    step_buffer: Floats
    host: Floats


def adapter_bytes(
    workload: Workload, value: Callable[[str], Any], memory: EngineMemory
) -> AdapterBytes:
    """The bytes of low-rank adapters on a rank, for stages whose dimensions ``value`` gives as
    columns; ``memory`` has the engine's bytes per parameter when all weights are trained.
    """
    tensor = np.asarray(value("tensor_parallel"), dtype=float)
    of_block = adapter_parameters(workload.model, workload.rank, workload.adapter_targets, tensor)
    layers = np.asarray(value("layers"), dtype=float)
    ranks, level = np.asarray(ranks_of("gather", value), dtype=float), value("zero")
    level = np.where(ranks > 1, level, 0)
    kept = {"weights": memory.weight, "gradients": memory.gradient, "optimizer": memory.optimizer}
    shares = {name: np.asarray(value(f"offload_{name}"), dtype=float) for name in kept}
    parts = {
        name: of_block * each / np.where(level >= sharded, ranks, 1)
        for (name, each), sharded in zip(kept.items(), (3, 2, 1), strict=True)
    }
    device = {name: layers * part * (1 - shares[name]) for name, part in parts.items()}
    comes = {
        "weights": (level >= 3) | (shares["weights"] > 0),
        "gradients": (level >= 2) | (shares["gradients"] > 0),
    }
    rings = sum(2 * of_block * kept[name] * comes[name] for name in comes)
    sums = 2 * parts["gradients"] * ((level >= 2) & (shares["gradients"] > 0))
    steps = np.minimum(layers, 2) * parts["optimizer"] * shares["optimizer"]
    return AdapterBytes(
        **device,
        buffers=np.asarray(rings + sums) * memory.rings,
        step_buffer=steps * memory.rings,
        host=np.asarray(sum(layers * part * shares[name] for name, part in parts.items())),
    )
