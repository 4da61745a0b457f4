"""Engines ``mistlab``, this package's own runtime (docs/decisions/0014-engine.md), and ``mist``.

``mist`` is the published Mist (EuroSys 2025). Both stream layers by one slot table, with kernels of
their own.
"""

from dataclasses import replace

from mistlab.engines.baselines import SEQUENCE_FIRST
from mistlab.engines.engine import (
    BATCHED_PRODUCTS,
    Engine,
    EngineMemory,
    KernelRule,
    OtherSums,
)
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


def _ring_memory(width: int, gradient: int = 0) -> EngineMemory:
    """Memory in a precision of ``width`` bytes, with rings of two buffers; gradients are as wide,
    or have ``gradient`` bytes."""
    return EngineMemory(weight=width, gradient=gradient or width, optimizer=12, rings=True)


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
    # runtime.models.dropout draws masks again, and so reads and writes values of 2 bytes alone,
    # where a graph has a byte more for each. The backward pass drops shares of attention twice.
    KernelRule(
        name="aten.native_dropout_backward", module="attention", bytes_factor=8 / 5, kernels=2
    ),
    *(
        KernelRule(name=name, bytes_factor=4 / 5)
        for name in ("aten.native_dropout", "aten.native_dropout_backward")
    ),
    # Blocks with a lean core do no more: no shares after dropout are kept in any block.
    KernelRule(name="mistlab.drop_again", runs=False),
    # Graphs that are made of traced ones have the mask's byte alone.
    *(
        KernelRule(name=name, module=module, bytes_factor=4.0)
        for name in ("mistlab.keep", "mistlab.use_kept")
        for module in ("dropout", "embedding.dropout")
    ),
)

# Where sums are wider than gradients: a product reads and writes its sum in 32 bits, as its rate
# has it; the gradient of a table is read in 16 bits and added in 32 (10 bytes in place of 6);
# vectors' gradients are copied to 32 bits by one kernel before another adds them.
_WIDE_SUMS = (
    KernelRule(adds="vector", together=True, kernels=2),
    KernelRule(adds="table", bytes_factor=10 / 6),
)


def _own_memory(width: int, gradient: int = 0) -> EngineMemory:
    """``_ring_memory`` with the loss of runtime.models.operators."""
    return replace(_ring_memory(width, gradient), fuses_loss=True)


MISTLAB = Engine(
    name="mistlab",
    system="mistlab",
    family="mistlab",
    # StreamedRanks.all_reduce_ reduces beside the products that runtime.engine.work.products puts
    # off.
    overlapped=replace(STREAMED, overlaps_tensor_backward=True),
    kernels=_KERNELS,
    kernels_of_wide_sums=_WIDE_SUMS,
    # Sums of bf16 gradients, which have 8 bits, lose what is below a 256th of them. Those of fp16
    # stay as they were measured.
    memory={"fp16": _own_memory(2), "bf16": _own_memory(2, 4), "fp32": _own_memory(4)},
    # In bytes a parameter: gradients of 16 bits are copied to 32 (6), one kernel reads gradient,
    # master and moments and writes master and moments (28), and weights are copied from masters
    # (6). Under fp16 the kernel also writes unscaled gradients (4). In full precision weights
    # move 8.
    step_moved={"fp16": 44, "bf16": 34, "fp32": 36},
    other_sums={
        "fp16": OtherSums(memory=_own_memory(2, 4), step_moved=38),
        "bf16": OtherSums(memory=_own_memory(2), step_moved=40),
    },
    optimizers=("adamw", "adamw-bf16", "adamw-8bit"),
    drops_tokens=True,
    offloads=True,
    context_exchanges=(RING, GATHER, HEADS),
    takes_orders=True,
    keeps_masks=False,
    recomputes_loss=True,
    runs_lean=True,
    orders_axes=True,
    runs_here=True,
)
