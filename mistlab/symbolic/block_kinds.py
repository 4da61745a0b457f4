"""The kinds of blocks that a model has: which parts each kind has, and which block is of which
kind."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

from mistlab.values.model import Family, ModelSpec
from mistlab.values.model_parts import Window

# Parts that a block may have beyond those of its family, in the order of graphs' names.
PARTS = (
    *("rotary", "positionless", "gated"),
    *("qk_norm", "attention_gate", "sinks", "window", "latent", "whole_queries", "post_norms"),
    *("experts", "shared_experts", "latent_experts", "state_space", "delta_rule"),
    *("mixer_missing", "network_missing"),
)

# The kind of a model's last block; most models have no other.
BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKinds:
    """The kinds of a model's blocks, which follow a ``pattern``; the ``parts`` of each kind."""

    pattern: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]


def kinds_of(model: ModelSpec) -> BlockKinds:
    """The kinds of a model of a family; a window belongs to all blocks but every
    ``full_every``-th."""
    if model.pattern:
        return _of_pattern(model)
    dense = 0 if model.experts is None else model.experts.dense_blocks
    turns = 1 if model.window is None else max(model.window.full_every, 1)
    # Without dense blocks at the start, kinds take turns from the first block on.
    blocks = [_parts_of(model, block) for block in range(model.layers if dense else turns)]
    names = [_name(parts, blocks[-1]) for parts in blocks]
    return BlockKinds(pattern=tuple(names), parts=dict(zip(names, blocks, strict=True)))


def _of_pattern(model: ModelSpec) -> BlockKinds:
    """The kinds of a hybrid model; the kind of the pattern's last block has the usual name."""
    pattern = model.pattern[: model.layers]
    names = {letter: BLOCK if letter == pattern[-1] else _LETTERS[letter] for letter in pattern}
    return BlockKinds(
        pattern=tuple(names[letter] for letter in pattern),
        parts={name: _parts_of_letter(model, letter) for letter, name in names.items()},
    )


# The kinds of blocks of hybrid models, by the letters of patterns.
_LETTERS = {
    "M": "scan",
    "*": "attention",
    "-": "network",
    "E": "experts",
    "G": "scan and network",
    "A": "attention and network",
    "D": "attention and plain network",
}


def _parts_of_letter(model: ModelSpec, letter: str) -> tuple[str, ...]:
    """The parts of a hybrid model's blocks of one letter."""
    experts, scan = model.experts, model.state_space
    has_experts = experts is not None and letter in "EGA"
    scans = scan is not None and letter in "MG"
    has = {
        **_structure(model),
        "qk_norm": model.qk_norm and letter in "*AD",
        "attention_gate": model.attention_gate and letter in "*AD",
        "experts": has_experts,
        "shared_experts": has_experts and experts is not None and experts.shared_ffn > 0,
        "latent_experts": has_experts and experts is not None and experts.hidden > 0,
        "state_space": scans,
        "delta_rule": scans and scan is not None and scan.delta_rule,
        "mixer_missing": letter in "-E",
        "network_missing": letter in "M*",
    }
    return tuple(part for part in PARTS if has.get(part, False))


def _parts_of(model: ModelSpec, block: int) -> tuple[str, ...]:
    """The parts of a block, counted from the model's first."""
    experts, window, latent = model.experts, model.window, model.latent
    has_experts = experts is not None and block >= experts.dense_blocks
    has = {
        "qk_norm": model.qk_norm,
        "attention_gate": model.attention_gate,
        "sinks": model.sinks,
        "window": window is not None and _has_window(window, block),
        "latent": latent is not None,
        "whole_queries": latent is not None and latent.query_rank is None,
        "post_norms": model.post_norms,
        "experts": has_experts,
        "shared_experts": has_experts and experts is not None and experts.shared_ffn > 0,
        "latent_experts": has_experts and experts is not None and experts.hidden > 0,
        **_structure(model),
    }
    return tuple(part for part in PARTS if has.get(part, False))


def _has_window(window: Window, block: int) -> bool:
    """Whether a block, counted from the model's first, attends to a window alone."""
    every = window.full_every
    return not every or block % every < every - 1


def _structure(model: ModelSpec) -> dict[str, bool]:
    """The parts by which blocks are built otherwise than those of the model's family."""
    plain = family_structure(model.family)
    is_other = model.position_embedding != plain.position_embedding
    return {
        "rotary": is_other and model.position_embedding == "rotary",
        "positionless": is_other and model.position_embedding == "none",
        "gated": plain.mlp_type == "mlp" and model.mlp_type == "gated_mlp",
    }


@cache
def family_structure(family: Family) -> ModelSpec:
    """The smallest model of a family, which has the family's own structure."""
    return ModelSpec.of(family=family, hidden=128, layers=1, heads=1)


def _name(parts: tuple[str, ...], last: tuple[str, ...]) -> str:
    if parts == last:
        return BLOCK
    differs = {*parts} ^ {*last}
    words = ["dense"] * ("experts" in differs) + ["windowed"] * ("window" in differs)
    return " ".join(words)
