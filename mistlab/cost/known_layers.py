"""The figures of layers for columns of strategies, computed once for equal sizes."""

from collections.abc import Mapping
from typing import Any

from numpy.typing import NDArray

from mistlab.cost.layers import LayerFigures, LayerModel, Pass
from mistlab.symbolic.distinct import Known
from mistlab.symbolic.sizes import size_columns
from mistlab.symbolic.symbols import layer_columns
from mistlab.values.workload import Workload


def figures_of_layers(
    known: Known[Mapping[str, LayerFigures]],
    layers: LayerModel,
    workload: Workload,
    columns: Mapping[str, NDArray[Any]],
) -> Mapping[str, LayerFigures]:
    """The figures of each layer for each strategy; ``known`` are those of sizes met before."""
    names = layer_columns()
    figures, rows = known(
        [columns[name] for name in names.values()],
        lambda sizes: layers(size_columns(workload, dict(zip(names, sizes, strict=True)))),
    )
    taken: dict[int, Pass] = {}

    def pass_of(one: Pass) -> Pass:
        # Types of layers that share a pass share its rows too.
        if id(one) not in taken:
            taken[id(one)] = one.taken(rows)
        return taken[id(one)]

    return {
        name: LayerFigures(
            passes={phase: pass_of(one) for phase, one in layer.passes.items()},
            again=None if layer.again is None else pass_of(layer.again),
            parameters=layer.parameters[rows],
            experts=layer.experts[rows],
            saved_bytes=layer.saved_bytes[rows],
            output_bytes=layer.output_bytes[rows],
        )
        for name, layer in figures.items()
    }
