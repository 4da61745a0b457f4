"""The engine ``fsdp``: torch's fully sharded data parallelism, as torchtitan runs it.

A rank keeps its shard of 32-bit weights, of gradients and of two moments: 16 bytes a parameter.
Each pass gathers the 16-bit weights of a block ahead and frees them after the block; each backward
pass reduces and scatters gradients while the next block computes.
"""

from mistlab.engines.baselines import CACHED_SHARE, KERNELS, OVERLAPPED
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory

FSDP = Engine(
    name="fsdp",
    overlapped=OVERLAPPED,
    kernels=KERNELS,
    memory=dict.fromkeys(
        ("bf16", "fp8"), EngineMemory(weight=2, gradient=4, optimizer=10, wide_logits=True)
    ),
    step_moved={"bf16": 50, "fp8": 50},
    cached_share=CACHED_SHARE,
)
