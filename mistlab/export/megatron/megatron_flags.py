"""Parses the options of Megatron-LM on a launch line, and lists the options that plans cannot
express.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from mistlab.core.values import near_matches, reject
from mistlab.export.found import checked_whole
from mistlab.export.given import ask_for_variable
from mistlab.export.megatron.option_tables import (
    FAMILIES,
    HARMLESS,
    HARMLESS_SWITCHES,
    MANY,
    RENAMED,
    SWITCHES,
    TELLING,
)
from mistlab.shell.shell_text import Unknown, Word

_WIDE_GRADIENTS = "gradients are predicted in the engine's default precision"
_SIXTEEN_BITS = "weights are predicted in 16 bits"
_ON_GPU = "activations are predicted to stay on the GPU"
_WHOLE_SEQUENCES = "sequences are predicted as unpacked, at full length"
_ONE_BY_ONE = "kernels are predicted as launched one by one"
_EQUAL_BLOCKS = "stages are predicted with equally many blocks"
_ALL_KEYS = "attention is predicted over the whole sequence"
_RESIDUALS = "residuals are predicted to branch off before the norm (pre-norm)"
_KEPT_WHOLE = "every rank is predicted to keep whole inputs of recomputed blocks"
_BF16_PRODUCTS = "attention's GEMMs are predicted in 16 bits"
_NO_OVERLAP = "communication is predicted as the engine overlaps it by default"

# Megatron-LM's options that plans cannot express, each with what the prediction assumes instead.
UNSAID: Mapping[str, str] = {
    "--moe-layer-recompute": "experts are predicted as kept, not recomputed",
    "--moe-shared-expert-overlap": "shared experts are predicted to run before the all-to-all",
    "--moe-shared-expert-gate": "shared experts are predicted without a gate",
    "--shared-expert-gate": "shared experts are predicted without a gate",
    "--overlap-moe-expert-parallel-comm": "the all-to-all of tokens is predicted as exposed",
    "--moe-fb-overlap": "the all-to-all of tokens is predicted as exposed",
    "--moe-alltoall-overlap-comm": "the all-to-all of tokens is predicted as exposed",
    "--moe-use-legacy-grouped-gemm": "experts are predicted as Transformer Engine's grouped GEMMs",
    "--moe-paged-stash": _ON_GPU,
    "--use-tutel": "experts are predicted with the engine's own kernels",
    "--num-zero-experts": "all experts are predicted to compute",
    "--no-rope-freq": "all blocks are predicted with rotary embedding",
    "--fp8-param-gather": _SIXTEEN_BITS,
    "--fp4-param-gather": _SIXTEEN_BITS,
    "--fp8-param": _SIXTEEN_BITS,
    "--first-last-layers-bf16": "the first and last blocks are predicted in 8 bits too",
    "--no-fp8-wgrad": "GEMMs of weight gradients are predicted in 8 bits too",
    "--fp8-dot-product-attention": _BF16_PRODUCTS,
    "--fp8-multi-head-attention": _BF16_PRODUCTS,
    "--fp8-output-proj": "the output head's GEMM is predicted in 16 bits",
    "--use-kitchen": "GEMMs are predicted as Transformer Engine's",
    "--kitchen-config-file": "GEMMs are predicted as Transformer Engine's",
    "--kitchen-recipe-number": "GEMMs are predicted as Transformer Engine's",
    "--te-precision-config-file": "GEMMs are predicted in one precision in all layers",
    "--add-qkv-bias": "queries, keys and values are predicted without biases",
    "--add-dense-bias": "linear layers are predicted without biases",
    "--main-grads-dtype": _WIDE_GRADIENTS,
    "--fp32-allreduce": _WIDE_GRADIENTS,
    "--megatron-fsdp-main-grads-dtype": _WIDE_GRADIENTS,
    "--megatron-fsdp-grad-comm-dtype": _WIDE_GRADIENTS,
    "--main-params-dtype": "master weights are predicted in 32 bits",
    "--megatron-fsdp-main-params-dtype": "master weights are predicted in 32 bits",
    "--reuse-fp32-param": "weights are predicted as kept beside 32-bit master weights",
    "--o2-optimizer": "master weights are predicted in 32 bits",
    "--quant-states": "moments are predicted in 32 bits",
    "--quant-grads": _WIDE_GRADIENTS,
    "--use-bnb-optimizer": "moments are predicted in 32 bits",
    "--outer-dp-sharding-strategy": "states are predicted whole in every replica",
    "--enable-full-sharding-in-hsdp": "states are predicted whole in every replica",
    "--fsdp-double-buffer": "gathered weights are predicted in one buffer",
    "--fine-grained-activation-offloading": _ON_GPU,
    "--offload-modules": _ON_GPU,
    "--activation-offload-fraction": _ON_GPU,
    "--swap-attention": _ON_GPU,
    "--swap-optimizer": "optimizer state is predicted to stay on the GPU",
    "--cpu-offloading-weights": "weights are predicted to stay on the GPU",
    "--recompute-activation-function": "their outputs are predicted as kept",
    "--recompute-norm": "their outputs are predicted as kept",
    "--recompute-mla-up-proj": "their outputs are predicted as kept",
    "--enable-recompute-layers-per-pp-rank": "recomputed blocks are predicted as counted per stage",
    "--recompute-in-advance": "recomputation is predicted to come with the backward pass",
    "--tp-comm-overlap": "tensor communication is predicted as the engine overlaps it by default",
    "--use-ascend-mc2": "tensor communication is predicted as the engine overlaps it by default",
    "--use-ascend-coc": "tensor communication is predicted as the engine overlaps it by default",
    "--rampup-batch-size": "the batch is predicted at its full size",
    "--step-batch-size-schedule": "the batch is predicted at its full size",
    "--defer-embedding-wgrad-compute": "the embedding's gradient is predicted as not deferred",
    "--overlap-param-gather-with-optimizer-step": _NO_OVERLAP,
    "--apply-residual-connection-post-layernorm": _RESIDUALS,
    "--use-post-ln": _RESIDUALS,
    "--post-norm": _RESIDUALS,
    "--fp32-residual-connection": "residuals are predicted in 16 bits",
    "--embed-layernorm": "the embedding is predicted without a norm",
    "--input-embeds-norm": "the embedding is predicted without a norm",
    "--parallel-layernorm": "attention and feed-forward network are predicted to share a norm",
    "--qk-l2-norm": "queries and keys are predicted without norms",
    "--attn-logit-softcapping": "attention's scores are predicted without soft-capping",
    "--use-alibi-mask": "attention is predicted without position biases",
    "--use-moba-attn": _ALL_KEYS,
    "--fp16-lm-cross-entropy": "the loss is predicted in 32 bits",
    "--cross-entropy-loss-fusion": "the loss is predicted as several kernels: --engine "
    "megatron-core-fused-loss predicts it as one",
    "--standalone-embedding-stage": _EQUAL_BLOCKS,
    "--enable-cuda-graph": _ONE_BY_ONE,
    "--external-cuda-graph": _ONE_BY_ONE,
    "--cuda-graph-impl": _ONE_BY_ONE,
    "--cuda-graph-scope": _ONE_BY_ONE,
    "--cuda-graph-modules": _ONE_BY_ONE,
    "--optimizer-cuda-graph": _ONE_BY_ONE,
    "--distribute-saved-activations": _KEPT_WHOLE,
    "--distribute-checkpointed-activations": _KEPT_WHOLE,
    "--partition-activations": _KEPT_WHOLE,
    "--reset-position-ids": _WHOLE_SEQUENCES,
    "--reset-attention-mask": _WHOLE_SEQUENCES,
    "--variable-seq-lengths": _WHOLE_SEQUENCES,
    "--no-pad-to-seq-lengths": _WHOLE_SEQUENCES,
    "--neat-pack": _WHOLE_SEQUENCES,
    "--dataloader-inter-document-masking": _WHOLE_SEQUENCES,
    "--max-seqlen-per-dp-cp-rank": _WHOLE_SEQUENCES,
    "--hybrid-context-parallel": _WHOLE_SEQUENCES,
    "--sft": "sequences are predicted at full length, neither padded nor packed",
    "--random-ltd": "sequences are predicted at their full length",
    "--data-efficiency-curriculum-learning": "sequences are predicted at their full length",
    "--curriculum-learning": "sequences are predicted at their full length",
    "--memory-centric-tiled-linear": "GEMMs are predicted as untiled",
    "--split-transformers": "whole blocks are predicted to be recomputed",
    "--ds-sequence-parallel-fpdt": "sequences are predicted without chunks",
    "--ds-sequence-parallel-fpdt-offloading": _ON_GPU,
    "--enable-zbh1-pipeline": "the pipeline schedule is predicted as 1f1b",
    "--schedules-method": "the pipeline schedule is predicted as 1f1b",
    "--microbatch-group-size-per-virtual-pipeline-stage": "model chunks are predicted "
    "to take as many micro-batches in turn as there are stages",
    "--microbatch-group-size-per-vp-stage": "model chunks are predicted to take as many "
    "micro-batches in turn as there are stages",
    "--hierarchical-context-parallel-sizes": "context parallelism is predicted in one level",
    "--mtp-use-repeated-layer": "every further token is predicted with a block of its own",
    "--mtp-spec": "further tokens are predicted with blocks like the model's last",
    "--high-priority-a2a-comm-stream": _NO_OVERLAP,
    "--moe-tp-extend-ep-overlap": _NO_OVERLAP,
    "--load-universal-checkpoint": "a step is predicted without loading a checkpoint",
    "--activation-func": "the activation is predicted by --swiglu and similar options",
    "--interleave-sliding-window": _ALL_KEYS,
    "--enable-seq1f1b": "the pipeline schedule is predicted as 1f1b",
    "--pack": _WHOLE_SEQUENCES,
    "--use-mc2": _NO_OVERLAP,
    "--num-microbatches-with-partial-activation-checkpoints": "blocks are predicted "
    "to be recomputed for all micro-batches",
    "--chunked-loss": "the loss is predicted without chunks",
    "--loss-chunk-size": "the loss is predicted without chunks",
}

_TOWER = "belongs to training an image encoder beside the decoder, which plans cannot express"
_ENCODER = "belongs to training an encoder beside a decoder or for retrieval: not supported"
_RETRIEVAL = "belongs to training with retrieved text, which plans cannot express"
_TEACHER = "belongs to distillation from a teacher, whose passes plans cannot express"
_FROZEN = "trains only a part of the weights, which plans cannot express"
_ADAPTERS = "trains adapters only, which this import does not support"
_SPARSE = "gives the model sparse attention, which is not supported"
_STREAMS = "gives the model several residual streams, which is not supported"
_WEIGHT_SHARDS = "shards weights along another axis, which plans cannot express"
_REINFORCED = "belongs to training by preferences or rewards, which plans cannot express"

# Megatron-LM's options that change the model or the task, each with the reason why an import
# refuses it.
REFUSED: Mapping[str, str] = {
    **dict.fromkeys(
        (
            *("--img-h", "--img-w", "--num-channels", "--patch-dim", "--vision-pretraining"),
            *("--vision-model-type", "--vision-tower", "--vision-backbone-type"),
            *("--language-model-type", "--mm-projector-type", "--vision-pretraining-type"),
            *("--image-size", "--dino-local-crops-number"),
        ),
        _TOWER,
    ),
    **dict.fromkeys(
        ("--encoder-tensor-model-parallel-size", "--encoder-pipeline-model-parallel-size"), _ENCODER
    ),
    **dict.fromkeys(
        (
            *("--decoder-num-layers", "--pipeline-model-parallel-split-rank"),
            *("--biencoder-projection-dim", "--ict-head-size", "--bert-load"),
        ),
        _ENCODER,
    ),
    **dict.fromkeys(
        ("--retro-add-retriever", "--retro-workdir", "--retro-project-dir"), _RETRIEVAL
    ),
    **dict.fromkeys(
        ("--kd", "--mos", "--load-teacher", "--num-layers-teacher", "--export-kd-teacher-load"),
        _TEACHER,
    ),
    **dict.fromkeys(
        (
            *("--freeze-all-layers", "--freeze-LM", "--freeze-ViT", "--freeze-llm"),
            *("--freeze-base-for-mtp",),
        ),
        _FROZEN,
    ),
    **dict.fromkeys(("--lora-r", "--lora-target-modules", "--qlora"), _ADAPTERS),
    **dict.fromkeys(
        (
            *("--enable-dsa-indexer", "--dsa-indexer-topk", "--index-topk", "--compress-ratios"),
            *("--use-sparse-flash-attn",),
        ),
        _SPARSE,
    ),
    **dict.fromkeys(("--enable-mhc", "--enable-mhc-connections", "--hc-mult"), _STREAMS),
    **dict.fromkeys(("--perform-rl-step", "--dpo-loss-type", "--pref-ftx"), _REINFORCED),
    "--num-experts-switch": "gives the model experts of the old SwitchMLP, which is not supported",
    "--cla-share-factor": "shares keys among blocks, which is not supported",
    "--share-kvstates": "shares keys among blocks, which is not supported",
    "--heterogeneous-layers-config-path": "sizes each block by a file, which is "
    "not supported: give --model",
    "--heterogeneous-layers-config-encoded-json": "sizes each block, which is not "
    "supported: give --model",
    "--moe-expert-model-parallelism": "divides experts among all data-parallel ranks: give "
    "--expert-model-parallel-size N in its place",
    "--moe-weight-parallelism": "divides experts among all data-parallel ranks: give "
    "--expert-model-parallel-size N in its place",
    "--kv-compress": "compresses keys, which is not supported",
    "--n-hash-layers": _SPARSE,
    "--o-lora-rank": _SPARSE,
    "--skip-train": "trains nothing, so there is nothing to predict: leave it out",
    "--yaml-cfg": "takes all options from that file: import it in place of this one",
    "--noop-layers": "adds blocks that do nothing, which is not supported: leave them out, "
    "and divide the blocks by --pipeline-model-parallel-layout",
    "--mtp-hybrid-override-pattern": "adds multi-token prediction to a hybrid model, which is "
    "not supported",
    "--tensor-parallel-num-weight-shards": _WEIGHT_SHARDS,
    "--expert-tensor-parallel-num-weight-shards": _WEIGHT_SHARDS,
    "--output-bert-embeddings": _ENCODER,
}
# Values that switch an option off; an option that imports refuse is accepted with such a value.
IDLE = frozenset(("0", "1", "false", "none", "null", ""))


# Parses the options of Megatron-LM on a launch line: for each option its values, its line number
# and its unknown parts.
#
# Names are parsed as by Megatron-LM's ``argparse``: dashes for underscores, unique prefixes,
# ``--no-X`` for a switch X; the last of several occurrences counts.


KNOWN = HARMLESS | TELLING | UNSAID.keys() | REFUSED.keys()
_SPELT = KNOWN | RENAMED.keys()
# Values that switch an option of Megatron-LM on, and values that switch it off, in files other than
# launch lines.
_ON, _OFF = frozenset(("true", "1", "yes", "on")), frozenset(("false", "0", "no", "off"))
# Values that mean that an option has no value.
_NONE = frozenset(("None", "null", "~"))
_SHORTEST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option on a launch line: its values, its line number, and the first part of it whose value
    is unknown.
    """

    words: tuple[str, ...]
    line: int = 0
    unknown: Unknown | None = None


@dataclass(slots=True, kw_only=True)
class Options:
    """The options on a launch line, by name; if an option occurs several times, the last one
    counts.

    ``repeated`` holds the values of the earlier occurrences. ``strays`` are words with unknown
    parts where an option could stand, such as ``$EXTRA_ARGS``. ``shortened`` maps each abbreviated
    option to its full name. ``spelt`` maps the names of Megatron-LM to the names on the line, where
    a relative of Megatron-LM has another name for an option. If the value of an ``excused`` option
    is unknown, the option counts as not given. ``taken`` collects the options that were asked for.
    """

    given: Mapping[str, Option]
    repeated: Mapping[str, Sequence[str]] = field(default_factory=dict)
    strays: Sequence[Word] = ()
    shortened: Mapping[str, str] = field(default_factory=dict)
    spelt: Mapping[str, str] = field(default_factory=dict)
    excused: frozenset[str] = frozenset()
    taken: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, arguments: Iterable[Word | str], excused: Iterable[str] = ()) -> "Options":
        """Parse options from the words of a launch line."""
        reader = _OptionReader()
        for argument in arguments:
            reader.take(argument if isinstance(argument, Word) else Word(text=argument))
        return cls(
            given=reader.given,
            repeated=reader.repeated,
            strays=tuple(reader.strays),
            shortened=reader.shortened,
            spelt=reader.spelt,
            excused=frozenset(excused),
        )

    @property
    def words(self) -> Mapping[str, Sequence[str]]:
        """Yield each option's name with its values."""
        return {name: option.words for name, option in self.given.items()}

    def where(self, name: str) -> str:
        """The name of an option with its line number, for messages."""
        line = self.given[name].line if name in self.given else 0
        return f"{name}: line {line}" if line else name

    def __contains__(self, name: object) -> bool:
        return name in self.given

    def has(self, name: str) -> bool:
        """Whether a switch is on the launch line and not turned off."""
        option = self._asked(name)
        if option is None:
            return False
        return not option.words or option.words[0].lower() not in _OFF

    def text(self, name: str) -> str | None:
        """Return the first value of an option, or None if the option is not on the launch line."""
        option = self._asked(name)
        if option is None:
            return None
        if not option.words or not option.words[0]:
            reject(f"{self.where(name)}: its value is missing: write it after the option")
        return None if option.words[0] in _NONE else option.words[0]

    def all_words(self, name: str) -> tuple[str, ...]:
        """Return all values of an option, none if the option is not on the launch line."""
        option = self._asked(name)
        return () if option is None else option.words

    def whole(self, name: str, *, minimum: int = 1) -> int | None:
        """Return the value of an option as a whole number, or None if the option is not on the
        launch line.
        """
        text = self.text(name)
        return None if text is None else checked_whole(self.where(name), text, minimum=minimum)

    def number(self, name: str, default: float, *, maximum: float | None = None) -> float:
        """Return the value of an option as a non-negative number, or a default if the option is not
        on the launch line.
        """
        text = self.text(name)
        try:
            number = default if text is None else float(text)
        except ValueError:
            reject(f"{self.where(name)}: {text!r} is not a number: give a number")
        if not 0 <= number <= (float("inf") if maximum is None else maximum):
            top = "" if maximum is None else f" to {maximum:g}"
            reject(f"{self.where(name)}: {number:g} is out of range: give a number from 0{top}")
        return number

    def choice(self, name: str, known: Sequence[str]) -> str | None:
        """Return the value of an option if it is one of the known values, or None if the option is
        not on the launch line.
        """
        text = self.text(name)
        if text is None or text in known:
            return text
        same = [word for word in known if word.lower() == text.lower()]
        if not same:
            reject(f"{self.where(name)}: {text!r} is unknown{near_matches(text, known)}")
        return same[0]

    @property
    def harmless(self) -> list[str]:
        """List the options on the launch line that do not affect cost."""
        return [name for name in self.given if _is_harmless(name)]

    @property
    def unknown(self) -> list[str]:
        """List the options on the launch line that no known version or fork of Megatron-LM has."""
        return [name for name in self.given if name not in KNOWN and not _is_harmless(name)]

    def _asked(self, name: str) -> Option | None:
        self.taken.add(name)
        option = self.given.get(name)
        if option is None or option.unknown is None:
            return option
        if name not in self.excused:
            ask_for_variable(name, option.unknown)
        return None


def _is_harmless(name: str) -> bool:
    return name in HARMLESS or (name not in KNOWN and name.startswith(FAMILIES))


class _OptionReader:
    """Parses a launch line word by word into options."""

    def __init__(self) -> None:
        self.given: dict[str, Option] = {}
        self.repeated: dict[str, list[str]] = {}
        self.strays: list[Word] = []
        self.shortened: dict[str, str] = {}
        self.spelt: dict[str, str] = {}
        self._name = ""

    def take(self, word: Word) -> None:
        """Parse the next word of the launch line: an option, or a value of the option before it."""
        name, equals, value = word.text.partition("=")
        if name.startswith("--") and len(name) > len("--") and "$" not in name:
            self._begin(name, word)
            if equals:
                self._add(value, word.unknown)
        elif word.unknown is not None and self._has_enough():
            self.strays.append(word)
        elif self._name:
            self._add(word.text, word.unknown)

    def _begin(self, spelt: str, word: Word) -> None:
        name, value = self._canonical(spelt)
        if name in self.given:
            before = " ".join(self.given[name].words) or "on"
            self.repeated.setdefault(name, []).append(before)
        self.given[name] = Option(words=value, line=word.line)
        self._name = name

    def _canonical(self, spelt: str) -> tuple[str, tuple[str, ...]]:
        """Return the usual name of an option, and the value that its spelling implies, such as
        false for ``--no-X``.
        """
        name = spelt.replace("_", "-")
        for beginning in ("--no-", "--disable-"):
            positive = "--" + name.removeprefix(beginning)
            if (
                name.startswith(beginning)
                and positive in SWITCHES
                and name not in _SPELT - HARMLESS
            ):
                return positive, ("false",)
        if name not in _SPELT and not name.startswith(FAMILIES) and len(name) >= _SHORTEST:
            longer = [known for known in _SPELT if known.startswith(name)]
            if len(longer) == 1:
                self.shortened[name] = longer[0]
                name = longer[0]
        if name in RENAMED:
            self.spelt[RENAMED[name]] = name
        return RENAMED.get(name, name), ()

    def _add(self, text: str, unknown: Unknown | None) -> None:
        option = self.given[self._name]
        # A switch that is set to false may be set to true later on the line: the last value counts.
        kept = () if option.words == ("false",) and text.lower() in _ON | _OFF else option.words
        if kept is not option.words:
            text = "true" if text.lower() in _OFF else "false"
        self.given[self._name] = Option(
            words=(*kept, text), line=option.line, unknown=option.unknown or unknown
        )

    def _has_enough(self) -> bool:
        """Whether the last option on the line already has all values that it takes."""
        if not self._name or self._name in SWITCHES | HARMLESS_SWITCHES:
            return True
        if self._name in MANY:
            return False
        return bool(self.given[self._name].words)


# Options that Megatron-DeepSpeed has and Megatron-LM lacks.
_OF_DEEPSPEED = (
    *("--deepspeed", "--deepspeed-config", "--zero-stage", "--ds-sequence-parallel-size"),
    *("--no-pipeline-parallel", "--create-moe-param-group", "--deepspeed-activation-checkpointing"),
)


def is_of_deepspeed(options: Options) -> bool:
    """Whether a launch line belongs to Megatron-DeepSpeed, whose options have other defaults than
    Megatron-LM's.
    """
    return any(name in options for name in _OF_DEEPSPEED)


def is_of_epfl(options: Options) -> bool:
    """Whether a launch line belongs to EPFL's Megatron-LLM, whose models have no biases by
    default.
    """
    return "--model-name" in options or "--use-bias" in options
