"""The costs of single layers: seconds of their kernels, and bytes that they keep and pass on.

Axes: C candidates; types of layers (``mistlab.symbolic.layer_types``) are named, not numbered.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
from numpy.typing import NDArray

from mistlab.cost.kernels import class_of, rule_of
from mistlab.engines.kernel_rules import KernelRule
from mistlab.machine.compute import OPERATOR_CLASSES, Compute
from mistlab.machine.hardware import PeakTflops
from mistlab.symbolic.compiled import Compiled, compile_expressions
from mistlab.symbolic.graph import PHASES, LayerGraph, Operator, Phase
from mistlab.symbolic.kept import kept
from mistlab.symbolic.layer_types import LayerTypes, graphs_of
from mistlab.symbolic.lazily import sympy
from mistlab.symbolic.stored_graph import StoredGraph
from mistlab.symbolic.symbols import size_names, size_symbol
from mistlab.symbolic.treatments import TREATMENTS, Treatment
from mistlab.values.workload import Precision

# One class more than those of operators: products that run beside tensor-parallel collectives.
BESIDE = "beside"

# The power of the norm that joins the GPU's time and the host's time to launch kernels.
JOIN = 8.0

Values = NDArray[np.float64]
KernelRules = tuple[KernelRule, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """A layer's forward or backward pass (C each).

    Tensor-parallel ranks exchange ``messages`` with ``message_bytes`` in all. ``beside_s`` of
    ``compute_s`` can run while these messages are under way.
    """

    compute_s: Values
    beside_s: Values
    messages: int
    message_bytes: Values

    def taken(self, rows: NDArray[np.int64]) -> Self:
        """The pass of the candidates in these rows."""
        return type(self)(
            compute_s=self.compute_s[rows],
            beside_s=self.beside_s[rows],
            messages=self.messages,
            message_bytes=self.message_bytes[rows],
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFigures:
    """One layer: its passes, parameters on a rank, and bytes that it keeps and passes on (C each).

    ``again`` is the part of the forward pass that runs once more before its backward pass. Types of
    layers with equal passes share them.
    """

    passes: Mapping[Phase, Pass]
    again: Pass | None
    parameters: Values
    saved_bytes: Values
    output_bytes: Values


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """The work of a model's layers by one engine's kernels, as functions of columns.

    Expressions of a pass are named after the first type of layer that has it. The numbers of
    ``compiled`` say how many messages the tensor-parallel ranks reduce in each named pass, and for
    each pass of each type, the place of its name among these names.
    """

    types: tuple[str, ...]
    compiled: Compiled

    @classmethod
    def of(
        cls, graph: StoredGraph, rules: KernelRules, treatments: tuple[tuple[str, Treatment], ...]
    ) -> Self:
        """Compile the layers of a graph."""
        return cls(
            types=LayerTypes.of(graph.pattern).names,
            compiled=_compiled(graph, rules, treatments, size_names()),
        )

    @property
    def messages(self) -> Mapping[str, int]:
        """Messages in each pass, by its name."""
        numbers = self.compiled.numbers.items()
        return {name.removesuffix(_MESSAGES): n for name, n in numbers if name.endswith(_MESSAGES)}

    def pass_of(self, layer_type: str, phase: str) -> str | None:
        """The name of a pass of a type of layers, if it has one."""
        place = self.compiled.numbers.get(f"{layer_type} {phase}")
        return None if place is None else [*self.messages][place]


_MESSAGES = " messages"
AGAIN = "again"


@kept
def _compiled(
    graph: StoredGraph,
    rules: KernelRules,
    treatments: tuple[tuple[str, Treatment], ...],
    columns: tuple[str, ...],
) -> Compiled:
    expressions: dict[str, sympy.Expr] = {}
    numbers: dict[str, int] = {}
    names: dict[tuple[str, tuple[Operator, ...]], str] = {}
    for layer_type, layer in graphs_of(graph.graph, treatments).items():
        expressions |= {
            f"{layer_type} parameters": layer.parameter_count,
            f"{layer_type} saved": layer.saved_bytes,
            f"{layer_type} output": layer.output_bytes,
        }
        for phase, operators in _passes(layer).items():
            name = names.setdefault((layer.name, operators), f"{layer_type} {phase}")
            if f"{name}{_MESSAGES}" not in numbers:
                messages = [o.read_bytes for o in operators if o.kind == "collective"]
                numbers[f"{name}{_MESSAGES}"] = len(messages)
                expressions[f"{name} messages"] = sympy.Add(*messages)
                for key, work in _work(operators, layer, rules, graph.attention).items():
                    expressions[f"{name} {key}"] = work
            numbers[f"{layer_type} {phase}"] = [*names.values()].index(name)
    return compile_expressions(expressions, columns=columns, constants={}, numbers=numbers)


def _passes(layer: LayerGraph) -> dict[str, tuple[Operator, ...]]:
    """The operators of each pass of a layer."""
    passes: dict[str, tuple[Operator, ...]] = {phase: layer.of_phase(phase) for phase in PHASES}
    return {**passes, AGAIN: layer.again} if layer.again else passes


def work_of(graph: StoredGraph, rules: KernelRules) -> LayerWork:
    """The work of a graph's layers by an engine's kernels."""
    return LayerWork.of(graph, rules, tuple(TREATMENTS.items()))


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModel:
    """The times of a model's layers under one engine on one GPU.

    ``slowdown`` is how many times slower the workload's arithmetic is than 16-bit arithmetic, for
    which rates are given.
    """

    work: LayerWork
    compute: Compute
    slowdown: float

    def __call__(self, columns: Mapping[str, Values]) -> Mapping[str, LayerFigures]:
        """The figures of each type of layer for columns of all sizes."""
        compiled = self.work.compiled
        values = dict(zip(compiled.names, compiled(columns), strict=True))
        passes = {
            name: self._pass(name, messages, values)
            for name, messages in self.work.messages.items()
        }

        def pass_of(layer_type: str, phase: str) -> Pass | None:
            name = self.work.pass_of(layer_type, phase)
            return None if name is None else passes[name]

        return {
            name: LayerFigures(
                passes={phase: one for phase in PHASES if (one := pass_of(name, phase))},
                again=pass_of(name, AGAIN),
                parameters=values[f"{name} parameters"],
                saved_bytes=values[f"{name} saved"],
                output_bytes=values[f"{name} output"],
            )
            for name in self.work.types
        }

    def _pass(self, name: str, messages: int, values: Mapping[str, Values]) -> Pass:
        s_per_flop = self.slowdown / self.compute.sustained
        seconds = {
            operators: values[f"{name} {operators} flop"] * (rate.s_per_flop * s_per_flop)
            + values[f"{name} {operators} bytes"] * rate.s_per_byte
            for operators in OPERATOR_CLASSES
            for rate in (self.compute.rate(operators),)
        }
        matmul, of_beside = self.compute.rate("matmul"), f"{name} {BESIDE}"
        beside_s = values[f"{of_beside} flop"] * (matmul.s_per_flop * s_per_flop)
        launches_s = values[f"{name} kernels"] * self.compute.launch_s
        return Pass(
            compute_s=_joined(np.sum([*seconds.values()], axis=0), launches_s),
            beside_s=beside_s + values[f"{of_beside} bytes"] * matmul.s_per_byte,
            messages=messages,
            message_bytes=values[f"{name} messages"],
        )


def slowdown_of(peaks: PeakTflops, precision: Precision) -> float:
    """How many times slower a precision's arithmetic is than 16-bit arithmetic."""
    peak: float | None = getattr(peaks, precision)
    return 1.0 if peak is None else peaks.fp16 / peak


def _work(
    operators: Sequence[Operator], layer: LayerGraph, rules: KernelRules, attention: str
) -> Mapping[str, sympy.Expr]:
    """Operations and bytes of each class of a layer's operators, and its number of kernels."""
    zero = sympy.Integer(0)
    classes = (*OPERATOR_CLASSES, BESIDE)
    sums = {f"{one} {unit}": zero for one in classes for unit in ("flop", "bytes")}
    sums["kernels"] = zero
    is_batch = sympy.Piecewise((1, size_symbol("b") > 1), (0, True))
    done = set[KernelRule]()
    for operator in operators:
        if operator.kind == "collective":
            continue
        own, rule = class_of(operator), rule_of(operator, layer, rules, attention)
        moved = operator.read_bytes + operator.written_bytes
        fused_bytes = moved * bytes_factor(rule)
        for one in (own, BESIDE) if _goes_on_beside(operator) else (own,):
            sums[f"{one} flop"] += operator.flop
            sums[f"{one} bytes"] += fused_bytes
        sums["memory bytes"] += _number(rule.copies_of_batches) * is_batch * moved
        if rule not in done:
            sums["kernels"] += _kernels(rule)
        if rule.together:
            done.add(rule)
    return sums


def _goes_on_beside(operator: Operator) -> bool:
    """Whether a product can run while tensor-parallel ranks reduce the gradient of a layer's input.

    Such a product makes the gradient of a weight whose rows are split over the ranks.
    """
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
    """The GPU's time joined with the host's time to launch: close to the longer of the two."""
    longer = np.maximum(gpu_s, launches_s)
    shares = (gpu_s / longer) ** JOIN + (launches_s / longer) ** JOIN
    return np.asarray(longer * shares ** (1 / JOIN))
