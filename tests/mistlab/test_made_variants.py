"""Graphs that are made of traced ones keep what tracing the same model counts."""

import pytest
import sympy

from mistlab.graph.graph import LayerGraph, ModelGraph
from mistlab.graph.library import Variant, graph_of, shipped
from mistlab.graph.stored_graph import StoredGraph, with_dropout, with_scores
from mistlab.plan.workload import ModelSpec, Workload
from tests.workloads import workload_of

NUMBERS = {"b": 2, "s": 64, "h": 48, "n": 4, "k": 4, "d": 12, "f": 192, "V": 256, "tp": 2}


def stored(**choices: object) -> StoredGraph:
    variant = Variant(family="gpt", precision="half", **choices)  # type: ignore[arg-type]
    found = shipped(variant)
    work = Workload(
        model=ModelSpec.of(family="gpt", hidden=48, layers=1, heads=4),
        sequence_length=64,
        global_batch=2,
        attention=variant.attention,  # type: ignore[arg-type]
        precision="bf16",
    )
    graph = graph_of(work)
    assert graph.graph == found
    return graph


def kept(graph: LayerGraph) -> float:
    return float(number(graph.saved_bytes))


def number(expression: sympy.Expr) -> sympy.Expr:
    return expression.subs({one: NUMBERS[one.name] for one in expression.free_symbols})


def peak(graph: LayerGraph, phase: str) -> float:
    return max(float(number(one.size_bytes)) for one in graph.peaks if one.phase == phase)


@pytest.mark.parametrize("attention", ["flash", "math"])
def test_dropout_adds_the_masks_that_tracing_counts(attention: str) -> None:
    made = with_dropout(stored(attention=attention), sequence_parallel=False).graph
    traced: ModelGraph = shipped(
        Variant(family="gpt", attention=attention, precision="half", dropout=True)
    )
    assert kept(made.block) == kept(traced.block)
    assert kept(made.embedding) == kept(traced.embedding)
    for phase in ("forward", "backward"):
        # Some of the traced temporaries are gone before all masks are there.
        assert peak(made.block, phase) == pytest.approx(peak(traced.block, phase), rel=0.1)


def test_written_out_scores_are_kept() -> None:
    made = with_scores(stored(attention="flash")).graph
    traced = shipped(Variant(family="gpt", attention="math", precision="half"))
    # Fused attention keeps its output and a number for each row in place of the scores.
    assert kept(made.block) == pytest.approx(kept(traced.block), rel=0.05)
    assert made.attention == "math"


def test_a_model_that_nobody_traced_with_dropout_has_a_graph() -> None:
    work = Workload(
        model=ModelSpec.from_mapping(
            {"family": "llama", "hidden": 64, "layers": 2, "heads": 2, "dropout": 0.1}
        ),
        sequence_length=64,
        global_batch=2,
        attention="math",
        precision="bf16",
    )
    modules = [one.module for one in graph_of(work).block.saved]
    assert modules.count("dropout") == 2
    latent = workload_of("deepseek-v3", 64, 2, "bf16", attention="math")
    # Dense first blocks write attention out too.
    for block in graph_of(latent).graph.kinds.values():
        assert any(one.shape[-1] == one.shape[-2] for one in block.saved if len(one.shape) == 4)
