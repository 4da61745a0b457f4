"""The slot tables and kernel rules that Megatron-LM and DeepSpeed have in common.

The kernels are those of Megatron-LM's models, which both systems train.
"""

from collections.abc import Mapping

from mistlab.engines.kernel_rules import KernelRule
from mistlab.schedule.slot_table import (
    BACKWARD,
    FORWARD,
    GATHER_SHARDED,
    GATHER_STEPPED,
    REDUCE,
    REDUCE_SHARDED,
    Phase,
    Task,
    Template,
)

_PASSES: Mapping[Phase, tuple[Task, ...]] = {
    "first_forward": (FORWARD, GATHER_SHARDED),
    "forward": (FORWARD, GATHER_SHARDED),
    "backward": (BACKWARD, GATHER_SHARDED, REDUCE_SHARDED),
}
_WHOLE_STEP = (
    Task(stream="gpu_to_gpu", kind="R"),
    Task(stream="compute", kind="S"),
    Task(stream="gpu_to_gpu", kind="U", from_zero=1),
)
# After the last backward: reduce its gradients, step, gather all weights, one after another.
AFTERWARDS = Template(
    phases={**_PASSES, "last_backward": (BACKWARD, GATHER_SHARDED), "step": _WHOLE_STEP},
    depth=0,
)
# Gradients are reduced during the last backward, weights gathered during the first forward.
OVERLAPPED = Template(
    phases={
        **_PASSES,
        "first_forward": (FORWARD, GATHER_STEPPED),
        "last_backward": (BACKWARD, GATHER_SHARDED, REDUCE),
        "step": (Task(stream="compute", kind="S"),),
    },
)

# The bytes that the allocator holds beyond tensors, as a share of the memory that comes and goes
# (activations, temporaries, the step's scratch). It is the mean of 16 ranks of two runs of Aceso's
# runtime, which is Megatron's, on A100 (0.05 to 0.20). Eight ranks of Megatron-LM on B200 show 0.11
# to 0.41.
CACHED_SHARE = 0.13

# Published systems lay activations out with the sequence before the batch. Then written-out
# attention needs one copy where this package's models make four, and gradients of fused queries,
# keys and values need not be joined.
SEQUENCE_FIRST = (
    KernelRule(
        name="aten.clone", module="attention", phase="forward", attention="math", bytes_factor=0.25
    ),
    KernelRule(name="aten.cat", module="attention", attention="flash", bytes_factor=0.0),
)
# A bias, dropout and the residual sum are one kernel, which also writes the mask.
_FUSED_RESIDUALS = (
    KernelRule(name="aten.add", module="", phase="forward", broadcasts=True, bytes_factor=0.0),
    KernelRule(name="aten.native_dropout", module="dropout", bytes_factor=0.2),
)
# The loss is computed in 32 bits: 52 bytes a logit instead of 20.
LOSS_IN_32_BITS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=2.6) for kind in ("elementwise", "reduction")
)
# Operands and result of fused attention are copied from sequence first to batch first and back.
_COPIES_FOR_ATTENTION = KernelRule(kind="attention", copies_of_batches=2.0)
# RMSNorm, rotary embedding and SwiGLU as separate operators, partly in 32 bits.
_UNFUSED_LLAMA = (
    KernelRule(name="mistlab.rms_norm", bytes_factor=6.0),
    KernelRule(name="mistlab.rms_norm_backward", bytes_factor=5.0),
    KernelRule(name="mistlab.rotate_", bytes_factor=6.0),
    KernelRule(name="mistlab.swiglu", bytes_factor=2.5),
    KernelRule(name="mistlab.swiglu_backward", bytes_factor=2.5),
)
KERNELS = (
    *SEQUENCE_FIRST,
    *_FUSED_RESIDUALS,
    *LOSS_IN_32_BITS,
    _COPIES_FOR_ATTENTION,
    *_UNFUSED_LLAMA,
)
