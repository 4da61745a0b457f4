"""Engines ``mistlab``, this package's own runtime (docs/decisions/0014-engine.md), and ``mist``.

``mist`` is the published Mist (EuroSys 2025). Both stream layers by one slot table, with kernels of
their own.
"""

from dataclasses import replace

from mistlab.engines.baselines import SEQUENCE_FIRST
from mistlab.engines.engine import BATCHED_PRODUCTS, Engine, EngineMemory, KernelRule
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.schedule.slots import (
    BACKWARD,
    FORWARD,
    GATHER_SHARDED,
    GATHER_STEPPED,
    REDUCE,
    REDUCE_SHARDED,
    Task,
    Template,
    evict,
    fetch,
)

# A layer's optimizer step waits for the next iteration, just before the layer's first forward.
_STEP_AHEAD = Task(stream="compute", kind="S", place="ahead")

STREAMED = Template(
    phases={
        "first_forward": (
            *(_STEP_AHEAD, FORWARD, GATHER_STEPPED, fetch("G"), fetch("O")),
            *(evict("O", "here"), evict("P", "here"), evict("A")),
        ),
        "forward": (FORWARD, GATHER_SHARDED, fetch("P"), evict("A")),
        "backward": (
            *(BACKWARD, GATHER_SHARDED, REDUCE_SHARDED, fetch("P"), fetch("G"), fetch("A")),
            evict("G"),
        ),
        "last_backward": (
            *(BACKWARD, GATHER_SHARDED, REDUCE, fetch("P"), fetch("G"), fetch("A")),
            evict("G"),
        ),
        "step": (),
    },
)


def _ring_memory(width: int) -> EngineMemory:
    """Memory in a precision of ``width`` bytes, with rings of two buffers."""
    return EngineMemory(weight=width, gradient=width, optimizer=12, rings=True)


MIST = Engine(
    name="mist",
    system="mist",
    family="mistlab",
    overlapped=STREAMED,
    # The published runtime's stages wait for every transfer.
    sends="blocking",
    kernels=SEQUENCE_FIRST,
    memory={"fp16": _ring_memory(2), "bf16": _ring_memory(2), "fp32": _ring_memory(4)},
    # Rates were fitted with a step of one kernel, which reads gradient, master and moments and
    # writes master and moments.
    step_moved={"fp16": 28, "bf16": 28, "fp32": 28},
    offloads=True,
)

# Operators without a rule here are torch's own, or one kernel of runtime.models.kernels, as in the
# graphs.
_KERNELS = (
    # Products add gradients of weights (runtime.engine.work.products); one kernel adds the
    # gradients of all vectors (ParameterPlaces.add_vectors).
    KernelRule(adds="weight", bytes_factor=0.0),
    KernelRule(adds="vector", together=True),
    # runtime.engine.work.stage_modules copies neither operands nor results, joins no gradients, and
    # scales inside its products, one for each sequence.
    *(
        KernelRule(name=name, module="attention", attention="math", bytes_own_keys=0.0)
        for name in ("aten.clone", "aten.cat", "aten.mul")
    ),
    *(
        KernelRule(name=name, module="attention", bytes_own_keys=1.0, kernels_a_sequence=1)
        for name in BATCHED_PRODUCTS
    ),
)

MISTLAB = Engine(
    name="mistlab",
    system="mistlab",
    family="mistlab",
    # StreamedRanks.all_reduce_ reduces beside the products that runtime.engine.work.products puts
    # off.
    overlapped=replace(STREAMED, overlaps_tensor_backward=True),
    kernels=_KERNELS,
    memory={"fp16": _ring_memory(2), "bf16": _ring_memory(2), "fp32": _ring_memory(4)},
    # In bytes a parameter: gradients are copied to 32 bits (6), one kernel reads gradient, master
    # and moments and writes master and moments (28), and weights are copied from masters (6). Under
    # fp16 the kernel also writes unscaled gradients (4). In full precision gradients need no copy,
    # and weights move 8.
    step_moved={"fp16": 44, "bf16": 40, "fp32": 36},
    optimizers=("adamw", "adamw-bf16", "adamw-8bit"),
    drops_tokens=True,
    offloads=True,
    context_exchanges=(RING, GATHER, HEADS),
    takes_orders=True,
    runs_here=True,
)
