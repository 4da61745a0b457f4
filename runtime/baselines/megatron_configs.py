"""Builds Megatron-core's configurations and arguments from the options of a Megatron-LM launch
line.
"""

import os
import sys
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mistlab.core.values import reject
from mistlab.export.megatron.megatron_flags import Options
from mistlab.export.megatron.megatron_parts import pattern_of
from mistlab.job.job import Job
from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.session import LaunchFile

# Fields of Megatron-core's configurations for experts, latent attention and windows, by the
# Megatron-LM options that set them. Other fields keep their defaults.


_WHOLE: Mapping[str, str] = {
    "--num-experts": "num_moe_experts",
    "--moe-router-topk": "moe_router_topk",
    "--moe-ffn-hidden-size": "moe_ffn_hidden_size",
    "--moe-shared-expert-intermediate-size": "moe_shared_expert_intermediate_size",
    "--moe-latent-size": "moe_latent_size",
    "--expert-model-parallel-size": "expert_model_parallel_size",
    "--expert-tensor-parallel-size": "expert_tensor_parallel_size",
    "--window-attn-skip-freq": "window_attn_skip_freq",
    "--moe-router-num-groups": "moe_router_num_groups",
    "--moe-router-group-topk": "moe_router_group_topk",
    "--mtp-num-layers": "mtp_num_layers",
    "--mamba-num-heads": "mamba_num_heads",
    "--mamba-head-dim": "mamba_head_dim",
    "--mamba-num-groups": "mamba_num_groups",
    "--mamba-state-dim": "mamba_state_dim",
    "--decoder-first-pipeline-num-layers": "num_layers_in_first_pipeline_stage",
    "--decoder-last-pipeline-num-layers": "num_layers_in_last_pipeline_stage",
}
_TEXT: Mapping[str, str] = {
    "--moe-token-dispatcher-type": "moe_token_dispatcher_type",
    "--moe-router-load-balancing-type": "moe_router_load_balancing_type",
    "--moe-router-score-function": "moe_router_score_function",
    "--softmax-type": "softmax_type",
    "--fp8-format": "fp8",
    "--fp8-recipe": "fp8_recipe",
    "--fp4-format": "fp4",
    "--fp4-recipe": "fp4_recipe",
}
_SWITCHES: Mapping[str, str] = {
    "--moe-grouped-gemm": "moe_grouped_gemm",
    "--moe-router-pre-softmax": "moe_router_pre_softmax",
    "--moe-router-enable-expert-bias": "moe_router_enable_expert_bias",
    "--moe-apply-probs-on-input": "moe_apply_probs_on_input",
    "--moe-pad-expert-input-to-capacity": "moe_pad_expert_input_to_capacity",
    "--qk-layernorm": "qk_layernorm",
    "--is-hybrid-model": "is_hybrid_model",
}
_NUMBERS: Mapping[str, str] = {
    "--moe-aux-loss-coeff": "moe_aux_loss_coeff",
    "--moe-router-topk-scaling-factor": "moe_router_topk_scaling_factor",
    "--moe-router-bias-update-rate": "moe_router_bias_update_rate",
    "--moe-z-loss-coeff": "moe_z_loss_coeff",
    "--moe-expert-capacity-factor": "moe_expert_capacity_factor",
}
_LATENT: Mapping[str, str] = {
    "--q-lora-rank": "q_lora_rank",
    "--kv-lora-rank": "kv_lora_rank",
    "--qk-head-dim": "qk_head_dim",
    "--qk-pos-emb-head-dim": "qk_pos_emb_head_dim",
    "--v-head-dim": "v_head_dim",
}


def parts_of(options: Options) -> dict[str, Any]:
    """The configuration fields set by options for experts, windows, multi-token prediction and low
    precision.
    """
    fields: dict[str, Any] = {name: options.has(option) for option, name in _SWITCHES.items()}
    for table, read in ((_WHOLE, options.whole), (_TEXT, options.text)):
        fields |= {name: read(option) for option, name in table.items() if option in options.words}
    for option, name in _NUMBERS.items():
        if option in options.words:
            fields[name] = options.number(option, 0.0)
    if (pattern := options.text("--moe-layer-freq")) is not None:
        fields["moe_layer_freq"] = pattern_of(pattern)
    if (window := options.text("--window-size")) is not None:
        fields["window_size"] = tuple(int(side) for side in window.split(","))
    return fields


def latent_of(options: Options) -> dict[str, Any]:
    """The configuration fields set by options for latent attention; empty for other attention."""
    if not options.has("--multi-latent-attention"):
        return {}
    return {"multi_latent_attention": True} | {
        name: options.whole(option) for option, name in _LATENT.items() if option in options.words
    }


# Megatron-core's own configurations, built from Megatron-LM's options.
#
# The wheel of Megatron-core has no option parser, so this module does what Megatron-LM's parser
# does with the options that an export writes.


# The data types for the precisions of moments that Megatron-LM's options name.
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfigs:
    """Megatron-core's configurations for a run: model and parallelism, data parallelism, optimizer.

    ``others`` are numbers that none of these configurations holds.
    """

    transformer: TransformerConfig
    data_parallel: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    others: dict[str, Any]


def configs_of(text: str, **overrides: Any) -> MegatronConfigs:
    """The configurations for a launch line, with Megatron-core's own (local) layers and without
    fusions; ``overrides`` set further fields of the transformer's configuration.
    """
    launch = launch_of(LaunchFile(text=text))
    options = Options.of([word.text for word in launch.arguments])
    dtype = torch.bfloat16 if options.has("--bf16") else torch.float32
    dtype = torch.float16 if options.has("--fp16") else dtype
    shards = options.has("--use-distributed-optimizer")
    strategy = options.text("--data-parallel-sharding-strategy") or "no_shard"
    return MegatronConfigs(
        transformer=_transformer(options, dtype, overrides),
        data_parallel=DistributedDataParallelConfig(
            grad_reduce_in_fp32=dtype == torch.bfloat16,
            overlap_grad_reduce=options.has("--overlap-grad-reduce"),
            overlap_param_gather=options.has("--overlap-param-gather"),
            use_distributed_optimizer=shards,
            use_megatron_fsdp=options.has("--use-megatron-fsdp"),
            data_parallel_sharding_strategy=strategy,
        ),
        optimizer=OptimizerConfig(
            optimizer="adam",
            lr=options.number("--lr", 1e-4),
            fp16=dtype == torch.float16,
            bf16=dtype == torch.bfloat16,
            params_dtype=dtype,
            use_distributed_optimizer=shards,
            overlap_param_gather=options.has("--overlap-param-gather"),
            use_precision_aware_optimizer=options.has("--use-precision-aware-optimizer"),
            optimizer_cpu_offload=options.has("--optimizer-cpu-offload"),
            optimizer_offload_fraction=options.number("--optimizer-offload-fraction", 0.0),
            exp_avg_dtype=_DTYPES[options.text("--exp-avg-dtype") or "fp32"],
            exp_avg_sq_dtype=_DTYPES[options.text("--exp-avg-sq-dtype") or "fp32"],
        ),
        others=_others(launch, options),
    )


def _transformer(
    options: Options, dtype: torch.dtype, overrides: dict[str, Any]
) -> TransformerConfig:
    gated = options.has("--swiglu")
    activation = squared_relu if options.has("--squared-relu") else F.silu if gated else F.gelu
    layout = options.text("--pipeline-model-parallel-layout")
    stages = options.whole("--pipeline-model-parallel-size") or 1
    hidden = options.whole("--hidden-size") or 0
    fields: dict[str, Any] = {
        "num_layers": options.whole("--num-layers"),
        "hidden_size": hidden,
        "ffn_hidden_size": options.whole("--ffn-hidden-size"),
        "num_attention_heads": options.whole("--num-attention-heads"),
        "num_query_groups": options.whole("--num-query-groups"),
        "kv_channels": options.whole("--kv-channels"),
        "normalization": options.text("--normalization") or "LayerNorm",
        "gated_linear_unit": gated,
        "activation_func": activation,
        "add_bias_linear": not options.has("--disable-bias-linear"),
        "attention_dropout": options.number("--attention-dropout", 0.1),
        "hidden_dropout": options.number("--hidden-dropout", 0.1),
        "attention_backend": AttnBackend[options.text("--attention-backend") or "auto"],
        "tensor_model_parallel_size": options.whole("--tensor-model-parallel-size") or 1,
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": options.whole(
            "--num-virtual-stages-per-pipeline-rank"
        ),
        "context_parallel_size": options.whole("--context-parallel-size") or 1,
        "sequence_parallel": options.has("--sequence-parallel"),
        "pipeline_dtype": dtype,
        "params_dtype": dtype,
        "fp16": dtype == torch.float16,
        "bf16": dtype == torch.bfloat16,
        "recompute_granularity": options.text("--recompute-granularity"),
        "recompute_method": options.text("--recompute-method"),
        "recompute_num_layers": options.whole("--recompute-num-layers"),
        "cpu_offloading": options.has("--cpu-offloading-num-layers"),
        "cpu_offloading_num_layers": options.whole("--cpu-offloading-num-layers") or 0,
        **parts_of(options),
    }
    if layout is not None:
        made = PipelineParallelLayerLayout.from_str(layout, stages)
        made.validate_layer_layout(fields["num_layers"], fields.get("mtp_num_layers"))
        fields["pipeline_model_parallel_layout"] = made
    latent = latent_of(options)
    kind = MLATransformerConfig if latent else TransformerConfig
    return kind(**{"transformer_impl": "local", **fields, **latent, **overrides})


def _others(launch: Launch, options: Options) -> dict[str, Any]:
    started = Options.of([word.text for word in launch.started])
    vocab = options.whole("--vocab-size") or 0
    tensor = options.whole("--tensor-model-parallel-size") or 1
    multiple = (options.whole("--make-vocab-size-divisible-by") or 128) * tensor
    return {
        "world_size": (started.whole("--nnodes") or 1) * (started.whole("--nproc-per-node") or 1),
        "micro_batch": options.whole("--micro-batch-size"),
        "global_batch": options.whole("--global-batch-size"),
        "sequence_length": options.whole("--seq-length"),
        "vocab": -(-vocab // multiple) * multiple,
        "position_embedding": options.text("--position-embedding-type") or "learned_absolute",
        "rotary_percent": options.number("--rotary-percent", 1.0),
        "rotary_base": options.number("--rotary-base", 10_000.0),
        "tied_embeddings": not options.has("--untie-embeddings-and-output-weights"),
    }


# Megatron-LM's own option parser, from a checkout, which accepts or rejects a launch line.
#
# The wheel of Megatron-core has no parser. The checkout is imported beside the wheel. Its checks
# for GPUs and TransformerEngine give the results of a machine that has both.


# Options that an exported launch line leaves to the user, with values that complete the line for
# the parser.
_BESIDE = "--mock-data --tokenizer-type NullTokenizer --lr 1e-4 --train-iters 10 --no-rope-fusion"
_HOPPER, _BLACKWELL = 9, 10


def arguments_of(text: str, job: Job, checkout: Path) -> Namespace:
    """The arguments of a launch line, once Megatron-LM has checked them and built the model's
    configuration.
    """
    if not (checkout / "megatron" / "training" / "arguments.py").is_file():
        reject(f"{checkout}: has no megatron/training/arguments.py: give Megatron-LM's checkout")
    launch = launch_of(LaunchFile(text=text))
    arguments_given = [*map(str, launch.arguments), *_BESIDE.split()]
    with _on_its_machine(job, checkout, "32" if "--use-megatron-fsdp" in arguments_given else "1"):
        from megatron.training import arguments  # noqa: PLC0415 (its package)

        version = _version_of(job)
        with (
            _as_command(arguments_given),
            patch.object(arguments, "get_device_arch_version", lambda: version),
            patch("torch.cuda.get_device_capability", lambda: (version, 0)),
        ):
            made: Namespace = arguments.validate_args(arguments.parse_args(), {})
            arguments.core_transformer_config_from_args(made)
    return made


def _version_of(job: Job) -> int:
    has_blocks = job.cluster.hardware.gpu.peak_tflops.fp4 is not None
    return _BLACKWELL if has_blocks else _HOPPER


@contextmanager
def _on_its_machine(job: Job, checkout: Path, connections: str) -> Iterator[None]:
    """Within the ``with`` block, Megatron-LM sees the number of processes and the paths of its
    first rank.
    """
    variables = {
        "RANK": "0",
        "WORLD_SIZE": str(job.cluster.num_gpus),
        "CUDA_DEVICE_MAX_CONNECTIONS": connections,
    }
    with (
        patch.dict(os.environ, variables),
        patch.object(sys, "path", [str(checkout), *sys.path]),
    ):
        yield


@contextmanager
def _as_command(command: Sequence[str]) -> Iterator[None]:
    """Within the ``with`` block, Megatron-LM's parser reads this command line, and raises an error
    instead of ending the process.
    """
    with patch.object(sys, "argv", ["pretrain.py", *command]):
        try:
            yield
        except SystemExit as error:
            message = f"the parser ends with status {error.code}"
            raise ValueError(message) from None
