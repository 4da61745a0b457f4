"""The engine ``nanotron``: Hugging Face's nanotron, in eager torch.

It trains in bf16. Weights and their gradients are 16-bit; a 32-bit copy of the gradients sums them
over micro-batches and is what data-parallel ranks reduce (nanotron/optim/gradient_accumulator.py).
Pipelines are 1F1B, and a stage waits for its sends. The head may have a stage to itself, because
blocks and head are divided over stages by their weights. Its ZeRO-1 shards optimizer state.
"""

from mistlab.engines.baselines import AFTERWARDS, CACHED_SHARE, KERNELS
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory

NANOTRON = Engine(
    name="nanotron",
    afterwards=AFTERWARDS,
    sends="blocking",
    kernels=KERNELS,
    memory={"bf16": EngineMemory(weight=2, gradient=6, optimizer=12, wide_logits=True)},
    step_moved={"bf16": 50},
    cached_share=CACHED_SHARE,
    highest_zero=1,
    highest_zero_in_pipeline=1,
    parts_ends=True,
)
