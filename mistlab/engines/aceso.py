"""The engine ``aceso``: Aceso's runtime (EuroSys 2024), which is Megatron-LM with fewer choices.

It trains in fp16 with 1F1B pipelines, data and tensor parallelism and recomputed blocks. It shards
no states, reduces gradients after the last backward, and its stages wait for every transfer.
"""

from mistlab.engines.baselines import CACHED_SHARE
from mistlab.engines.engine import Engine
from mistlab.engines.megatron import MEGATRON

ACESO = Engine(
    name="aceso",
    afterwards=MEGATRON.afterwards,
    sends="blocking",
    kernels=MEGATRON.kernels,
    memory={"fp16": MEGATRON.memory["fp16"]},
    step_moved={"fp16": MEGATRON.step_moved["fp16"]},
    cached_share=CACHED_SHARE,
    highest_zero=0,
    highest_zero_in_pipeline=0,
    measured_as="megatron",
)
