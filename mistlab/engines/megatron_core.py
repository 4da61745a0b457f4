"""Engines ``megatron-core``, ``megatron-bridge`` and ``megatron-fsdp``: current versions of
Megatron.

Megatron-core is the library under NeMo, Megatron-Bridge and Megatron-LM; its kernels are those of
Transformer Engine.

Norms, rotary embedding, gates and the loss are fused kernels; GEMMs accumulate the weight gradients
that they compute. ``megatron-core`` accumulates gradients in 32 bits, and its host takes part in
each exchange of tokens between experts. ``megatron-core-fused-loss`` is the same with the loss in
fused operators (``cross-entropy-loss-fusion``), ``megatron-fsdp`` the same with weights and
gradients sharded as well (``megatron-fsdp optim_grads_params``).

``megatron-bridge`` has the settings of Megatron-Bridge's recipes: gradients are accumulated and
reduced in 16 bits, parts of blocks run as CUDA graphs, and fused kernels (HybridEP) exchange tokens
in the order of experts. ``megatron-bridge-alltoall`` is the same with Megatron's plain exchange,
``megatron-bridge-eager`` with DeepEP and without CUDA graphs, and ``megatron-bridge-graph`` with a
whole iteration as one CUDA graph and with exchanges overlapped.
"""

from dataclasses import replace

from mistlab.engines.baselines import (
    AFTERWARDS,
    CACHED_SHARE,
    OVERLAPPED,
    SEQUENCE_FIRST,
)
from mistlab.engines.engine import (
    Engine,
    EngineMemory,
    ExpertExchange,
    HostTime,
    KernelRule,
    OtherSums,
)
from mistlab.engines.fitted import fitted
from mistlab.schedule.context_ways import GATHER, HEADS, RING
from mistlab.schedule.orders import INTERLEAVED

# The loss is one kernel forward and one backward, which compute in 32-bit registers.
_FUSED_LOSS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=0.5) for kind in ("elementwise", "reduction")
)
# GEMMs accumulate the weight gradients that they compute (gradient accumulation fusion). The
# accumulation of the gradients of biases and norms is not counted, since the host time of these
# engines is fitted to whole blocks.
_FUSED_ACCUMULATION = KernelRule(kind="accumulate", bytes_factor=0.0)
# Except for those below, half of the conversions to 8 bits are fused into the kernels that produce
# the converted tensors.
_FUSED_CASTS = KernelRule(name="mistlab.cast", bytes_factor=0.5)
# The operands of experts' GEMMs are converted by kernels of their own: experts receive tokens from
# an exchange, and their second GEMM reads an activation of Megatron's, so no kernel before these
# GEMMs can convert.
_OWN_CASTS = tuple(
    KernelRule(name="mistlab.cast", module=module) for module in ("experts.up", "experts.down")
)
# In experts with biases, the bias of the second GEMM is weighted by the routing weight of each copy
# of a token in 32 bits, added expert by expert, concatenated, and converted to 16 bits, in a kernel
# each. A channel of a copy moves 28 bytes forward and 40 backward (``TEGroupedMLP._apply_bias``), 4
# and 2 in the layer graph.
_WEIGHTED_BIASES = (
    KernelRule(name="mistlab.add_by_group", module="experts.down", bytes_factor=7.0),
    KernelRule(name="mistlab.sum_by_group", module="experts.down", bytes_factor=20.0),
)
_KERNELS = (
    *(*SEQUENCE_FIRST, _FUSED_ACCUMULATION),
    *(*_OWN_CASTS, _FUSED_CASTS, *_WEIGHTED_BIASES, *_FUSED_LOSS),
)
# The kernels that exchange tokens between ranks also sort them by expert, so the copies for sorting
# cost nothing.
_SORTED_ON_THE_WAY = KernelRule(name="aten.clone", module="experts", bytes_factor=0.0)

_FITTED, _FITTED_OF_BRIDGE = fitted("megatron-core"), fitted("megatron-bridge")
# The host time of a block: Python issues its kernels through Transformer Engine's modules, and
# waits for the GPU after each pipeline message, except with several chunks per stage
# (``batch_p2p_sync`` in ``p2p_communication.py``).
_EAGER = HostTime(**_FITTED["host"], waits_for_sends=True)

# The host time of one operator of a block with experts. CUDA graphs of a block's parts exclude its
# exchanges and experts, so their host is as slow as without graphs; a single graph of the whole
# iteration has no host time.
_OPERATOR_S: float = _FITTED["operator_s"]
# Megatron's plain exchange of tokens between experts waits until the host knows how many tokens the
# rank receives.
_PLAIN = ExpertExchange(wait_s=_FITTED["wait_s"], operator_s=_OPERATOR_S)

# Workspaces that every plan needs: cuBLAS has workspaces of 32 MiB for torch's forward and backward
# threads, and Transformer Engine has one of its own. Ranks of tiny models were measured to allocate
# 45 (A100, free choice of kernels) to 130 MiB (H100) beyond their tensors.
_WORKSPACES_MIB = 96

_HALF = EngineMemory(weight=2, gradient=4, optimizer=12, wide_logits=1, fixed_mib=_WORKSPACES_MIB)
_SIXTEEN = replace(_HALF, gradient=2)
# Memory where gradients have other bits than by default: 32 by
# ``accumulate-allreduce-grads-in-fp32`` under fp16, 16 by ``grad-reduce-in-bf16`` otherwise.
_IN_32_BITS = OtherSums(memory=_HALF, step_moved=50)
_IN_16_BITS = OtherSums(memory=_SIXTEEN, step_moved=48)

MEGATRON_CORE = Engine(
    name="megatron-core",
    system="megatron-core",
    family="megatron",
    overlapped=replace(OVERLAPPED, overlaps_tensor_backward=True),
    afterwards=AFTERWARDS,
    kernels=_KERNELS,
    memory={
        "fp16": EngineMemory(
            weight=2,
            gradient=2,
            optimizer=12,
            step_scratch=4,
            wide_logits=1,
            fixed_mib=_WORKSPACES_MIB,
        ),
        "bf16": _HALF,
        "fp8": _HALF,
        "fp4": _HALF,
        "fp32": EngineMemory(weight=4, gradient=4, optimizer=8, fixed_mib=_WORKSPACES_MIB),
    },
    step_moved={"fp16": 62, "bf16": 50, "fp8": 50, "fp4": 50, "fp32": 44},
    other_sums={
        # Under fp16 the step also unscales gradients and checks them for infinities (8 bytes per
        # parameter).
        "fp16": replace(_IN_32_BITS, step_moved=58),
        **dict.fromkeys(("bf16", "fp8", "fp4"), _IN_16_BITS),
    },
    # Megatron's precision-aware optimizer keeps each moment in 32, 16 or 8 bits.
    optimizers=("adamw", "adamw-bf16", "adamw-8bit"),
    drops_tokens=True,
    host=_EAGER,
    expert_exchange=_PLAIN,
    cached_share=CACHED_SHARE,
    highest_zero=1,
    highest_zero_in_pipeline=1,
    orders=tuple(INTERLEAVED),
    context_exchanges=(RING, GATHER, HEADS),
)
# The host time of one expert: GEMMs, conversions and paddings run expert by expert.
_OF_AN_EXPERT_S: float = _FITTED_OF_BRIDGE["expert_s"]
# The exchange of tokens by HybridEP: its buffers hold a routing weight for every expert of a node
# beside each copy of a token, and its ranks first gather the map from all tokens to experts
# (``allgather_routing_map``).
_FUSED = ExpertExchange(
    once_a_node=True,
    expert_s=_OF_AN_EXPERT_S,
    operator_s=_OPERATOR_S,
    weights_of_all=True,
)
# The fused operators of the loss keep another 32-bit copy of the logits.
MEGATRON_CORE_FUSED_LOSS = replace(
    MEGATRON_CORE,
    name="megatron-core-fused-loss",
    memory={
        precision: replace(memory, wide_logits=memory.wide_logits + 2)
        for precision, memory in MEGATRON_CORE.memory.items()
    },
    other_sums={
        precision: replace(row, memory=replace(row.memory, wide_logits=row.memory.wide_logits + 2))
        for precision, row in MEGATRON_CORE.other_sums.items()
    },
)
# Megatron's own FSDP keeps the same tensors as Megatron-core, and also shards gradients and
# weights.
MEGATRON_FSDP = replace(
    MEGATRON_CORE,
    name="megatron-fsdp",
    highest_zero=3,
    highest_zero_in_pipeline=3,
)
MEGATRON_BRIDGE = replace(
    MEGATRON_CORE,
    name="megatron-bridge",
    system="megatron-bridge",
    kernels=(_SORTED_ON_THE_WAY, *_KERNELS),
    memory={"bf16": _SIXTEEN, "fp8": _SIXTEEN, "fp4": _SIXTEEN},
    step_moved={"bf16": 48, "fp8": 48, "fp4": 48},
    # Recipes that set ``grad_reduce_in_fp32`` reduce gradients in 32 bits.
    other_sums=dict.fromkeys(("bf16", "fp8", "fp4"), _IN_32_BITS),
    eight_bit_on=_FITTED_OF_BRIDGE["eight_bit_on"],
    # Recipes of Megatron-Bridge can also shard weights (Megatron-FSDP).
    highest_zero=3,
    highest_zero_in_pipeline=3,
    host=None,
    expert_exchange=_FUSED,
)
# Without CUDA graphs the host issues the kernels of a block with experts from Python.
_EAGER_EXPERTS = replace(_EAGER, **_FITTED_OF_BRIDGE["host_of_experts"])
MEGATRON_BRIDGE_ALLTOALL = replace(
    MEGATRON_BRIDGE,
    name="megatron-bridge-alltoall",
    kernels=_KERNELS,
    expert_exchange=replace(_PLAIN, expert_s=_OF_AN_EXPERT_S),
    host=_EAGER_EXPERTS,
)
MEGATRON_BRIDGE_EAGER = replace(
    MEGATRON_BRIDGE,
    name="megatron-bridge-eager",
    # DeepEP sends only the routing weights of the experts that a token chose.
    expert_exchange=replace(_FUSED, weights_of_all=False),
    host=_EAGER_EXPERTS,
)
# The whole iteration is one CUDA graph, and exchanges of tokens overlap with another micro-batch's
# kernels. The exchanges occupy 16 multiprocessors (``moe_hybridep_num_sms``) of the 148 of a
# Blackwell GPU.
MEGATRON_BRIDGE_GRAPH = replace(
    MEGATRON_BRIDGE,
    name="megatron-bridge-graph",
    expert_exchange=ExpertExchange(once_a_node=True, weights_of_all=True, hidden=1 - 16 / 148),
)
