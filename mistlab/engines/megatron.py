"""The engine ``megatron``: Megatron-LM, by its own table of bytes (README, Distributed Optimizer).

Under bf16 gradients are summed in 32 bits. Under fp16 they stay 16-bit, and the step makes a 32-bit
copy of the gradients that the rank steps. There are no buckets: gradients lie in one buffer and are
reduced in it, and weights are gathered in place.
"""

from dataclasses import replace

from mistlab.engines.baselines import AFTERWARDS, CACHED_SHARE, KERNELS, OVERLAPPED
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory
from mistlab.engines.kernel_rules import KernelRule
from mistlab.schedule.orders import INTERLEAVED
from mistlab.values.context_ways import GATHER, HEADS, RING

# Products add gradients of weights (gradient accumulation fusion). A kernel of its own adds the
# gradient of each bias and norm, which matters where the host launches for longer than the GPU
# computes. That of the table of tokens would add a thousandth to a pass, and is left out.
_ACCUMULATION = tuple(KernelRule(adds=adds, bytes_factor=0.0) for adds in ("weight", "table"))
# The fused softmax needs a multiple of four. Without it separate kernels scale, mask, convert to 32
# bits and back.
_SOFTMAX_OF_FOURS = tuple(
    KernelRule(name=name, fused_for=4, bytes_unfused=unfused, kernels_unfused=12)
    for name, unfused in (
        ("mistlab.causal_softmax", 10.0),
        ("mistlab.causal_softmax_backward", 7.0),
    )
)

MEGATRON = Engine(
    name="megatron",
    overlapped=replace(OVERLAPPED, overlaps_tensor_backward=True),
    afterwards=replace(AFTERWARDS, overlaps_tensor_backward=True),
    kernels=(*_ACCUMULATION, *_SOFTMAX_OF_FOURS, *KERNELS),
    memory={
        "fp16": EngineMemory(weight=2, gradient=2, optimizer=12, step_scratch=4, wide_logits=1),
        "bf16": EngineMemory(weight=2, gradient=4, optimizer=12, wide_logits=1),
        "fp32": EngineMemory(weight=4, gradient=4, optimizer=8),
    },
    # As DeepSpeed's step, but 32-bit gradients need no copy and 2 more bytes to clear, and in full
    # precision weights are stepped in place.
    step_moved={"fp16": 62, "bf16": 50, "fp32": 44},
    cached_share=CACHED_SHARE,
    # Its distributed optimizer shards optimizer state alone.
    orders=tuple(INTERLEAVED),
    context_exchanges=(RING, GATHER, HEADS),
    highest_zero=1,
    highest_zero_in_pipeline=1,
)
