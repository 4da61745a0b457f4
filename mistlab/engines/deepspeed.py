"""The engine ``deepspeed``: DeepSpeed with its ZeRO optimizer and its pipeline engine.

Gradients are 16-bit; for the step they are flattened, and then converted to 32 bits
(deepspeed/runtime/zero/stage_1_and_2.py, stage3.py). Each backward pass takes a bucket of
``reduce_bucket_size`` elements; a pipeline takes it when it reduces. Under ZeRO-3 at most
``stage3_max_live_parameters`` weights stay gathered. Both settings are DeepSpeed's defaults.
Masters are copies even in full precision.
"""

from mistlab.engines.baselines import AFTERWARDS, CACHED_SHARE, KERNELS, OVERLAPPED
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory


def _memory(width: int) -> EngineMemory:
    """DeepSpeed's memory in a precision of ``width`` bytes."""
    return EngineMemory(
        weight=width,
        gradient=width,
        optimizer=12,
        step_scratch=6 if width == 2 else 4,
        bucket_elements=500_000_000,
        gathered_elements=1_000_000_000,
        wide_logits=int(width == 2),
    )


DEEPSPEED = Engine(
    name="deepspeed",
    overlapped=OVERLAPPED,
    afterwards=AFTERWARDS,
    kernels=KERNELS,
    memory={"fp16": _memory(2), "bf16": _memory(2), "fp32": _memory(4)},
    # In bytes a parameter: gradients are converted to 32 bits (6), searched for infinities while
    # the loss scale is undone (8; only fp16 has one), their norm is taken (4), they are clipped (8)
    # and stepped (28); weights are written and gradients cleared (8). In full precision gradients
    # (8) and weights (8) are copied too.
    step_moved={"fp16": 62, "bf16": 54, "fp32": 60},
    cached_share=CACHED_SHARE,
    # Its pipeline engine accumulates whole gradients over a stage's micro-batches and asserts a
    # level below 2 (deepspeed/runtime/pipe/engine.py; deepspeedai/DeepSpeed, issues 1110 and 4164).
    highest_zero_in_pipeline=1,
)
