"""The row of DeepSpeed, as its ZeRO optimizer and its pipeline engine have it.

Gradients are 16-bit; for the step they are flattened, and then made 32-bit
(deepspeed/runtime/zero/stage_1_and_2.py, stage3.py). A bucket of ``reduce_bucket_size`` elements is
taken for each backward pass, in a pipeline when it reduces. Under ZeRO-3 weights stay gathered up
to ``stage3_max_live_parameters``. Both are its defaults. Masters are clones in full precision too.
"""

from mistlab.engines.baselines import AFTERWARDS, CACHED_SHARE, KERNELS, OVERLAPPED
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory


def _memory(width: int) -> EngineMemory:
    """What it keeps in a precision of so many bytes."""
    return EngineMemory(
        weight=width,
        gradient=width,
        optimizer=12,
        step_scratch=6 if width == 2 else 4,
        bucket_elements=500_000_000,
        gathered_elements=1_000_000_000,
        wide_logits=width == 2,
    )


DEEPSPEED = Engine(
    name="deepspeed",
    overlapped=OVERLAPPED,
    afterwards=AFTERWARDS,
    kernels=KERNELS,
    memory={"fp16": _memory(2), "bf16": _memory(2), "fp32": _memory(4)},
    # Gradients are converted to 32 bits (6), looked through for infinities while the loss scale is
    # undone (8; only fp16 has one), their norm is taken (4), they are clipped (8) and stepped (28);
    # weights are written and gradients cleared (8). In full precision it copies too: gradients (8)
    # and weights (8).
    step_moved={"fp16": 62, "bf16": 54, "fp32": 60},
    cached_share=CACHED_SHARE,
    # Its pipeline engine accumulates whole gradients over a stage's micro-batches and asserts a
    # level below 2 (deepspeed/runtime/pipe/engine.py; deepspeedai/DeepSpeed, issues 1110 and 4164).
    highest_zero_in_pipeline=1,
)
