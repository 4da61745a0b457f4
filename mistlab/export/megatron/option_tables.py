"""Tables of options of Megatron-LM and its derivatives: those that the import reads, and those that
do not affect cost.

Names are those of NVIDIA/Megatron-LM (``megatron/training/arguments.py`` from 1.0 to core 0.19), of
Microsoft's and BigScience's Megatron-DeepSpeed, Alibaba's Pai-Megatron-Patch, EPFL's Megatron-LLM,
AMD's fork and Huawei's MindSpeed-LLM. Underscores count as dashes.
"""

from collections.abc import Mapping

from mistlab.core.values import word_set
from mistlab.export.found import harmless_names

# Other spellings of Megatron-LM's options, each with the spelling that this package uses.
RENAMED: Mapping[str, str] = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--checkpoint-activations": "--recompute-activations-of-all-blocks",
    "--use-custom-fsdp": "--use-megatron-fsdp",
    "--data-parallel-sharding": "--data-parallel-sharding-strategy",
    "--activations-checkpoint-method": "--recompute-method",
    "--activations-checkpoint-granularity": "--recompute-granularity",
    "--activations-checkpoint-num-layers": "--recompute-num-layers",
    "--checkpoint-num-layers": "--recompute-num-layers",
    "--num-key-value-heads": "--num-key-heads",
    "--num-attention-heads-kv": "--num-key-heads",
    "--n-head-kv": "--num-key-heads",
    "--use-flash-attn-v1": "--use-flash-attn",
    "--use-flash-attn-v2": "--use-flash-attn",
    "--use-flash-attn-triton": "--use-flash-attn",
    "--use-flash-attn-builder": "--use-flash-attn",
    "--rotary-position-embeddings-theta": "--rotary-base",
    "--rope-theta": "--rotary-base",
    "--partial-rotary-factor": "--rotary-percent",
    "--use-llama2-rotary-position-embeddings": "--use-rotary-position-embeddings",
    "--use-mistral-rotary-position-embeddings": "--use-rotary-position-embeddings",
    "--no-tie-embed-logits": "--untie-embeddings-and-output-weights",
    "--use-rms-norm": "--use-rmsnorm",
    "--RMSNorm": "--use-rmsnorm",
    "--topk": "--moe-router-topk",
    "--moe-topk": "--moe-router-topk",
    "--moe-expert-parallel-size": "--expert-model-parallel-size",
    "--moe-train-capacity-factor": "--moe-expert-capacity-factor",
    "--moe-intermediate-size": "--moe-ffn-hidden-size",
    "--shared-moe-ffn-hidden-size": "--moe-shared-expert-intermediate-size",
    "--n-shared-experts": "--num-shared-experts",
    "--num-moe-experts": "--num-experts",
    "--qk-nope-head-dim": "--qk-head-dim",
    "--qk-rope-head-dim": "--qk-pos-emb-head-dim",
    "--multi-head-latent-attention": "--multi-latent-attention",
    "--intermediate-size": "--ffn-hidden-size",
    "--pad-vocab-size-to": "--padded-vocab-size",
    "--sliding-window-size": "--sliding-window",
    "--deepspeed-config-file": "--deepspeed-config",
    "--hybrid-override-pattern": "--hybrid-layer-pattern",
    "--virtual-pipeline-model-parallel-size": "--num-virtual-stages-per-pipeline-rank",
    "--num-layers-in-first-pipeline-stage": "--decoder-first-pipeline-num-layers",
    "--num-layers-in-last-pipeline-stage": "--decoder-last-pipeline-num-layers",
    "--gated-linear-unit": "--swiglu",
    "--fp8": "--fp8-format",
    "--fp4": "--fp4-format",
    # The name of this option in FlagScale.
    "--apply-layernorm-rms": "--use-rmsnorm",
    # The names of these options in MegaBlocks and in Megatron-LLaMA.
    "--moe-num-experts": "--num-experts",
    "--moe-top-k": "--moe-router-topk",
    "--moe-capacity-factor": "--moe-expert-capacity-factor",
    "--overlapped-distributed-optimizer": "--use-distributed-optimizer",
}

# Options of Megatron-LM that are switches, without a value.
SWITCHES = word_set(
    """
    --sequence-parallel --qk-layernorm --use-distributed-optimizer --use-megatron-fsdp
    --use-torch-fsdp2 --torch-fsdp2-no-reshard-after-forward --overlap-grad-reduce
    --overlap-param-gather --recompute-activations --recompute-activations-of-all-blocks
    --optimizer-cpu-offload --bf16 --fp16 --use-flash-attn --group-query-attention --swiglu --geglu
    --squared-relu --use-rmsnorm --use-rotary-position-embeddings --no-position-embedding
    --untie-embeddings-and-output-weights --disable-bias-linear --add-bias-linear --use-bias
    --parallel-attn --quick-geglu --disable-bias-linear-fc --disable-bias-attn-fc
    --moe-grouped-gemm --moe-pad-expert-input-to-capacity --multi-latent-attention
    --use-precision-aware-optimizer --moe-router-enable-expert-bias
    --moe-router-force-load-balancing --moe-router-pre-softmax --moe-apply-probs-on-input
    --disable-moe-token-dropping --enable-expert-tensor-parallelism --enable-shared-expert
    --moe-tp-extend-ep --moe-extended-tp --deepspeed --cpu-optimizer --cpu-torch-adam
    --no-pipeline-parallel
    --deepspeed-activation-checkpointing --checkpoint-in-cpu --is-hybrid-model
    --attention-output-gate --fp8-e4m3 --fp8-hybrid --kv-channels-of-heads
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --use-mcore-models --use-legacy-models --use-checkpoint-args --cpu-offloading
    """
)

# Options of Megatron-LM that take any number of values.
MANY = word_set(
    """
    --num-experts --recompute-modules --window-size --num-layer-list --cp-comm-type
    --rampup-batch-size
    --moe-router-load-balancing-type --moe-aux-loss-coeff --data-path --train-data-path
    --valid-data-path --test-data-path --train-data --valid-data --split --profile-ranks
    --special-tokens --spec --cuda-graph-scope --cuda-graph-modules --offload-modules
    --hierarchical-context-parallel-sizes --tiktoken-special-tokens --iterations-to-skip
    --train-weighted-split-paths --valid-weighted-split-paths --test-weighted-split-paths
    --datasets --eval-iters --nvtx-ranges --noop-layers --lora-target-modules
    """
)

# Options that affect the cost of a step or what a plan can be; the import reads all of them.
TELLING = SWITCHES | word_set(
    """
    --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --cp-comm-type --context-parallel-algo --ds-sequence-parallel-size
    --pipeline-model-parallel-layout --decoder-first-pipeline-num-layers
    --decoder-last-pipeline-num-layers --num-layers-per-virtual-pipeline-stage
    --num-virtual-stages-per-pipeline-rank --num-layer-list --pp-partition-method
    --micro-batch-size --global-batch-size --data-parallel-sharding-strategy
    --num-distributed-optimizer-instances --recompute-granularity --recompute-method
    --recompute-num-layers --recompute-modules --optimizer --optimizer-offload-fraction
    --optimizer-offload-policy --cpu-offloading-num-layers --attention-backend --transformer-impl
    --num-layers --encoder-num-layers --hidden-size --ffn-hidden-size --num-attention-heads
    --kv-channels --num-query-groups --num-key-heads --attention-head-type --seq-length
    --encoder-seq-length --decoder-seq-length --max-position-embeddings --vocab-size
    --make-vocab-size-divisible-by --padded-vocab-size --extra-vocab-size --tokenizer-type
    --tokenizer-model --tokenizer-name-or-path --patch-tokenizer-type --vocab-file --vocab-extra-ids
    --normalization --glu-activation --position-embedding-type --rotary-percent --rotary-base
    --attention-dropout --hidden-dropout --world-size --num-experts --moe-router-topk
    --moe-ffn-hidden-size --moe-shared-expert-intermediate-size --num-shared-experts
    --moe-latent-size --moe-layer-freq --expert-interval --first-k-dense-replace --mlp-type
    --expert-model-parallel-size --expert-tensor-parallel-size --moe-token-dispatcher-type
    --moe-expert-capacity-factor --q-lora-rank --kv-lora-rank --qk-head-dim --qk-pos-emb-head-dim
    --v-head-dim --window-size --window-attn-skip-freq --sliding-window --softmax-type
    --mtp-num-layers --fp8-format --fp8-recipe --fp4-format --fp4-recipe --exp-avg-dtype
    --exp-avg-sq-dtype --moe-router-load-balancing-type --moe-aux-loss-coeff
    --moe-router-score-function --moe-router-num-groups --moe-router-group-topk
    --moe-router-topk-scaling-factor --moe-router-bias-update-rate --moe-z-loss-coeff
    --multiple-of --hidden-dim-multiplier --stage
    --hybrid-layer-pattern --hybrid-attention-ratio --hybrid-mlp-ratio --mamba-state-dim
    --mamba-head-dim --mamba-num-groups --mamba-num-heads --mamba-expand
    --experimental-attention-variant --linear-attention-freq --full-attention-interval
    --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads
    --deepspeed-config --zero-stage --remote-device --model-name --spec
    """
)


# Options of Megatron-LM and its derivatives that do not affect the cost of a step.
#
# They concern data, learning rates, logs, checkpoints, inference, or choices of kernels that plans
# do not have.


# Prefixes of options that do not affect cost: of logs, checkpoints, learning rates, positions and
# inference. An option with such a prefix that does affect cost is listed elsewhere by its full
# name.
FAMILIES = tuple(
    sorted(
        word_set(
            """
            --inference- --rl- --grpo- --langrl- --wandb- --tensorboard- --log- --profile- --ckpt-
            --dist-ckpt- --fim- --inprocess- --fault-injector- --one-logger- --flight-recorder-
            --straggler- --otel- --save- --lr- --non-persistent- --adlr- --object-storage-
            --text-generate- --eval- --adam- --retro- --mup- --tiktoken- --tokenizer-
            --rope-scaling- --yarn- --weight-decay- --aml- --rerun-
            """
        )
    )
)

# Options without a value that do not affect the cost of a step.
HARMLESS_SWITCHES = harmless_names("megatron_switches")

# Options with a value that do not affect the cost of a step.
HARMLESS_VALUES = harmless_names("megatron_values")
HARMLESS = HARMLESS_SWITCHES | HARMLESS_VALUES
