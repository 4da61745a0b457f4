"""What single layers take by themselves: seconds of their kernels, and bytes that they pass on.

Axes: C candidates; the layers of a model (embedding, block, head) are named, not numbered.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.kernels import class_of, rule_of
from mistlab.engines.kernel_rules import KernelRule
from mistlab.machine.compute import OPERATOR_CLASSES, Compute
from mistlab.machine.hardware import PeakTflops
from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.graph import LAYERS, PHASES, LayerGraph, Operator, Phase
from mistlab.symbolic.kept import kept
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.symbolic.symbols import size_names, size_symbol
from mistlab.values.workload import Precision

# Besides the classes of operators: products that go on beside tensor-parallel collectives.
BESIDE = "beside"

# The GPU's time and the host's time to launch kernels join smoothly: the larger one rules.
JOIN = 8.0

Values = NDArray[np.float64]
KernelRules = tuple[KernelRule, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """One layer's forward or backward (C each): ``messages`` of tensor-parallel ranks in all
    ``message_bytes``; ``beside_s`` of the computation can go on while these are under way."""

    compute_s: Values
    beside_s: Values
    messages: int
    message_bytes: Values


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFigures:
    """One layer: its passes, its parameters on a rank, and what it keeps and passes on (C each)."""

    passes: Mapping[Phase, Pass]
    parameters: Values
    saved_bytes: Values
    input_bytes: Values
    output_bytes: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of a model's layers by one engine's kernels, as functions of columns."""

    compiled: Compiled

    def messages(self, name: str, phase: Phase) -> int:
        """How many messages the tensor-parallel ranks reduce in a phase of a layer."""
        return self.compiled.numbers[f"{name} {phase}"]

    @classmethod
    def of(cls, graph: StoredGraph, rules: KernelRules) -> Self:
        """Compile a graph's layers."""
        return cls(compiled=_compiled(graph, rules))


@kept
def _compiled(graph: StoredGraph, rules: KernelRules) -> Compiled:
    layers = dict(zip(LAYERS, graph.layers, strict=True))
    expressions: dict[str, sympy.Expr] = {}
    for name, layer in layers.items():
        expressions |= {
            f"{name} parameters": layer.parameter_count,
            f"{name} saved": layer.saved_bytes,
            f"{name} input": layer.input_bytes,
            f"{name} output": layer.output_bytes,
        }
        for phase in PHASES:
            messages = [o.read_bytes for o in layer.collectives if o.phase == phase]
            expressions[f"{name} {phase} messages"] = sympy.Add(*messages)
            for key, work in _work(layer, phase, rules, graph.attention).items():
                expressions[f"{name} {phase} {key}"] = work
    return compile_expressions(
        expressions,
        columns=size_names(),
        constants={},
        numbers={
            f"{name} {phase}": sum(o.phase == phase for o in layer.collectives)
            for name, layer in layers.items()
            for phase in PHASES
        },
    )


@cache
def work_of(graph: StoredGraph, rules: KernelRules) -> LayerWork:
    """The work of a graph's layers by an engine's kernels."""
    return LayerWork.of(graph, rules)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModel:
    """The layers of a model under one engine on one GPU.

    ``slowdown`` is of the workload's arithmetic against 16 bits, for which rates are given.
    """

    work: LayerWork
    compute: Compute
    slowdown: float

    def __call__(self, columns: Mapping[str, Values]) -> Mapping[str, LayerFigures]:
        """The figures of each layer for columns of all sizes."""
        compiled = self.work.compiled
        values = dict(zip(compiled.names, compiled(columns), strict=True))
        return {
            name: LayerFigures(
                passes={phase: self._pass(name, phase, values) for phase in PHASES},
                parameters=values[f"{name} parameters"],
                saved_bytes=values[f"{name} saved"],
                input_bytes=values[f"{name} input"],
                output_bytes=values[f"{name} output"],
            )
            for name in LAYERS
        }

    def _pass(self, name: str, phase: Phase, values: Mapping[str, Values]) -> Pass:
        s_per_flop = self.slowdown / self.compute.sustained
        seconds = {
            operators: values[f"{name} {phase} {operators} flop"] * (rate.s_per_flop * s_per_flop)
            + values[f"{name} {phase} {operators} bytes"] * rate.s_per_byte
            for operators in OPERATOR_CLASSES
            for rate in (self.compute.rate(operators),)
        }
        matmul, of_beside = self.compute.rate("matmul"), f"{name} {phase} {BESIDE}"
        beside_s = values[f"{of_beside} flop"] * (matmul.s_per_flop * s_per_flop)
        launches_s = values[f"{name} {phase} kernels"] * self.compute.launch_s
        return Pass(
            compute_s=_joined(np.sum([*seconds.values()], axis=0), launches_s),
            beside_s=beside_s + values[f"{of_beside} bytes"] * matmul.s_per_byte,
            messages=self.work.messages(name, phase),
            message_bytes=values[f"{name} {phase} messages"],
        )


def slowdown_of(peaks: PeakTflops, precision: Precision) -> float:
    """How much slower a precision's arithmetic is than 16 bits."""
    peak: float | None = getattr(peaks, precision)
    return 1.0 if peak is None else peaks.fp16 / peak


def _work(
    layer: LayerGraph, phase: Phase, rules: KernelRules, attention: str
) -> Mapping[str, sympy.Expr]:
    """Operations and bytes of each class of operators in one phase, and how many kernels."""
    zero = sympy.Integer(0)
    classes = (*OPERATOR_CLASSES, BESIDE)
    sums = {f"{one} {unit}": zero for one in classes for unit in ("flop", "bytes")}
    sums["kernels"] = zero
    is_batch = sympy.Piecewise((1, size_symbol("b") > 1), (0, True))
    done = set[KernelRule]()
    for operator in layer.of_phase(phase):
        if operator.kind == "collective":
            continue
        operators, rule = class_of(operator), rule_of(operator, layer, rules, attention)
        moved = operator.read_bytes + operator.written_bytes
        fused_bytes = moved * bytes_factor(rule)
        for one in (operators, BESIDE) if _goes_on_beside(operator) else (operators,):
            sums[f"{one} flop"] += operator.flop
            sums[f"{one} bytes"] += fused_bytes
        sums["memory bytes"] += _number(rule.copies_of_batches) * is_batch * moved
        if rule not in done:
            sums["kernels"] += _kernels(rule)
        if rule.together:
            done.add(rule)
    return sums


def _goes_on_beside(operator: Operator) -> bool:
    """Whether a product need not wait until tensor-parallel ranks have reduced the gradient of its
    layer's input: it makes the gradient of a weight whose rows are split over them."""
    if operator.kind != "matmul" or operator.phase != "backward":
        return False
    tokens, ranks = {size_symbol("b"), size_symbol("s")}, size_symbol("tp")
    first, *_, last = (sympy.sympify(size).free_symbols for size in operator.outputs[0])
    return ranks in first and ranks not in last and not tokens & (first | last)


def bytes_factor(rule: KernelRule) -> sympy.Expr:
    """Of the bytes that an operator reads and writes, the part that its kernel moves."""
    if rule.bytes_own_keys is not None:
        return _where_own_keys(_number(rule.bytes_own_keys), _number(rule.bytes_factor))
    return _where_fused(rule, rule.bytes_factor, rule.bytes_unfused)


def _kernels(rule: KernelRule) -> sympy.Expr:
    if rule.bytes_factor == 0:
        return sympy.Integer(0)
    if rule.bytes_own_keys is None:
        return _where_fused(rule, rule.kernels, rule.kernels + rule.kernels_unfused)
    of_own = rule.kernels_a_sequence * size_symbol("b")
    return _where_own_keys(of_own, sympy.Integer(rule.kernels))


def _where_own_keys(own: sympy.Expr, shared: sympy.Expr) -> sympy.Expr:
    heads, keys = size_symbol("n"), size_symbol("k")
    return sympy.Piecewise((own, sympy.Eq(heads, keys)), (shared, True))


def _where_fused(rule: KernelRule, fused: float, unfused: float) -> sympy.Expr:
    if rule.fused_for == 1:
        return _number(fused)
    b, heads, ranks = (size_symbol(name) for name in ("b", "n", "tp"))
    is_fused = sympy.Eq(sympy.Mod(b * heads / ranks, rule.fused_for), 0)
    return sympy.Piecewise((_number(fused), is_fused), (_number(unfused), True))


def _number(factor: float) -> sympy.Expr:
    return sympy.nsimplify(factor)


def _joined(gpu_s: Values, launches_s: Values) -> Values:
    """The GPU's time and the host's time to launch: close to the longer of the two."""
    longer = np.maximum(gpu_s, launches_s)
    shares = (gpu_s / longer) ** JOIN + (launches_s / longer) ** JOIN
    return np.asarray(longer * shares ** (1 / JOIN))
