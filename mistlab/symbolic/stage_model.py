"""Stages compiled in two steps: from sizes to layers, and from layers to stages.

Layers' sums depend on a structure's graph and on sizes, stages' on the layers' sums and a plan's
choices. Each is compiled once, the first for each graph, the second once and for all; rows then go
at millions a second, since candidates share their few layers.
"""

from dataclasses import dataclass, fields
from functools import cache
from typing import Self

import sympy

from mistlab.distinct import distinct_rows
from mistlab.stages import StageBatch, StageFigures
from mistlab.symbolic.compiled import Compiled, Shared, compile_expressions
from mistlab.symbolic.feasible import divides, holds, remainders
from mistlab.symbolic.graph import LAYERS, PHASES, ModelGraph
from mistlab.symbolic.layer import LayerSums, sum_name
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.sizes import size_columns
from mistlab.symbolic.stage import stage_expressions
from mistlab.symbolic.states import StateSizes, sizes_of
from mistlab.symbolic.symbols import CHOICES, SIZES
from mistlab.workload import Workload


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """The stages of one workload as a function of columns."""

    workload: Workload
    layers: Compiled
    remainders: Compiled
    assumptions: tuple[str, ...]
    stages: Compiled

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """The compiled layers of a workload's graph, and the stages that they make up."""
        graph = graph_of(workload)
        return cls(
            workload=workload,
            layers=_layers(graph),
            remainders=_remainders(graph),
            assumptions=graph.assumptions,
            stages=_stages(sizes_of(workload.precision), workload.model.tied_embeddings),
        )

    def figures(self, batch: StageBatch) -> StageFigures:
        """What each candidate holds and does."""
        found = distinct_rows([batch.micro_batch, batch.tensor_parallel])
        columns = size_columns(self.workload, *found.columns)
        table = dict(zip(self.layers.names, self.layers(columns), strict=True))
        index = found.index
        feasible = divides(self.remainders, columns)[index]
        if self.assumptions:
            feasible &= holds(self.assumptions, columns)[index]
        shared = Shared(table={**table, **columns}, index=index)
        values = self.stages({name: batch.by_symbol[name] for name in CHOICES}, shared)
        return StageFigures(feasible=feasible, **dict(zip(self.stages.names, values, strict=True)))


@cache
def _layers(graph: ModelGraph) -> Compiled:
    expressions = {
        sum_name(name, entry.name): getattr(sums, entry.name)
        for name, layer in zip(LAYERS, graph.layers, strict=True)
        for sums in (LayerSums.of(layer),)
        for entry in fields(LayerSums)
    }
    return compile_expressions(expressions, columns=tuple(SIZES), constants={})


@cache
def _remainders(graph: ModelGraph) -> Compiled:
    return remainders(graph.conditions, tuple(SIZES), {})


@cache
def _stages(sizes: StateSizes, tied_embeddings: bool) -> Compiled:
    stage = stage_expressions(sizes, tied_embeddings=tied_embeddings)
    held = {
        "weights_bytes": stage.weights.device,
        "gradients_bytes": stage.gradients.device,
        "optimizer_bytes": stage.optimizer.device,
        "buffers_bytes": stage.buffers_bytes,
    }
    peaks = {
        f"{phase}_peak_bytes": sympy.Add(
            *held.values(), sympy.Max(*stage.moments[phase], evaluate=False)
        )
        for phase in PHASES
    }
    named = {
        "parameters": stage.parameters,
        **held,
        "activations_bytes": stage.activations.device,
        "logits_bytes": stage.logits_bytes,
        "largest_parameters": stage.largest_parameters,
        "head_parameters": stage.head_parameters,
        "host_bytes": stage.host_bytes,
        **peaks,
        **stage.work,
    }
    symbols = {symbol.name for e in named.values() for symbol in e.free_symbols}
    columns = (*CHOICES, *sorted(symbols - set(CHOICES)))
    return compile_expressions(named, columns=columns, constants={})
