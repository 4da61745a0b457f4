"""The engine ``fsdp``: torch's fully sharded data parallelism, of models with fused kernels.

A rank keeps its shard of 32-bit weights, of gradients and of two moments: 16 bytes a parameter.
Each pass gathers the 16-bit weights of a block ahead and frees them after the block; each backward
pass reduces and scatters gradients while the next block computes.

``fsdp-rowwise`` is the same with 8-bit products that are scaled row by row. Models without kernels
of their own are those of ``mistlab.engines.fsdp_of_torch``.
"""

from dataclasses import replace

from mistlab.engines.baselines import CACHED_SHARE, LOSS_IN_32_BITS, OVERLAPPED
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory
from mistlab.engines.host_time import HostTime
from mistlab.values.context_ways import GATHER, RING

# torchtitan computes the loss of the logits as 32-bit numbers, operator by operator: beside 16-bit
# logits there are logarithms of shares, their gradient and that of the logits, 14 bytes a logit.
# Workspaces are cuBLAS's, of torch's two threads.
_MEMORY = EngineMemory(weight=2, gradient=4, optimizer=10, wide_logits=5, fixed_mib=64)

FSDP = Engine(
    name="fsdp",
    # torch.distributed.pipelining also interleaves; AutoModel's runs by it are read as 1F1B.
    orders=("gpipe", "zb-v", "dualpipe-v"),
    # torch.distributed.tensor.experimental.context_parallel gathers keys, or passes them on.
    context_exchanges=(RING, GATHER),
    overlapped=OVERLAPPED,
    kernels=LOSS_IN_32_BITS,
    memory=dict.fromkeys(("bf16", "fp8", "fp4"), _MEMORY),
    step_moved={"bf16": 50, "fp8": 50, "fp4": 50},
    # torchao's, which replaces torch's optimizer.
    optimizers=("adamw", "adamw-8bit"),
    cached_share=CACHED_SHARE,
    # Fitted to 256 runs of llm-foundry on A100 and H100 (docs/results/runs.md). Its attention is a
    # kernel in Triton with linear biases. Bytes are counted operator by operator, where its kernels
    # are fused.
    products_share=0.957,
    attention_share=0.70,
    memory_share=1.6,
    # The same kernels make less of an H100.
    shares_on={"h100-80gb": (0.88, 0.416, 1.11)},
    # B200's 8-bit rate is Transformer Engine's; torchao's products are 1.7 times as fast as 16-bit
    # ones.
    eight_bit_on={"b200-180gb": 0.81},
    host=HostTime(
        forward_s=1.6e-3, backward_s=2.4e-3, end_s=0.5e-3, step_s=2e-3, sharded_step_s=1e-3
    ),
)

# 8-bit products with a scale for each row are CUTLASS's kernels in torch, not cuBLAS's, whose own
# scales are of whole tensors. Of seven runs of torchtitan on H100 with both, those scaled by rows
# take 1.14 to 1.37 times as long: their products keep up two thirds.
_OF_ROWS = 0.66
ROWWISE = {"h100-80gb": _OF_ROWS, "h200-141gb": _OF_ROWS, "b200-180gb": 0.81 * _OF_ROWS}
FSDP_ROWWISE = replace(FSDP, name="fsdp-rowwise", eight_bit_on=ROWWISE, measured_as="fsdp")
