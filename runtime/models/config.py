"""The configuration of a transformer: its sizes, its structure and its division over ranks.

A size is an ``int`` or a ``torch.SymInt``, so the same model code builds a real model and a model
whose sizes are symbols. Sizes are those of the whole model; each rank builds its share.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from mistlab.engines.engine import ENGINES, SINGLE
from mistlab.graph.library import kinds_of
from mistlab.plan.rotary import RotaryScaling
from mistlab.plan.routers import Router
from mistlab.plan.workload import ROTARY_BASE, Attention, ModelSpec, Workload
from runtime.models.ranks import Size, space_of

TYPE_OF_PRECISION = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    **dict.fromkeys(SINGLE, torch.float32),
}


def sums_of(workload: Workload) -> torch.dtype:
    """The data type in which the gradients of a workload's precision are accumulated."""
    memory = workload.trained_by(ENGINES["mistlab"]).memory_in(workload.precision)
    dtype = TYPE_OF_PRECISION[workload.precision]
    return dtype if memory.gradient == dtype.itemsize else torch.float32


# The target of tokens that were not masked: an encoder has no loss for them.
NOT_HIDDEN = -100


@dataclass(frozen=True, slots=True, kw_only=True)
class Structure:
    """The parts of a block and their connections, independent of sizes.

    A block that ``mixes`` has attention or a state-space mixer; one that ``has_network`` has a
    feed-forward network or experts. Most blocks have both. In an ``encoder`` tokens attend to all
    tokens, a norm follows each residual sum (post-norm), and a dense layer precedes the logits.
    """

    norm: Literal["layernorm", "rmsnorm"]
    gated_mlp: bool
    activation: Literal["gelu", "gelu_tanh", "silu", "relu2"]
    position: Literal["absolute", "rotary", "none"]
    parallel_block: bool
    qk_norm: bool = False
    attention_gate: bool = False
    sinks: bool = False
    window: bool = False
    latent: bool = False
    whole_queries: bool = False
    post_norms: bool = False
    experts: bool = False
    shared_experts: bool = False
    latent_experts: bool = False
    state_space: bool = False
    delta_rule: bool = False
    mixes: bool = True
    has_network: bool = True
    encoder: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertRanks:
    """How many ranks hold a block's experts, and this rank's index among them.

    ``parallel`` ranks have different experts (this rank is number ``rank``); ``tensor`` ranks have
    parts of the same experts (this rank is ``tensor_rank``). The busiest rank's experts take
    ``taken`` copies for each token. With one rank there is no exchange.
    """

    parallel: Size = 1
    tensor: Size = 1
    taken: Size = 1
    rank: int = 0
    tensor_rank: int = 0

    @property
    def is_one(self) -> bool:
        """Whether a single rank holds all experts of a block."""
        return isinstance(self.parallel, int) and self.parallel == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Sizes and switches of one model on one tensor-parallel rank.

    Sizes are those of the whole model. ``positions`` is the longest sequence. Rotary embedding
    rotates ``rotated`` channels of each head, with the base ``rotary_base``. The last
    ``unused_vocab`` tokens of the vocabulary are padding, which the model never predicts. Sizes
    from ``window`` on belong to optional parts. Layer graphs have no ``router``, since its rule
    changes no cost. An expert takes at most ``capacity`` times the mean number of copies of a
    sequence's tokens per expert; 0 means no limit.
    """

    hidden: Size
    heads: Size
    kv_heads: Size
    head_dim: Size
    ffn: Size
    vocab: Size
    positions: Size
    rotated: Size
    layers: int = 1
    tensor_parallel: Size = 1
    attention: Attention = "flash"
    dtype: torch.dtype = torch.bfloat16
    biases: bool = False
    tied_embeddings: bool = False
    dropout: float = 0.0
    attention_dropout: float | None = None
    unused_vocab: int = 0
    rotary_base: float = ROTARY_BASE
    rotary_scaling: RotaryScaling | None = None
    window: Size = 0
    query_rank: Size = 0
    key_rank: Size = 0
    value_dim: Size = 0
    experts: Size = 0
    active: Size = 0
    expert_ffn: Size = 0
    shared_ffn: Size = 0
    expert_hidden: Size = 0
    scan_heads: Size = 0
    scan_channels: Size = 0
    scan_groups: Size = 0
    states: Size = 0
    expert_ranks: ExpertRanks = ExpertRanks()
    router: Router | None = None
    gate_limit: float = 0.0
    capacity: float = 0.0

    @property
    def dropped_shares(self) -> float:
        """The dropout probability of attention probabilities."""
        return self.dropout if self.attention_dropout is None else self.attention_dropout


def config_with(
    *, hidden: Size, heads: Size, tensor_parallel: Size = 1, **others: Any
) -> ModelConfig:
    """A configuration from its main sizes; other sizes follow from them unless ``others`` gives
    them.

    Heads divide the hidden size, the feed-forward network is four times as wide, and there are
    2,048 positions. If a main size is a symbol, the vocabulary is the symbol ``V``, which stands
    for 50,304.
    """
    space = space_of((hidden, heads, tensor_parallel))
    torch._check(hidden % heads == 0)
    head_dim = hidden // heads
    sizes: dict[str, Any] = {
        "kv_heads": heads,
        "head_dim": head_dim,
        "ffn": 4 * hidden,
        "vocab": 50304 if space is None else space.size("V", 50304),
        "positions": 2048,
        "rotated": head_dim,
    }
    return ModelConfig(
        hidden=hidden, heads=heads, tensor_parallel=tensor_parallel, **(sizes | others)
    )


ONE_RANK = ExpertRanks()


def config_of(
    workload: Workload, *, tensor_parallel: int = 1, expert_ranks: ExpertRanks = ONE_RANK
) -> ModelConfig:
    """The configuration of a workload's model."""
    spec = workload.model
    return ModelConfig(
        **_sizes_of_parts(spec),
        hidden=spec.hidden,
        heads=spec.heads,
        kv_heads=spec.kv_heads,
        head_dim=spec.head_dim,
        ffn=spec.ffn,
        vocab=spec.padded_vocab(tensor_parallel),
        positions=workload.sequence_length,
        rotated=spec.rotated_channels,
        layers=spec.layers,
        tensor_parallel=tensor_parallel,
        attention=workload.attention,
        dtype=TYPE_OF_PRECISION[workload.precision],
        biases=spec.biases,
        tied_embeddings=spec.tied_embeddings,
        dropout=spec.dropout,
        attention_dropout=spec.attention_dropout,
        unused_vocab=spec.padded_vocab(tensor_parallel) - spec.vocab,
        rotary_base=spec.rotary_base,
        rotary_scaling=spec.rotary_scaling,
        expert_ranks=expert_ranks,
        capacity=workload.expert_capacity or 0.0,
    )


def _sizes_of_parts(spec: ModelSpec) -> dict[str, Any]:
    """The sizes of optional parts of a model, from its description: experts, latent attention,
    state-space layers.
    """
    sizes: dict[str, Any] = {}
    if spec.window is not None:
        sizes["window"] = spec.window.size
    if spec.latent is not None:
        sizes |= {name: getattr(spec.latent, name) or 0 for name in _OF_LATENT}
    if spec.experts is not None:
        sizes |= {"experts": spec.experts.count, "expert_ffn": spec.experts.ffn}
        sizes |= {"active": spec.experts.active, "shared_ffn": spec.experts.shared_ffn}
        sizes |= {"expert_hidden": spec.experts.hidden, "gate_limit": spec.experts.gate_limit}
        sizes |= {"router": spec.experts.router}
    if spec.state_space is not None:
        scan = spec.state_space
        sizes |= {"scan_heads": scan.heads, "scan_channels": scan.channels}
        sizes |= {"scan_groups": scan.groups, "states": scan.states}
    return sizes


_OF_LATENT = ("query_rank", "key_rank", "value_dim")


def structure_of(spec: ModelSpec) -> Structure:
    """The structure of a model's plain blocks from its description.

    ``structure_of_block`` adds the parts of other kinds of blocks, such as experts or windows.
    """
    return Structure(
        norm=spec.norm,
        gated_mlp=spec.mlp_type == "gated_mlp",
        activation=spec.activation,
        position=spec.position_embedding,
        encoder=spec.is_encoder,
        parallel_block=spec.parallel_block,
        qk_norm=spec.qk_norm,
        attention_gate=spec.attention_gate,
        sinks=spec.sinks,
        latent=spec.latent is not None,
        whole_queries=spec.latent is not None and spec.latent.query_rank is None,
        post_norms=spec.post_norms,
    )


def structure_of_block(spec: ModelSpec, block: int) -> Structure:
    """The structure of the block with index ``block``, in a model whose blocks are of alternating
    kinds.
    """
    kinds = kinds_of(spec)
    parts = kinds.parts[kinds.pattern[block % len(kinds.pattern)]]
    parts_of_kind: dict[str, Any] = {part: True for part in parts if part in _PARTS_OF_KINDS}
    parts_of_kind |= {has: False for part, has in LACKING.items() if part in parts}
    return replace(structure_of(spec), **parts_of_kind)


# How a kind of blocks is marked that lacks attention or a network, and the switch of ``Structure``
# that each mark turns off.
LACKING = {"mixer_missing": "mixes", "network_missing": "has_network"}
# The switches of ``Structure`` that may differ between the blocks of one model.
_PARTS_OF_KINDS = (
    *("experts", "shared_experts", "latent_experts", "window", "state_space", "delta_rule"),
)


def shard(size: Size, parts: Size, what: str) -> Size:
    """The size of one of ``parts`` equal parts; raises an error if ``size`` is not divisible.

    If the sizes are symbols, the trace notes "``parts`` divides ``size``" as a condition.
    """
    if isinstance(size, int) and isinstance(parts, int) and size % parts:
        message = (
            f"{what} {size} cannot be divided equally among {parts} ranks: give a parallel degree "
            f"that divides {size}"
        )
        raise ValueError(message)
    torch._check(size % parts == 0)
    return size // parts
