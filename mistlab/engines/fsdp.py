"""Engines ``fsdp...``: PyTorch's Fully Sharded Data Parallel in its variants.

``fsdp`` trains models with fused kernels, ``fsdp-eager`` and ``fsdp-compiled`` train them with
torch's own operators, ``fsdp-te`` with Transformer Engine's kernels. Engines ``...-rowwise`` scale
the operands of 8-bit GEMMs row by row.
"""

from dataclasses import replace
from typing import Any

from mistlab.engines.baselines import LOSS_IN_32_BITS, OVERLAPPED
from mistlab.engines.engine import (
    SINGLE,
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

# Each rank has its shard of 32-bit weights, gradients and two moments: 16 bytes per parameter. Each
# pass prefetches the all-gather of a block's 16-bit weights and frees them after the block; each
# backward pass reduce-scatters gradients while the next block computes.
#
# torchtitan computes the loss from 32-bit logits, operator by operator: beside 16-bit logits,
# memory holds log-probabilities, their gradient and the logits' gradient, 14 bytes per logit.
# Workspaces are cuBLAS's, one for each of torch's two threads.
_MEMORY = EngineMemory(weight=2, gradient=4, optimizer=10, wide_logits=5, fixed_mib=64)
# In 32 bits the weights are also those that are gathered, and a logit takes 16 bytes: itself, its
# log-probability, and both gradients.
_IN_32_BITS = EngineMemory(weight=4, gradient=4, optimizer=8, wide_logits=2, fixed_mib=64)
_REDUCED_IN_16_BITS = replace(_MEMORY, reduced=2)

# A step moves 50 bytes per parameter, of which the copy of weights to 16 bits takes 6. Under fp16
# ``ShardedGradScaler`` scales the loss: the step also reads 32-bit gradients, unscales them and
# checks them for infinities (8).
_STEP_MOVED: dict[Precision, int] = {"bf16": 50, "fp16": 58, "fp8": 50, "fp4": 50}

# Activations may be offloaded after a block's forward pass and prefetched before its backward pass,
# on streams of their own: torchtune's ``OffloadActivations`` and TRL's ``activation_offloading``.
_LEAVING: dict[Phase, tuple[Task, ...]] = {
    phase: (*tasks, evict("A") if "forward" in phase else fetch("A"))
    for phase, tasks in OVERLAPPED.phases.items()
    if phase != "step"
}
_OVERLAPPED = replace(OVERLAPPED, phases={**OVERLAPPED.phases, **_LEAVING})

# In 32 bits the loss converts nothing. Log-probabilities read and write 8 bytes per logit, their
# gradient is filled (4), and the logits' gradient reads both and is written (12): 24 bytes instead
# of the layer graph's 40.
_LOSS_AS_IT_IS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=24 / 40)
    for kind in ("elementwise", "reduction")
)

_FITTED = fitted("fsdp")
FSDP = Engine(
    name="fsdp",
    system="fsdp",
    family="fsdp",
    # torch.distributed.pipelining has interleaved orders of passes too, but plans of AutoModel with
    # a pipeline are read as 1F1B.
    orders=("gpipe", "zb-v", "dualpipe-v"),
    # torch.distributed.tensor.experimental.context_parallel all-gathers keys and values, or passes
    # them around a ring.
    context_exchanges=(RING, GATHER),
    overlapped=_OVERLAPPED,
    kernels=LOSS_IN_32_BITS,
    kernels_in_32_bits=_LOSS_AS_IT_IS,
    memory={
        **dict.fromkeys(_STEP_MOVED, _MEMORY),
        **dict.fromkeys(SINGLE, _IN_32_BITS),
    },
    usual_precision="bf16",
    step_moved={**_STEP_MOVED, **dict.fromkeys(SINGLE, 44)},
    # Even if ``MixedPrecisionPolicy.reduce_dtype`` has 16 bits, shards of gradients are accumulated
    # in 32 bits.
    other_sums={
        name: OtherSums(memory=_REDUCED_IN_16_BITS, step_moved=moved)
        for name, moved in _STEP_MOVED.items()
    },
    # The optimizers AdamW and torchao's AdamW with 8-bit moments.
    optimizers=("adamw", "adamw-8bit"),
    cached_share=_FITTED["cached_share"],
    products_share=_FITTED["products_share"],
    attention_share=_FITTED["attention_share"],
    attention_kernel="a Triton kernel with linear biases",
    memory_share=_FITTED["memory_share"],
    # On an H100 the kernels of FSDP reach a smaller share of the hardware's measured rates.
    shares_on={name: tuple(shares) for name, shares in _FITTED["shares_on"].items()},
    eight_bit_on=_FITTED["eight_bit_on"],
    host=HostTime(**_FITTED["host"]),
    offloads_activations=True,
    # Products of bitsandbytes and torchao with few bits have no tensor-parallel form, and no tool
    # that fine-tunes puts them into pipelines.
    divides_quantised=False,
)

# 8-bit GEMMs with a scale per row run CUTLASS kernels in torch; those with a scale per tensor run
# cuBLAS.
_OF_ROWS: float = fitted("fsdp-rowwise")["eight_bit_share"]
_B200: float = FSDP.eight_bit_on["b200-180gb"]
_ROWWISE = {"h100-80gb": _OF_ROWS, "h200-141gb": _OF_ROWS, "b200-180gb": _B200 * _OF_ROWS}
FSDP_ROWWISE = replace(FSDP, name="fsdp-rowwise", eight_bit_on=_ROWWISE)

# ``fsdp-eager`` launches each operator of a block as its own kernel: RMSNorm, rotary embedding and
# the gated activation read and write memory several times, partly in 32 bits. ``fsdp-compiled``
# compiles each block and the loss (``torch.compile``), which fuses these chains.
# ``fsdp-compiled-blocks`` compiles blocks but not the loss, torchtitan's default until spring 2025.
#
# FSDP2 copies gathered weights out of the all-gather buffer in each pass, and gradients into the
# reduce-scatter buffer (``_fsdp_collectives.py``).

# Bytes that FSDP2's copies move per parameter: weights are read and written in 16 bits (8 in both
# passes); gradients are read in 16 bits and written in 32 (6, as much as the layer graph's
# accumulation of gradients moves).
_COPIES = KernelRule(kind="accumulate", adds="weight", bytes_factor=14 / 6)

# The bytes that a chain of eager operators moves, as a multiple of those of the layer graph's
# single kernel. RMSNorm forward: to 32 bits (6), square (8), mean (4), multiplication (8), to 16
# bits (6), weights (4), instead of 4.
_EAGER = (
    KernelRule(name="mistlab.rms_norm", bytes_factor=9.0),
    KernelRule(name="mistlab.rms_norm_backward", bytes_factor=92 / 6),
    # Rotary embedding of queries and keys: to 32 bits (6), complex multiplication (8), to 16 bits
    # (6), instead of 4.
    KernelRule(name="mistlab.rotate_", bytes_factor=5.0),
    # SwiGLU forward: the activation and a multiplication; backward: two multiplications and the
    # activation.
    KernelRule(name="mistlab.swiglu", bytes_factor=5 / 3),
    KernelRule(name="mistlab.swiglu_backward", bytes_factor=9 / 5),
    # The gradient of a block's input is summed over query, key and value, and that of the network's
    # input over gate and value: three additions more than the graph's two.
    KernelRule(name="aten.add", phase="backward", bytes_factor=2.5),
    # To convert a tensor to 8 bits, separate kernels find its largest magnitude, and cast it to
    # each of two layouts.
    KernelRule(name="mistlab.cast", bytes_factor=2.0),
    _COPIES,
    *LOSS_IN_32_BITS,
)
# In 32 bits nothing is converted, and values that were read or written in 16 bits take twice as
# many. RMSNorm forward: square (8), mean (4), multiplication (8), weights (8), instead of 8; the
# copies of FSDP2 read and write weights (16 in both passes) and gradients (8), instead of 12.
_COPIES_IN_32_BITS = KernelRule(kind="accumulate", adds="weight", bytes_factor=24 / 12)
_EAGER_IN_32_BITS = (
    KernelRule(name="mistlab.rms_norm", bytes_factor=28 / 8),
    KernelRule(name="mistlab.rms_norm_backward", bytes_factor=92 / 12),
    *(
        rule
        for rule in _EAGER
        if rule.name in ("mistlab.swiglu", "mistlab.swiglu_backward", "aten.add")
    ),
    _COPIES_IN_32_BITS,
    *_LOSS_AS_IT_IS,
)
_BLOCKS = (
    # One kernel adds the residual and normalises; in the backward pass one kernel computes the
    # norm's gradient and adds the residual's.
    KernelRule(name="mistlab.rms_norm", module="mlp_norm", bytes_factor=0.5),
    KernelRule(name="aten.add", phase="backward", bytes_factor=1 / 3),
    # Query, key and value have separate weights, so their gradients need not be concatenated.
    KernelRule(name="aten.cat", module="attention", bytes_factor=0.0),
    _COPIES,
)
# A compiled loss reads its logits twice, and a third time to write the gradient: 8 bytes per logit
# instead of 20.
_LOSS = tuple(
    KernelRule(kind=kind, module="head", bytes_factor=8 / 20)
    for kind in ("elementwise", "reduction")
)


def _keeping(kept_by: str, wide_logits: int) -> dict[str, Any]:
    """The fields of ``Engine`` for the tensors that torch keeps of a block for the backward pass
    (``kept_by``), and for copies of logits in 32 bits.
    """

    def kept(row: EngineMemory) -> EngineMemory:
        return replace(row, kept_by=kept_by, wide_logits=min(wide_logits, row.wide_logits))

    memory: dict[Precision, EngineMemory] = {name: kept(row) for name, row in FSDP.memory.items()}
    others = {name: replace(row, memory=kept(row.memory)) for name, row in FSDP.other_sums.items()}
    return {"memory": memory, "other_sums": others}


_WIDE = FSDP.memory["bf16"].wide_logits
_MEMORY_SHARE: float = fitted("fsdp-eager")["memory_share"]
FSDP_EAGER = replace(
    FSDP,
    name="fsdp-eager",
    kernels=_EAGER,
    kernels_in_32_bits=_EAGER_IN_32_BITS,
    **_keeping("eager", _WIDE),
    orders=(*FSDP.orders, *INTERLEAVED),
    memory_share=_MEMORY_SHARE,
    shares_on={
        "a100-80gb": (FSDP.products_share, 1.0, _MEMORY_SHARE),
        "a100-40gb": (FSDP.products_share, 1.0, _MEMORY_SHARE),
        # MI300X and MI325X are given the shares that were fitted on H100, since their hardware
        # files come from datasheets.
        **dict.fromkeys(("h100-80gb", "mi300x-192gb", "mi325x-256gb"), FSDP.shares_on["h100-80gb"]),
    },
    # On GB200, torchao's 8-bit GEMMs are given the share of the measured rate that was fitted on
    # B200.
    eight_bit_on={**FSDP.eight_bit_on, "gb200-186gb": _B200},
    # In eager torch, lean operators may replace those of a model; a compiler decides by itself what
    # is kept for the backward pass.
    runs_lean=True,
)
FSDP_COMPILED = replace(
    FSDP_EAGER,
    name="fsdp-compiled",
    runs_lean=False,
    kernels=(*_BLOCKS, *_LOSS),
    kernels_in_32_bits=(*_BLOCKS[:-1], _COPIES_IN_32_BITS, *_LOSS),
    # A compiled loss keeps only logits and their gradient, in 16 bits.
    **_keeping("compiled", 0),
)
FSDP_COMPILED_BLOCKS = replace(
    FSDP_COMPILED,
    name="fsdp-compiled-blocks",
    kernels=(*_BLOCKS, *LOSS_IN_32_BITS),
    kernels_in_32_bits=(*_BLOCKS[:-1], _COPIES_IN_32_BITS, *_LOSS_AS_IT_IS),
    **_keeping("compiled", _WIDE),
)
FSDP_EAGER_ROWWISE, FSDP_COMPILED_ROWWISE, FSDP_COMPILED_BLOCKS_ROWWISE = (
    replace(row, name=f"{row.name}-rowwise", eight_bit_on=_ROWWISE)
    for row in (FSDP_EAGER, FSDP_COMPILED, FSDP_COMPILED_BLOCKS)
)

# llm-foundry uses flash-attention's fused cross entropy: one kernel writes the 16-bit gradient over
# the logits. With the loss in chunks, this engine stands for AutoModel's cut cross entropy, which
# has one chunk of logits at a time.
FSDP_FUSED_LOSS = replace(FSDP, name="fsdp-fused-loss", chunk_tokens=256, **_keeping("", 0))
# With these engines, each tensor-parallel rank holds logits of the whole vocabulary, as in models
# parallelised with DTensor.
FSDP_EAGER_WHOLE_LOGITS, FSDP_COMPILED_BLOCKS_WHOLE_LOGITS = (
    replace(
        engine,
        name=f"{engine.name}-whole-logits",
        memory={name: replace(row, whole_logits=True) for name, row in engine.memory.items()},
        other_sums={},
    )
    for engine in (FSDP_EAGER, FSDP_COMPILED_BLOCKS)
)

# ``fsdp-te``: FSDP2 with Transformer Engine kernels, as in NeMo AutoModel.
#
# Its GEMMs are those of the other FSDP engines. Attention is cuDNN's, at the hardware file's rates.
# Tokens reach experts by DeepEP as in Megatron-Bridge; experts' GEMMs run one after another.
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
