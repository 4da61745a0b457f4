"""Megatron-LM's options, as far as launch lines give them: which tell of cost, which do not.

Names are those of Megatron-LM at core 0.16, and older ones that it still takes.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from mistlab.export.found import checked_whole
from mistlab.export.words import names_in
from mistlab.values.errors import InputError, near_matches

# Older names, and what stands for them now.
RENAMED: Mapping[str, str] = {
    "--model-parallel-size": "--tensor-model-parallel-size",
    "--batch-size": "--micro-batch-size",
    "--checkpoint-activations": "--recompute-activations-of-all-blocks",
    "--use-custom-fsdp": "--use-megatron-fsdp",
    "--data-parallel-sharding": "--data-parallel-sharding-strategy",
}

# Options that change what a step costs, or what a plan is; each is read by ``megatron_read``.
TELLING = names_in(
    """
    --tensor-model-parallel-size --pipeline-model-parallel-size --context-parallel-size
    --cp-comm-type
    --sequence-parallel --qk-layernorm
    --pipeline-model-parallel-layout --decoder-first-pipeline-num-layers
    --decoder-last-pipeline-num-layers --num-layers-per-virtual-pipeline-stage
    --num-virtual-stages-per-pipeline-rank --micro-batch-size --global-batch-size
    --use-distributed-optimizer --use-megatron-fsdp --data-parallel-sharding-strategy
    --overlap-grad-reduce --overlap-param-gather --recompute-granularity --recompute-method
    --recompute-num-layers --recompute-modules --recompute-activations
    --recompute-activations-of-all-blocks --optimizer-cpu-offload --optimizer-offload-fraction
    --cpu-offloading-num-layers --bf16 --fp16 --attention-backend --use-flash-attn
    --num-layers --hidden-size --ffn-hidden-size --num-attention-heads --kv-channels
    --group-query-attention --num-query-groups --seq-length --max-position-embeddings
    --vocab-size --make-vocab-size-divisible-by --normalization --swiglu
    --position-embedding-type --use-rotary-position-embeddings --rotary-percent --rotary-base
    --untie-embeddings-and-output-weights --disable-bias-linear --attention-dropout
    --hidden-dropout --world-size --quick-geglu
    --num-experts --moe-router-topk --moe-ffn-hidden-size --moe-shared-expert-intermediate-size
    --moe-latent-size --moe-layer-freq --expert-model-parallel-size --expert-tensor-parallel-size
    --moe-grouped-gemm --moe-token-dispatcher-type --moe-expert-capacity-factor
    --moe-pad-expert-input-to-capacity --multi-latent-attention --q-lora-rank --kv-lora-rank
    --qk-head-dim --qk-pos-emb-head-dim --v-head-dim --window-size --window-attn-skip-freq
    --softmax-type --mtp-num-layers --fp8-format --fp8-recipe --fp4-format --fp4-recipe
    --use-precision-aware-optimizer --exp-avg-dtype --exp-avg-sq-dtype
    --moe-router-load-balancing-type --moe-aux-loss-coeff --moe-router-enable-expert-bias
    --moe-router-force-load-balancing
    """
)

# Options that change cost in ways that plans cannot say, and what a prediction takes instead.
UNSAID: Mapping[str, str] = {
    "--moe-layer-recompute": "experts are taken as kept, not recomputed",
    "--moe-shared-expert-overlap": "shared experts are taken as run before the exchange",
    "--moe-shared-expert-gate": "shared experts are taken without a gate",
    "--overlap-moe-expert-parallel-comm": "exchanges of tokens are taken as waited for",
    "--moe-use-legacy-grouped-gemm": "experts are taken as Transformer Engine's grouped products",
    "--attention-output-gate": "attention is taken without a gate",
    "--no-rope-freq": "all blocks are taken with rotary embedding",
    "--fp8-param-gather": "weights are taken in 16 bits",
    "--fp4-param-gather": "weights are taken in 16 bits",
    "--first-last-layers-bf16": "the first and last blocks are taken in 8 bits too",
    "--no-fp8-wgrad": "gradients of weights are taken as products of 8 bits too",
    "--add-qkv-bias": "queries, keys and values are taken without biases of their own",
    "--squared-relu": "the activation is taken as GELU",
    "--grad-reduce-in-bf16": "gradients are taken in the engine's own width",
    "--accumulate-allreduce-grads-in-fp32": "gradients are taken in the engine's own width",
    "--main-grads-dtype": "gradients are taken in the engine's own width",
    "--main-params-dtype": "master weights are taken in 32 bits",
    "--fine-grained-activation-offloading": "activations are taken to stay on the GPU",
    "--offload-modules": "activations are taken to stay on the GPU",
    "--cpu-offloading-weights": "weights are taken to stay on the GPU",
    "--tp-comm-overlap": "tensor communication is taken as the engine overlaps it",
    "--rampup-batch-size": "the batch is taken at its full size",
    "--defer-embedding-wgrad-compute": "the embedding's gradient is taken in its own pass",
    "--apply-residual-connection-post-layernorm": "residuals are taken before the norm",
    "--account-for-embedding-in-pipeline-split": "stages are taken with equal blocks",
    "--account-for-loss-in-pipeline-split": "stages are taken with equal blocks",
    "--enable-cuda-graph": "kernels are taken as launched one by one",
    "--cuda-graph-impl": "kernels are taken as launched one by one",
    "--distribute-saved-activations": "kept inputs are taken whole on every rank",
    "--reset-position-ids": "sequences are taken as whole",
    "--reset-attention-mask": "sequences are taken as whole",
}

# Options without effect on the cost of a step that a plan could tell.
HARMLESS = names_in(
    """
    --lr --min-lr --lr-decay-style --lr-decay-iters --lr-decay-samples --lr-warmup-iters
    --lr-warmup-fraction --lr-warmup-samples --lr-wsd-decay-style --lr-wsd-decay-iters
    --weight-decay --clip-grad --adam-beta1 --adam-beta2 --adam-eps --optimizer --train-iters
    --train-samples --eval-iters --eval-interval --log-interval --save-interval --save --load
    --data-path --train-data-path --valid-data-path --test-data-path --data-cache-path --split
    --mock-data --dataloader-type --num-workers --no-create-attention-mask-in-dataloader
    --no-mmap-bin-files --tokenizer-type --tokenizer-model --vocab-file --merge-file
    --seed --init-method-std --init-method-xavier-uniform --tensorboard-dir
    --tensorboard-log-interval --tensorboard-queue-size --log-throughput --log-progress
    --log-params-norm --log-num-zeros-in-grad --log-timers-to-tensorboard
    --log-validation-ppl-to-tensorboard --log-memory-to-tensorboard --log-world-size-to-tensorboard
    --timing-log-level --timing-log-option --wandb-project --wandb-exp-name --wandb-save-dir
    --profile --profile-step-start --profile-step-end --profile-ranks --use-pytorch-profiler
    --distributed-backend --distributed-timeout-minutes --loss-scale --initial-loss-scale
    --min-loss-scale --loss-scale-window --hysteresis --no-load-optim --no-load-rng --no-save-optim
    --no-save-rng --finetune --ckpt-format --dist-ckpt-format --async-save --use-dist-ckpt
    --use-checkpoint-args --exit-on-missing-checkpoint --exit-interval --exit-duration-in-mins
    --exit-signal-handler --attention-softmax-in-fp32 --norm-epsilon --layernorm-epsilon
    --use-mcore-models --use-legacy-models --transformer-impl --no-gradient-accumulation-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion --no-rope-fusion --no-persist-layer-norm --cross-entropy-loss-fusion
    --cross-entropy-fusion-impl --manual-gc --manual-gc-interval
    --no-async-tensor-model-parallel-allreduce
    --use-torch-optimizer-for-cpu-offload
    --overlap-cpu-optimizer-d2h-h2d --no-pin-cpu-grads --no-pin-cpu-params --ddp-bucket-size
    --ddp-average-in-collective --check-for-nan-in-loss-and-grad --no-check-for-nan-in-loss-and-grad
    --deterministic-mode --eod-mask-loss --use-cpu-initialization --local-rank --rank
    --moe-permute-fusion
    --moe-router-dtype --moe-router-score-function --moe-z-loss-coeff --moe-router-pre-softmax
    --moe-router-topk-scaling-factor --moe-router-num-groups --moe-router-group-topk
    --moe-router-bias-update-rate --moe-router-fusion --moe-router-padding-for-quantization
    --moe-router-padding-for-fp8 --moe-token-drop-policy --moe-per-layer-logging
    --moe-apply-probs-on-input --moe-flex-dispatcher-backend --moe-enable-deepep
    --moe-deepep-num-sms --moe-hybridep-num-sms --moe-use-upcycling --moe-input-jitter-eps
    --rope-type --rotary-scaling-factor --mscale --mscale-all-dim --mtp-loss-scaling-factor
    --no-position-embedding --enable-experimental --fp8-interval --num-layers-at-start-in-bf16
    --num-layers-at-end-in-bf16
    --fp8-margin --fp8-amax-history-len
    --fp8-amax-compute-algo --fp8-param-gather --no-initialization --weight-decay-incr-style
    --start-weight-decay --end-weight-decay --override-opt_param-scheduler --use-rope-scaling
    --rope-scaling-factor --rotary-interleaved --rotary-seq-len-interpolation-factor
    --delay-wgrad-compute --overlap-p2p-communication --no-overlap-p2p-communication
    --align-param-gather --no-align-grad-reduce --distributed-timeout-seconds
    --no-query-key-layer-scaling --apply-query-key-layer-scaling --decrease-batch-size-if-needed
    """
)


@dataclass(slots=True, kw_only=True)
class Options:
    """The options of a launch line by name, each with its words; the last of several counts.

    ``taken`` grows with every option that is asked for.
    """

    words: Mapping[str, Sequence[str]]
    repeated: Mapping[str, Sequence[str]]
    taken: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, arguments: Sequence[str]) -> "Options":
        """Options of the words of a launch line."""
        words: dict[str, list[str]] = {}
        repeated: dict[str, list[str]] = {}
        name = ""
        for argument in arguments:
            if argument.startswith("--") and len(argument) > 2:
                name, _, value = argument.partition("=")
                name = RENAMED.get(name, name.replace("_", "-"))
                if name in words:
                    repeated.setdefault(name, []).append(" ".join(words[name]) or "on")
                words[name] = [value] if value else []
            elif name:
                words[name].append(argument)
        return cls(words=words, repeated=repeated)

    def has(self, name: str) -> bool:
        """Whether a switch is on."""
        self.taken.add(name)
        return name in self.words

    def text(self, name: str) -> str | None:
        """The first word of an option, if it is given."""
        self.taken.add(name)
        if name not in self.words:
            return None
        if not self.words[name]:
            message = f"{name}: its value is missing: give one"
            raise InputError(message)
        return self.words[name][0]

    def whole(self, name: str, *, minimum: int = 1) -> int | None:
        """A whole number, if the option is given."""
        text = self.text(name)
        return None if text is None else checked_whole(name, text, minimum=minimum)

    def number(self, name: str, default: float, *, maximum: float | None = None) -> float:
        """A number that is not negative, or a default."""
        text = self.text(name)
        try:
            number = default if text is None else float(text)
        except ValueError:
            message = f"{name}: {text!r} is not a number: give one"
            raise InputError(message) from None
        if not 0 <= number <= (float("inf") if maximum is None else maximum):
            top = "" if maximum is None else f" to {maximum:g}"
            message = f"{name}: {number:g} is out of range: give one from 0{top}"
            raise InputError(message)
        return number

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """One of some words, if the option is given."""
        text = self.text(name)
        if text is not None and text not in known:
            message = f"{name}: {text!r} is unknown{near_matches(text, known)}"
            raise InputError(message)
        return text

    @property
    def harmless(self) -> list[str]:
        """Options that say nothing about cost."""
        return [name for name in self.words if name in HARMLESS]

    @property
    def unknown(self) -> list[str]:
        """Options that Megatron-LM does not have, as far as is known here."""
        known = HARMLESS | TELLING | UNSAID.keys()
        return [name for name in self.words if name not in known]
