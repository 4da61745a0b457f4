"""A workload's stages, compiled: from columns of candidates to what they hold and do.

Compiling takes about two seconds, once a workload; rows then go at millions a second.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Self

import numpy as np
import sympy
from numpy.typing import NDArray

from mistlab.model import ModelSpec
from mistlab.stages import Column, StageBatch, StageFigures
from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.feasible import divides, holds, remainders
from mistlab.symbolic.graph import PHASES, Phase
from mistlab.symbolic.library import graph_of
from mistlab.symbolic.stage import StageExpressions, stage_expressions
from mistlab.symbolic.states import HALF, SINGLE
from mistlab.symbolic.symbols import CHOICES, choice_symbol
from mistlab.workload import Workload

COLUMNS = ("b", "tp", "V", *CHOICES)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageModel:
    """The stages of one workload as one function of columns."""

    model: ModelSpec
    constants: Mapping[str, int]
    remainders: Compiled
    assumptions: tuple[str, ...]
    compiled: Compiled

    @classmethod
    def of(cls, workload: Workload) -> Self:
        """Compile the expressions of a workload's layer graph."""
        graph = graph_of(workload)
        constants = _constants(workload)
        expressions = stage_expressions(
            graph,
            SINGLE if workload.precision == "fp32" else HALF,
            tied_embeddings=workload.model.tied_embeddings,
            constants=constants,
        )
        return cls(
            model=workload.model,
            constants=constants,
            remainders=remainders(graph.conditions, ("tp", "V"), constants),
            assumptions=graph.assumptions,
            compiled=compile_expressions(_named(expressions), columns=COLUMNS, constants={}),
        )

    def figures(self, batch: StageBatch) -> StageFigures:
        """What each candidate holds and does."""
        vocabularies, feasible = self._by_degree(batch.tensor_parallel)
        columns = {**batch.by_symbol, "V": vocabularies}
        if self.assumptions:
            feasible &= holds(self.assumptions, columns, self.constants)
        return StageFigures(
            feasible=feasible,
            **dict(zip(self.compiled.names, self.compiled(columns), strict=True)),
        )

    def _by_degree(self, degrees: Column) -> tuple[Column, NDArray[np.bool_]]:
        """The padded vocabulary, and whether every size divides: by the degree alone."""
        # A table of the few degrees there are: rows are many.
        distinct = np.flatnonzero(np.bincount(degrees))
        vocabularies = np.array([self.model.padded_vocab(int(degree)) for degree in distinct])
        sizes = {"tp": distinct, "V": vocabularies}
        place = np.zeros(distinct[-1] + 1, dtype=np.intp)
        place[distinct] = np.arange(len(distinct))
        rows = place[degrees]
        return vocabularies[rows], divides(self.remainders, sizes)[rows]


def _constants(workload: Workload) -> Mapping[str, int]:
    model = workload.model
    return {
        "s": workload.sequence_length,
        "h": model.hidden,
        "n": model.heads,
        "k": model.kv_heads,
        "d": model.head_dim,
        "r": model.rotated_channels,
        "f": model.ffn,
    }


def _named(stage: StageExpressions) -> Mapping[str, sympy.Expr]:
    held = {
        "weights_bytes": stage.weights.device,
        "gradients_bytes": stage.gradients.device,
        "optimizer_bytes": stage.optimizer.device,
        "buffers_bytes": stage.buffers_bytes,
    }
    named = {
        "parameters": stage.parameters,
        **held,
        "activations_bytes": stage.activations.device,
        "host_bytes": stage.host_bytes,
    }
    for phase in PHASES:
        moments = sympy.Max(*stage.moments[phase], evaluate=False)
        named[f"{phase}_peak_bytes"] = sympy.Add(*held.values(), moments)
        named |= _work(stage, phase)
    return named


def _work(stage: StageExpressions, phase: Phase) -> Mapping[str, sympy.Expr]:
    of_phase = {kind: work for (p, kind), work in stage.work.items() if p == phase}
    moved = [work.moved_bytes for kind, work in of_phase.items() if kind != "collective"]
    collective = of_phase.get("collective")
    return {
        f"{phase}_flop": _collected([work.flop for work in of_phase.values()]),
        f"{phase}_moved_bytes": _collected(moved),
        f"{phase}_collective_bytes": collective.moved_bytes if collective else sympy.Integer(0),
    }


def _collected(terms: Iterable[sympy.Expr]) -> sympy.Expr:
    """A sum as one polynomial in sizes for each choice, which is the shortest to evaluate."""
    return sympy.collect(sympy.expand(sympy.Add(*terms)), list(map(choice_symbol, CHOICES)))
