"""What an engine keeps and does as a workload trains: adapters beside frozen weights (LoRA, QLoRA),
and losses in chunks."""

from collections.abc import Mapping
from dataclasses import replace
from functools import lru_cache
from typing import Literal

from mistlab.engines.engine import MOMENTS_BYTES, Engine, KernelRule, Optimizer, Sums

Train = Literal["all", "adapters"]
Base = Literal["16bit", "8bit", "4bit"]
Loss = Literal["whole", "chunked"]
States = Literal["mixed", "16bit"]

# What blocks keep whose operators torch runs one by one (``EngineMemory.kept_by``).
ONE_BY_ONE = ("eager", "autocast")
# Where everything has 16 bits, a step reads a gradient, and reads and writes a weight and two
# moments.
_MOVED_IN_16_BITS = 2 + 2 * 3 * 2

# Bytes of a frozen weight of a block. Eight bits have a 32-bit scale of 4,096 weights. Four bits
# (NF4, Dettmers et al. 2023, arXiv 2305.14314) have an 8-bit scale of 64 weights, of which 256
# share a 32-bit one.
BASE_BYTES: Mapping[Base, float] = {
    "16bit": 2.0,
    "8bit": 1.0 + 4 / 4096,
    "4bit": 0.5 + 1 / 64 + 4 / (64 * 256),
}

# Weights of few bits are packed in blocks, of which so many share a 32-bit scale.
BLOCK = 64
BLOCKS_A_SCALE: Mapping[Base, int] = {"8bit": 64, "4bit": 256}

# No product makes gradients of frozen weights, so a backward pass has one product for each of the
# forward pass, in place of two, and nothing is added up.
_FROZEN = (
    KernelRule(kind="matmul", phase="backward", makes="weight", runs=False),
    KernelRule(kind="accumulate", runs=False),
)


# Scales and sums of adapters are part of their thin products where kernels are fused.
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
    """The engine as it trains: all weights, or adapters beside weights of some bits that have
    neither gradients nor optimizer state; with logits of all tokens at once, or in chunks; with
    states as the engine mixes them, or weights, gradients and moments of 16 bits; with gradients
    summed in bits that are not the usual ones.

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
    """The rules of an engine's operators beside adapted products: none where all run one by one."""
    is_eager = any(row.kept_by in ONE_BY_ONE for row in engine.memory.values())
    return () if is_eager else (_FUSED_ADAPTERS,)


def _in_16_bits(engine: Engine, optimizer: Optimizer) -> Engine:
    """The engine without sums or master weights of 32 bits; moments have 16 bits, or fewer if the
    optimizer's have."""
    # What an optimizer of fewer bits saves is taken off later.
    moments = 4.0 if optimizer == "adamw" else MOMENTS_BYTES["adamw"]
    return replace(
        engine,
        memory={
            name: replace(row, weight=2, gradient=2, reduced=0, optimizer=moments, step_scratch=0)
            for name, row in engine.memory.items()
        },
        step_moved=dict.fromkeys(engine.step_moved, _MOVED_IN_16_BITS),
    )
