"""Engines ``trainer...`` and ``llmq``: frameworks for fine-tuning, and for training on consumer
GPUs.

``trainer`` is Hugging Face's models under its Trainer, TRL, PEFT, Accelerate or axolotl, and others
that run a model's operators one by one (litgpt, torchtune, scripts). ``trainer-fused`` has these
models with fused kernels (Unsloth, Liger), ``trainer-tiled`` also runs networks on parts of a
sequence (Snowflake's ALST). ``llmq`` is a trainer in C++ whose step is a CUDA graph.
"""

from dataclasses import replace

from mistlab.engines.baselines import DEEPSPEED, OVERLAPPED
from mistlab.engines.engine import (
    SINGLE,
    Engine,
    EngineMemory,
    HostTime,
    Optimizer,
    Precision,
)
from mistlab.engines.fitted import fitted
from mistlab.engines.fsdp import FSDP, FSDP_EAGER
from mistlab.engines.megatron_core import MEGATRON_CORE
from mistlab.schedule.context_ways import HEADS

# The memory of Hugging Face's Trainer and similar frameworks. A single GPU gathers nothing; several
# shard by FSDP or similarly. Logits are cast to 32 bits, then come log-probabilities and gradients,
# with torchtitan's bytes per logit. Of sharded weights, embedding and head (FSDP's root module)
# stay gathered beside a block and the prefetched next one; a block's gradients are whole in
# autograd and again in the reduce-scatter's input (torch/distributed/fsdp). Quantised GEMMs of
# bitsandbytes keep their inputs.
_MEMORY, _IN_32_BITS = (
    replace(FSDP_EAGER.memory[name], gathered_blocks=2, quantised_inputs=1)
    for name in ("bf16", "fp32")
)
_PRECISIONS: tuple[Precision, ...] = ("bf16", "fp16", "fp8", "fp4")
_MOVED_IN_16_BITS = dict.fromkeys(_PRECISIONS, FSDP.step_moved["bf16"])
_STEP_MOVED = {**_MOVED_IN_16_BITS, **dict.fromkeys(SINGLE, FSDP.step_moved["fp32"])}
_OPTIMIZERS: tuple[Optimizer, ...] = ("adamw", "adamw-bf16", "adamw-8bit")


def _memory(row: EngineMemory, wide: EngineMemory) -> dict[Precision, EngineMemory]:
    """The memory of an engine by precision: ``wide`` in 32 bits, ``row`` in the others."""
    return {**dict.fromkeys(_PRECISIONS, row), **dict.fromkeys(SINGLE, wide)}


# These frameworks run FlashAttention or cuDNN at the rates of the hardware file, so the share of
# attention's rate is not taken from FSDP.
_PRODUCTS, _, _MOVED = FSDP_EAGER.shares("")
_SHARES_ON = {
    name: (products, 1.0, moved) for name, (products, _, moved) in FSDP_EAGER.shares_on.items()
}
# The number of tokens per chunk of a chunked loss, a compromise between frameworks: an eighth of a
# few thousand (torchtune), as many as make logits no larger than their input (Liger), 256 (TRL).
_CHUNK_TOKENS = 1024
TRAINER = replace(
    FSDP_EAGER,
    chunk_tokens=_CHUNK_TOKENS,
    name="trainer",
    system="trainer",
    family="trainer",
    memory=_memory(_MEMORY, _IN_32_BITS),
    step_moved=_STEP_MOVED,
    other_sums={},
    optimizers=_OPTIMIZERS,
    products_share=_PRODUCTS,
    attention_share=1.0,
    attention_kernel="",
    memory_share=_MOVED,
    shares_on=_SHARES_ON,
    context_exchanges=(*FSDP_EAGER.context_exchanges, HEADS),
    runs_lean=False,
    # ``gradient_checkpointing`` of the Trainer and its like is for all blocks.
    recomputes_some=False,
)

# The training loop of litgpt's scripts keeps the last loss until the next one exists, and with it
# the tensors that quantised GEMMs of bitsandbytes keep outside of autograd: then the inputs of two
# micro-batches. The loss takes 128 tokens of each sequence at a time, in 16 bits
# (``chunked_cross_entropy``): beside the logits there are log-probabilities, and about half as much
# in the gradients of a chunk.
TRAINER_LOOP = replace(
    TRAINER,
    name="trainer-loop",
    memory=_memory(
        *(replace(row, quantised_inputs=2, wide_logits=2) for row in (_MEMORY, _IN_32_BITS))
    ),
)

# Until the end of 2024, Hugging Face models returned 32-bit logits, which stayed in memory beside
# log-probabilities and both gradients.
_WIDE = replace(_MEMORY, wide_logits=6)
TRAINER_WIDE_LOGITS = replace(
    TRAINER, name="trainer-wide-logits", memory=_memory(_WIDE, _IN_32_BITS)
)

# Models are loaded in 32 bits and run under torch.autocast, so weights are stored and gathered in
# 32 bits. Without autocast that is training in 32 bits, engine ``trainer``.
TRAINER_AUTOCAST = replace(
    TRAINER,
    name="trainer-autocast",
    step_moved=_MOVED_IN_16_BITS,
    memory=dict.fromkeys(
        _PRECISIONS,
        replace(_WIDE, weight=4, optimizer=8, kept_by="autocast"),
    ),
)

# DeepSpeed's ZeRO (its states, buckets and reductions), training Hugging Face's models with their
# own operators.
DEEPSPEED_TRAINER = replace(
    DEEPSPEED,
    name="deepspeed-trainer",
    usual_precision="bf16",
    kernels=TRAINER.kernels,
    kernels_in_32_bits=TRAINER.kernels_in_32_bits,
    memory={
        name: replace(row, kept_by=TRAINER.memory[name].kept_by, wide_logits=wide_logits)
        for name, row in DEEPSPEED.memory.items()
        for wide_logits in (TRAINER.memory[name].wide_logits,)
    },
    other_sums={},
    host=TRAINER.host,
    products_share=TRAINER.products_share,
    attention_share=TRAINER.attention_share,
    memory_share=TRAINER.memory_share,
    shares_on=TRAINER.shares_on,
    recomputes_some=TRAINER.recomputes_some,
    divides_quantised=TRAINER.divides_quantised,
)

# Quantised GEMMs in fused kernels need not keep their inputs. As many weights stay gathered as
# DeepSpeed's ``stage3_max_live_parameters`` says.
_FUSED, _FUSED_IN_32_BITS = (
    replace(row, quantised_inputs=0, gathered_blocks=0, gathered_elements=1_000_000_000)
    for row in (_MEMORY, _IN_32_BITS)
)
# Norms, rotary embedding, activations and loss are one kernel each, as in Unsloth and Liger,
# launched from Python through adapter modules.
TRAINER_FUSED = replace(
    TRAINER,
    name="trainer-fused",
    kernels=MEGATRON_CORE.kernels,
    kernels_in_32_bits=None,
    memory=_memory(
        *(
            replace(row, kept_by="", wide_logits=0, fuses_loss=True)
            for row in (_FUSED, _FUSED_IN_32_BITS)
        )
    ),
    host=HostTime(**fitted("trainer-fused")["host"]),
    runs_lean=False,
)
# The feed-forward network runs on one tile of the sequence after the other, so that only one tile's
# wide activations exist.
TRAINER_TILED = replace(
    TRAINER_FUSED,
    name="trainer-tiled",
    memory=_memory(
        replace(_FUSED, kept_by="tiled", wide_logits=1),
        replace(_FUSED_IN_32_BITS, kept_by="tiled", wide_logits=0),
    ),
)

# llm.c: weights and gradients in 16 bits, master weights and moments in 32 bits.
TRAINER_C = Engine(
    name="trainer-c",
    system="trainer",
    family="trainer",
    overlapped=OVERLAPPED,
    kernels=MEGATRON_CORE.kernels,
    memory={"bf16": EngineMemory(weight=2, gradient=2, optimizer=12)},
    step_moved={"bf16": 30},
    cached_share=0.0,
    highest_zero=1,
)

# llmq: weights, gradients and both moments in 16 bits; the gradient of the logits is written over
# them.
_LLMQ = EngineMemory(weight=2, gradient=2, optimizer=4, wide_logits=-1, fixed_mib=64)
LLMQ = Engine(
    name="llmq",
    system="trainer",
    family="trainer",
    overlapped=FSDP.overlapped,
    kernels=MEGATRON_CORE.kernels,
    memory=dict.fromkeys(_PRECISIONS, _LLMQ),
    # The bytes per parameter that the optimizer step moves: it reads a gradient, and reads and
    # writes a weight and two moments.
    step_moved=dict.fromkeys(_PRECISIONS, 14),
    optimizers=_OPTIMIZERS,
    cached_share=0.0,
    offloads_activations=True,
)
