"""Hybrid models of Megatron-LM's options: which part each block has, and how stages divide them.

The grammar is that of ``--hybrid-layer-pattern`` (core 0.17): a letter a block, ``|`` between
stages, ``/`` before the blocks of further tokens. Older lines give shares of attention and of
networks (``--hybrid-attention-ratio``, ``--hybrid-mlp-ratio``).
"""

from typing import Any

from mistlab.core.values import InputError, within
from mistlab.export.megatron_flags import Options
from mistlab.plan.workload import StateSpace

PATTERN = "--hybrid-layer-pattern"
# Megatron-LM's defaults.
STATES, CHANNELS, GROUPS, EXPAND = 128, 64, 8, 2
# Its letters for blocks that models here have; its G, D and + are parts that they have not.
_LETTERS = "M*-E"
_MEANINGS = {
    "G": "a gated delta net without a network",
    "D": "sparse attention",
    "+": "latent attention",
}
_SWITCHES = ("--is-hybrid-model", "--hybrid-attention-ratio", "--hybrid-mlp-ratio")


def is_hybrid(options: Options, program: str = "") -> bool:
    """Whether options, or the program, build blocks of a pattern."""
    name = program.lower()
    builds = "pretrain_mamba" in name or "pretrain_hybrid" in name
    return builds or PATTERN in options or any(options.has(name) for name in _SWITCHES)


def hybrid_parts(options: Options, layers: int | None, hidden: int) -> dict[str, Any]:
    """The pattern of a hybrid model and its state space, as fields of a model."""
    pattern = "".join(segments_of(options, layers))
    fields: dict[str, Any] = {"pattern": shortest(pattern), "layers": len(pattern)}
    if "M" in pattern:
        fields["state_space"] = _state_space(options, hidden)
    return fields


def segments_of(options: Options, layers: int | None) -> list[str]:
    """The blocks of each part of a pipeline by a pattern's bars; without bars all of them."""
    text = options.text(PATTERN)
    if text is None:
        return [_by_shares(options, layers)]
    main, *further = text.split("/")
    if any(further):
        message = (
            f"{options.where(PATTERN)}: {text} has further tokens (/): no hybrid model here has "
            "them: leave them out"
        )
        raise InputError(message)
    for letter in main.replace("|", ""):
        if letter not in _LETTERS:
            meaning = _MEANINGS.get(letter, "no kind of block")
            message = (
                f"{options.where(PATTERN)}: {letter!r} is {meaning}, which no model here has: give "
                f"blocks of {_LETTERS}"
            )
            raise InputError(message)
    if not main.replace("|", ""):
        message = f"{options.where(PATTERN)}: {text!r} has no blocks: give a letter for each"
        raise InputError(message)
    return main.split("|")


def shortest(pattern: str) -> str:
    """The shortest pattern that makes the same blocks when it takes turns.

    >>> shortest("DADA")
    'DA'
    """
    sizes = (size for size in range(1, len(pattern) + 1) if len(pattern) % size == 0)
    return next(
        pattern[:size] for size in sizes if pattern[:size] * (len(pattern) // size) == pattern
    )


def _by_shares(options: Options, layers: int | None) -> str:
    """Blocks of state spaces with attention and networks at even distances, by their shares."""
    if layers is None:
        message = "--num-layers: is missing: give it, or --hybrid-layer-pattern"
        raise InputError(message)
    attention = round(layers * options.number("--hybrid-attention-ratio", 0.0, maximum=1))
    networks = round(layers * options.number("--hybrid-mlp-ratio", 0.0, maximum=1))
    blocks = ["M"] * layers
    # Attention between sections of equal length; networks among what is left, the first one late.
    _spread(blocks, "*", (layers - attention) / (attention + 1))
    if networks:
        _spread(blocks, "-", (layers - attention - networks) / networks)
    return "".join(blocks)


def _spread(blocks: list[str], letter: str, distance: float) -> None:
    """Turn the mixer after every so many mixers into another kind of block."""
    left = distance
    for index, block in enumerate(blocks):
        if block != "M":
            continue
        if left < 1 / 2:
            blocks[index] = letter
            left += distance
        else:
            left -= 1


def _state_space(options: Options, hidden: int) -> StateSpace:
    channels = options.whole("--mamba-head-dim") or CHANNELS
    heads = options.whole("--mamba-num-heads")
    expand = options.whole("--mamba-expand") or EXPAND
    with within("model.state_space"):
        return StateSpace(
            heads=heads or hidden * expand // channels,
            channels=channels,
            groups=options.whole("--mamba-num-groups") or GROUPS,
            states=options.whole("--mamba-state-dim") or STATES,
        )
