"""Options of Megatron-LM and its relatives that say nothing of what a step costs.

They name data, learning rates, logs, checkpoints, inference, or choices of kernels that plans do
not have. ``mistlab.export.megatron_tables.telling`` names the sources.
"""

from mistlab.export.words import names_in

# Beginnings of names: every option that begins so, and stands in no other table.
FAMILIES = tuple(
    sorted(
        names_in(
            """
            --inference- --rl- --grpo- --langrl- --wandb- --tensorboard- --log- --profile- --ckpt-
            --dist-ckpt- --fim- --inprocess- --fault-injector- --logits- --one-logger-
            --flight-recorder- --straggler- --otel- --ft- --save- --load- --lr- --muon- --async-
            --non-persistent- --adlr- --object-storage- --text-generate- --eval- --adam- --export-
            --hf- --retro- --dino- --dsa- --index- --mup- --tiktoken- --tokenizer- --bert-
            --train- --retriever- --sft- --lu-lora- --kd- --megatron-fsdp- --mhc- --zero-
            --moe-router- --moe-routing- --rope-scaling- --yarn- --fp8- --tp-comm- --no-tp-comm-
            --disable-tp-comm- --weight-decay --aml- --rerun- --data-
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
    --data-parallel-random-init --dataloader-defer-npy-index-mmap --dataloader-fast-cache-load
    --ddp-average-in-collective --ddp-pad-buckets-for-high-nccl-busbw
    --ddp-reduce-scatter-with-fp32-accumulation --deallocate-pipeline-outputs
    --decode-only-cuda-graphs --decrease-batch-size-if-needed --deepscale --deepspeed-mpi
    --delay-offload-until-cuda-graph --delay-param-gather --delay-wgrad-compute --deterministic-mode
    --dino-norm-last-layer --disable-align-grad-reduce
    --disable-async-tensor-model-parallel-allreduce --disable-attention-softmax-in-fp32
    --disable-batch-p2p-comm --disable-batch-p2p-sync --disable-bf16-reduced-precision-matmul
      --disable-check-for-nan-in-loss
    --disable-chunked-prefill --disable-ckpt-load-validate-sharding-integrity
    --disable-clone-scatter-output-in-embedding --disable-cpu-offloading-activations
    --disable-dsa-indexer-rotate-activation --disable-dsa-indexer-scoring-relu
    --disable-filter-warnings --disable-flight-recorder-dump-on-timeout
    --disable-flight-recorder-extra-dump-on-exec --disable-flight-recorder-include-only-active
    --disable-fp8-wgrad --disable-gloo-process-groups --disable-jit-fuser --disable-load-optim
    --disable-load-rng --disable-log-loss-scale-to-tensorboard --disable-mamba-mem-eff-path
    --disable-manual-gc-eval --disable-mem-efficient-ln --disable-moe-top2-2nd-expert-sampling
    --disable-msc --disable-multi-latent-attention --disable-pad-vocab-size
    --disable-parallel-output --disable-parameter-transpose-cache --disable-save-optim
    --disable-save-rng --disable-save-tokenizer-assets --disable-straggler-on-startup
    --disable-strict-fsdp-dtensor-load --disable-symmetric-registration --disable-te-fused-rope
    --disable-tokenizer-sentencepiece-ignore-extra-whitespaces
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
    --multiple-validation-sets --muon-nesterov --muon-no-split-qkv --muon-use-nesterov
    --muon-use-syrk --nccl-all-reduce-for-prefill --no-align-grad-reduce --no-align-param-gather
    --no-async-tensor-model-parallel-allreduce --no-attention-softmax-in-fp32
    --no-barrier-with-level-1-timing --no-batch-p2p-comm --no-batch-p2p-sync
    --no-bias-dropout-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion --no-chat-template
    --no-check-for-nan-in-loss --no-check-for-nan-in-loss-and-grad --no-checking
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
    --tp-comm-split-rs --tp-only-amax-red --transformer-timers --trust-remote-code
    --tune-mm-mlp-adapter --universal-checkpoint --use-checkpoint-lr-scheduler
    --use-checkpoint-opt-param-scheduler --use-contiguous-buffers-in-ddp --use-cp-send-recv-overlap
    --use-cpu-initialization --use-deter-comp --use-dist-ckpt --use-distributed-backend
    --use-fused-lightning-indexer --use-fused-lightning-indexer-loss --use-fused-mhc
    --use-fused-ring-attention-update --use-fused-rmsnorm --use-fused-rotary-pos-emb
    --use-fused-swiglu --use-fused-weighted-squared-relu --use-glm-rope --use-global-aux-loss
    --use-gloo-process-groups --use-grouped-gemm-for-dense-mlp --use-grouped-gemm-for-shared-expert
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
    --DDP-impl --activation-func-clamp-value --add-eos-token --ai-framework --alibi-fusion-attn-type
    --align-param-gather --app-tag-run-name --app-tag-run-version --attention-mask-type
    --autocast-dtype --batch-invariant-backend --beta-fast --beta-slow --block-data-path --cache-dir
    --chat-template --check-for-nan-in-loss-and-grad --check-weight-hash-across-dp-replicas-interval
    --classes-fraction --clip-grad --codecarbon-dir --compress-rope-theta --config-logger-dir
    --cp-attention-mask-type --cp-window-size --cross-entropy-fusion-impl --cuda-graph-warmup-steps
    --dataloader-save --dataloader-seq-length --dataloader-type --dataset --dataset-additional-keys
    --dataset-config --dataset-dir --dataset-impl --datasets --ddp-bucket-size --ddp-num-buckets
    --ddp-param-name-patterns-for-fp32-local-accumulation --decoupled-lr --decoupled-min-lr
    --deepscale-config --delta-offload-bytes-across-pp-ranks --dim-model-base --distributed-backend
    --distributed-timeout-minutes --distributed-timeout-seconds
    --distributed-timeout-seconds-after-init --dpo-beta --dpo-label-smoothing --drop-thinking
    --ds-sequence-parallel-fpdt-chunk-size --dump-param-to-param-group-map --dynamic-factor
    --embedding-init-method --embedding-init-method-std --embedding-multiplier-scale
    --embedding-path --empty-unused-memory-level --enable-a2avc --enable-thinking --end-weight-decay
    --epochs --error-injection-rate --error-injection-type --evaluation-batch-size
    --evidence-data-path --exit-duration-in-mins --exit-interval --exit-signal
    --experimental-attention-variant-loss-scale-func --expert-gtp-weight-remat-size --fc-type
    --finalize-model-grads-func --fine-grained-offloading-max-inflight-offloads
    --finetune-data-files --finetune-data-split --finetune-hf-dataset --fix-sub-seq-length
    --flash-attention-version --fp4-quantizer-factory --gdp-num-chunk-states-to-recompute
    --gdp-num-householder --generation-length --glu-linear-offset --gpu-sniff-test-interval
    --grad-scale-func --grad-sync-func --gtp-remat-opt-in-modules --gtp-weight-remat-size
    --handler-name --hc-eps --hc-sinkhorn-iters --head-lr-mult --hidden-size-teacher
    --high-freq-factor --high-priority-stream-groups --history-turns --hysteresis --ict-load
    --image-aspect-ratio --image-folder --image-tag-type --img-dim --indexer-batch-size
    --indexer-log-interval --indexer-loss-coeff --indexer-qk-quant-scheme --init-method
    --init-method-std --initial-loss-scale --input-len --instruction-template --interleave-probs
    --iter-per-epoch --iterations-to-skip --json-keys --kill-switch-file --kill-switch-path
    --kitchen-attention-backend --layernorm-epsilon --linear-conv-kernel-dim --lion-beta1
    --lion-beta2 --load --loader --local-rank --logging-level --long-factor --long-mscale
    --longrope-freqs-type --lora-alpha --lora-load --lora-modules-to-save
    --lora-register-forward-hook --loss-compute-mode --loss-scale --loss-scale-window
    --low-freq-factor --lr --mamba-chunk-size --mamba-d-conv --mamba-d-ssm
    --mamba-inference-conv-states-dtype --mamba-inference-ssm-states-dtype
    --mamba-training-ssm-states-dtype --manual-gc-interval --map-keys --mask-factor --mask-prob
    --mask-type --max-batch-size --max-eval-samples --max-length --max-new-tokens --max-num-tiles
    --max-padding-length --max-queue-size --max-samples --max-tokens-to-oom --mean-noise-span-length
    --memory-keys --memory-snapshot-path --merge-file --merge-group-keys --metadata-path --metrics
    --mg-save-dir --mid-level-dataset-surplus --min-loss-scale --min-lr --min-offloaded-tensor-size
    --min-scale --mix-strategy --mlp-chunks-for-prefill --mlp-chunks-for-training
    --mm-vision-select-layer --moba-calc-method --moba-chunk-size --moba-topk --model-type
    --model-type-hf --modules-to-filter --moe-combine-bwd-dtype --moe-comm-aux-loss-coeff
    --moe-deepep-num-sms --moe-device-level-aux-loss-coeff --moe-dispatch-fwd-dtype
    --moe-eval-capacity-factor --moe-expert-rank-capacity-factor --moe-flex-dispatcher-backend
    --moe-flex-dispatcher-num-sms --moe-grad-scale-func --moe-hybridep-num-blocks-permute
    --moe-hybridep-num-blocks-unpermute --moe-hybridep-num-sms --moe-hybridep-num-sms-preprocessing
    --moe-input-jitter-eps --moe-loss-coeff --moe-min-capacity --moe-mlp-glu-interleave-size
    --moe-paged-stash-buffer-size-factor-cpu --moe-paged-stash-buffer-size-factor-cuda
    --moe-paged-stash-page-size --moe-shared-expert-glu-interleave-size --moe-token-drop-policy
    --moe-upcycling-granularity --moe-z-loss-coeff --most-recent-k --mrope-section --mscale
    --mscale-all-dim --mtp-grad-scale-func --mtp-loss-scaling-factor --n-group --n-subs
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
    --pipeline-model-parallel-comm-backend --pre-tockens --pretrained-checkpoint --prompt-path
    --prompt-type --prompt-type-path --qad-train-target --qat-quant-block-size --qat-scheme
    --qk-clip-alpha --qk-clip-threshold --quant-recipe --query-in-block-prob --query-pre-attn-scalar
    --qwen-version --rank --reasoning-effort --ref-model --refer-model-iter --refit-method
    --relative-attention-max-distance --relative-attention-num-buckets --repetition-penalty
    --replication-factor --replication-jump --result-rejected-tracker-filename --reward-tokens
    --rope-factor --rope-type --rotary-scale-factor --rotary-scaling-factor
    --rotary-seq-len-interpolation-factor --routed-scaling-factor --router-type --runtime-time-unit
    --s3-cache-path --sample-rate --save --saver --scalar-loss-mask --scale-depth --scale-emb
    --scale-fmt --script-data-dir --seed --seq1f1b-balance-method --seq1f1b-splits --sgd-momentum
    --shape-order --shared-expert-gate-output-dimension --sharp-enabled-group --short-factor
    --short-mscale --short-seq-prob --skip-iters --skip-train-iteration-range --softmax-scale
    --source-seq-len --sparse-mode --spatial-merge-size --special-tokens --split --stage
    --start-eval-at-iter --start-weight-decay --suggested-communication-unit-size --swiglu-limit
    --swin-backbone-type --symmetric-ar-type --target-expert-parallel-size
    --target-pipeline-parallel-size --target-seq-len --target-tensor-parallel-size --task
    --task-data-path --task-list --te-gmm-mode --teacher-model-config --temperature
    --temporal-patch-size --test-data-path --test-weighted-split-paths
    --test-weighted-split-paths-path --throughput-window-size --tile-factor --timers
    --timing-log-level --timing-log-option --titles-data-path --top-k --top-p --topk-group
    --transformer-type --use-dataset-only --use-gigatoken --valid-data --valid-data-path
    --valid-num-workers --valid-weighted-split-paths --valid-weighted-split-paths-path
    --validation-set-names --verbosity --version --vocab-extra-ids-list --warmup --wd-incr-steps
    --wgrad-deferral-limit --workers --wsd-decay-steps --z-loss-weight
    """
)
HARMLESS = HARMLESS_SWITCHES | HARMLESS_VALUES
