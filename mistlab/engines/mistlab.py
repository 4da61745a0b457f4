"""Engines ``mistlab``, this package's own runtime (docs/decisions/0014-engine.md), and ``mist``,
the published system Mist (EuroSys 2025).

Both stream layers through the GPU by the same table of overlapping tasks (slot table); each has
kernels of its own.
"""

from dataclasses import replace

from mistlab.engines.baselines import SEQUENCE_FIRST
from mistlab.engines.engine import (
    BATCHED_PRODUCTS,
    SINGLE,
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

# A layer's optimizer step runs in the next iteration, just before the layer's first forward pass.
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
    """The memory of this package's runtime per parameter, in a precision of ``width`` bytes.
    Gathered layers, and layers fetched from the host, have two buffers each, used in turn.
    """
    return EngineMemory(weight=width, gradient=gradient or width, optimizer=12, rings=True)


MIST = Engine(
    name="mist",
    system="mist",
    family="mistlab",
    overlapped=STREAMED,
    # In the runtime of the published Mist, a stage that sends or receives does nothing else
    # meanwhile.
    sends="blocking",
    kernels=SEQUENCE_FIRST,
    memory={"fp16": _ring_memory(2), "bf16": _ring_memory(2), "fp32": _ring_memory(4)},
    # Bytes per parameter that the optimizer step moves: the rate of steps was fitted with a step of
    # one kernel, which reads gradient, master weight and moments, and writes master weight and
    # moments.
    step_moved={"fp16": 28, "bf16": 28, "fp32": 28},
    offloads=True,
)

# How this runtime's kernels differ from the operators of a layer graph. An operator without a rule
# here runs as in the graph: by torch, or by one kernel of runtime.models.kernels.
_KERNELS = (
    # GEMMs accumulate weight gradients (runtime.engine.work.products), and one kernel accumulates
    # the gradients of all biases and norms (ParameterPlaces.add_vectors).
    KernelRule(adds="weight", bytes_factor=0.0),
    KernelRule(adds="vector", together=True),
    # runtime.engine.work.stage_modules copies neither operands nor results of attention,
    # concatenates no gradients, and fuses scaling into its GEMMs, one for each sequence.
    *(
        KernelRule(name=name, module="attention", attention="math", bytes_own_keys=0.0)
        for name in ("aten.clone", "aten.cat", "aten.mul")
    ),
    *(
        KernelRule(name=name, module="attention", bytes_own_keys=1.0, kernels_a_sequence=1)
        for name in BATCHED_PRODUCTS
    ),
    # runtime.models.residuals fuses bias, dropout, residual addition and the next norm into one
    # kernel, which does not read the sum again; the backward kernel of a norm also adds the
    # residual's gradient. Norms of lean blocks are separate.
    KernelRule(name="aten.add", module="", phase="forward", broadcasts=True, bytes_factor=0.0),
    *(
        rule
        for name in ("aten.native_layer_norm", "mistlab.rms_norm")
        for rule in (
            KernelRule(name=name, behind="aten.add", bytes_factor=0.5, kernels=0),
            KernelRule(
                name="aten.add",
                phase="backward",
                behind=f"{name}_backward",
                bytes_factor=1 / 3,
                kernels=0,
            ),
        )
    ),
    *(
        KernelRule(name=name, module="dropout", phase="forward", bytes_factor=0.0)
        for name in ("aten.native_dropout", "mistlab.keep")
    ),
    # runtime.models.dropout regenerates masks, so its kernels move the 2-byte values only, and not
    # a byte of mask for each as in the layer graph. The backward pass applies attention dropout
    # twice.
    KernelRule(
        name="aten.native_dropout_backward", module="attention", bytes_factor=8 / 5, kernels=2
    ),
    *(
        KernelRule(name=name, bytes_factor=4 / 5)
        for name in ("aten.native_dropout", "aten.native_dropout_backward")
    ),
    # A lean block repeats attention dropout in its backward pass, but so does every block of this
    # runtime, so the layer graph's extra operator is no extra work.
    KernelRule(name="mistlab.drop_again", runs=False),
    # In layer graphs whose dropout was derived rather than traced, dropout moves only a byte of
    # mask per value; this runtime's kernels read and write the 2-byte values instead.
    *(
        KernelRule(name=name, module=module, bytes_factor=4.0)
        for name in ("mistlab.keep", "mistlab.use_kept")
        for module in ("dropout", "embedding.dropout")
    ),
)

# Rules where gradients are accumulated in more bits than they have: a GEMM reads and writes its
# accumulator in 32 bits, as in its rate; the gradient of an embedding table is read in 16 bits and
# accumulated in 32 (10 bytes instead of 6); gradients of biases and norms are copied to 32 bits by
# one kernel before another accumulates them.
_WIDE_SUMS = (
    KernelRule(adds="vector", together=True, kernels=2),
    KernelRule(adds="table", bytes_factor=10 / 6),
)


def _own_memory(width: int, gradient: int = 0) -> EngineMemory:
    """The memory of this package's runtime per parameter, with a fused kernel for the loss."""
    return replace(_ring_memory(width, gradient), fuses_loss=True)


MISTLAB = Engine(
    name="mistlab",
    system="mistlab",
    family="mistlab",
    # The runtime overlaps tensor-parallel all-reduces (``StreamedRanks.all_reduce_``) with GEMMs of
    # the backward pass that ``runtime.engine.work.products`` defers.
    overlapped=replace(STREAMED, overlaps_tensor_backward=True),
    kernels=_KERNELS,
    kernels_of_wide_sums=_WIDE_SUMS,
    # Accumulation in bf16, with 8 significant bits, would lose addends below a 256th of the sum, so
    # bf16 gradients are accumulated in 32 bits. Gradients of fp16 stay in 16 bits, as in measured
    # runs.
    memory={
        "fp16": _own_memory(2),
        "bf16": _own_memory(2, 4),
        **dict.fromkeys(SINGLE, _own_memory(4)),
    },
    # Bytes per parameter that the optimizer step moves: 16-bit gradients are copied to 32 (6), one
    # kernel reads gradient, master weight and moments and writes master weight and moments (28),
    # and weights are copied from master weights (6). Under fp16 the kernel also writes unscaled
    # gradients (4). In full precision the copy of weights moves 8.
    step_moved={"fp16": 44, "bf16": 34, "fp32": 36, "tf32": 36},
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
