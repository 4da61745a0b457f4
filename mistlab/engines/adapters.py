"""Changes an engine to a workload's training options: low-rank adapters beside frozen weights
(LoRA, QLoRA), a loss in chunks of tokens, 16-bit weights and optimizer states.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from mistlab.engines.engine import MOMENTS_BYTES, Engine, KernelRule, Optimizer, Sums

Train = Literal["all", "adapters"]
Base = Literal["16bit", "8bit", "4bit"]
Loss = Literal["whole", "chunked"]
States = Literal["mixed", "16bit"]

# Values of ``EngineMemory.kept_by`` under which torch launches one kernel for each operator.
ONE_BY_ONE = ("eager", "autocast")
# Values of it under which blocks keep copies of keys and values for every head of the queries.
COPYING_KEYS = (*ONE_BY_ONE, "compiled")
# The bytes per parameter that an optimizer step in 16 bits moves: it reads a gradient, and reads
# and writes a weight and two moments.
_MOVED_IN_16_BITS = 2 + 2 * 3 * 2

# The bytes of each frozen weight of a block, by the number of its bits. 8-bit weights have a 32-bit
# scale per 4,096. NF4 weights (Dettmers et al. 2023, arXiv 2305.14314) have an 8-bit scale per 64,
# and a 32-bit scale per 256 of these scales.
BASE_BYTES: Mapping[Base, float] = {
    "16bit": 2.0,
    "8bit": 1.0 + 4 / 4096,
    "4bit": 0.5 + 1 / 64 + 4 / (64 * 256),
}

# The number of weights in a quantisation block, all of which have the same scale.
BLOCK = 64
BLOCKS_A_SCALE: Mapping[Base, int] = {"8bit": 64, "4bit": 256}

# Frozen weights have no gradients: the backward pass has one GEMM per GEMM of the forward pass, not
# two, and accumulates no weight gradients.
_FROZEN = (
    KernelRule(kind="matmul", phase="backward", makes="weight", runs=False),
    KernelRule(kind="accumulate", runs=False),
)


# Engines with fused kernels scale an adapter's output, and add it to the frozen GEMM's, in the
# kernel of the adapter's low-rank GEMM.
_FUSED_ADAPTERS = KernelRule(name="mistlab.adapter", bytes_factor=0.5)


@lru_cache(maxsize=256)
def training(
    engine: Engine,
    train: Train,
    base: Base,
    loss: Loss,
    states: States,
    sums: Sums,
    optimizer: Optimizer,
) -> Engine:
    """The engine with a workload's training options: adapters beside frozen weights, which have
    neither gradients nor optimizer states; logits of all tokens at once or in chunks; 16-bit or
    mixed-precision weights and states; and the bits in which gradients are accumulated.

    States of the adapters themselves are counted with the stage (``mistlab.graph.stage_model``).
    """
    if sums != "usual":
        engine = engine.summing(sums)
    if loss == "chunked":
        memory = {
            name: replace(row, loss_tokens=engine.chunk_tokens, loss_again=engine.recomputes_loss)
            for name, row in engine.memory.items()
        }
        engine = replace(engine, memory=memory)
    if states == "16bit":
        engine = _in_16_bits(engine, optimizer)
    if train == "all":
        return engine
    frozen = 0.0 if base == "16bit" else BASE_BYTES[base]
    return replace(
        engine,
        kernels=(*_FROZEN, *_of_adapters(engine), *engine.kernels),
        kernels_in_32_bits=None
        if engine.kernels_in_32_bits is None
        else (*_FROZEN, *_of_adapters(engine), *engine.kernels_in_32_bits),
        memory={
            name: replace(
                row,
                gradient=0,
                reduced=0,
                optimizer=0,
                step_scratch=0,
                frozen_weight=frozen,
                quantised_inputs=0 if base == "16bit" else row.quantised_inputs,
            )
            for name, row in engine.memory.items()
        },
        step_moved=dict.fromkeys(engine.step_moved, 0),
        optimizers=("adamw", "adamw-bf16", "adamw-8bit"),
    )


def _of_adapters(engine: Engine) -> tuple[KernelRule, ...]:
    """The engine's kernel rules for the operators beside adapters' low-rank GEMMs; none if the
    engine runs each operator as a kernel of its own.
    """
    is_eager = any(row.kept_by in ONE_BY_ONE for row in engine.memory.values())
    return () if is_eager else (_FUSED_ADAPTERS,)


def _in_16_bits(engine: Engine, optimizer: Optimizer) -> Engine:
    """The engine with weights and gradients in 16 bits and without master weights; optimizer
    moments have 16 bits, or fewer if the optimizer stores fewer.
    """
    # For optimizers with low-precision moments, 32-bit moments are counted here, since the bytes
    # that they save are subtracted later.
    moments = 4.0 if optimizer == "adamw" else MOMENTS_BYTES["adamw"]
    return replace(
        engine,
        memory={
            name: replace(row, weight=2, gradient=2, reduced=0, optimizer=moments, step_scratch=0)
            for name, row in engine.memory.items()
        },
        step_moved=dict.fromkeys(engine.step_moved, _MOVED_IN_16_BITS),
    )
