"""Finds the layer graphs of a workload's model in the files that come with the package, or derives
them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools
from mistlab.core.files import read_json
from mistlab.core.values import InputError, reject
from mistlab.engines.engine import SINGLE
from mistlab.graph.adapted import kept_by_torch, with_adapters, with_further_tokens
from mistlab.graph.compiled import Compiled, compile_expressions, compile_sums, kept
from mistlab.graph.graph import ModelGraph
from mistlab.graph.stored_graph import (
    StoredGraph,
    in_precision,
    with_dropout,
    with_fused_loss,
    with_scores,
    with_window,
)
from mistlab.graph.sums import Sum, sympy
from mistlab.graph.symbols import size_symbol
from mistlab.plan.model_parts import Window
from mistlab.plan.workload import Activation, Family, ModelSpec, Workload

if TYPE_CHECKING:
    from mistlab.graph.graph import Condition

# Finds the kinds of blocks of a model (with experts, with a window, ...), and which block of the
# model is of which kind.


# The parts that blocks may have beyond those of their model family, in the order in which the names
# of layer graphs list them.
PARTS = (
    *("rotary", "positionless", "gated"),
    *("qk_norm", "attention_gate", "sinks", "window", "latent", "whole_queries", "post_norms"),
    *("experts", "shared_experts", "latent_experts", "state_space", "delta_rule"),
    *("mixer_missing", "network_missing"),
)

# The name of the kind of a model's last block; most models have no other kind of block.
BLOCK = "block"


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockKinds:
    """The kinds of blocks of a model, which repeat in a ``pattern``, and the ``parts`` (experts,
    window, ...) of each kind.
    """

    pattern: tuple[str, ...]
    parts: Mapping[str, tuple[str, ...]]


def kinds_of(model: ModelSpec) -> BlockKinds:
    """The kinds of blocks of a model of a known family.

    Every block has the model's attention window, except each ``full_every``-th.
    """
    if model.pattern:
        return _of_pattern(model)
    dense = 0 if model.experts is None else model.experts.dense_blocks
    turns = 1 if model.window is None else max(model.window.full_every, 1)
    # Blocks repeat after one period of the pattern; if the first blocks are dense, the period is
    # the whole model.
    blocks = [_parts_of(model, block) for block in range(model.layers if dense else turns)]
    names = [_name(parts, blocks[-1]) for parts in blocks]
    return BlockKinds(pattern=tuple(names), parts=dict(zip(names, blocks, strict=True)))


def _of_pattern(model: ModelSpec) -> BlockKinds:
    """The kinds of blocks of a hybrid model, by the letters of its pattern.

    The kind of the pattern's last block is named ``block``.
    """
    pattern = model.pattern[: model.layers]
    names = {letter: BLOCK if letter == pattern[-1] else _LETTERS[letter] for letter in pattern}
    return BlockKinds(
        pattern=tuple(names[letter] for letter in pattern),
        parts={name: _parts_of_letter(model, letter) for letter, name in names.items()},
    )


# What each letter in the pattern of a hybrid model stands for.
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
    """The parts (experts, scan, ...) of the kind of block that a letter in a hybrid model's pattern
    stands for.
    """
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
    """The parts (experts, window, ...) of a block, given its index in the model."""
    experts, window, latent = model.experts, model.window, model.latent
    has_experts = model.has_experts_in(block)
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
    """Whether a block, by its index in the model, attends to a window of tokens only."""
    every = window.full_every
    return not every or block % every < every - 1


def _structure(model: ModelSpec) -> dict[str, bool]:
    """The features (such as rotary embedding or a gate) by which a model's blocks differ from those
    of its family.
    """
    plain = family_structure(model.family)
    is_other = model.position_embedding != plain.position_embedding
    return {
        "rotary": is_other and model.position_embedding == "rotary",
        "positionless": is_other and model.position_embedding == "none",
        "gated": plain.mlp_type == "mlp" and model.mlp_type == "gated_mlp",
    }


@cache
def family_structure(family: Family) -> ModelSpec:
    """The smallest model of a family; it has the features that all models of the family share."""
    return ModelSpec.of(family=family, hidden=128, layers=1, heads=1)


def _name(parts: tuple[str, ...], last: tuple[str, ...]) -> str:
    if parts == last:
        return BLOCK
    differs = {*parts} ^ {*last}
    traits = ["dense"] * ("experts" in differs) + ["windowed"] * ("window" in differs)
    return " ".join(traits)


# Checks for which candidates' sizes a layer graph is valid.


def remainders(conditions: Sequence[Condition], columns: tuple[str, ...]) -> Compiled:
    """The remainder of each size divided by the divisor that a layer graph requires, as an
    expression; zero where it divides.
    """
    left_over = {
        f"{condition.size} over {condition.divisor}": Sum.named(
            f"numpy.mod({condition.size}, {condition.divisor})"
        )
        for condition in conditions
    }
    return compile_sums(left_over, columns=columns)


def divides(compiled: Compiled, columns: Mapping[str, NDArray[Any]]) -> Bools:
    """A mask of the candidates whose sizes are divisible as a layer graph requires.

    For example, heads that do not divide over the tensor-parallel ranks make a row infeasible.
    """
    return np.asarray((compiled(columns) == 0).all(axis=0))


def holds(
    assumptions: Sequence[str],
    columns: Mapping[str, NDArray[Any]],
) -> Bools:
    """A mask of the candidates whose sizes satisfy all comparisons on which the traced model's code
    branched.
    """
    values = _indicators(tuple(assumptions), tuple(columns))(columns)
    return np.asarray((values == 1).all(axis=0))


def broken_at(assumptions: Sequence[str], sequence_length: int) -> list[str]:
    """Those comparisons of the traced model's code that a sequence length violates, whatever the
    other sizes are.
    """
    return [*_broken(tuple(assumptions), sequence_length).numbers]


@kept
def _indicators(assumptions: tuple[str, ...], columns: tuple[str, ...]) -> Compiled:
    """Make an expression for each comparison on which the traced code branched: 1 where it holds,
    else 0.
    """
    from mistlab.graph.graph_text import relation_from  # noqa: PLC0415 (needs SymPy)

    indicators = {
        text: sympy.Piecewise((1, relation_from(text)), (0, True)) for text in assumptions
    }
    return compile_expressions(indicators, columns=columns, constants={})


@kept
def _broken(assumptions: tuple[str, ...], sequence_length: int) -> Compiled:
    """The comparisons that a sequence length violates, given by names so that results can be
    cached.
    """
    from mistlab.graph.graph_text import relation_from  # noqa: PLC0415 (needs SymPy)

    at = {size_symbol("s"): sequence_length}
    false = [text for text in assumptions if relation_from(text).subs(at) == False]  # noqa: E712
    return compile_expressions({}, columns=(), constants={}, numbers=dict.fromkeys(false, 1))


# Finds the layer graph of each workload, in the files shipped with the package or derived from
# them.


FAMILIES = ("gpt", "llama", "falcon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """What decides a layer graph besides sizes: model family, attention, precision, biases,
    dropout, and the parts of blocks.

    ``precision`` is ``half`` (two bytes) or ``single`` (four bytes). With ``sequence_parallel``
    tensor-parallel ranks split tokens wherever they do not split weights. ``parts`` are parts of
    blocks that not all models of the family have, in the order of ``block_kinds.PARTS``. With
    ``whole_shares`` dropout is not applied to the attention probabilities.
    """

    family: str
    attention: str
    precision: str
    biases: bool = False
    dropout: bool = False
    sequence_parallel: bool = False
    parts: tuple[str, ...] = ()
    whole_shares: bool = False

    @property
    def name(self) -> str:
        """The name of the variant's layer graph file, without its extension."""
        parts = [self.family, self.attention, self.precision]
        parts += ["biases"] * self.biases + ["dropout"] * self.dropout
        parts += ["whole"] * self.whole_shares
        parts += [part.replace("_", "") for part in self.parts]
        parts += ["sequence"] * self.sequence_parallel
        return "-".join(parts)


@cache
def variants() -> tuple[Variant, ...]:
    """The variants of models whose layer graphs are shipped, each also with sequence parallelism:
    each family, GPT with and without biases and dropout (in 32 bits only with biases, as GPT-2),
    current models, and encoders.
    """
    plain = [
        Variant(family=family, attention=attention, precision=precision)
        for family, attention, precision in product(FAMILIES, ("flash", "math"), ("half", "single"))
    ]
    switched = [
        Variant(family="gpt", attention=attention, precision=bits, biases=biases, dropout=dropout)
        for attention, bits in product(("flash", "math"), ("half", "single"))
        for biases, dropout in product((False, True)[bits == "single" :], (False, True))
        if biases or dropout
    ]
    of_today = [
        Variant(family=family, attention=attention, precision="half", biases=biases, parts=parts)
        for family, attention, biases, parts in _OF_TODAY
    ]
    encoders = [
        Variant(family="bert", attention=attention, precision=bits, biases=True, dropout=dropout)
        for attention, bits in product(("flash", "math"), ("half", "single"))
        for dropout in (False, True)
    ]
    whole = (*plain, *switched, *of_today, *encoders)
    return (*whole, *(replace(variant, sequence_parallel=True) for variant in whole))


_EXPERTS, _LATENT = ("experts",), ("latent",)
_SINKS = ("sinks",)
_SHARED = (*_EXPERTS, "shared_experts")
# Variants of current models: family, attention, whether there are biases, and parts of blocks. The
# first rows are Mixtral, Qwen 3, gpt-oss, DeepSeek V2 and V3, GPT with experts as Megatron trains
# it, and hybrid models.
_OF_TODAY: tuple[tuple[str, str, bool, tuple[str, ...]], ...] = (
    ("llama", "flash", False, _EXPERTS),
    ("llama", "flash", False, _SHARED),
    ("llama", "flash", False, ("qk_norm",)),
    ("llama", "flash", False, ("qk_norm", *_EXPERTS)),
    ("llama", "flash", True, (*_SINKS, *_EXPERTS)),
    ("llama", "flash", True, (*_SINKS, "window", *_EXPERTS)),
    ("llama", "flash", False, _LATENT),
    ("llama", "flash", False, (*_LATENT, *_SHARED)),
    # This variant is for DeepSeek-V2-Lite and Moonlight.
    ("llama", "flash", False, (*_LATENT, "whole_queries")),
    ("llama", "flash", False, (*_LATENT, "whole_queries", *_SHARED)),
    ("gpt", "flash", False, _EXPERTS),
    ("gpt", "math", False, _EXPERTS),
    # This variant is for Nemotron-H and Nemotron 3, whose blocks are each only a mixer or only a
    # network.
    ("nemotron", "flash", False, ("state_space", "network_missing")),
    ("nemotron", "flash", False, ("network_missing",)),
    ("nemotron", "flash", False, ("mixer_missing",)),
    ("nemotron", "flash", False, (*_SHARED, "mixer_missing")),
    ("nemotron", "flash", False, (*_SHARED, "latent_experts", "mixer_missing")),
    # These variants are for Qwen3-Next and Qwen 3.5, with experts and without, and for GLM 4.5.
    ("llama", "flash", False, (*_SHARED, "state_space", "delta_rule")),
    ("llama", "flash", False, ("state_space", "delta_rule")),
    ("llama", "flash", False, ("qk_norm", "attention_gate", *_SHARED)),
    ("llama", "flash", False, ("qk_norm", "attention_gate")),
    ("llama", "flash", False, ("qk_norm", *_SHARED)),
    # These variants are for Llama with biases, and for models with norms before and after each half
    # of a block: Gemma 2 and 3, GLM 4.
    ("llama", "flash", True, ()),
    ("llama", "flash", False, ("post_norms",)),
    ("llama", "flash", False, ("qk_norm", "post_norms")),
    # These variants are for GPT with rotary embedding (StarCoder 2) and without positions (BLOOM
    # and MPT, which have ALiBi), for Falcon with biases (GPT-NeoX) and with a gate (Command R), and
    # for Nemotron's networks after attention with rotary embedding (Arcee, Apertus).
    ("gpt", "flash", False, ("rotary",)),
    ("gpt", "flash", True, ("rotary",)),
    ("gpt", "flash", False, ("positionless",)),
    ("gpt", "flash", True, ("positionless",)),
    ("falcon", "flash", True, ()),
    ("falcon", "flash", False, ("gated",)),
    ("nemotron", "flash", False, ("rotary",)),
    ("nemotron", "flash", False, ("rotary", "qk_norm")),
)


def shipped(variant: Variant) -> ModelGraph:
    """The layer graph of a variant from the files shipped with the package."""
    return _stored(variant).graph


def _of(variant: Variant) -> StoredGraph | None:
    """The layer graph of a variant, shipped or derived from a shipped one; None if neither is
    possible.
    """
    if variant in variants():
        return _stored(variant)
    if variant.dropout:
        base = _of(replace(variant, dropout=False, whole_shares=False))
        if base is None:
            return None
        return with_dropout(
            base,
            sums=_sums_of(variant),
            drops_shares=not variant.whole_shares,
            sequence_parallel=variant.sequence_parallel,
        )
    if variant.attention == "math":
        base = _of(replace(variant, attention="flash"))
        return None if base is None else with_scores(base)
    if "window" in variant.parts:
        base = _of(replace(variant, parts=tuple(p for p in variant.parts if p != "window")))
        return None if base is None else with_window(base)
    return None


def _sums_of(variant: Variant) -> int:
    """The number of residual additions in a block: two, or one in a block that is only a mixer or
    only a network.
    """
    lacks_half = {"mixer_missing", "network_missing"} & {*variant.parts}
    return 1 if lacks_half or family_structure(variant.family).parallel_block else 2


@cache
def _stored(variant: Variant) -> StoredGraph:
    text = (files("mistlab.catalog") / "graphs" / f"{variant.name}.json").read_text("utf-8")
    return StoredGraph.of(json.loads(text), variant.name)


def graph_of(
    workload: Workload,
    kept_by: str = "",
    *,
    fuses_loss: bool = False,
    quantised_inputs: int = 0,
) -> StoredGraph:
    """The layer graph of a workload: a shipped graph, or that of the model's trace.

    ``kept_by`` names the implementation (eager torch, ...) whose kept tensors count, if these are
    not the graph's own.
    """
    model = workload.model
    precision = "single" if workload.precision in SINGLE else "half"
    if model.family == "custom":
        traced = _traced(workload, precision)
        return _kept_by(traced, workload, kept_by)
    graph = _of_family(workload, precision, sequence_parallel=False, kept_by=kept_by)
    return as_trained(graph, workload, fuses_loss=fuses_loss, quantised_inputs=quantised_inputs)


def sequence_graph_of(
    workload: Workload,
    kept_by: str = "",
    *,
    fuses_loss: bool = False,
    quantised_inputs: int = 0,
) -> StoredGraph | None:
    """The layer graph of a workload under sequence parallelism, or None for a model that was traced
    without it.
    """
    if workload.model.family == "custom":
        return None
    precision = "single" if workload.precision in SINGLE else "half"
    graph = _of_family(workload, precision, sequence_parallel=True, kept_by=kept_by)
    return as_trained(graph, workload, fuses_loss=fuses_loss, quantised_inputs=quantised_inputs)


def _kept_by(graph: StoredGraph, workload: Workload, kept_by: str) -> StoredGraph:
    """A layer graph in a workload's precision, with the tensors that an implementation such as
    eager torch (``kept_by``) keeps for the backward pass.
    """
    made = in_precision(graph, workload.precision, keeps_wide=bool(kept_by))
    return kept_by_torch(made, kept_by) if kept_by else made


def as_trained(
    graph: StoredGraph, workload: Workload, *, fuses_loss: bool, quantised_inputs: int = 0
) -> StoredGraph:
    """A family's layer graph with the engine's loss, heads for multi-token prediction, and low-rank
    adapters.
    """
    model = workload.model
    made = with_fused_loss(graph) if fuses_loss else graph
    if model.further_tokens:
        made = with_further_tokens(made, model.further_tokens, tied=model.tied_embeddings)
    if workload.train == "all":
        return made
    is_gated = model.mlp_type == "gated_mlp"
    return with_adapters(
        made, workload.adapter_targets, is_gated=is_gated, kept_inputs=quantised_inputs
    )


@cache
def _of_family(
    workload: Workload, precision: str, *, sequence_parallel: bool, kept_by: str
) -> StoredGraph:
    """The layer graph of a model of a known family, with all of its kinds of blocks."""
    model = _seen(workload)
    kinds = kinds_of(model)
    common = Variant(
        family=model.family,
        attention=workload.attention,
        precision=precision,
        biases=model.biases,
        dropout=model.dropout > 0,
        sequence_parallel=sequence_parallel,
        whole_shares=workload.attention == "math" and model.dropout > model.dropped_shares == 0,
    )
    of_kinds = {name: replace(common, parts=parts) for name, parts in kinds.parts.items()}
    for variant in of_kinds.values():
        is_known = _has_known_structure(model)
        if _of(variant) is None or not is_known:
            has_fused = is_known and _of(replace(variant, attention="flash")) is not None
            features = ["biases"] * variant.biases + ["dropout"] * variant.dropout
            features += ["norm, network or positions unlike the family's"] * (not is_known)
            reject(
                f"workload.model: no layer graph (operators of a block) is shipped for "
                f"{model.name or 'this model'} of family {model.family} with attention: "
                f"{', '.join([variant.attention, *features, *variant.parts])}: "
                f"{'give attention: flash, or ' * has_fused}trace the model by python -m "
                "experiments.trace MODEL.yaml --out MODEL.json (MODEL.yaml: the model's mapping)"
            )
    if len(of_kinds) == 1:
        graph = _known(of_kinds[BLOCK])
    else:
        graph = replace(_with_kinds(tuple(of_kinds.items())), turns=kinds.pattern)
    return _kept_by(graph, workload, kept_by)


@cache
def _with_kinds(variants_of_kinds: tuple[tuple[str, Variant], ...]) -> StoredGraph:
    """The layer graph of a model whose blocks are of several kinds.

    Kinds are in the order in which they first occur.
    """
    variants = dict(variants_of_kinds)
    graph = _known(variants[BLOCK]).mapping
    others = {name: _known(variant).mapping for name, variant in variants.items() if name != BLOCK}
    conditions = [*graph["conditions"], *(one for g in others.values() for one in g["conditions"])]
    mapping = {
        **graph,
        "further_blocks": [{**g["block"], "name": name} for name, g in others.items()],
        "pattern": [*variants],
        "conditions": [one for i, one in enumerate(conditions) if one not in conditions[:i]],
    }
    return StoredGraph.of(mapping, graph["name"])


def _known(variant: Variant) -> StoredGraph:
    graph = _of(variant)
    assert graph is not None, variant.name
    return graph


def _has_known_structure(model: ModelSpec) -> bool:
    """Whether a model's blocks differ from its family's only in parts that ``Variant``
    describes.
    """
    plain = family_structure(model.family)
    is_gated = model.mlp_type == "gated_mlp"
    return (
        model.norm == plain.norm
        and model.parallel_block == plain.parallel_block
        and (is_gated or plain.mlp_type == "mlp")
        and (is_gated or _same_kernel(model.activation) == _same_kernel(plain.activation))
        and (model.position_embedding != "absolute" or plain.position_embedding == "absolute")
    )


def _same_kernel(activation: Activation) -> Activation:
    """The activation function to which this one counts as equal, since its kernel costs as much:
    both versions of GELU count as one.
    """
    return "gelu_tanh" if activation == "gelu" else activation


def _seen(workload: Workload) -> ModelSpec:
    """The workload without an attention window that no sequence exceeds, since layer graphs need
    not know of it.
    """
    model = workload.model
    if model.window is None or model.window.size < workload.sequence_length:
        return model
    return replace(model, window=None)


def _traced(workload: Workload, precision: str) -> StoredGraph:
    model, attention = workload.model, workload.attention
    assert model.graph_file is not None
    content = read_json(Path(model.graph_file))
    graphs = [StoredGraph.of(mapping, model.graph_file) for mapping in content.get("graphs", [])]
    for graph in graphs:
        if graph.precision == precision and graph.attention in (attention, "own"):
            _check_assumptions(graph, workload)
            return graph
    have = ", ".join(f"{g.attention} {g.precision}" for g in graphs) or "none"
    message = (
        f"{model.graph_file}: no graph for attention {attention} in {precision} precision "
        f"(there is {have}): trace the model with it"
    )
    raise InputError(message)


def _check_assumptions(graph: StoredGraph, workload: Workload) -> None:
    """Refuse a sequence length at which the code of a traced model would branch otherwise than in
    its trace.
    """
    broken = broken_at(graph.assumptions, workload.sequence_length) if graph.assumptions else []
    if broken:
        reject(
            f"workload.sequence_length: {workload.sequence_length} breaks {', '.join(broken)}, "
            f"which {workload.model.graph_file} assumes: trace the model again with "
            f"--sequence-length {workload.sequence_length}"
        )
