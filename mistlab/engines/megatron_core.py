"""The engines ``megatron-core`` and ``megatron-bridge``: Megatron as it is today, on Transformer
Engine's kernels, for NeMo, Megatron-Bridge and Megatron-LM alike.

Norms, rotary embedding, gates and the loss are fused kernels; gradients of weights are added up in
the products that make them. ``megatron-core`` sums gradients in 32 bits, and its host takes part in
each exchange of tokens between experts. ``megatron-bridge`` has the settings of Megatron-Bridge's
recipes: gradients are summed and reduced in 16 bits, blocks run as CUDA graphs, and fused kernels
(DeepEP, HybridEP) exchange tokens in the order of experts. ``megatron-bridge-alltoall`` is the same
with Megatron's plain exchange.
"""

from dataclasses import replace

from mistlab.engines.baselines import (
    AFTERWARDS,
    CACHED_SHARE,
    FUSED_ACCUMULATION,
    OVERLAPPED,
    SEQUENCE_FIRST,
)
from mistlab.engines.engine import Engine
from mistlab.engines.engine_memory import EngineMemory
from mistlab.engines.expert_exchange import ExpertExchange
from mistlab.engines.host_time import HostTime
from mistlab.engines.kernel_rules import KernelRule
from mistlab.schedule.orders import INTERLEAVED

# The loss is one kernel forward and one backward, in 32-bit registers.
_FUSED_LOSS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=0.5) for kind in ("elementwise", "reduction")
)
# Half of the conversions to 8 bits are done by the kernels that make what is converted.
_FUSED_CASTS = KernelRule(name="mistlab.cast", bytes_factor=0.5)
_KERNELS = (*SEQUENCE_FIRST, FUSED_ACCUMULATION, _FUSED_CASTS, *_FUSED_LOSS)
# Copies of tokens are sorted by the kernels that exchange them.
_SORTED_ON_THE_WAY = KernelRule(name="aten.clone", module="experts", bytes_factor=0.0)

# Python issues a block's kernels through Transformer Engine's modules. Blocks of 70B on eight GPUs
# of a node take as long as that, whatever the GPU does (SimuMax's runs on B200).
_EAGER = HostTime(forward_s=1.9e-3, backward_s=2.9e-3)

# The plain exchange tells the host how many rows come before it goes on. Measured blocks with
# experts take 3 to 9 ms longer than their kernels, in six exchanges (SimuMax, Megatron-Bridge).
_PLAIN = ExpertExchange(wait_s=0.7e-3)

_HALF = EngineMemory(weight=2, gradient=4, optimizer=12, wide_logits=1)

MEGATRON_CORE = Engine(
    name="megatron-core",
    overlapped=replace(OVERLAPPED, overlaps_tensor_backward=True),
    afterwards=AFTERWARDS,
    kernels=_KERNELS,
    memory={
        "fp16": EngineMemory(weight=2, gradient=2, optimizer=12, step_scratch=4, wide_logits=1),
        "bf16": _HALF,
        "fp8": _HALF,
        "fp32": EngineMemory(weight=4, gradient=4, optimizer=8),
    },
    step_moved={"fp16": 62, "bf16": 50, "fp8": 50, "fp32": 44},
    host=_EAGER,
    expert_exchange=_PLAIN,
    cached_share=CACHED_SHARE,
    highest_zero=1,
    highest_zero_in_pipeline=1,
    orders=tuple(INTERLEAVED),
    measured_as="megatron",
)
_SIXTEEN = EngineMemory(weight=2, gradient=2, optimizer=12, wide_logits=1)
MEGATRON_BRIDGE = replace(
    MEGATRON_CORE,
    name="megatron-bridge",
    kernels=(_SORTED_ON_THE_WAY, *_KERNELS),
    memory={"bf16": _SIXTEEN, "fp8": _SIXTEEN},
    step_moved={"bf16": 48, "fp8": 48},
    # Its recipes shard weights too where they say so (Megatron-FSDP).
    highest_zero=3,
    highest_zero_in_pipeline=3,
    host=None,
    expert_exchange=ExpertExchange(once_a_node=True),
)
MEGATRON_BRIDGE_ALLTOALL = replace(
    MEGATRON_BRIDGE,
    name="megatron-bridge-alltoall",
    kernels=_KERNELS,
    expert_exchange=_PLAIN,
)
