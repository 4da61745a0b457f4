"""The activations of a block that are freed if Megatron's selective recomputation
(``recompute_modules``) names modules of the block.

A named module keeps its inputs and recomputes its inner activations (megatron/core/transformer:
``CheckpointWithoutOutput``, ``tensor_parallel.checkpoint``). Not treated here are attention's core
(``core_attn``) and the whole layer of experts (``moe``), which a plan itself can recompute.
"""

from collections.abc import Mapping
from math import prod

import numpy as np

from experiments.runs.run_row import Recomputation, RunRow
from mistlab.graph.graph import LayerGraph, SavedTensor
from mistlab.graph.library import graph_of, sequence_graph_of
from mistlab.graph.sums import Sum
from mistlab.graph.symbols import size_columns
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.plan.plan import StagePlan
from mistlab.plan.workload import Workload

# The kinds of recomputation that recompute only some operators of a block, so that other operators
# can be recomputed by name.
PARTLY = ("cheap", "core")
# For each flag of a row, the modules of a block whose saved inputs are recomputed instead of kept:
# the inputs of GEMMs are outputs of norms and of activation functions.
_FREED: Mapping[str, tuple[str, ...]] = {
    "redoes_norms": ("attention.qkv", "attention.query_up", "experts.router", "mlp.up"),
    "redoes_gates": ("experts.down", "mlp.down"),
    "redoes_network": ("mlp", "mlp.down"),
    "redoes_shared": ("shared", "shared.down"),
}
# For latent attention: the flag for recomputing queries, keys and values from latent vectors; the
# attention core's module, which saves these three with its result and 32-bit sums; and the number
# of tensors that are recomputed.
_LATENT, _CORE, _OPERANDS = "redoes_latent", "attention", 3


def redone_of(row: RunRow) -> tuple[str, ...]:
    """The flags for those parts of a block that a row's run recomputes."""
    return tuple(flag for flag in (*_FREED, _LATENT) if getattr(row, flag))


def freed_share(
    workload: Workload, stage: StagePlan, recompute: Recomputation, *, in_sequence: bool
) -> float:
    """The share of a stage's activations that recomputing parts of blocks frees, without those of
    the block that is being recomputed; 0 if blocks are recomputed whole. With ``in_sequence``,
    tokens are divided over tensor-parallel ranks.
    """
    flags = {*recompute.redone}
    if not flags or recompute.way not in PARTLY:
        return 0.0
    stored = sequence_graph_of(workload) if in_sequence else None
    stored = stored or graph_of(workload)
    graph = stored.counts
    blocks = {block.name: block for block in (graph.block, *graph.further_blocks)}
    sizes = _sizes(workload, stage)
    turns = stored.turns or graph.pattern
    kept = sum(_bytes(blocks[name].saved, sizes) for name in turns)
    freed = sum(_bytes(_freed(blocks[name], flags), sizes) for name in turns)
    return freed / kept * (1 - 1 / stage.layers)


def _freed(block: LayerGraph, flags: set[str]) -> list[SavedTensor]:
    modules = {module for flag in flags - {_LATENT} for module in _FREED[flag]}
    freed = [one for one in block.saved if one.module in modules and not one.is_input]
    core = [one for one in block.saved if one.module == _CORE and one.dtype != "float32"]
    is_latent = any(one.module == "attention.key_up" for one in block.saved)
    return [*freed, *core[:_OPERANDS]] if is_latent and _LATENT in flags else freed


def _sizes(workload: Workload, stage: StagePlan) -> Mapping[str, float]:
    sizes = {
        row.symbol: np.array([stage.value(name)]) for name, row in DIMENSIONS.items() if row.is_size
    }
    return {name: float(np.ravel(one)[0]) for name, one in size_columns(workload, sizes).items()}


def _bytes(
    tensors: list[SavedTensor] | tuple[SavedTensor, ...], sizes: Mapping[str, float]
) -> float:
    return sum(_value(Sum.of(tensor.size_bytes), sizes) for tensor in tensors)


def _value(size: Sum, sizes: Mapping[str, float]) -> float:
    products = (
        (float(number), [sizes[name] ** float(power) for name, power in powers])
        for powers, number in size.terms.items()
    )
    return float(sum(number * prod(factors) for number, factors in products))
