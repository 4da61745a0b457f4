"""Engine ``ddp``: PyTorch's DistributedDataParallel, in which each rank holds a whole model of
torch's own operators and gradients are all-reduced.

By default a bucket of gradients is all-reduced while earlier layers compute. With one bucket for
the whole model (``bucket_cap_mb`` above its size) nothing overlaps.
"""

from dataclasses import replace

from mistlab.engines.baselines import AFTERWARDS, OVERLAPPED
from mistlab.engines.engine import SINGLE, KernelRule
from mistlab.engines.fsdp import FSDP_EAGER
from mistlab.engines.trainers import TRAINER_AUTOCAST

# Gradients are views of the buckets (``gradient_as_bucket_view``), so there is one copy of them.
# Under autocast 32-bit weights are cast to 16 bits before each GEMM.
_AUTOCAST, _IN_32_BITS = TRAINER_AUTOCAST.memory["bf16"], FSDP_EAGER.memory["fp32"]


def _kernels(rules: tuple[KernelRule, ...], moved: float) -> tuple[KernelRule, ...]:
    """Kernel rules without gathers of weights, where each gradient is copied into its bucket;
    ``moved`` are bytes, relative to the layer graph's accumulation.
    """
    copied = KernelRule(kind="accumulate", adds="weight", bytes_factor=moved)
    return (*(rule for rule in rules if rule.kind != "accumulate"), copied)


DDP = replace(
    FSDP_EAGER,
    name="ddp",
    system="ddp",
    orders=(),
    usual_precision="fp16",
    overlapped=OVERLAPPED,
    afterwards=AFTERWARDS,
    # In 16 bits a weight is cast once (6) and its gradient back (6), which the bucket takes (8),
    # instead of 6. In 32 bits the bucket takes it (8), instead of 12.
    kernels=_kernels(FSDP_EAGER.kernels, 20 / 6),
    kernels_in_32_bits=_kernels(FSDP_EAGER.kernels_in_32_bits or (), 8 / 12),
    memory={
        **dict.fromkeys(("fp16", "bf16"), replace(_AUTOCAST, gathered_blocks=0)),
        **dict.fromkeys(SINGLE, _IN_32_BITS),
    },
    step_moved=dict.fromkeys(("fp16", "bf16", *SINGLE), FSDP_EAGER.step_moved["fp32"]),
    other_sums={},
    highest_zero=0,
    highest_zero_in_pipeline=0,
    offloads_activations=False,
)
