"""What each engine keeps on a GPU, and what its optimizer's step takes: facts of their code.

Megatron-LM's are those of its own table of bytes a parameter (its README, "Distributed
Optimizer"): under bf16 gradients add up in 32 bits; under fp16 they stay 16-bit, and the step makes
a 32-bit copy of those that the rank steps. There are no buckets: gradients lie in one buffer, are
reduced in it, and weights are gathered in place.

DeepSpeed's are those of its ZeRO optimizer (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py).
Gradients are 16-bit; for the step they are flattened, and then made 32-bit. A bucket of
``reduce_bucket_size`` elements is taken for each backward pass, in a pipeline when it reduces.
Under ZeRO-3 weights stay gathered up to ``stage3_max_live_parameters``. Both are its defaults.
Masters are clones in full precision too.

Models under either compute the loss in 32 bits, as ``mistlab.cost.kernels`` has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mistlab.values.plan import Engine
from mistlab.values.workload import Precision


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """What an engine keeps in one precision, in bytes a parameter unless said otherwise.

    ``weight``, ``gradient`` and ``optimizer`` are there throughout, ``step_scratch`` while the
    rank's part is stepped. With ``rings`` layers come and go through buffers of two; without,
    gradients are reduced through a bucket of ``bucket_elements``, and at most ``gathered_elements``
    of sharded weights stay whole. With ``wide_logits`` a 32-bit copy of logits takes the place of
    their 16-bit gradient.
    ``step_moved`` is what the step reads and writes.
    """

    weight: int
    gradient: int
    optimizer: int
    step_scratch: int = 0
    rings: bool = False
    bucket_elements: int = 0
    gathered_elements: int = 0
    wide_logits: bool = False
    step_moved: int


def memory_of(engine: Engine, precision: Precision) -> EngineMemory:
    """What training under an engine keeps in a precision."""
    return _MEMORY[engine][precision]


# What a step moves. In mistlab gradients are copied to 32 bits (6), one kernel reads gradient,
# master and moments and writes the latter three (28), and weights are copied from masters (6);
# under fp16 the kernel writes unscaled gradients too (4). In full precision gradients need no copy,
# and weights move 8. The baselines convert gradients to 32 bits (6), look for infinities while they
# undo the loss scale (8), take the norm (4), clip (8), step (28), and write weights and clear
# gradients (8). Only fp16 has a loss scale. Megatron's 32-bit gradients need no copy and take 2
# more to clear, and in full precision it steps weights in place. DeepSpeed copies in full precision
# too: gradients (8) and weights (8).
def _mistlab(step_moved: int, *, width: int = 2) -> EngineMemory:
    return EngineMemory(
        weight=width, gradient=width, optimizer=12, rings=True, step_moved=step_moved
    )


def _deepspeed(step_moved: int, *, width: int = 2) -> EngineMemory:
    return EngineMemory(
        weight=width,
        gradient=width,
        optimizer=12,
        step_scratch=6 if width == 2 else 4,
        bucket_elements=500_000_000,
        gathered_elements=1_000_000_000,
        wide_logits=width == 2,
        step_moved=step_moved,
    )


_MEMORY: Mapping[Engine, Mapping[Precision, EngineMemory]] = {
    "mistlab": {"fp16": _mistlab(44), "bf16": _mistlab(40), "fp32": _mistlab(36, width=4)},
    "megatron": {
        "fp16": EngineMemory(
            weight=2, gradient=2, optimizer=12, step_scratch=4, wide_logits=True, step_moved=62
        ),
        "bf16": EngineMemory(weight=2, gradient=4, optimizer=12, wide_logits=True, step_moved=50),
        "fp32": EngineMemory(weight=4, gradient=4, optimizer=8, step_moved=44),
    },
    "deepspeed": {
        "fp16": _deepspeed(62),
        "bf16": _deepspeed(54),
        "fp32": _deepspeed(60, width=4),
    },
}
