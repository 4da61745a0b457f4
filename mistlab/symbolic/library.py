"""The layer graphs that come with the package, and the graph of each workload."""

import json
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path

from mistlab.symbolic.feasible import broken_at
from mistlab.symbolic.graph import ModelGraph
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.values.datafile import read_json
from mistlab.values.errors import InputError
from mistlab.values.model import ModelSpec
from mistlab.values.workload import Workload

FAMILIES = ("gpt", "llama", "falcon")


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """The choices besides sizes that decide a graph.

    ``precision`` is ``half`` (two bytes) or ``single`` (four bytes). With ``sequence_parallel``
    tensor-parallel ranks split tokens wherever they do not split weights.
    """

    family: str
    attention: str
    precision: str
    biases: bool = False
    dropout: bool = False
    sequence_parallel: bool = False

    @property
    def name(self) -> str:
        """The variant's file name, without its ending."""
        parts = [self.family, self.attention, self.precision]
        parts += ["biases"] * self.biases + ["dropout"] * self.dropout
        parts += ["sequence"] * self.sequence_parallel
        return "-".join(parts)


def variants() -> tuple[Variant, ...]:
    """The variants of all shipped graphs: each family, and GPT also with biases and dropout; all of
    them also with sequence parallelism."""
    plain = [
        Variant(family=family, attention=attention, precision=precision)
        for family, attention, precision in product(FAMILIES, ("flash", "math"), ("half", "single"))
    ]
    switched = [
        Variant(family="gpt", attention=attention, precision="half", biases=biases, dropout=dropout)
        for attention, biases, dropout in product(("flash", "math"), (False, True), (False, True))
        if biases or dropout
    ]
    whole = (*plain, *switched)
    return (*whole, *(replace(variant, sequence_parallel=True) for variant in whole))


def shipped(variant: Variant) -> ModelGraph:
    """The shipped graph of a variant."""
    return _stored(variant).graph


@cache
def _stored(variant: Variant) -> StoredGraph:
    text = (files("mistlab.catalog") / "graphs" / f"{variant.name}.json").read_text("utf-8")
    return StoredGraph.of(json.loads(text), variant.name)


def graph_of(workload: Workload) -> StoredGraph:
    """The graph of a workload: a shipped graph, or the graph of its traced model."""
    model = workload.model
    precision = "single" if workload.precision == "fp32" else "half"
    if model.family == "custom":
        return _traced(workload, precision)
    variant = _variant_of(workload, precision)
    if variant not in variants() or not _has_family_structure(model):
        message = (
            f"workload.model: no layer graph is shipped for {variant.name} with the structure of "
            f"{model.name or 'this model'}: use the family's own structure, biases and dropout, or "
            "trace it: python -m experiments.trace MODEL.yaml --out MODEL.json, MODEL.yaml having "
            "the mapping"
        )
        raise InputError(message)
    return _stored(variant)


def sequence_graph_of(workload: Workload) -> StoredGraph | None:
    """The graph of a workload with sequence parallelism; None if its model was traced without."""
    if workload.model.family == "custom":
        return None
    whole = _variant_of(workload, "single" if workload.precision == "fp32" else "half")
    return _stored(replace(whole, sequence_parallel=True))


def _variant_of(workload: Workload, precision: str) -> Variant:
    model = workload.model
    return Variant(
        family=model.family,
        attention=workload.attention,
        precision=precision,
        biases=model.biases,
        dropout=model.dropout > 0,
    )


def _has_family_structure(model: ModelSpec) -> bool:
    plain = ModelSpec.of(family=model.family, hidden=128, layers=1, heads=1)
    names = ("norm", "mlp_type", "activation", "parallel_block", "position_embedding")
    return all(getattr(model, name) == getattr(plain, name) for name in names)


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
