"""A workload: the model and its parts, the trained parameters, the batch and the precision."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self

from mistlab.core.values import (
    MOST_EXPERTS,
    MOST_HEADS,
    MOST_HIDDEN,
    MOST_LAYERS,
    MOST_TOKENS,
    MOST_VOCAB,
    MOST_WIDTH,
    FieldError,
    bounded,
    check_field,
    check_fields,
    from_mapping,
    one_of,
    ratio,
    refuse,
    within,
)
from mistlab.engines.adapters import Base, Loss, States, Train, training
from mistlab.engines.engine import ENGINES, Engine, Optimizer, Precision, Sums
from mistlab.plan.family_defaults import FAMILY_DEFAULTS
from mistlab.plan.model_parts import Experts, LatentAttention, StateSpace, Trained, Window
from mistlab.plan.reducing import reducing
from mistlab.plan.rotary import RotaryScaling
from mistlab.reduction.reduction_costs import PLAIN_REDUCTION, Reduction

# The description of a transformer, and the defaults of each model family.
#
# Llama's feed-forward width follows arXiv 2302.13971: 2/3 of four times the hidden size, rounded up
# to 256.


Family = Literal["gpt", "llama", "falcon", "nemotron", "bert", "custom"]
MlpType = Literal["mlp", "gated_mlp"]
Norm = Literal["layernorm", "rmsnorm"]
Activation = Literal["gelu", "gelu_tanh", "silu", "relu2"]
PositionEmbedding = Literal["absolute", "rotary", "none"]

# The letters of block kinds in a hybrid model's pattern.
PATTERN_LETTERS = "M*-EGAD"
VOCAB_MULTIPLE = 128
LLAMA_FFN_MULTIPLE = 256
# The base of rotary position embeddings as published (Su et al. 2021, arXiv 2104.09864).
ROTARY_BASE = 10_000.0
NORM_EPSILON = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """The sizes and structure of a model; ``of`` and ``from_mapping`` fill in omitted fields.

    ``ffn`` is the inner width of the feed-forward network (and of its gate). Rotary embedding turns
    the share ``rotary_fraction`` of a head's channels, the slowest channel by one radian in about
    ``rotary_base`` positions, or slower with ``rotary_scaling``. ``norm_epsilon`` is added under
    the root of norms. ``dropout`` is the dropout rate of the embedding and of the outputs of
    attention and network, ``attention_dropout`` that of attention probabilities; None stands for
    ``dropout``.

    ``qk_norm`` normalises each head's queries and keys. ``attention_gate`` multiplies attention's
    output, channel by channel, by gates computed with the queries. With ``sinks`` each head has one
    more score, without a value. ``post_norms`` normalise the outputs of attention and network
    before they are added to the residual. ``window``, ``latent``, ``experts`` and ``state_space``
    are parts that some models have. The head also predicts ``further_tokens`` tokens after the next
    one, each with a further block (multi-token prediction).

    ``graph_file`` is the JSON file with the traced layers of a custom model.
    ``tensor_parallel_degrees`` are the degrees that its code supports; None stands for all degrees
    that divide heads and widths. ``trained`` describes the published training. ``context`` is the
    number of tokens, prompt and output together, that the released model supports; None if no
    release says it. ``checkpoint`` names the weights that training starts from. ``remarks`` say
    where the description differs from the model, such as SiLU in place of a gate's GELU;
    predictions repeat them.

    Models of family bert are encoders (Devlin et al. 2018): tokens attend to all tokens, norms
    follow the residual additions, and the head predicts masked tokens.

    A hybrid model has a ``pattern``: a letter for each block, repeated over the model. Blocks have
    one part only (``M`` state-space mixer, ``*`` attention, ``-`` network, ``E`` experts), or a
    mixer and a network (``G`` state-space mixer, ``A`` attention, both with experts if the model
    has experts; ``D`` attention and the plain network).
    """

    name: str = ""
    family: Family
    hidden: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))
    layers: int = field(metadata=bounded(minimum=1, most=MOST_LAYERS))
    heads: int = field(metadata=bounded(minimum=1, most=MOST_HEADS))
    kv_heads: int = field(metadata=bounded(minimum=1, most=MOST_HEADS))
    head_dim: int = field(metadata=bounded(minimum=1, most=MOST_HIDDEN))
    ffn: int = field(metadata=bounded(minimum=1, most=MOST_WIDTH))
    mlp_type: MlpType
    vocab: int = field(metadata=bounded(minimum=1, most=MOST_VOCAB))
    norm: Norm
    activation: Activation
    parallel_block: bool
    position_embedding: PositionEmbedding
    rotary_fraction: float = field(metadata=ratio())
    rotary_base: float = field(default=ROTARY_BASE, metadata=bounded(above=0, most=1e15))
    tied_embeddings: bool
    biases: bool
    dropout: float = field(metadata=ratio())
    attention_dropout: float | None = field(default=None, metadata=ratio())
    qk_norm: bool = False
    attention_gate: bool = False
    sinks: bool = False
    post_norms: bool = False
    window: Window | None = None
    latent: LatentAttention | None = None
    experts: Experts | None = None
    state_space: StateSpace | None = None
    further_tokens: int = field(default=0, metadata=bounded(minimum=0, most=MOST_LAYERS))
    pattern: str = ""
    graph_file: str | None = None
    # The import path of a traced model's code, on which no cost depends.
    factory: str = field(default="", compare=False)
    tensor_parallel_degrees: tuple[int, ...] | None = field(
        default=None, metadata=bounded(minimum=1, most=MOST_HIDDEN)
    )
    # No cost depends on these two fields: models that differ only in them are equal.
    rotary_scaling: RotaryScaling | None = field(default=None, compare=False)
    norm_epsilon: float = field(
        default=NORM_EPSILON, compare=False, metadata=bounded(above=0, most=1.0)
    )
    # The longest sequence that the model was released for; models that differ only in it are equal.
    context: int | None = field(
        default=None, compare=False, metadata=bounded(minimum=1, maximum=MOST_TOKENS)
    )
    # The repository of Hugging Face (``Qwen/Qwen3-8B``) or path with the weights; models that
    # differ only in it are equal.
    checkpoint: str = field(default="", compare=False)
    # The model's published training run; models that differ only in it are equal.
    trained: Trained | None = field(default=None, compare=False)
    # Notes on the source of the description; models that differ only in them are equal.
    remarks: tuple[str, ...] = field(default=(), compare=False)

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_attention()
        self._check_dropout()
        self._check_rotary()
        self._check_experts()
        self._check_pattern()
        if self.mlp_type == "gated_mlp" and self.activation != "silu":
            refuse(
                "activation",
                f"{self.activation!r} cannot gate a gated_mlp: give silu, or mlp_type: mlp",
            )
        if self.graph_file is not None and self.family != "custom":
            refuse(
                "graph_file",
                f"{self.graph_file!r} is for family custom, but family is {self.family}: give "
                "family: custom",
            )
        if self.factory and self.family != "custom":
            refuse(
                "factory",
                f"{self.factory!r} is for family custom, but family is {self.family}: give "
                "family: custom",
            )
        if self.further_tokens and self.family == "custom":
            refuse(
                "further_tokens",
                f"{self.further_tokens}, but a traced model's graph already has its whole output "
                "head: leave it out, and trace the model with multi-token prediction",
            )

    @classmethod
    def of(cls, *, family: Family, hidden: int, layers: int, heads: int, **others: Any) -> Self:
        """A model of a family, such as Llama; omitted fields have the family's defaults."""
        given = {"family": family, "hidden": hidden, "layers": layers, "heads": heads, **others}
        return cls.from_mapping(given)

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any], where: str = "") -> Self:
        """A model from a mapping of fields; omitted fields have the family's defaults."""
        with within(where):
            return from_mapping(cls, _completed(mapping))

    @property
    def has_plain_blocks(self) -> bool:
        """Whether the model's blocks have no optional parts (experts, windows, ...)."""
        parts = (self.experts, self.latent, self.window, self.qk_norm, self.sinks, self.pattern)
        others = (self.attention_gate, self.post_norms, self.further_tokens)
        return not any((*parts, *others))

    @property
    def dropped_shares(self) -> float:
        """The dropout probability of attention probabilities."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout

    @property
    def is_encoder(self) -> bool:
        """Whether every token attends to all tokens, and the loss is over masked tokens (BERT)."""
        return self.family == "bert"

    def has_experts_in(self, block: int) -> bool:
        """Whether the block with this index has experts in place of its feed-forward network."""
        if self.experts is None:
            return False
        if self.pattern:
            return self.pattern[block % len(self.pattern)] in "EGA"
        return block >= self.experts.dense_blocks

    @property
    def is_hybrid(self) -> bool:
        """Whether some blocks lack attention or a feed-forward network, as in hybrid models."""
        return not set(self.pattern) <= set("AD")

    @property
    def head_has_table(self) -> bool:
        """Whether the last stage needs the embedding table: for tied weights or further tokens."""
        return self.tied_embeddings or self.further_tokens > 0

    @property
    def rotated_channels(self) -> int:
        """The number of channels of a head that rotary embedding rotates."""
        return round(self.head_dim * self.rotary_fraction)

    @property
    def learned_positions(self) -> int | None:
        """Positions with a learned embedding in the released weights; None without such
        embeddings.
        """
        return self.context if self.position_embedding == "absolute" else None

    def padded_vocab(self, tensor_parallel: int) -> int:
        """The vocabulary size in training, padded if tensor-parallel ranks cannot divide it."""
        if self.vocab % tensor_parallel == 0:
            return self.vocab
        multiple = VOCAB_MULTIPLE * tensor_parallel
        return -(-self.vocab // multiple) * multiple

    def _check_attention(self) -> None:
        if self.heads % self.kv_heads:
            refuse(
                "kv_heads",
                f"{self.kv_heads} does not divide heads {self.heads}: give a divisor of heads",
            )
        if self.latent is not None and self.kv_heads != self.heads:
            refuse(
                "kv_heads",
                f"{self.kv_heads}, but latent attention has keys for each of the {self.heads} "
                f"heads: give {self.heads}, or leave it out",
            )
        if self.attention_gate and not self.qk_norm:
            refuse(
                "attention_gate",
                "true, but it is supported only together with qk_norm: give qk_norm: true, or "
                "leave it out",
            )
        if self.post_norms and (self.pattern or self.parallel_block):
            refuse(
                "post_norms",
                "true, but it is not supported together with pattern or parallel_block: leave it "
                "out",
            )

    def _check_dropout(self) -> None:
        if self.attention_dropout and not self.dropout:
            refuse(
                "attention_dropout",
                f"{self.attention_dropout:g}, but it is supported only with dropout above 0: give "
                "dropout too, or leave it out",
            )

    def _check_experts(self) -> None:
        dense = 0 if self.experts is None else self.experts.dense_blocks
        if dense > self.layers:
            refuse(
                "experts.dense_blocks",
                f"{dense} is more than the model's {self.layers} layers: give at most "
                f"{self.layers}",
            )
        limit = 0.0 if self.experts is None else self.experts.gate_limit
        if limit and self.mlp_type != "gated_mlp":
            refuse(
                "experts.gate_limit",
                f"{limit:g}, but mlp_type {self.mlp_type} has no gates: give mlp_type: gated_mlp, "
                "or leave it out",
            )

    def _check_pattern(self) -> None:
        if (self.state_space is None) != (not set(self.pattern) & set("MG")):
            if self.state_space is None:
                problem = "has state-space blocks (M or G): give state_space too"
                refuse("pattern", f"{self.pattern!r} {problem}")
            problem = "has no state-space blocks (M or G), but state_space is given: leave it out"
            refuse("pattern", f"{self.pattern!r} {problem}, or write M or G")
        if self.experts is None and "E" in self.pattern:
            refuse("pattern", f"{self.pattern!r} has blocks with experts (E): give experts too")
        if self.further_tokens and self.pattern:
            refuse(
                "further_tokens",
                f"{self.further_tokens}, but a model with a pattern cannot have it: leave it out",
            )
        if strange := set(self.pattern) - set(PATTERN_LETTERS):
            refuse(
                "pattern",
                f"{''.join(sorted(strange))!r} is not a kind of block: write only letters of "
                f"{PATTERN_LETTERS} (docs/reference/plan-file.md)",
            )

    def _check_rotary(self) -> None:
        is_rotary = self.position_embedding == "rotary"
        if is_rotary != (self.rotary_fraction > 0):
            refuse(
                "rotary_fraction",
                f"{self.rotary_fraction:g} does not go with position_embedding "
                f"{self.position_embedding}: give "
                f"{'a share above 0' if is_rotary else '0, or position_embedding: rotary'}",
            )
        if not is_rotary and self.rotary_scaling is not None:
            refuse(
                "rotary_scaling",
                f"{self.rotary_scaling.kind}, but position_embedding is "
                f"{self.position_embedding}: leave it out, or give position_embedding: rotary",
            )
        if self.rotary_scaling and self.rotary_scaling.score_factor != 1 and self.latent is None:
            refuse(
                "rotary_scaling.score_factor",
                f"{self.rotary_scaling.score_factor:g}, but only latent attention has it: leave it "
                "out",
            )
        if self.rotary_scaling:
            with within("rotary_scaling"):
                self.rotary_scaling.check(self.rotated_channels)
        if not is_rotary and self.rotary_base != ROTARY_BASE:
            refuse(
                "rotary_base",
                f"{self.rotary_base:g} does not go with position_embedding "
                f"{self.position_embedding}: leave it out, or give position_embedding: rotary",
            )
        channels = self.head_dim * self.rotary_fraction
        if self.rotated_channels % 2 or not math.isclose(channels, self.rotated_channels):
            refuse(
                "rotary_fraction",
                f"{self.rotary_fraction:g} of head_dim {self.head_dim} is {channels:g} channels, "
                "which do not pair up: give a share that makes an even number",
            )


def without_dropout(model: ModelSpec) -> ModelSpec:
    """A copy of the model that is trained without dropout."""
    return replace(model, dropout=0.0, attention_dropout=None) if model.dropout else model


def _completed(given: Mapping[str, Any]) -> Mapping[str, Any]:
    """A model's mapping completed with the defaults of its family; unchanged if it lacks a field on
    which the defaults depend.
    """
    if not isinstance(given, Mapping) or not {"family", "hidden", "heads"} <= given.keys():
        return given
    family = check_field(ModelSpec, "family", given["family"])
    hidden = check_field(ModelSpec, "hidden", given["hidden"])
    heads = check_field(ModelSpec, "heads", given["heads"])
    filled = {**FAMILY_DEFAULTS[family], **given}
    filled.setdefault("kv_heads", heads)
    if "head_dim" not in filled:
        filled["head_dim"] = _head_dim(hidden, heads)
    filled.setdefault("ffn", _llama_ffn(hidden) if _is_gated(filled) else 4 * hidden)
    is_rotary = filled["position_embedding"] == "rotary"
    filled.setdefault("rotary_fraction", 1.0 if is_rotary else 0.0)
    return filled


def _head_dim(hidden: int, heads: int) -> int:
    if hidden % heads:
        refuse(
            "heads",
            f"{heads} does not divide hidden {hidden}: give head_dim, or a divisor of hidden",
        )
    return hidden // heads


def _is_gated(filled: Mapping[str, Any]) -> bool:
    return bool(filled["mlp_type"] == "gated_mlp")


def _llama_ffn(hidden: int) -> int:
    return -(-(8 * hidden // 3) // LLAMA_FFN_MULTIPLE) * LLAMA_FFN_MULTIPLE


# The workload of a training step: a model, its batch and its precision.


Attention = Literal["flash", "math"]
AdapterTargets = Literal["all", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """One training step: ``global_batch`` sequences of ``sequence_length`` tokens.

    ``attention`` is fused in one kernel (flash) or computed GEMM by GEMM (math). Precision fp8 is
    bf16 with weights and GEMMs of blocks in 8 bits; with fp4 these GEMMs take 4-bit operands,
    except those of experts, which take 8-bit ones. The optimizer keeps its two moments in 32, 16 or
    8 bits.

    In blocks with experts, the busiest rank gets ``expert_imbalance`` times as many tokens as the
    mean. With ``expert_capacity`` an expert takes at most this multiple of the mean number of
    tokens; further tokens are dropped. ``expert_padding`` fills every expert up to its capacity
    with empty tokens.

    ``train`` says whether all weights are trained, or adapters of rank ``adapter_rank`` beside
    frozen weights (LoRA), on all GEMMs of blocks or on those of attention. Frozen weights of blocks
    have 16 bits, or 8 or 4 bits and are dequantised before each GEMM (``base``). A ``loss`` in
    chunks computes logits for some tokens at a time. ``states`` are in mixed precision as the
    engine has them, or weights, gradients and moments all have 16 bits. ``gradients`` are the bits
    in which gradients are accumulated and reduced, usually the engine's. With a ``reduction`` other
    than the plain one, data-parallel ranks communicate less, and training gives other weights.
    """

    model: ModelSpec
    sequence_length: int = field(metadata=bounded(minimum=1, maximum=MOST_TOKENS))
    global_batch: int = field(metadata=bounded(minimum=1, maximum=MOST_TOKENS))
    attention: Attention
    precision: Precision
    optimizer: Optimizer = "adamw"
    expert_imbalance: float = field(default=1.0, metadata=bounded(minimum=1, most=MOST_EXPERTS))
    expert_capacity: float | None = field(
        default=None, metadata=bounded(above=0, most=MOST_EXPERTS)
    )
    expert_padding: bool = False
    train: Train = "all"
    adapter_rank: int | None = field(default=None, metadata=bounded(minimum=1, most=MOST_HIDDEN))
    adapter_targets: AdapterTargets = "all"
    base: Base = "16bit"
    loss: Loss = "whole"
    states: States = "mixed"
    gradients: Sums = "usual"
    reduction: Reduction = PLAIN_REDUCTION

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_adapters()
        learned = self.model.learned_positions
        if learned is not None and self.sequence_length > learned:
            refuse(
                "sequence_length",
                f"{self.sequence_length} is more than the {learned} learned positions of "
                f"{self.model.name or 'the model'}: give at most {learned}, or the model as a "
                "mapping with a longer context",
            )
        if self.train == "adapters" and not self.reduces_plainly:
            refuse(
                "reduction.kind",
                f"{self.reduction.kind} is not supported with train: adapters: leave reduction "
                "out, or give train: all",
            )
        if self.states == "16bit" and self.gradients == "32bit":
            refuse("gradients", "32bit, but states is 16bit: leave one of them out")
        if self.expert_capacity is not None and self.model.experts is None:
            refuse(
                "expert_capacity",
                f"{self.expert_capacity:g}, but the model has no experts: leave it out",
            )
        if self.expert_padding and self.expert_capacity is None:
            refuse(
                "expert_padding",
                "true, but expert_capacity, to which experts' tokens are padded, is missing: give "
                "expert_capacity too, or leave expert_padding out",
            )

    def _check_adapters(self) -> None:
        """Refuse adapter settings without ``train: adapters``, and a rank above the model's
        width.
        """
        if self.train == "adapters":
            if self.rank > self.model.hidden:
                refuse(
                    "adapter_rank",
                    f"{self.rank} is above the model's width {self.model.hidden}: give at "
                    f"most {self.model.hidden}; 8 to 64 are usual",
                )
            return
        if self.base != "16bit":
            refuse(
                "base",
                f"{self.base} weights cannot be trained, but train is all: give train: adapters, "
                "or leave base out",
            )
        if self.adapter_rank is not None:
            refuse(
                "adapter_rank",
                f"{self.adapter_rank}, but train is all: give train: adapters, or leave it out",
            )
        if self.adapter_targets != "all":
            refuse(
                "adapter_targets",
                f"{self.adapter_targets}, but train is all: give train: adapters, or leave it out",
            )

    @property
    def is_plain(self) -> bool:
        """Whether a workload trains all weights, with the default precision of states and
        gradients, default loss and plain gradient reduction.
        """
        usual = self.states == "mixed" and self.gradients == "usual" and self.reduces_plainly
        return self.train == "all" and self.loss == "whole" and usual

    @property
    def training_all(self) -> Self:
        """The same workload with all weights trained in 16 bits, and no adapters."""
        return replace(self, train="all", adapter_rank=None, adapter_targets="all", base="16bit")

    @property
    def reduces_plainly(self) -> bool:
        """Whether data-parallel ranks all-reduce whole gradients in every step."""
        return self.reduction == PLAIN_REDUCTION or self.reduction.is_plain

    @property
    def averages_weights(self) -> bool:
        """Whether data-parallel ranks step independently, and average weights."""
        return self.reduction != PLAIN_REDUCTION and self.reduction.is_apart

    def trained_by(self, engine: Engine) -> Engine:
        """A copy of the engine that is adapted to what the workload trains, such as low-rank
        adapters only.
        """
        if self.is_plain:
            return engine
        kinds = self.train, self.base, self.loss, self.states, self.gradients, self.optimizer
        return reducing(training(engine, *kinds), self.reduction)

    @property
    def rank(self) -> int:
        """The rank of the low-rank adapters; 16 by default."""
        return 16 if self.adapter_rank is None else self.adapter_rank

    @property
    def remarks(self) -> tuple[str, ...]:
        """Notes for users: on the model's description, and on sequences beyond its context."""
        notes = tuple(f"the model as it is read: {remark}" for remark in self.model.remarks)
        context = self.model.context
        if context is None or self.sequence_length <= context:
            return notes
        name = self.model.name or "the model"
        note = f"sequences of {self.sequence_length:,} tokens exceed the context of {context:,}"
        return (*notes, f"{note} that {name} was released with: training has to extend it")

    @property
    def tokens(self) -> int:
        """Number of tokens in one step."""
        return self.sequence_length * self.global_batch

    @property
    def expert_load(self) -> tuple[float, float]:
        """The tokens that the experts of a rank receive, relative to an even distribution: on an
        average rank, and on the busiest.
        """
        if self.expert_capacity is None:
            return 1.0, self.expert_imbalance
        if self.expert_padding:
            return self.expert_capacity, self.expert_capacity
        return min(1.0, self.expert_capacity), min(self.expert_imbalance, self.expert_capacity)


def unsupported(workload: Workload, engine: Engine) -> FieldError | None:
    """The error about the first option of a workload that an engine does not support; None if it
    supports all.
    """
    if workload.precision not in engine.memory:
        able = _alike(engine, lambda row: workload.precision in row.memory)
        return FieldError(
            "workload.precision",
            f"{workload.precision}, but engine {engine.name} does not train in it: give "
            f"{one_of([*engine.memory])}, or engine: {able}",
        )
    if workload.optimizer not in engine.optimizers:
        able = _alike(engine, lambda row: workload.optimizer in row.optimizers)
        return FieldError(
            "workload.optimizer",
            f"{workload.optimizer}, but engine {engine.name} does not train with it: give "
            f"{one_of(engine.optimizers)}, or engine: {able}",
        )
    if problem := engine.sums_problem(workload.precision, workload.gradients):
        return FieldError("workload.gradients", problem)
    if workload.expert_capacity is not None and not engine.drops_tokens:
        able = _alike(engine, lambda row: row.drops_tokens)
        return FieldError(
            "workload.expert_capacity",
            f"{workload.expert_capacity:g}, but engine {engine.name} drops no tokens: leave it "
            f"out, or give engine: {able}",
        )
    return None


def _alike(engine: Engine, is_able: Callable[[Engine], bool]) -> str:
    """The name of the first able engine, of programs for fine-tuning if the engine is of one."""
    able = (row for row in ENGINES.values() if is_able(row))
    return min(able, key=lambda row: row.recomputes_some != engine.recomputes_some).name
