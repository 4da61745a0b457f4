"""Sums over a layer graph: its work by class of operators, and its memory."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from typing import Self

from mistlab.symbolic.graph import PHASES, Kind, LayerGraph, Operator, Phase
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.maximum import largest
from mistlab.symbolic.sums import total


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorWork:
    """The work of one class of operators in one phase, for one micro-batch on one rank."""

    operators: int
    flop: sympy.Expr
    moved_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExpressions:
    """The work and memory of a layer, for one micro-batch on one rank.

    ``saved_bytes`` are kept for the backward pass, and the peaks include them. Operators that run
    again belong to the backward pass.
    """

    work: Mapping[tuple[Phase, Kind], OperatorWork]
    parameters: sympy.Expr
    expert_parameters: sympy.Expr
    saved_bytes: sympy.Expr
    input_bytes: sympy.Expr
    forward_peak_bytes: sympy.Expr
    backward_peak_bytes: sympy.Expr
    output_bytes: sympy.Expr

    def flop(self, phase: Phase) -> sympy.Expr:
        """Floating-point operations of a phase, over all classes."""
        return self._total(work.flop for (p, _), work in self.work.items() if p == phase)

    def moved_bytes(self, phase: Phase) -> sympy.Expr:
        """Bytes read and written by the kernels of a phase, without collectives."""
        return self._total(
            w.moved_bytes for (p, k), w in self.work.items() if p == phase and k != "collective"
        )

    def collective_bytes(self, phase: Phase) -> sympy.Expr:
        """Bytes of the messages that tensor-parallel ranks reduce in a phase."""
        work = self.work.get((phase, "collective"))
        return self._total(()) if work is None else work.moved_bytes

    def _total(self, parts: Iterable[sympy.Expr]) -> sympy.Expr:
        return total(parts, like=self.input_bytes)


def expressions_of(graph: LayerGraph) -> LayerExpressions:
    """The sums over a layer's operators and tensors."""
    grouped: dict[tuple[Phase, Kind], list[Operator]] = defaultdict(list)
    for operator in graph.operators:
        grouped[operator.phase, operator.kind].append(operator)
    for operator in graph.again:
        grouped["backward", operator.kind].append(operator)
    peaks = {phase: [p.size_bytes for p in graph.peaks if p.phase == phase] for phase in PHASES}
    return LayerExpressions(
        work={key: _work(operators) for key, operators in grouped.items()},
        parameters=graph.parameter_count,
        expert_parameters=graph.expert_parameter_count,
        saved_bytes=graph.saved_bytes,
        input_bytes=graph.input_bytes,
        forward_peak_bytes=largest(peaks["forward"]),
        backward_peak_bytes=largest(peaks["backward"]),
        output_bytes=graph.output_bytes,
    )


def _work(operators: list[Operator]) -> OperatorWork:
    # A collective reads and writes its message in place, so the message counts once.
    moved = [
        o.read_bytes if o.kind == "collective" else o.read_bytes + o.written_bytes
        for o in operators
    ]
    return OperatorWork(
        operators=len(operators),
        flop=total((o.flop for o in operators), like=operators[0].flop),
        moved_bytes=total(moved, like=moved[0]),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSums:
    """The sums of a layer that stages need: expressions in sizes, or symbols for them."""

    parameters: sympy.Expr
    expert_parameters: sympy.Expr
    saved_bytes: sympy.Expr
    input_bytes: sympy.Expr
    forward_peak_bytes: sympy.Expr
    backward_peak_bytes: sympy.Expr
    output_bytes: sympy.Expr
    forward_flop: sympy.Expr
    backward_flop: sympy.Expr
    forward_moved_bytes: sympy.Expr
    backward_moved_bytes: sympy.Expr
    forward_collective_bytes: sympy.Expr
    backward_collective_bytes: sympy.Expr

    @classmethod
    def of(cls, graph: LayerGraph) -> Self:
        """The sums of one layer."""
        layer = expressions_of(graph)
        plain = {name: getattr(layer, name) for name in _PLAIN}
        phases: dict[str, sympy.Expr] = {}
        for phase in PHASES:
            phases |= {
                f"{phase}_flop": layer.flop(phase),
                f"{phase}_moved_bytes": layer.moved_bytes(phase),
                f"{phase}_collective_bytes": layer.collective_bytes(phase),
            }
        return cls(**plain, **phases)

    @classmethod
    def symbols(cls, layer: str) -> Self:
        """Symbols that stand for the sums of a layer."""
        return cls(
            **{
                entry.name: sympy.Symbol(sum_name(layer, entry.name), nonnegative=True)
                for entry in fields(cls)
            }
        )


_PLAIN = [entry.name for entry in fields(LayerExpressions) if entry.name != "work"]


def sum_name(layer: str, name: str) -> str:
    """The name of the symbol for one sum of one layer."""
    return f"{layer}_{name}"
