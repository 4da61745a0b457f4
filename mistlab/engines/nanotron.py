"""The engine ``nanotron``: Hugging Face's nanotron, in eager torch.

It trains in bf16. Weights and their gradients are 16-bit; a 32-bit copy of the gradients
accumulates them over micro-batches (nanotron/optim/gradient_accumulator.py). Data-parallel ranks
reduce this copy during the last backward pass, layer by layer. Its ZeRO-1 shards optimizer states;
weights are gathered after the step.

Pipelines are 1F1B, and a stage sends and receives in turn with its passes. Blocks and head are
divided over the stages by their weights, so the last stages may have no block.

``nanotron-whole-inputs`` also keeps whole tensors of the blocks by which its host is ahead of the
GPU.
"""

from dataclasses import replace

from mistlab.engines.baselines import LOSS_IN_32_BITS, SEQUENCE_FIRST
from mistlab.engines.engine import Engine, EngineMemory, HostTime, KernelRule
from mistlab.engines.fitted import fitted
from mistlab.schedule.slots import BACKWARD, FORWARD, REDUCE, Task, Template

_PASSES = Template(
    phases={
        "first_forward": (FORWARD,),
        "forward": (FORWARD,),
        "backward": (BACKWARD,),
        "last_backward": (BACKWARD, REDUCE),
        "step": (
            Task(stream="compute", kind="S"),
            Task(stream="gpu_to_gpu", kind="U", from_zero=1),
        ),
    },
    sends="meeting",
    overlaps_tensor_backward=True,
)
# nanotron's RMSNorm is one kernel (flash-attn's, in Triton). Rotary embedding is computed in 32
# bits, and the gate's activation and multiplication are two kernels.
_KERNELS = (
    *SEQUENCE_FIRST,
    *LOSS_IN_32_BITS,
    KernelRule(name="mistlab.rotate_", bytes_factor=6.0),
    KernelRule(name="mistlab.swiglu", bytes_factor=2.5),
    KernelRule(name="mistlab.swiglu_backward", bytes_factor=2.5),
)

_FITTED = fitted("nanotron")

NANOTRON = Engine(
    name="nanotron",
    system="nanotron",
    family="nanotron",
    overlapped=_PASSES,
    sends="meeting",
    kernels=_KERNELS,
    memory={
        "bf16": EngineMemory(
            weight=2,
            gradient=6,
            reduced=4,
            optimizer=12,
            # The loss keeps logits in 16 and in 32 bits, and the exponentials of the 32-bit logits:
            # 10 bytes per logit.
            wide_logits=3,
            kept_gates=2,
            # Two workspaces of cuBLAS of 32 MiB each, and buffers of torch and NCCL.
            fixed_mib=_FITTED["fixed_mib"],
        )
    },
    step_moved={"bf16": 50},
    cached_share=_FITTED["cached_share"],
    products_share=_FITTED["products_share"],
    attention_share=_FITTED["attention_share"],
    memory_share=_FITTED["memory_share"],
    crowded_factor=_FITTED["crowded_factor"],
    host=HostTime(**_FITTED["host"]),
    highest_zero=1,
    highest_zero_in_pipeline=1,
    parts_ends=True,
    slowest="ultrascale",
)

# A block's forward pass gathers two inputs and computes two outputs before they are
# reduce-scattered, and torch's allocator reuses their memory only when the GPU has finished with
# them. A stream accepts some 1,024 launches before the host blocks, which is about a dozen blocks.
# Runs without a pipeline that are not slow have 96 to 112 more bytes per token and channel, in
# models of 16, 32 and 80 blocks alike.
NANOTRON_WHOLE_INPUTS = replace(
    NANOTRON,
    name="nanotron-whole-inputs",
    memory={
        name: replace(row, whole_tensors=4, blocks_ahead=12)
        for name, row in NANOTRON.memory.items()
    },
)
