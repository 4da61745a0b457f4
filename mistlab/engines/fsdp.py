"""Engines ``fsdp...``: torch's fully sharded data parallelism.

``fsdp`` trains models with fused kernels, ``fsdp-eager`` and ``fsdp-compiled`` those in torch's own
operators, ``fsdp-te`` those in Transformer Engine's kernels. Engines ``...-rowwise`` scale 8-bit
products row by row.
"""

from dataclasses import replace
from typing import Any

from mistlab.engines.baselines import CACHED_SHARE, LOSS_IN_32_BITS, OVERLAPPED
from mistlab.engines.engine import (
    Engine,
    EngineMemory,
    HostTime,
    KernelRule,
    OtherSums,
    Precision,
)
from mistlab.engines.fitted import fitted
from mistlab.engines.megatron_core import MEGATRON_BRIDGE
from mistlab.schedule.context_ways import GATHER, RING
from mistlab.schedule.orders import INTERLEAVED
from mistlab.schedule.slots import Phase, Task, evict, fetch

# A rank keeps its shard of 32-bit weights, of gradients and of two moments: 16 bytes a parameter.
# Each pass gathers the 16-bit weights of a block ahead and frees them after the block; each
# backward pass reduces and scatters gradients while the next block computes.
#
# torchtitan computes the loss of the logits as 32-bit numbers, operator by operator: beside 16-bit
# logits there are logarithms of shares, their gradient and that of the logits, 14 bytes a logit.
# Workspaces are cuBLAS's, of torch's two threads.
_MEMORY = EngineMemory(weight=2, gradient=4, optimizer=10, wide_logits=5, fixed_mib=64)
_REDUCED_IN_16_BITS = OtherSums(memory=replace(_MEMORY, reduced=2), step_moved=50)

# What blocks keep may leave behind their forward pass and come back ahead of their backward pass:
# torchtune's ``OffloadActivations``, on streams of its own, and TRL's ``activation_offloading``.
_LEAVING: dict[Phase, tuple[Task, ...]] = {
    phase: (*tasks, evict("A") if "forward" in phase else fetch("A"))
    for phase, tasks in OVERLAPPED.phases.items()
    if phase != "step"
}
_OVERLAPPED = replace(OVERLAPPED, phases={**OVERLAPPED.phases, **_LEAVING})

_FITTED = fitted("fsdp")
FSDP = Engine(
    name="fsdp",
    system="fsdp",
    family="fsdp",
    # torch.distributed.pipelining also interleaves; AutoModel's runs by it are read as 1F1B.
    orders=("gpipe", "zb-v", "dualpipe-v"),
    # torch.distributed.tensor.experimental.context_parallel gathers keys, or passes them on.
    context_exchanges=(RING, GATHER),
    overlapped=_OVERLAPPED,
    kernels=LOSS_IN_32_BITS,
    memory=dict.fromkeys(("bf16", "fp8", "fp4"), _MEMORY),
    step_moved={"bf16": 50, "fp8": 50, "fp4": 50},
    # ``MixedPrecisionPolicy.reduce_dtype`` of 16 bits: shards are added up in the weights' own 32.
    other_sums=dict.fromkeys(("bf16", "fp8", "fp4"), _REDUCED_IN_16_BITS),
    # torchao's, which replaces torch's optimizer.
    optimizers=("adamw", "adamw-8bit"),
    cached_share=CACHED_SHARE,
    products_share=_FITTED["products_share"],
    attention_share=_FITTED["attention_share"],
    memory_share=_FITTED["memory_share"],
    # The same kernels make less of an H100.
    shares_on={name: tuple(shares) for name, shares in _FITTED["shares_on"].items()},
    eight_bit_on=_FITTED["eight_bit_on"],
    host=HostTime(**_FITTED["host"]),
    offloads_activations=True,
)

# 8-bit products with a scale for each row are CUTLASS's kernels in torch, not cuBLAS's, whose own
# scales are of whole tensors.
_OF_ROWS: float = fitted("fsdp-rowwise")["eight_bit_share"]
_B200: float = FSDP.eight_bit_on["b200-180gb"]
_ROWWISE = {"h100-80gb": _OF_ROWS, "h200-141gb": _OF_ROWS, "b200-180gb": _B200 * _OF_ROWS}
FSDP_ROWWISE = replace(FSDP, name="fsdp-rowwise", eight_bit_on=_ROWWISE)

# ``fsdp-eager`` runs the operators of a block one by one, so RMSNorm, rotary embedding and the gate
# are chains of kernels that read and write their numbers again and again, partly in 32 bits.
# ``fsdp-compiled`` has each block and the loss compiled (``torch.compile``), which makes one kernel
# of each chain. ``fsdp-compiled-blocks`` has blocks compiled, and the loss operator by operator, as
# torchtitan had it until the spring of 2025.
#
# FSDP2 copies gathered weights apart, in each pass, and gradients together before they are reduced
# (``_fsdp_collectives.py``).

# Bytes a parameter: weights are read and written in 16 bits (8 in both passes); gradients are read
# in 16 bits and written in 32, in place of sums (6, as in the graph).
_COPIES = KernelRule(kind="accumulate", adds="weight", bytes_factor=14 / 6)

# Bytes of each chain over those of the graph's one kernel. Forward RMSNorm: to 32
# bits (6), square (8), mean (4), product (8), to 16 bits (6), weights (4), in place of 4.
_EAGER = (
    KernelRule(name="mistlab.rms_norm", bytes_factor=9.0),
    KernelRule(name="mistlab.rms_norm_backward", bytes_factor=92 / 6),
    # To 32 bits (6), complex product (8), to 16 bits (6), in place of 4; queries and keys.
    KernelRule(name="mistlab.rotate_", bytes_factor=5.0),
    # The activation and the product; in the backward pass two products and the activation.
    KernelRule(name="mistlab.swiglu", bytes_factor=5 / 3),
    KernelRule(name="mistlab.swiglu_backward", bytes_factor=9 / 5),
    # Gradients of a block's input are summed over queries, keys and values, of the network's input
    # over gate and network: three sums beside the graph's two.
    KernelRule(name="aten.add", phase="backward", bytes_factor=2.5),
    # The largest number of a tensor, and its conversion in either layout, are kernels of their own.
    KernelRule(name="mistlab.cast", bytes_factor=2.0),
    _COPIES,
    *LOSS_IN_32_BITS,
)
_BLOCKS = (
    # One kernel adds and norms; in the backward pass it norms and adds.
    KernelRule(name="mistlab.rms_norm", module="mlp_norm", bytes_factor=0.5),
    KernelRule(name="aten.add", phase="backward", bytes_factor=1 / 3),
    # Queries, keys and values have weights of their own: their gradients are not joined.
    KernelRule(name="aten.cat", module="attention", bytes_factor=0.0),
    _COPIES,
)
# A loss that is compiled reads its logits twice, and once more to write their gradient: 8 bytes a
# logit in place of 20.
_LOSS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=8 / 20)
    for kind in ("elementwise", "reduction")
)


def _keeping(kept_by: str, wide_logits: int) -> dict[str, Any]:
    """The fields of an engine that keeps these."""

    def kept(row: EngineMemory) -> EngineMemory:
        return replace(row, kept_by=kept_by, wide_logits=wide_logits)

    memory: dict[Precision, EngineMemory] = {name: kept(row) for name, row in FSDP.memory.items()}
    others = {name: replace(row, memory=kept(row.memory)) for name, row in FSDP.other_sums.items()}
    return {"memory": memory, "other_sums": others}


_WIDE = FSDP.memory["bf16"].wide_logits
_MEMORY_SHARE: float = fitted("fsdp-eager")["memory_share"]
FSDP_EAGER = replace(
    FSDP,
    name="fsdp-eager",
    kernels=_EAGER,
    **_keeping("eager", _WIDE),
    orders=(*FSDP.orders, *INTERLEAVED),
    memory_share=_MEMORY_SHARE,
    shares_on={
        "a100-80gb": (FSDP.products_share, 1.0, _MEMORY_SHARE),
        "a100-40gb": (FSDP.products_share, 1.0, _MEMORY_SHARE),
        # The files of MI300X and MI325X are H100's by datasheet.
        **dict.fromkeys(("h100-80gb", "mi300x-192gb", "mi325x-256gb"), FSDP.shares_on["h100-80gb"]),
    },
    # Torchao's products on GB200 are those on B200.
    eight_bit_on={**FSDP.eight_bit_on, "gb200-186gb": _B200},
    # A model's own operators may be replaced; a compiler chooses itself what is kept.
    runs_lean=True,
)
FSDP_COMPILED = replace(
    FSDP_EAGER,
    name="fsdp-compiled",
    runs_lean=False,
    kernels=(*_BLOCKS, *_LOSS),
    # 16-bit logits and their gradient.
    **_keeping("compiled", 0),
)
FSDP_COMPILED_BLOCKS = replace(
    FSDP_COMPILED,
    name="fsdp-compiled-blocks",
    kernels=(*_BLOCKS, *LOSS_IN_32_BITS),
    **_keeping("compiled", _WIDE),
)
FSDP_EAGER_ROWWISE, FSDP_COMPILED_ROWWISE, FSDP_COMPILED_BLOCKS_ROWWISE = (
    replace(row, name=f"{row.name}-rowwise", eight_bit_on=_ROWWISE)
    for row in (FSDP_EAGER, FSDP_COMPILED, FSDP_COMPILED_BLOCKS)
)

# llm-foundry's loss is flash-attention's: one kernel, which leaves the gradient of 16-bit logits in
# their place.
# A loss in chunks is the cut cross-entropy of AutoModel then, which has a block of logits at once.
FSDP_FUSED_LOSS = replace(FSDP, name="fsdp-fused-loss", chunk_tokens=256, **_keeping("", 0))
# Where DTensor's plans give each tensor-parallel rank the logits of the whole vocabulary.
FSDP_EAGER_WHOLE_LOGITS, FSDP_COMPILED_BLOCKS_WHOLE_LOGITS = (
    replace(
        engine,
        name=f"{engine.name}-whole-logits",
        memory={name: replace(row, whole_logits=True) for name, row in engine.memory.items()},
        other_sums={},
    )
    for engine in (FSDP_EAGER, FSDP_COMPILED_BLOCKS)
)

# ``fsdp-te`` is FSDP2 of models whose kernels are Transformer Engine's, as AutoModel's.
#
# Products are those of other engines of FSDP. Attention is cuDNN's, which hardware files have the
# rates of. Copies of tokens go to experts as in Megatron-Bridge, by DeepEP; experts' products run
# one after another.
FSDP_TE = replace(
    FSDP,
    name="fsdp-te",
    orders=(*FSDP.orders, *INTERLEAVED),
    attention_share=1.0,
    memory_share=_MEMORY_SHARE,
    shares_on={
        name: (products, 1.0, moved) for name, (products, _, moved) in FSDP.shares_on.items()
    },
    expert_exchange=MEGATRON_BRIDGE.expert_exchange,
)
