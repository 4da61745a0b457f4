"""The options of Megatron-LM at core 0.16 that exports write, with their types and choices.

Names are those of ``megatron/training/arguments.py``, and of the fields of ``TransformerConfig``,
``ModelParallelConfig`` and others of which it makes options. ``check`` holds a line against the
rules of ``validate_args`` and of ``TransformerConfig`` for what is written.
"""

import argparse
import re
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence

from mistlab.shell.launch import launch_of
from mistlab.shell.session import LaunchFile

SWITCHES = """
    --sequence-parallel --use-distributed-optimizer --use-megatron-fsdp --overlap-grad-reduce
    --overlap-param-gather --optimizer-cpu-offload --use-precision-aware-optimizer --bf16 --fp16
    --group-query-attention --swiglu --untie-embeddings-and-output-weights --disable-bias-linear
    --qk-layernorm --multi-latent-attention --moe-grouped-gemm --moe-router-pre-softmax
    --moe-pad-expert-input-to-capacity --squared-relu --is-hybrid-model
    --moe-router-enable-expert-bias --moe-apply-probs-on-input
"""
WHOLE_NUMBERS = """
    --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --expert-model-parallel-size --expert-tensor-parallel-size --micro-batch-size
    --num-virtual-stages-per-pipeline-rank --global-batch-size --seq-length
    --max-position-embeddings --recompute-num-layers --cpu-offloading-num-layers --num-layers
    --hidden-size --ffn-hidden-size --num-attention-heads --num-query-groups --kv-channels
    --vocab-size --make-vocab-size-divisible-by --rotary-base --num-experts --moe-router-topk
    --moe-ffn-hidden-size --moe-shared-expert-intermediate-size --moe-latent-size --q-lora-rank
    --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --mtp-num-layers
    --mamba-num-heads --mamba-head-dim --mamba-num-groups --mamba-state-dim
    --decoder-first-pipeline-num-layers --decoder-last-pipeline-num-layers
    --moe-router-num-groups --moe-router-group-topk
"""
TEXTS = "--pipeline-model-parallel-layout --hybrid-override-pattern --hybrid-layer-pattern"
NUMBERS = """
    --optimizer-offload-fraction --attention-dropout --hidden-dropout --rotary-percent
    --moe-aux-loss-coeff --moe-expert-capacity-factor --moe-router-topk-scaling-factor
    --moe-router-bias-update-rate --moe-z-loss-coeff
"""
CHOICES = {
    "--cp-comm-type": ("p2p", "all_gather", "a2a", "a2a+p2p"),
    "--attention-backend": ("flash", "fused", "unfused", "local", "auto"),
    "--data-parallel-sharding-strategy": (
        *("no_shard", "optim", "optim_grads", "optim_grads_params"),
    ),
    "--recompute-granularity": ("full", "selective"),
    "--recompute-method": ("uniform", "block"),
    "--recompute-modules": (
        *("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
    ),
    "--ckpt-format": ("torch", "torch_dist", "zarr", "torch_dcp", "fsdp_dtensor"),
    "--normalization": ("LayerNorm", "RMSNorm"),
    "--position-embedding-type": ("learned_absolute", "rope", "mrope", "relative", "none"),
    "--softmax-type": ("vanilla", "off-by-one", "learnable"),
    "--moe-router-load-balancing-type": (
        *("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
    ),
    "--moe-router-score-function": ("softmax", "sigmoid"),
    "--moe-token-dispatcher-type": ("allgather", "alltoall", "flex"),
    "--fp8-format": ("e4m3", "hybrid"),
    "--fp8-recipe": ("tensorwise", "delayed", "mxfp8", "blockwise", "custom"),
    "--fp4-format": ("e2m1",),
    "--fp4-recipe": ("nvfp4", "custom"),
    "--exp-avg-dtype": ("fp32", "fp16", "bf16", "fp8"),
    "--exp-avg-sq-dtype": ("fp32", "fp16", "bf16", "fp8"),
}


def _pattern(text: str) -> list[int] | int:
    if "[" not in text:
        return int(text)
    if re.search(r"[^,\d\[\]\(\)\+\*]", text):
        raise ValueError(text)
    return list(eval(text))


def _pair(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.strip("()").split(","))


class _Parser(ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise ValueError(message)


def parser() -> ArgumentParser:
    """A parser that knows the options that exports write, and no other."""
    made = _Parser(allow_abbrev=False)
    for name in SWITCHES.split():
        made.add_argument(name, action="store_true")
    for name in WHOLE_NUMBERS.split():
        made.add_argument(name, type=int)
    for name in NUMBERS.split():
        made.add_argument(name, type=float)
    for name, choices in CHOICES.items():
        made.add_argument(name, choices=choices)
    for name in TEXTS.split():
        made.add_argument(name)
    made.add_argument("--spec", nargs="*")
    made.add_argument("--moe-layer-freq", type=_pattern)
    made.add_argument("--window-attn-skip-freq", type=_pattern)
    made.add_argument("--window-size", type=_pair)
    return made


def parsed(line: str) -> Namespace:
    """The options of a launch line; refuses what Megatron-LM would refuse."""
    launch = launch_of(LaunchFile(text=line))
    arguments: Sequence[str] = [word.text for word in launch.arguments]
    found = parser().parse_args(arguments)
    for broken, rule in RULES.items():
        if not rule(found):
            raise ValueError(broken)
    return found


def _splits_sequences(found: argparse.Namespace) -> bool:
    alone = (found.tensor_model_parallel_size or 1) == 1 or not found.num_experts
    return alone or found.sequence_parallel


def _letters(found: argparse.Namespace) -> str:
    """The letters of a hybrid's blocks, without the marks between its segments."""
    pattern = found.hybrid_override_pattern or found.hybrid_layer_pattern or ""
    return str(pattern).replace("|", "")


def _segments(found: argparse.Namespace) -> int:
    return str(found.hybrid_layer_pattern or "").count("|") + 1


RULES = {
    "Megatron-FSDP saves in a format of its own": lambda found: (
        not found.use_megatron_fsdp or found.ckpt_format == "fsdp_dtensor"
    ),
    "a hybrid has a letter for each block": lambda found: (
        len(_letters(found)) in (0, found.num_layers)
    ),
    "a hybrid's letters are known": lambda found: set(_letters(found)) <= set("M*-E"),
    "a hybrid has one pattern": lambda found: (
        not (found.hybrid_override_pattern and found.hybrid_layer_pattern)
    ),
    "segments are as many as stages, or a multiple": lambda found: (
        not found.hybrid_layer_pattern or _segments(found) % found.pipeline_model_parallel_size == 0
    ),
    "a pattern has no layout": lambda found: (
        not _letters(found)
        or not (found.pipeline_model_parallel_layout or found.num_virtual_stages_per_pipeline_rank)
    ),
    "a hybrid has a specification": lambda found: not _letters(found) or len(found.spec or ()) == 2,
    "latent attention shares no keys": lambda found: (
        not (found.multi_latent_attention and found.group_query_attention)
    ),
    "tensor-parallel ranks with experts split sequences": _splits_sequences,
    "experts with biases are whole": lambda found: (
        not found.num_experts or found.disable_bias_linear or found.expert_tensor_parallel_size == 1
    ),
    "experts are divided evenly": lambda found: (
        not found.num_experts or found.num_experts % found.expert_model_parallel_size == 0
    ),
    "a single expert's softmax comes first": lambda found: (
        not found.num_experts
        or found.moe_router_topk > 1
        or found.moe_router_pre_softmax
        or found.moe_router_score_function == "sigmoid"
    ),
    "only sigmoids are corrected": lambda found: (
        not found.moe_router_enable_expert_bias or found.moe_router_score_function == "sigmoid"
    ),
    "groups divide experts": lambda found: (
        not found.moe_router_group_topk
        or (
            found.num_experts % (found.moe_router_num_groups or 1) == 0
            and found.moe_router_group_topk <= (found.moe_router_num_groups or 0)
        )
    ),
    "weights of inputs are those of one expert": lambda found: (
        not found.moe_apply_probs_on_input or found.moe_router_topk == 1
    ),
    "padding needs a capacity": lambda found: (
        not found.moe_pad_expert_input_to_capacity or found.moe_expert_capacity_factor is not None
    ),
    "a pattern has all blocks": lambda found: (
        found.moe_layer_freq is None or len(found.moe_layer_freq) == found.num_layers
    ),
    "few bits beside bf16": lambda found: not (found.fp8_format or found.fp4_format) or found.bf16,
    "8 or 4 bits": lambda found: not (found.fp8_format and found.fp4_format),
    "short moments need their optimizer": lambda found: (
        {found.exp_avg_dtype, found.exp_avg_sq_dtype} <= {None, "fp32"}
        or (found.use_precision_aware_optimizer and found.use_distributed_optimizer)
    ),
    "later tokens need rotary embedding or none": lambda found: (
        not found.mtp_num_layers or found.position_embedding_type in ("rope", "none")
    ),
    "a model of heads without given channels is divided by them": lambda found: (
        found.kv_channels is not None or found.hidden_size % found.num_attention_heads == 0
    ),
}
