"""The layer graphs that come with the package, and the graph of each workload."""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path

from mistlab.symbolic.block_kinds import BLOCK, family_structure, kinds_of
from mistlab.symbolic.eight_bit import in_precision
from mistlab.symbolic.feasible import broken_at
from mistlab.symbolic.further_tokens import with_further_tokens
from mistlab.symbolic.graph import ModelGraph
from mistlab.symbolic.kept_by_torch import kept_by_torch
from mistlab.symbolic.made_variants import with_dropout, with_scores, with_window
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.values.datafile import read_json
from mistlab.values.errors import InputError
from mistlab.values.model import Activation, ModelSpec
from mistlab.values.workload import Workload

FAMILIES = ("gpt", "llama", "falcon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The choices besides sizes that decide a graph.

    ``precision`` is ``half`` (two bytes) or ``single`` (four bytes). With ``sequence_parallel``
    tensor-parallel ranks split tokens wherever they do not split weights. ``parts`` are the parts
    of its blocks beyond those of the family, in the order of ``block_kinds.PARTS``.
    """

    family: str
    attention: str
    precision: str
    biases: bool = False
    dropout: bool = False
    sequence_parallel: bool = False
    parts: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The variant's file name, without its ending."""
        parts = [self.family, self.attention, self.precision]
        parts += ["biases"] * self.biases + ["dropout"] * self.dropout
        parts += [part.replace("_", "") for part in self.parts]
        parts += ["sequence"] * self.sequence_parallel
        return "-".join(parts)


@cache
def variants() -> tuple[Variant, ...]:
    """The variants of all shipped graphs: each family, GPT also with biases and dropout, and models
    of today; all of them also with sequence parallelism."""
    plain = [
        Variant(family=family, attention=attention, precision=precision)
        for family, attention, precision in product(FAMILIES, ("flash", "math"), ("half", "single"))
    ]
    switched = [
        Variant(family="gpt", attention=attention, precision="half", biases=biases, dropout=dropout)
        for attention, biases, dropout in product(("flash", "math"), (False, True), (False, True))
        if biases or dropout
    ]
    of_today = [
        Variant(family=family, attention=attention, precision="half", biases=biases, parts=parts)
        for family, attention, biases, parts in _OF_TODAY
    ]
    whole = (*plain, *switched, *of_today)
    return (*whole, *(replace(variant, sequence_parallel=True) for variant in whole))


_EXPERTS, _LATENT = ("experts",), ("latent",)
_SINKS = ("sinks",)
_SHARED = (*_EXPERTS, "shared_experts")
# Family, attention, biases and parts of blocks: Mixtral, Qwen 3, gpt-oss, DeepSeek V2 and V3; GPT
# with experts, as Megatron trains it; hybrid models.
_OF_TODAY: tuple[tuple[str, str, bool, tuple[str, ...]], ...] = (
    ("llama", "flash", False, _EXPERTS),
    ("llama", "flash", False, _SHARED),
    ("llama", "flash", False, ("qk_norm",)),
    ("llama", "flash", False, ("qk_norm", *_EXPERTS)),
    ("llama", "flash", True, (*_SINKS, *_EXPERTS)),
    ("llama", "flash", True, (*_SINKS, "window", *_EXPERTS)),
    ("llama", "flash", False, _LATENT),
    ("llama", "flash", False, (*_LATENT, *_SHARED)),
    # DeepSeek-V2-Lite and Moonlight.
    ("llama", "flash", False, (*_LATENT, "whole_queries")),
    ("llama", "flash", False, (*_LATENT, "whole_queries", *_SHARED)),
    ("gpt", "flash", False, _EXPERTS),
    ("gpt", "math", False, _EXPERTS),
    # Nemotron-H and Nemotron 3: blocks with one part alone.
    ("nemotron", "flash", False, ("state_space", "network_missing")),
    ("nemotron", "flash", False, ("network_missing",)),
    ("nemotron", "flash", False, ("mixer_missing",)),
    ("nemotron", "flash", False, (*_SHARED, "mixer_missing")),
    ("nemotron", "flash", False, (*_SHARED, "latent_experts", "mixer_missing")),
    # Qwen3-Next and Qwen 3.5, with experts and without; GLM 4.5.
    ("llama", "flash", False, (*_SHARED, "state_space", "delta_rule")),
    ("llama", "flash", False, ("state_space", "delta_rule")),
    ("llama", "flash", False, ("qk_norm", "attention_gate", *_SHARED)),
    ("llama", "flash", False, ("qk_norm", "attention_gate")),
    ("llama", "flash", False, ("qk_norm", *_SHARED)),
    # Llama with biases; norms before and after each half of a block: Gemma 2 and 3, GLM 4.
    ("llama", "flash", True, ()),
    ("llama", "flash", False, ("post_norms",)),
    ("llama", "flash", False, ("qk_norm", "post_norms")),
    # GPT with rotary embedding (StarCoder 2), and without positions (BLOOM and MPT, which have
    # ALiBi); Falcon with biases (GPT-NeoX) and with a gate (Command R); Nemotron's networks after
    # attention with rotary embedding (Arcee, Apertus).
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
    """The shipped graph of a variant."""
    return _stored(variant).graph


def _of(variant: Variant) -> StoredGraph | None:
    """The graph of a variant: shipped, or made of a shipped one; None if there is neither."""
    if variant in variants():
        return _stored(variant)
    if variant.dropout:
        base = _of(replace(variant, dropout=False))
        splits = variant.sequence_parallel
        return None if base is None else with_dropout(base, sequence_parallel=splits)
    if variant.attention == "math":
        base = _of(replace(variant, attention="flash"))
        return None if base is None else with_scores(base)
    if "window" in variant.parts:
        base = _of(replace(variant, parts=tuple(p for p in variant.parts if p != "window")))
        return None if base is None else with_window(base)
    return None


@cache
def _stored(variant: Variant) -> StoredGraph:
    text = (files("mistlab.catalog") / "graphs" / f"{variant.name}.json").read_text("utf-8")
    return StoredGraph.of(json.loads(text), variant.name)


def graph_of(workload: Workload, kept_by: str = "") -> StoredGraph:
    """The graph of a workload: a shipped graph, or the graph of its traced model. ``kept_by`` says
    whose kernels keep tensors, if not the graph's own (``mistlab.symbolic.kept_by_torch``)."""
    model = workload.model
    precision = "single" if workload.precision == "fp32" else "half"
    if model.family == "custom":
        traced = _traced(workload, precision)
        return _kept_by(traced, workload, kept_by)
    return _of_family(workload, precision, sequence_parallel=False, kept_by=kept_by)


def sequence_graph_of(workload: Workload, kept_by: str = "") -> StoredGraph | None:
    """The graph of a workload with sequence parallelism; None if its model was traced without."""
    if workload.model.family == "custom":
        return None
    precision = "single" if workload.precision == "fp32" else "half"
    return _of_family(workload, precision, sequence_parallel=True, kept_by=kept_by)


def _kept_by(found: StoredGraph, workload: Workload, kept_by: str) -> StoredGraph:
    """A graph in a workload's precision, keeping what these kernels keep."""
    made = in_precision(found, workload.precision, keeps_wide=bool(kept_by))
    return kept_by_torch(made, kept_by) if kept_by else made


@cache
def _of_family(
    workload: Workload, precision: str, *, sequence_parallel: bool, kept_by: str
) -> StoredGraph:
    """The graph of a model of a family, with all kinds of its blocks."""
    model = _seen(workload)
    kinds = kinds_of(model)
    own = Variant(
        family=model.family,
        attention=workload.attention,
        precision=precision,
        biases=model.biases,
        dropout=model.dropout > 0,
        sequence_parallel=sequence_parallel,
    )
    of_kinds = {name: replace(own, parts=parts) for name, parts in kinds.parts.items()}
    for variant in of_kinds.values():
        if _of(variant) is None or not _has_known_structure(model):
            message = (
                f"workload.model: no layer graph is shipped for {variant.name} with the structure "
                f"of {model.name or 'this model'}: use the family's own structure, biases and "
                "dropout, or trace it: python -m experiments.trace MODEL.yaml --out MODEL.json, "
                "MODEL.yaml having the mapping"
            )
            raise InputError(message)
    if len(of_kinds) == 1:
        found = _known(of_kinds[BLOCK])
    else:
        found = replace(_with_kinds(tuple(of_kinds.items())), turns=kinds.pattern)
    made = _kept_by(found, workload, kept_by)
    return with_further_tokens(made, model.further_tokens, tied=model.tied_embeddings)


@cache
def _with_kinds(variants_of_kinds: tuple[tuple[str, Variant], ...]) -> StoredGraph:
    """The graph of a model whose blocks are of several kinds; the kinds in order of appearance."""
    own = dict(variants_of_kinds)
    graph = _known(own[BLOCK]).mapping
    others = {name: _known(variant).mapping for name, variant in own.items() if name != BLOCK}
    conditions = [*graph["conditions"], *(one for g in others.values() for one in g["conditions"])]
    mapping = {
        **graph,
        "further_blocks": [{**g["block"], "name": name} for name, g in others.items()],
        "pattern": [*own],
        "conditions": [one for i, one in enumerate(conditions) if one not in conditions[:i]],
    }
    return StoredGraph.of(mapping, graph["name"])


def _known(variant: Variant) -> StoredGraph:
    found = _of(variant)
    assert found is not None, variant.name
    return found


def _has_known_structure(model: ModelSpec) -> bool:
    """Whether a model's blocks are its family's, but for what parts of variants say."""
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
    """The activation whose kernel reads, writes and keeps the same: both ways to work out GELU are
    one operator."""
    return "gelu_tanh" if activation == "gelu" else activation


def _seen(workload: Workload) -> ModelSpec:
    """The workload's model, without a window that no sequence is longer than."""
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
    """Refuse a sequence at which the traced code takes another branch."""
    broken = broken_at(graph.assumptions, workload.sequence_length) if graph.assumptions else []
    if broken:
        message = (
            f"workload.sequence_length: {workload.sequence_length} breaks {', '.join(broken)}, "
            f"on which {workload.model.graph_file} rests: trace the model again with "
            f"--sequence-length {workload.sequence_length}"
        )
        raise InputError(message)
