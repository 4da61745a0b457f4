"""Megatron-core's own configurations, built from Megatron-LM's options.

The wheel of Megatron-core has no parser of options. What Megatron-LM's parser does with the options
that an export writes is done here.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (its usual name)
from megatron.core.activations import squared_relu
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.transformer import MLATransformerConfig, TransformerConfig
from megatron.core.transformer.enums import AttnBackend
from megatron.core.transformer.pipeline_parallel_layer_layout import PipelineParallelLayerLayout

from mistlab.export.megatron_flags import Options
from mistlab.shell.launch import Launch, launch_of
from mistlab.shell.source import Source
from runtime.baselines.megatron_parts import latent_of, parts_of

# As Megatron-LM takes the words for moments.
_DTYPES = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "fp8": torch.uint8,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronConfigs:
    """Configurations of Megatron-core: model and parallelism, data parallelism, optimizer.

    ``others`` are numbers that no configuration of Megatron-core holds.
    """

    transformer: TransformerConfig
    data_parallel: DistributedDataParallelConfig
    optimizer: OptimizerConfig
    others: dict[str, Any]


def configs_of(text: str, **overrides: Any) -> MegatronConfigs:
    """The configurations of a launch line; ``overrides`` are fields of the transformer's."""
    launch = launch_of(Source(text=text))
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
        "bias_activation_fusion": False,
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
        "transformer_impl": "local",
        **parts_of(options),
    }
    if layout is not None:
        made = PipelineParallelLayerLayout.from_str(layout, stages)
        made.validate_layer_layout(fields["num_layers"], fields.get("mtp_num_layers"))
        fields["pipeline_model_parallel_layout"] = made
    latent = latent_of(options)
    kind = MLATransformerConfig if latent else TransformerConfig
    return kind(**{**fields, **latent, **overrides})


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
