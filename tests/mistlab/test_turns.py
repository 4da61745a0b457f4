"""Graphs of equal text whose kinds of blocks take turns unlike one another keep their own turns."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from mistlab.economy.bill import model_parameters
from mistlab.graph.adapted import (
    kept_by_torch,
    with_adapters,
    with_further_tokens,
    with_loss_again,
)
from mistlab.graph.library import graph_of
from mistlab.graph.stored_graph import StoredGraph, in_precision, with_fused_loss
from tests.workloads import workload_of

CHANGES: dict[str, Callable[[StoredGraph], StoredGraph]] = {
    "adapters": lambda graph: with_adapters(graph, "all", is_gated=True),
    "loss again": with_loss_again,
    "kept by torch": lambda graph: kept_by_torch(graph, "eager"),
    "further tokens": lambda graph: with_further_tokens(graph, 1, tied=False),
    "8 bits": lambda graph: in_precision(graph, "fp8"),
    "4 bits": lambda graph: in_precision(graph, "fp4"),
    "fused loss": with_fused_loss,
}
EXPERTS = workload_of("deepseek-v3", 4096, 8, "bf16")
LAYERS = (12, 20)


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_a_changed_graph_has_the_turns_of_its_own_model(
    change: Callable[[StoredGraph], StoredGraph],
) -> None:
    models = [replace(EXPERTS, model=replace(EXPERTS.model, layers=layers)) for layers in LAYERS]
    graphs = [graph_of(workload) for workload in models]
    assert graphs[0] == graphs[1]
    assert [len(change(graph).pattern) for graph in graphs] == [*LAYERS]


def test_parameters_do_not_depend_on_the_model_before() -> None:
    def parameters(dense: int) -> int:
        model = EXPERTS.model
        assert model.experts is not None
        experts = replace(model.experts, dense_blocks=dense)
        return model_parameters(replace(EXPERTS, model=replace(model, experts=experts)))

    fewer = [parameters(dense) for dense in (1, 2, 3)]
    assert fewer[0] - fewer[1] == fewer[1] - fewer[2] > 0
