"""Options of Megatron-LM and its relatives: whose value an import reads, and the harmless ones.

Names are those of NVIDIA/Megatron-LM (``megatron/training/arguments.py`` from 1.0 to core 0.19), of
Microsoft's and BigScience's Megatron-DeepSpeed, Alibaba's Pai-Megatron-Patch, EPFL's Megatron-LLM,
AMD's fork and Huawei's MindSpeed-LLM. Underscores count as dashes.
"""

from collections.abc import Mapping

from mistlab.export.found import names_in

# Other spellings, and the name that stands for them here.
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
    # Of FlagScale.
    "--apply-layernorm-rms": "--use-rmsnorm",
    # Of MegaBlocks, and of Megatron-LLaMA.
    "--moe-num-experts": "--num-experts",
    "--moe-top-k": "--moe-router-topk",
    "--moe-capacity-factor": "--moe-expert-capacity-factor",
    "--overlapped-distributed-optimizer": "--use-distributed-optimizer",
}

# Switches: options without a value of their own.
SWITCHES = names_in(
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
    --moe-router-force-load-balancing
    --disable-moe-token-dropping --enable-expert-tensor-parallelism --enable-shared-expert
    --moe-tp-extend-ep --moe-extended-tp --deepspeed --cpu-optimizer --cpu-torch-adam
    --no-pipeline-parallel
    --deepspeed-activation-checkpointing --checkpoint-in-cpu --is-hybrid-model
    --attention-output-gate --fp8-e4m3 --fp8-hybrid --kv-channels-of-heads
    --account-for-embedding-in-pipeline-split --account-for-loss-in-pipeline-split
    --use-mcore-models --use-legacy-models --use-checkpoint-args --cpu-offloading
    """
)

# Options of which a word alone does not say the value: they take as many words as stand there.
MANY = names_in(
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

# Options that change what a step costs, or what a plan is; each is read.
TELLING = SWITCHES | names_in(
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
    --multiple-of --hidden-dim-multiplier --stage
    --hybrid-layer-pattern --hybrid-attention-ratio --hybrid-mlp-ratio --mamba-state-dim
    --mamba-head-dim --mamba-num-groups --mamba-num-heads --mamba-expand
    --experimental-attention-variant --linear-attention-freq --full-attention-interval
    --linear-key-head-dim --linear-value-head-dim --linear-num-key-heads --linear-num-value-heads
    --deepspeed-config --zero-stage --remote-device --model-name --spec
    """
)


# Options of Megatron-LM and its relatives that say nothing of what a step costs.
#
# They name data, learning rates, logs, checkpoints, inference, or choices of kernels that plans do
# not have. ``mistlab.export.megatron.option_tables`` names the sources.


# Beginnings of names whose options cost nothing, whatever follows: they tell of logs, checkpoints,
# learning rates, positions and inference, or of what is refused as a whole (retrieval, rewards).
# An option of a family that also has costs is in a table by its whole name.
FAMILIES = tuple(
    sorted(
        names_in(
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

# Without a value.
HARMLESS_SWITCHES = names_in(
    """
    --abort-on-unmet-fused-kernel-constraints --activation-func-fp8-input-store --adaptive-seq-len
    --add-output-layer-bias --add-rmsnorm-offset --adlr-autoresume --align-grad-reduce
    --allow-ambiguous-pad-tokens --allow-missing-vision-projection-checkpoint --alternative-prompt
    --append-eod --apply-layernorm-1p --apply-query-key-layer-scaling --apply-rope-fusion
    --apply-rope-no-in-complex --apply-wd-to-qk-layernorm --async-ckpt-use-cpu-shm
    --async-log-allreduce --async-save --async-tensor-model-parallel-allreduce
    --attention-softmax-in-fp32 --auto-detect-ckpt-format --barrier-with-L1-time
    --batch-invariant-mode --batch-p2p-comm --batch-p2p-sync --bert-no-binary-head
    --bias-activation-fusion --bias-dropout-fusion --biencoder-shared-query-context-model
    --broadcast --cache-mla-latents --calc-ft-timeouts --calculate-per-token-loss --chain-of-thought
    --check-for-large-grads --check-for-nan-in-loss --check-for-spiky-loss
    --ckpt-assume-constant-structure --ckpt-convert-update-legacy-dist-opt-format
    --ckpt-drop-redundant-extra-state --ckpt-fully-parallel-load
    --ckpt-fully-parallel-load-per-rank-objects --ckpt-fully-parallel-save
    --ckpt-load-validate-sharding-integrity --ckpt-pg-tensors-cache-create
    --clone-scatter-output-in-embedding --contigious-checkpointing
    --convert-checkpoint-from-megatron-to-transformers --cpu-offloading-activations
    --cpu-offloading-double-buffering --cpu-offloading-retain-pinned-cpu-buffers
    --create-all-gather-group --create-moe-param-group --cuda-graph-retain-backward-graph
    --cuda-graph-use-single-mempool --cut-max-seqlen --cvcuda-image-processing
    --data-parallel-random-init --data-shared-file-system --dataloader-defer-npy-index-mmap
    --dataloader-fast-cache-load --ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw
    --ddp-reduce-scatter-with-fp32-accumulation --deallocate-pipeline-outputs
    --decode-only-cuda-graphs --decrease-batch-size-if-needed --deepscale --deepspeed-mpi
    --delay-offload-until-cuda-graph --delay-param-gather --delay-wgrad-compute --deterministic-mode
    --dino-norm-last-layer --disable-align-grad-reduce
    --disable-async-tensor-model-parallel-allreduce --disable-attention-softmax-in-fp32
    --disable-batch-p2p-comm --disable-batch-p2p-sync --disable-bf16-reduced-precision-matmul
    --disable-check-for-nan-in-loss --disable-chunked-prefill
    --disable-ckpt-load-validate-sharding-integrity --disable-clone-scatter-output-in-embedding
    --disable-cpu-offloading-activations --disable-dsa-indexer-rotate-activation
    --disable-dsa-indexer-scoring-relu --disable-filter-warnings
    --disable-flight-recorder-dump-on-timeout --disable-flight-recorder-extra-dump-on-exec
    --disable-flight-recorder-include-only-active --disable-fp8-wgrad --disable-gloo-process-groups
    --disable-jit-fuser --disable-load-optim --disable-load-rng
    --disable-log-loss-scale-to-tensorboard --disable-mamba-mem-eff-path --disable-manual-gc-eval
    --disable-mem-efficient-ln --disable-moe-top2-2nd-expert-sampling --disable-msc
    --disable-multi-latent-attention --disable-pad-vocab-size --disable-parallel-output
    --disable-parameter-transpose-cache --disable-save-optim --disable-save-rng
    --disable-save-tokenizer-assets --disable-straggler-on-startup
    --disable-strict-fsdp-dtensor-load --disable-symmetric-registration --disable-te-fused-rope
    --disable-tokenizer-sentencepiece-ignore-extra-whitespaces --disable-tp-comm-bulk-dgrad
    --disable-tp-comm-bulk-wgrad --disable-tp-comm-overlap-ag --disable-tp-comm-overlap-rs
    --disable-tp-comm-split-ag --disable-tp-comm-split-rs
    --disable-use-tokenizer-model-from-checkpoint-args --disable-vision-class-token
    --dist-ckpt-optim-fully-reshardable --dist-ckpt-save-pre-mcore-014
    --distrib-optim-fully-reshardable-mem-efficient --distributed-optimizer-no-replica
    --ds-fused-adam --ds-inference --dsa-indexer-k-norm-fp32 --dsa-indexer-rope-interleaved
    --dsa-indexer-rotate-activation --dsa-indexer-scoring-relu --dsa-indexer-use-sparse-loss
    --embedding-weights-in-fp32 --enable-autocast --enable-chunked-prefill --enable-elastic-training
    --enable-experimental --enable-ft-package --enable-gpt-oss --enable-hbmfault-repair
    --enable-hf2mg-convert --enable-high-availability --enable-mg2hf-convert --enable-mla-absorb
    --enable-mla-scale-kv-lora --enable-mla-scale-q-lora --enable-msc --enable-one-logger
    --enable-share-memory --enable-worker-reboot --enable-zbh1-exact-semantics --eod-mask-loss
    --ep-overlap-early-attn-memory-release --eval-dev --eval-fp32 --eval-only
    --exit-on-missing-checkpoint --exit-signal-handler --exit-signal-handler-for-dataloader
    --exit-signal-handler-for-training --export-default-te-spec --export-force-local-attention
    --export-kd-finalize --export-kv-cache-quant --export-legacy-megatron
    --export-moe-apply-probs-on-input --export-offline-model --export-qk-l2-norm
    --export-te-mcore-model --fake-process-group --fill-neg-inf --filter-warnings --fim-data
    --finetune --fix-router --flash-decode --flight-recorder-dump-on-timeout
    --flight-recorder-extra-dump-on-exec --flight-recorder-include-only-active
    --flight-recorder-include-stack-trace --force-ds-sequence-parallel --fp4-param
    --fp8-reuse-quantized-weight --fp8-wgrad --freeze-clip-vision-tower
    --fsdp-db-use-persist-buf-on-alloc-fail --fsdp-manual-registration
    --full-shuffle-instruction-dataset --full-validation --fully-parallel-load --fully-parallel-save
    --fused-residual-rmsnorm --fused-single-qkv-rope --gdp-cutedsl-kernel --gelu-tanh
    --gemm-gradient-accumulation-fusion --gradient-accumulation-fusion --greedy
    --grpo-filter-groups-with-same-reward --gtp-expert-remat-nccl-ub --gtp-remat-nccl-ub
    --gtp-remat-reduce-scatter-with-fp32-accumulation --hetereogenous-dist-checkpoint
    --heterogeneous-block-specs --hf-chat-template --index-share-for-mtp-iteration --inference
    --inference-cuda-graph-all-prefills --inference-disable-triton-nvls-kernels
    --inference-dynamic-batching --inference-dynamic-batching-track-generated-token-events
    --inference-dynamic-batching-track-paused-request-events --inference-fuse-tp-communication
    --inference-moe-disable-fused-quant-kernels --inference-rng-tracker --init-method-xavier-uniform
    --init-model-with-meta-device --init-norm-weight-in-fp32 --inprocess-empty-cuda-cache
    --inprocess-restart --input-jitter --input-layernorm-in-fp32 --is-instruction-dataset
    --is-pairwise-dataset --jit-compile --keep-fp8-transpose-cache
    --keep-fp8-transpose-cache-when-using-custom-fsdp --keep-last --keep-newlines
    --kv-head-repeat-before-uly-alltoall --layernorm-zero-centered-gamma
    --layerwise-disaggregated-training --lazy-mpu-init --legacy-tokenizer --lima-dropout
    --load-checkpoint-loosely --load-main-params-from-ckpt --load-model-opt-format --load-optim
    --load-rng --log-batch-size-to-tensorboard --log-device-memory-used --log-energy
    --log-l2-norm-grad-to-tensorboard --log-loss-scale-to-tensorboard --log-max-attention-logit
    --log-memory-to-tensorboard --log-num-zeros-in-grad --log-optimizer-states-to-tensorboard
    --log-params-norm --log-progress --log-runtime-to-tensorboard --log-straggler --log-throughput
    --log-throughput-to-tensorboard --log-timers-to-tensorboard --log-validation-ppl-to-tensorboard
    --log-world-size-to-tensorboard --logits-load-ignore-errors --lora-ckpt-filter --lora-fusion
    --loss-on-targets-only --manual-gc --manual-gc-eval --masked-softmax-fusion
    --megatron-cp-in-bnsd --megatron-fsdp-enable-fine-grained-param-gather
    --megatron-fsdp-max-pool-double-buffer --memory-efficient-layer-norm --mla-down-proj-fusion
    --mla-fa-divide-qk --mla-fa-without-pad --mla-mm-split --mla-swap-core-attn-out
    --mla-up-proj-tp-overlap --mla-zero-memory --mm-use-im-patch-token --mm-use-im-start-end
    --mmap-warmup --mock-data --modelopt-enabled --moe --moe-apply-probs-on-input
    --moe-enable-deepep --moe-enable-routing-replay --moe-hybridep-pad-uneven-dispatch-inputs
    --moe-input-feature-slicing --moe-ncclep-zero-copy --moe-pad-experts-for-cuda-graph-inference
    --moe-per-layer-logging --moe-permutation-async-comm --moe-permute-fusion
    --moe-permute-fusion-into-hybridep --moe-revert-type-after-topk --moe-router-fusion
    --moe-router-padding-for-fp8 --moe-router-pre-softmax --moe-routing-trace-capture-hidden-states
    --moe-routing-trace-capture-logits --moe-routing-trace-dump-weights --moe-single-grouped-bias
    --moe-single-grouped-weight --moe-token-dropping --moe-use-grouped-tensor --moe-use-upcycling
    --mtp-detach-heads --mtp-hsm --mtp-mem-efficient-logits --mtp-standalone
    --multiple-validation-sets --muon-nesterov --muon-no-split-qkv --muon-split-qkv
    --muon-use-nesterov --muon-use-syrk --nccl-all-reduce-for-prefill --no-align-grad-reduce
    --no-align-param-gather --no-async-tensor-model-parallel-allreduce
    --no-attention-softmax-in-fp32 --no-barrier-with-level-1-timing --no-batch-p2p-comm
    --no-batch-p2p-sync --no-bias-dropout-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-chat-template --no-check-for-nan-in-loss --no-check-for-nan-in-loss-and-grad --no-checking
    --no-ckpt-fully-parallel-save --no-ckpt-load-validate-sharding-integrity
    --no-clone-scatter-output-in-embedding --no-contiguous-buffers-in-local-ddp
    --no-cpu-offloading-activations --no-create-attention-mask-in-dataloader --no-cut-token
    --no-data-sharding --no-delay-grad-reduce --no-dsa-indexer-rotate-activation
    --no-dsa-indexer-scoring-relu --no-enable-linear-qkv --no-filter-warnings
    --no-flight-recorder-dump-on-timeout --no-flight-recorder-extra-dump-on-exec
    --no-flight-recorder-include-only-active --no-gradient-accumulation-fusion
    --no-gradient-reduce-div-fusion --no-initialization --no-load-lr-state --no-load-optim
    --no-load-rng --no-log-learnig-rate-to-tensorboard --no-log-loss-scale-to-tensorboard
    --no-manual-gc-eval --no-masked-softmax-fusion --no-mmap-bin-files --no-multi-latent-attention
    --no-new-tokens --no-one-logger --no-overlap-p2p-communication --no-pad-vocab-size
    --no-persist-layer-norm --no-pin-cpu-grads --no-pin-cpu-params --no-post-layer-norm
    --no-query-key-layer-scaling --no-rope-fusion --no-save-optim --no-save-rng
    --no-save-tokenizer-assets --no-scatter-gather-tensors-in-pipeline --no-shared-storage
    --no-shuffle --no-strict-fsdp-dtensor-load --no-sync-func
    --no-tokenizer-sentencepiece-ignore-extra-whitespaces --no-use-gmm-fp8
    --no-use-layer-wise-param-layout --no-use-sparse-c8-indexer
    --no-use-tokenizer-model-from-checkpoint-args --no-weight-decay-cond-type
    --no-yarn-correction-range-round-to-int --norm-topk-prob --npu-deterministic --nvtx-ranges
    --o2-gradient --one-logger-async --only-convert-last-checkpoint --openai-gelu
    --origin-postprocess --otel-enabled --overlap-cpu-optimizer-d2h-h2d
    --overlap-dispatch-backward-with-experts-wgrad --overlap-p2p-comm
    --overlap-p2p-comm-warmup-flush --overlap-p2p-communication
    --overlap-p2p-communication-warmup-flush --override-lr-scheduler --override-opt-param-scheduler
    --overwrite-cache --pad-vocab-size --padded-samples --perform-initialization
    --persist-layer-norm --position-encoding-2d --profile --profile-backward
    --profile-data-simplification --profile-record-shapes --profile-with-cpu --profile-with-memory
    --profile-with-stack --pytorch-profiler-collect-callstack --pytorch-profiler-collect-chakra
    --pytorch-profiler-collect-shapes --qk-clip --record-memory-history --record-shapes
    --renormalize-blend-weights --repeated-dataloader --replication --reset-iteration
    --retriever-score-scaling --retro-no-verify-neighbor-count --retro-return-doc-ids
    --return-data-index --reuse-grad-buf-for-mxfp8-param-ag
    --reweight-loss-based-on-position-frequency --rl-durable-rollout-bank
    --rl-offload-optimizer-during-inference --rl-profile --rl-use-sequence-packing
    --rmsnorm-weight-in-fp32 --rotary-interleaved --router-gating-in-fp32
    --run-workload-inspector-server --save-layer-by-layer --save-lora-to-hf --save-optim --save-rng
    --save-tokenizer-assets --scattered-embeddings --seq-aux --set-level-for-all-loggers
    --skip-bias-add --split-sentences --square-alibi-mask --streaming --strict-fsdp-dtensor-load
    --swap-layer-input --sync-tp-duplicated-parameters --synchronize-each-layer
    --te-comparison-with-bf16 --te-comparison-with-cpu --te-rng-tracker --test-mode --time
    --tokenizer-hf-include-special-tokens --tokenizer-hf-no-include-special-tokens
    --tokenizer-hf-no-use-fast --tokenizer-hf-use-fast --tokenizer-not-use-fast
    --tokenizer-sentencepiece-ignore-extra-whitespaces --tokenizer-sentencepiece-legacy
    --topk-softmax-in-fp32 --tp-comm-atomic-ag --tp-comm-atomic-rs --tp-comm-bulk-dgrad
    --tp-comm-bulk-wgrad --tp-comm-overlap-ag --tp-comm-overlap-disable-fc1
    --tp-comm-overlap-disable-qkv --tp-comm-overlap-rs --tp-comm-overlap-rs-dgrad --tp-comm-split-ag
    --tp-comm-split-rs --tp-only-amax-red --train-from-scratch --train-on-prompt
    --transformer-timers --trust-remote-code --tune-mm-mlp-adapter --universal-checkpoint
    --use-checkpoint-lr-scheduler --use-checkpoint-opt-param-scheduler
    --use-contiguous-buffers-in-ddp --use-cp-send-recv-overlap --use-cpu-initialization
    --use-deter-comp --use-dist-ckpt --use-distributed-backend --use-fused-lightning-indexer
    --use-fused-lightning-indexer-loss --use-fused-mhc --use-fused-ring-attention-update
    --use-fused-rmsnorm --use-fused-rotary-pos-emb --use-fused-swiglu
    --use-fused-weighted-squared-relu --use-glm-rope --use-global-aux-loss --use-gloo-process-groups
    --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert
    --use-inference-optimized-layers --use-kitchen-attention --use-kv-cache
    --use-legacy-static-engine --use-mamba-mem-eff-path --use-mp-args-from-checkpoint-args --use-mup
    --use-nccl-ub --use-nd-matmul --use-normhead --use-nsys-profiler --use-one-sent-docs
    --use-persistent-ckpt-worker --use-pin-memory --use-pytorch-profiler --use-ring-exchange-p2p
    --use-rope-scaling --use-same-sampling-seed-across-dp-ranks --use-sharp --use-te
    --use-te-activation-func --use-te-rng-tracker --use-thumbnail --use-tiling
    --use-tokenizer-model-from-checkpoint-args --use-torch-optimizer-for-cpu-offload
    --use-tp-pp-dp-mapping --use-transformer-engine-op-fuser --use-triton-gdn --use-triton-mhc
    --use-triton-swiglu-limit --use-wandb --verify-integrity --wandb-logger
    --yarn-correction-range-round-to-int --zero-contigious-gradients --zero-reduce-scatter
    """
)

# With a value.
HARMLESS_VALUES = names_in(
    """
    --DDP-impl --activation-func-clamp-value --adam-beta1 --adam-beta2 --adam-eps --add-eos-token
    --ai-framework --alibi-fusion-attn-type --align-param-gather --app-tag-run-name
    --app-tag-run-version --async-ckpt-cpu-priority --async-ckpt-io-priority --async-sched-mode
    --async-strategy --attention-mask-type --autocast-dtype --batch-invariant-backend
    --bert-embedder-type --bert-model --beta-fast --beta-slow --block-data-path --cache-dir
    --chat-template --check-for-nan-in-loss-and-grad --check-weight-hash-across-dp-replicas-interval
    --ckpt-format --classes-fraction --clip-grad --codecarbon-dir --compress-rope-theta
    --config-logger-dir --cp-attention-mask-type --cp-window-size --cross-entropy-fusion-impl
    --cuda-graph-warmup-steps --data-args-path --data-cache-path --data-dir --data-file-list
    --data-file-list-p --data-file-list-u --data-files --data-folder --data-impl --data-manager-type
    --data-mixture --data-path --data-per-class-fraction --dataloader-save --dataloader-seq-length
    --dataloader-type --dataset --dataset-additional-keys --dataset-config --dataset-dir
    --dataset-impl --datasets --ddp-bucket-size --ddp-num-buckets
    --ddp-param-name-patterns-for-fp32-local-accumulation --decoupled-lr --decoupled-min-lr
    --deepscale-config --delta-offload-bytes-across-pp-ranks --dim-model-base --dino-bottleneck-size
    --dino-freeze-last-layer --dino-head-hidden-size --dino-local-img-size --dino-teacher-temp
    --dino-warmup-teacher-temp --dino-warmup-teacher-temp-epochs --dist-ckpt-format
    --distributed-backend --distributed-timeout-minutes --distributed-timeout-seconds
    --distributed-timeout-seconds-after-init --dpo-beta --dpo-label-smoothing --drop-thinking
    --ds-sequence-parallel-fpdt-chunk-size --dsa-indexer-head-dim --dsa-indexer-k-norm-epsilon
    --dsa-indexer-loss-coeff --dsa-indexer-n-heads --dsa-indexer-skip-topk-offset
    --dsa-indexer-topk-freq --dsa-kernel-backend --dump-param-to-param-group-map --dynamic-factor
    --embedding-init-method --embedding-init-method-std --embedding-multiplier-scale
    --embedding-path --empty-unused-memory-level --enable-a2avc --enable-thinking --end-weight-decay
    --epochs --error-injection-rate --error-injection-type --eval-interval --eval-iters
    --evaluation-batch-size --evidence-data-path --exit-duration-in-mins --exit-interval
    --exit-signal --experimental-attention-variant-loss-scale-func --expert-gtp-weight-remat-size
    --export-kd-cfg --export-kd-teacher-ckpt-format --export-kd-teacher-model-config
    --export-model-type --export-quant-cfg --export-real-quant-cfg --fc-type
    --finalize-model-grads-func --fine-grained-offloading-max-inflight-offloads
    --finetune-data-files --finetune-data-split --finetune-hf-dataset --fix-sub-seq-length
    --flash-attention-version --fp4-quantizer-factory --fp8-amax-compute-algo --fp8-amax-history-len
    --fp8-interval --fp8-margin --fp8-quantizer-factory --ft-num-warmup-iters
    --gdp-num-chunk-states-to-recompute --gdp-num-householder --generation-length
    --glu-linear-offset --gpu-sniff-test-interval --grad-scale-func --grad-sync-func
    --gtp-remat-opt-in-modules --gtp-weight-remat-size --handler-name --hc-eps --hc-sinkhorn-iters
    --head-lr-mult --hf-autotokenizer-model --hf-config --hf-dir --hf-hub-token
    --hidden-size-teacher --high-freq-factor --high-priority-stream-groups --history-turns
    --hysteresis --ict-load --image-aspect-ratio --image-folder --image-tag-type --img-dim
    --index-url --indexer-batch-size --indexer-log-interval --indexer-loss-coeff
    --indexer-qk-quant-scheme --init-method --init-method-std --initial-loss-scale --input-len
    --instruction-template --interleave-probs --iter-per-epoch --iterations-to-skip --json-keys
    --kd-alpha-ce --kd-beta-ce --kd-temp --kill-switch-file --kill-switch-path
    --kitchen-attention-backend --layernorm-epsilon --linear-conv-kernel-dim --lion-beta1
    --lion-beta2 --load --load-dir --load-iters --load-path --load-pretrained-checkpoint --load-tag
    --load-weights --loader --local-rank --log-interval --logging-level --logits-load-decode-threads
    --logits-load-dir --logits-load-kd-loss-alpha --logits-load-msc-prefetch-depth
    --logits-load-prefetch-factor --logits-save-dir --logits-save-dtype --logits-save-top-k
    --logits-save-top-p --logits-save-top-p-min-k --long-factor --long-mscale --longrope-freqs-type
    --lora-alpha --lora-load --lora-modules-to-save --lora-register-forward-hook --loss-compute-mode
    --loss-scale --loss-scale-window --low-freq-factor --lr --lr-decay-iters --lr-decay-samples
    --lr-decay-style --lr-warmup-fraction --lr-warmup-iters --lr-warmup-samples --lr-wsd-decay-iters
    --lr-wsd-decay-style --mamba-chunk-size --mamba-d-conv --mamba-d-ssm
    --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
    --mamba-training-ssm-states-dtype --manual-gc-interval --map-keys --mask-factor --mask-prob
    --mask-type --max-batch-size --max-eval-samples --max-length --max-new-tokens --max-num-tiles
    --max-padding-length --max-queue-size --max-samples --max-tokens-to-oom --mean-noise-span-length
    --megatron-fsdp-version --memory-keys --memory-snapshot-path --merge-file --merge-group-keys
    --metadata-path --metrics --mg-save-dir --mhc-init-gating-factor --mhc-num-residual-streams
    --mhc-recompute-layer-num --mhc-sinkhorn-iterations --mid-level-dataset-surplus --min-loss-scale
    --min-lr --min-offloaded-tensor-size --min-scale --mix-strategy --mlp-chunks-for-prefill
    --mlp-chunks-for-training --mm-vision-select-layer --moba-calc-method --moba-chunk-size
    --moba-topk --model-type --model-type-hf --modules-to-filter --moe-combine-bwd-dtype
    --moe-comm-aux-loss-coeff --moe-deepep-num-sms --moe-device-level-aux-loss-coeff
    --moe-dispatch-fwd-dtype --moe-eval-capacity-factor --moe-expert-rank-capacity-factor
    --moe-flex-dispatcher-backend --moe-flex-dispatcher-num-sms --moe-grad-scale-func
    --moe-hybridep-num-blocks-permute --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms
    --moe-hybridep-num-sms-preprocessing --moe-input-jitter-eps --moe-loss-coeff --moe-min-capacity
    --moe-mlp-glu-interleave-size --moe-paged-stash-buffer-size-factor-cpu
    --moe-paged-stash-buffer-size-factor-cuda --moe-paged-stash-page-size
    --moe-router-bias-update-rate --moe-router-dtype --moe-router-force-biased
    --moe-router-group-topk --moe-router-num-groups --moe-router-padding-for-quantization
    --moe-router-quantile-balancing-ema --moe-router-score-function
    --moe-router-topk-limited-devices --moe-router-topk-scaling-factor
    --moe-routing-trace-max-training-iters --moe-routing-trace-path
    --moe-shared-expert-glu-interleave-size --moe-token-drop-policy --moe-upcycling-granularity
    --moe-z-loss-coeff --most-recent-k --mrope-section --mscale --mscale-all-dim
    --mtp-grad-scale-func --mtp-loss-scaling-factor --muon-coefficient-type
    --muon-extra-scale-factor --muon-fp32-matmul-prec --muon-momentum --muon-ns-steps
    --muon-num-ns-steps --muon-scalar-optimizer --muon-scale-mode --muon-tp-mode --n-group --n-subs
    --nccl-communicator-config-path --next-tockens --noise-density --norm-epsilon
    --null-tokenizer-eod-id --null-tokenizer-pad-id --num-attention-heads-teacher --num-classes
    --num-dataset-builder-threads --num-experts-teacher --num-fewshot --num-frames
    --num-layers-at-end-in-bf16 --num-layers-at-start-in-bf16 --num-speculative-tokens --num-workers
    --o-groups --online-evaluation-config --onnx-safe --optimizer-offload-auto-threshold
    --optimizer-offload-chunk-size --original-max-position-embeddings --original-seq-len
    --out-seq-length --output-layer-init-method --output-layer-slice-num --output-logit-dtype
    --output-logit-softcapping --output-multiplier-scale --output-prefix --override-ckpt-iteration
    --override-opt_param-scheduler --pad-to-multiple-of --padded-base-length --param-sync-func
    --params-dtype --patch-size --per-dataset-sequences-path --per-split-data-args-path
    --persistent-save-interval --phase-transition-iterations --pipeline-dtype
    --pipeline-model-parallel-comm-backend --pre-tockens --pretrained-checkpoint --profile-ranks
    --profile-step-end --profile-step-start --prompt-path --prompt-type --prompt-type-path
    --qad-train-target --qat-quant-block-size --qat-scheme --qk-clip-alpha --qk-clip-threshold
    --quant-recipe --query-in-block-prob --query-pre-attn-scalar --qwen-version --rank
    --reasoning-effort --ref-model --refer-model-iter --refit-method
    --relative-attention-max-distance --relative-attention-num-buckets --repetition-penalty
    --replication-factor --replication-jump --result-rejected-tracker-filename
    --retriever-report-topk-accuracies --retriever-seq-length --reward-tokens --rope-factor
    --rope-scaling-factor --rope-type --rotary-scale-factor --rotary-scaling-factor
    --rotary-seq-len-interpolation-factor --routed-scaling-factor --router-type --runtime-time-unit
    --s3-cache-path --sample-rate --save --save-interval --saver --scalar-loss-mask --scale-depth
    --scale-emb --scale-fmt --script-data-dir --seed --seq1f1b-balance-method --seq1f1b-splits
    --sft-tokenizer-prompt-format --sgd-momentum --shape-order --shared-expert-gate-output-dimension
    --sharp-enabled-group --short-factor --short-mscale --short-seq-prob --skip-iters
    --skip-train-iteration-range --softmax-scale --source-seq-len --sparse-mode --spatial-merge-size
    --special-tokens --split --start-eval-at-iter --start-weight-decay
    --suggested-communication-unit-size --swiglu-limit --swin-backbone-type --symmetric-ar-type
    --target-expert-parallel-size --target-pipeline-parallel-size --target-seq-len
    --target-tensor-parallel-size --task --task-data-path --task-list --te-gmm-mode
    --teacher-model-config --temperature --temporal-patch-size --tensorboard-dir
    --tensorboard-log-interval --tensorboard-queue-size --test-data-path --test-weighted-split-paths
    --test-weighted-split-paths-path --throughput-window-size --tile-factor --timers
    --timing-log-level --timing-log-option --titles-data-path --top-k --top-p --topk-group
    --tp-comm-bootstrap-backend --tp-comm-overlap-cfg --train-data --train-data-exact-num-epochs
    --train-data-path --train-desc-path --train-doc-idx-path --train-file --train-idx-path
    --train-iters --train-iters-to-skip --train-range-to-skip --train-sample-idx-path
    --train-samples --train-shuffle-idx-path --train-steps --train-sync-interval --train-tokens
    --train-weighted-split-paths --train-weighted-split-paths-path --transformer-type
    --use-dataset-only --use-gigatoken --valid-data --valid-data-path --valid-num-workers
    --valid-weighted-split-paths --valid-weighted-split-paths-path --validation-set-names
    --verbosity --version --vocab-extra-ids-list --wandb-exp-name --wandb-project --wandb-save-dir
    --warmup --wd-incr-steps --weight-decay --weight-decay-incr-style --wgrad-deferral-limit
    --workers --wsd-decay-steps --z-loss-weight --zero-allgather-bucket-size
    --zero-reduce-bucket-size
    """
)
HARMLESS = HARMLESS_SWITCHES | HARMLESS_VALUES
