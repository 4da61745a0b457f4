"""Computes the memory and work of pipeline stages for many candidates at once, with compiled
expressions.

There are two steps. Sums of layers depend on a model's graph and on sizes; they are compiled once
for each graph. Figures of stages depend on the sums of layers and on a plan's choices; they are
compiled once for each engine. Candidates share few distinct layers, so millions of rows take a
second.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Bools, Floats, Ints
from mistlab.core.distinct import Known, distinct_rows
from mistlab.engines.engine import ENGINES, EngineMemory
from mistlab.graph.compiled import Compiled, Shared, compile_expressions, compile_sums, kept
from mistlab.graph.graph import PHASES
from mistlab.graph.layer_types import (
    HEAD,
    LayerSums,
    LayerTypes,
    graphs_of,
    sum_name,
    sums_of_blocks,
    type_of,
)
from mistlab.graph.library import divides, graph_of, holds, remainders, sequence_graph_of
from mistlab.graph.stored_graph import StoredGraph
from mistlab.graph.sums import sympy
from mistlab.graph.symbols import (
    PLAIN_GRAPH,
    GraphChoice,
    by_graph,
    exchanges_of,
    layer_columns,
    size_columns,
    size_names,
    splits_tokens,
)
from mistlab.graph.treatments import PLAIN, TREATMENTS, Treatment
from mistlab.plan.adapter_sizes import adapter_bytes
from mistlab.plan.dimension import Dimension
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.plan.reducing import replicated
from mistlab.plan.workload import Workload, without_dropout
from mistlab.schedule.context_ways import HEADS
from mistlab.stages.stage_batch import StageBatch, StageFigures, StagePeaks

_Treatments = tuple[tuple[str, Treatment], ...]
_Dimensions = tuple[tuple[str, Dimension], ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Sizes:
    """The values of all sizes and the sums over each layer, in a table over the distinct
    micro-batch sizes and tensor-parallel degrees.

    ``feasible`` says whether the model's sizes divide.
    """

    feasible: Bools
    table: Mapping[str, Floats]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """Computes the memory and work of stages of one workload under one engine, for many candidates
    at once.
    """

    workload: Workload
    engine: str
    graph: StoredGraph
    types: LayerTypes
    layers: Compiled
    remainders: Compiled
    assumptions: tuple[str, ...]
    treatments: _Treatments
    split: StoredGraph | None
    _known: Known[_Sizes] = field(default_factory=Known, init=False, repr=False, compare=False)

    @classmethod
    def of(cls, workload: Workload, engine: str = "mistlab") -> Self:
        """Make the model of a workload's stages; compiles the expressions of its layer graph."""
        memory, seen = _memory_of(workload, engine), workload
        if not ENGINES[engine].keeps_masks:
            seen = replace(workload, model=without_dropout(workload.model))
        kept_by, fuses, inputs = memory.kept_by, memory.fuses_loss, memory.quantised_inputs
        graph = graph_of(seen, kept_by, fuses_loss=fuses, quantised_inputs=inputs)
        split = sequence_graph_of(seen, kept_by, fuses_loss=fuses, quantised_inputs=inputs)
        treatments, names = tuple(TREATMENTS.items()), size_names()
        return cls(
            workload=workload,
            engine=engine,
            graph=graph,
            types=LayerTypes.of(graph.pattern),
            layers=_layers(graph, treatments, names),
            remainders=_remainders(graph, names),
            assumptions=graph.assumptions,
            treatments=treatments,
            split=split,
        )

    @property
    def memory(self) -> EngineMemory:
        """The engine's memory constants for the workload's precision and optimizer."""
        return _memory_of(self.workload, self.engine)

    def figures(self, batch: StageBatch) -> StageFigures:
        """The memory and work of each candidate stage."""
        feasible, values = self._values(batch, _all)
        return StageFigures(feasible=feasible, **values)

    def layers_of(self, batch: StageBatch) -> Mapping[str, Floats]:
        """The sums over one layer of each type (bytes, operations, parameters) for each candidate
        stage, by the names that ``sum_name`` gives.
        """
        sizes, rows = self._sizes_of(batch)
        return {name: sizes.table[name][rows] for name in self.layers.names}

    def head_of(self, batch: StageBatch) -> Mapping[str, Floats]:
        """The bytes that the head keeps and those at its peaks for each candidate, as this engine
        computes its loss, by the names that ``sum_name`` gives.
        """
        sizes, rows = self._sizes_of(batch)
        head = _head(self.memory)
        values = head(sizes.table)[:, rows]
        return dict(zip(head.names, values, strict=True))

    def beyond_graphs(self, batch: StageBatch) -> tuple[Floats, frozenset[str]]:
        """The bytes that this engine allocates while a block runs beyond those of the layer graph,
        for each candidate, and the types of blocks that keep these bytes for their backward pass.
        """
        sizes, rows = self._sizes_of(batch)
        b, s, f, h, tp = (sizes.table[name][rows] for name in ("b", "s", "f", "h", "tp"))
        gates = self.memory.kept_gates * b * s * f / tp
        whole = self.memory.whole_tensors * batch.sequence_parallel * b * s * h * (1 - 1 / tp)
        most = max(1, self.memory.blocks_ahead)
        ahead = self.memory.blocks_ahead / np.maximum(most, batch.layers * batch.in_flight)
        keep = (PLAIN, *(name for name, row in self.treatments if not row.peaks_as_plain))
        types = frozenset(type_of(kind, name) for kind in self.types.kinds for name in keep)
        return self.memory.weight * (gates + whole * ahead), types

    def peaks(self, batch: StageBatch) -> StagePeaks:
        """The memory figures that decide whether each candidate fits; computing all figures takes
        twice as long.
        """
        feasible, values = self._values(batch, _peaks)
        return StagePeaks(feasible=feasible, **values)

    def _values(
        self, batch: StageBatch, compiled: _StageCompiler
    ) -> tuple[Bools, Mapping[str, Floats]]:
        sizes, rows = self._sizes_of(batch)
        shared = Shared(table=sizes.table, index=rows)
        if self.workload.averages_weights:
            columns = replicated(batch.columns, self.workload.reduction)
            batch = StageBatch.of_columns(columns)
        tables = tuple(DIMENSIONS.items()), tuple(TREATMENTS.items())
        stages = compiled(self.memory, self.workload.model.head_has_table, *tables)
        values = stages(batch.by_symbol(stages.columns), shared)
        named = dict(zip(stages.names, values, strict=True))
        if self.workload.train == "adapters":
            named = self._with_adapters(batch, named)
        return sizes.feasible[rows], named

    def _with_adapters(self, batch: StageBatch, values: Mapping[str, Floats]) -> dict[str, Floats]:
        """Add the weights, gradients and optimizer states of low-rank adapters to the memory
        figures.

        Neither the largest layer nor the head has trained parameters of its own.
        """
        work = self.workload
        memory = _memory_of(work.training_all, self.engine)
        of = adapter_bytes(work, batch.value, memory)
        states = {
            "weights_bytes": of.weights,
            "gradients_bytes": of.gradients,
            "optimizer_bytes": of.optimizer,
            "buffers_bytes": of.buffers,
        }
        held = sum(states.values())
        figures = {
            **states,
            "held_bytes": held,
            "host_bytes": of.host,
            "step_buffer_bytes": of.step_buffer,
            "forward_peak_bytes": held + of.step_buffer,
            "backward_peak_bytes": held,
            "step_peak_bytes": held + of.step_buffer,
        }
        added = {name: value + figures.get(name, 0.0) for name, value in values.items()}
        untrained = np.zeros_like(values["held_bytes"])
        return {**added, "largest_parameters": untrained, "head_parameters": untrained}

    def _sizes_of(self, batch: StageBatch) -> tuple[_Sizes, Ints]:
        """The distinct sizes among the candidates, and for each candidate the index of its
        sizes.
        """
        names = [*layer_columns().values()]
        if len(self.types.pattern) == 1:
            return self._known([batch.value(name) for name in names], self._sizes)
        # If kinds of blocks alternate, stages have too many distinct sums over layers for a table.
        kinds = self.types.columns
        distinct = distinct_rows([batch.value(name) for name in (*names, *kinds)])
        known, rows = self._known(distinct.columns[: len(names)], self._sizes)
        table = {name: column[rows] for name, column in known.table.items()}
        stages = dict(zip(kinds, distinct.columns[len(names) :], strict=True))
        table |= sums_of_blocks(self.types, table, stages)
        return _Sizes(feasible=known.feasible[rows], table=table), distinct.index

    def _sizes(self, degrees: Sequence[NDArray[Any]]) -> _Sizes:
        """The values of all sizes and the sums over each layer for them, given columns of the sizes
        that candidates choose.
        """
        columns = size_columns(self.workload, dict(zip(layer_columns(), degrees, strict=True)))
        values = by_graph(self.layers, self._other_layers, columns)
        sums = dict(zip(self.layers.names, values, strict=True))
        feasible = divides(self.remainders, columns) & self._splits(columns)
        feasible &= columns["s"] % 1 == 0
        feasible &= self._exchanges(columns)
        if self.assumptions:
            feasible &= holds(self.assumptions, columns)
        of_blocks = sums_of_blocks(self.types, sums, {}) if len(self.types.pattern) == 1 else {}
        return _Sizes(feasible=feasible, table={**sums, **of_blocks, **columns})

    def _splits(self, columns: Mapping[str, Floats]) -> Bools:
        """A mask of the candidates whose tensor-parallel ranks can split the tokens, if they choose
        sequence parallelism.
        """
        whole = ~splits_tokens(columns)
        if self.split is None or whole.all():
            return whole
        return whole | divides(_remainders(self.split, size_names()), columns)

    def _exchanges(self, columns: Mapping[str, Floats]) -> Bools:
        """A mask of the candidates whose context-parallel ranks can exchange keys in the way that
        they choose.

        To exchange heads, the ranks must divide the heads.
        """
        ranks = np.where(exchanges_of(columns) == HEADS, columns["tp"] * columns["cp"], 1)
        return np.asarray((columns["n"] % ranks == 0) & (columns["k"] % ranks == 0))

    def _other_layers(self, choice: GraphChoice) -> Compiled:
        graph = self.split if self.split is not None and choice.splits_tokens else self.graph
        return _layers(graph, self.treatments, size_names(), choice)


def _memory_of(workload: Workload, engine: str) -> EngineMemory:
    """An engine's memory constants for a workload."""
    row = workload.trained_by(ENGINES[engine])
    return row.memory_in(workload.precision, workload.optimizer)


@kept
def _layers(
    graph: StoredGraph,
    treatments: _Treatments,
    columns: tuple[str, ...],
    choice: GraphChoice = PLAIN_GRAPH,
) -> Compiled:
    expressions = {
        sum_name(name, entry.name): getattr(sums, entry.name)
        for name, layer in graphs_of(graph.counts, treatments, choice.exchange, choice.lean).items()
        for sums in (LayerSums.of(layer),)
        for entry in fields(LayerSums)
    }
    return compile_sums(expressions, columns=columns)


@kept
def _remainders(graph: StoredGraph, columns: tuple[str, ...]) -> Compiled:
    return remainders(graph.counts.conditions, columns)


# A function that compiles a stage's expressions; its results are cached by its arguments: the
# engine's memory constants, whether embeddings are tied, and the tables of the plan's choices and
# of the ways to run blocks.
_StageCompiler = Callable[[EngineMemory, bool, _Dimensions, _Treatments], Compiled]


@kept
def _all(
    memory: EngineMemory, tied_embeddings: bool, _: _Dimensions, treatments: _Treatments
) -> Compiled:
    return _compiled(_expressions(memory, tied_embeddings, treatments))


@kept
def _peaks(
    memory: EngineMemory, tied_embeddings: bool, _: _Dimensions, treatments: _Treatments
) -> Compiled:
    expressions = _expressions(memory, tied_embeddings, treatments)
    names = [entry.name for entry in fields(StagePeaks) if entry.name in expressions]
    return _compiled({name: expressions[name] for name in names})


@kept
def _head(memory: EngineMemory) -> Compiled:
    from mistlab.graph.stage_expressions import head_of  # noqa: PLC0415 (needs SymPy)

    head = head_of(memory)
    names = ("saved_bytes", "forward_peak_bytes", "backward_peak_bytes")
    return _compiled({sum_name(HEAD, name): getattr(head, name) for name in names})


def _expressions(
    memory: EngineMemory, tied_embeddings: bool, treatments: _Treatments
) -> Mapping[str, sympy.Expr]:
    from mistlab.graph.stage_expressions import stage_expressions  # noqa: PLC0415 (needs SymPy)

    stage = stage_expressions(memory, tied_embeddings=tied_embeddings, treatments=treatments)
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
    peaks["step_peak_bytes"] = sympy.Add(*held.values(), stage.step_buffer_bytes)
    return {
        "parameters": stage.parameters,
        **held,
        "held_bytes": sympy.Add(*held.values()),
        "step_buffer_bytes": stage.step_buffer_bytes,
        "activations_bytes": stage.activations.device,
        "logits_bytes": stage.logits_bytes,
        "largest_parameters": stage.largest_parameters,
        "head_parameters": stage.head_parameters,
        "host_bytes": stage.host_bytes,
        **peaks,
        **stage.work,
    }


def _compiled(named: Mapping[str, sympy.Expr]) -> Compiled:
    symbols = {symbol.name for e in named.values() for symbol in e.free_symbols}
    return compile_expressions(named, columns=tuple(sorted(symbols)), constants={})
