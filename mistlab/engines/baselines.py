"""Engines ``megatron``, ``aceso``, ``zero-bubble``, ``deepspeed`` and ``deepspeed-pipe``: the
systems that published evaluations compare with.

The slot tables and kernel rules of other engines are derived from theirs. Their kernels are those
of Megatron-LM's models, which all of these systems train.
"""

from collections.abc import Mapping
from dataclasses import replace

from mistlab.engines.engine import SINGLE, Engine, EngineMemory, KernelRule, OtherSums
from mistlab.engines.fitted import fitted
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.schedule.orders import INTERLEAVED, SPLIT
from mistlab.schedule.slots import (
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
# Engines with these tasks overlap no communication of data-parallel ranks: after the last backward
# pass they reduce gradients, then run the optimizer step, then gather weights.
AFTERWARDS = Template(
    phases={**_PASSES, "last_backward": (BACKWARD, GATHER_SHARDED), "step": _WHOLE_STEP},
    depth=0,
)
# Engines with these tasks reduce gradients during the last backward pass, and gather weights during
# the next iteration's first forward pass.
OVERLAPPED = Template(
    phases={
        **_PASSES,
        "first_forward": (FORWARD, GATHER_STEPPED),
        "last_backward": (BACKWARD, GATHER_SHARDED, REDUCE),
        "step": (Task(stream="compute", kind="S"),),
    },
)

CACHED_SHARE: float = fitted("megatron")["cached_share"]

# Published systems store activations in order of sequence position before batch: unfused attention
# then needs one copy where this package's models make four, and gradients of fused queries, keys
# and values need not be concatenated.
SEQUENCE_FIRST = (
    KernelRule(
        name="aten.clone", module="attention", phase="forward", attention="math", bytes_factor=0.25
    ),
    KernelRule(name="aten.cat", module="attention", attention="flash", bytes_factor=0.0),
)
# One kernel adds bias and residual, applies dropout and writes its mask: of the five bytes per
# element that dropout moves (input, output and mask) only the mask's remains.
_FUSED_RESIDUALS = (
    KernelRule(name="aten.add", module="", phase="forward", broadcasts=True, bytes_factor=0.0),
    KernelRule(name="aten.native_dropout", module="dropout", bytes_factor=1 / 5),
)
# These systems compute the loss in 32 bits, which moves 52 bytes per logit instead of the layer
# graph's 20.
LOSS_IN_32_BITS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=52 / 20)
    for kind in ("elementwise", "reduction")
)
# The kernels of fused attention take batch-first tensors, so operands and result are transposed by
# copies.
_COPIES_FOR_ATTENTION = KernelRule(kind="attention", copies_of_batches=2.0)
# In Llama, RMSNorm, rotary embedding and SwiGLU are separate operators, partly in 32 bits.
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

# ``megatron`` is Megatron-LM, whose memory is as in its own table of bytes (README, Distributed
# Optimizer).
#
# Under bf16 gradients are accumulated in 32 bits. Under fp16 they stay in 16 bits, and the step
# makes a 32-bit copy of the gradients in the rank's shard. There are no buckets: gradients are in
# one buffer and reduced in place, and weights are gathered in place.

# GEMMs accumulate weight gradients (gradient accumulation fusion). A separate kernel accumulates
# the gradient of each bias and norm, which matters where the host launches more slowly than the GPU
# computes. Accumulating the gradient of the token embedding would add a thousandth to a pass, and
# is neglected.
_ACCUMULATION = tuple(KernelRule(adds=adds, bytes_factor=0.0) for adds in ("weight", "table"))
# The fused softmax kernel needs a number of rows (a rank's heads times sequences) that is a
# multiple of four; otherwise separate kernels scale, mask, and convert to 32 bits and back.
_SOFTMAX_OF_FOURS = tuple(
    KernelRule(name=name, fused_for=4, bytes_unfused=unfused, kernels_unfused=12)
    for name, unfused in (
        ("mistlab.causal_softmax", 10.0),
        ("mistlab.causal_softmax_backward", 7.0),
    )
)

MEGATRON = Engine(
    name="megatron",
    system="megatron",
    family="megatron",
    overlapped=replace(OVERLAPPED, overlaps_tensor_backward=True),
    afterwards=replace(AFTERWARDS, overlaps_tensor_backward=True),
    kernels=(*_ACCUMULATION, *_SOFTMAX_OF_FOURS, *KERNELS),
    memory={
        "fp16": EngineMemory(weight=2, gradient=2, optimizer=12, step_scratch=4, wide_logits=1),
        "bf16": EngineMemory(weight=2, gradient=4, optimizer=12, wide_logits=1),
        "fp32": EngineMemory(weight=4, gradient=4, optimizer=8),
    },
    # Bytes per parameter that the optimizer step moves: as in DeepSpeed's step (below), but 32-bit
    # gradients need no copy and 2 more bytes to clear, and full-precision weights are updated in
    # place.
    step_moved={"fp16": 62, "bf16": 50, "fp32": 44},
    # Under fp16, gradients are accumulated in 32 bits with the option
    # ``accumulate-allreduce-grads-in-fp32``; under bf16 always.
    other_sums={
        "fp16": OtherSums(
            memory=EngineMemory(weight=2, gradient=4, optimizer=12, wide_logits=1), step_moved=58
        )
    },
    cached_share=CACHED_SHARE,
    orders=tuple(INTERLEAVED),
    context_exchanges=(RING, GATHER, HEADS),
    # The distributed optimizer of Megatron-LM shards optimizer states only.
    highest_zero=1,
    highest_zero_in_pipeline=1,
)

# ``aceso`` is Aceso's runtime (EuroSys 2024): Megatron-LM with fewer choices.
#
# It trains in fp16 with 1F1B pipelines, data and tensor parallelism and recomputed blocks. It
# shards no states, reduces gradients after the last backward pass, and its stages block on every
# transfer.
ACESO = Engine(
    name="aceso",
    system="aceso",
    family="megatron",
    afterwards=MEGATRON.afterwards,
    sends="blocking",
    kernels=MEGATRON.kernels,
    memory={"fp16": MEGATRON.memory["fp16"]},
    step_moved={"fp16": MEGATRON.step_moved["fp16"]},
    cached_share=CACHED_SHARE,
    highest_zero=0,
    highest_zero_in_pipeline=0,
)

# ``zero-bubble`` and ``zero-bubble-waiting`` are a fork of Megatron-LM with separate
# weight-gradient passes.
#
# Weight gradients are computed separately from input gradients, and fill the bubbles of a pipeline
# (Qi et al. 2024). Each stage steps as soon as its own passes have ended, and checks the norm of
# all gradients afterwards. Under 1F1B and interleaved orders the fork's stages block on their sends
# (``zero-bubble-waiting``), since its examples disable overlapped sends. Everything else is
# Megatron-LM.

# The orders of passes with separate weight-gradient passes that this fork has; DualPipeV is in
# torch and DeepSeek's code.
_ORDERS = tuple(order for order in SPLIT if order != "dualpipe-v")

ZERO_BUBBLE = replace(
    MEGATRON,
    name="zero-bubble",
    system="zero-bubble",
    orders=_ORDERS,
    context_exchanges=(RING,),
    steps_apart=True,
    send_wait_s=fitted("zero-bubble")["send_wait_s"],
)
ZERO_BUBBLE_WAITING = replace(
    ZERO_BUBBLE,
    name="zero-bubble-waiting",
    orders=MEGATRON.orders,
    sends="blocking",
)


# ``deepspeed`` is DeepSpeed with its ZeRO optimizer and its pipeline engine.
#
# Gradients have 16 bits; for the step they are flattened, and then converted to 32 bits
# (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py). Each backward pass allocates a bucket of
# ``reduce_bucket_size`` elements; a pipeline allocates it when it reduces. Under ZeRO-3 at most
# ``stage3_max_live_parameters`` weights stay gathered. Both settings have DeepSpeed's defaults.
# Master weights are copies even in full precision.
#
# ``data_types.grad_accum_dtype`` accumulates in 32 bits, in a tensor beside each gradient or in the
# rank's shard (``use_separate_grad_accum``), and ``communication_data_type`` reduces in as many.
def _of_deepspeed(width: int, gradient: int = 0) -> EngineMemory:
    """DeepSpeed's bytes per parameter and buckets in a precision of ``width`` bytes; gradients have
    as many bytes, unless ``gradient`` is given.
    """
    gradient = gradient or width
    return EngineMemory(
        weight=width,
        gradient=gradient,
        optimizer=12,
        step_scratch=6 if gradient == 2 else 4,
        bucket_elements=500_000_000,
        gathered_elements=1_000_000_000,
        wide_logits=int(width == 2),
    )


DEEPSPEED = Engine(
    name="deepspeed",
    system="deepspeed",
    family="deepspeed",
    overlapped=OVERLAPPED,
    afterwards=AFTERWARDS,
    kernels=KERNELS,
    memory={
        **dict.fromkeys(("fp16", "bf16"), _of_deepspeed(2)),
        **dict.fromkeys(SINGLE, _of_deepspeed(4)),
    },
    # Bytes per parameter that the optimizer step moves: gradients are converted to 32 bits (6),
    # unscaled and checked for infinities (8; fp16 only), their norm is computed (4), they are
    # clipped (8) and applied (28); weights are written and gradients cleared (8). In full precision
    # gradients (8) and weights (8) are copied too.
    step_moved={"fp16": 62, "bf16": 54, "fp32": 60, "tf32": 60},
    # Gradients that are accumulated in 32 bits need no conversion before the step (6 bytes less),
    # and 2 more bytes to clear.
    other_sums={
        "fp16": OtherSums(memory=_of_deepspeed(2, 4), step_moved=58),
        "bf16": OtherSums(memory=_of_deepspeed(2, 4), step_moved=50),
    },
    cached_share=CACHED_SHARE,
    # DeepSpeed-Ulysses exchanges heads (deepspeed/sequence/layer.py).
    context_exchanges=(RING, HEADS),
    # DeepSpeed's pipeline engine accumulates whole gradients over a stage's micro-batches, and
    # asserts a ZeRO level below 2 (deepspeed/runtime/pipe/engine.py; deepspeedai/DeepSpeed, issues
    # 1110 and 4164).
    highest_zero_in_pipeline=1,
)

# ``deepspeed-pipe`` trains Megatron-DeepSpeed's models, which DeepSpeed's pipeline engine runs even
# in one stage. Their last layer converts logits to 32 bits (``float16_to_fp32``); the engine keeps
# them in its buffers, which are at least two (``num_pipe_buffers``), beside the probabilities and
# the 16-bit gradient of the loss: 14 bytes a logit (``deepspeed/runtime/pipe/engine.py``). Full
# precision is torch's own optimizer without ZeRO, which makes no copies.
_OUTPUTS_OF_16_BITS = replace(DEEPSPEED.memory["fp16"], wide_logits=5)
DEEPSPEED_PIPE = replace(
    DEEPSPEED,
    name="deepspeed-pipe",
    memory={
        **dict.fromkeys(("fp16", "bf16"), _OUTPUTS_OF_16_BITS),
        **dict.fromkeys(
            SINGLE,
            replace(DEEPSPEED.memory["fp32"], optimizer=8, step_scratch=0, wide_logits=1),
        ),
    },
    other_sums={
        name: replace(row, memory=replace(row.memory, wide_logits=5))
        for name, row in DEEPSPEED.other_sums.items()
    },
    highest_zero=1,
)
