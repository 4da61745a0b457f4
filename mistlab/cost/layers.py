"""Computes the costs of a model's layers: the seconds of kernels and collectives, and the bytes
that a layer keeps for its backward pass.

Axes: C candidates, S strategies, T types of layers (``mistlab.graph.layer_types``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from mistlab.core.arrays import Floats, Ints
from mistlab.core.distinct import Known
from mistlab.cost.kernels import class_of, kernels_of_join, rule_of
from mistlab.engines.engine import KernelRule
from mistlab.graph.compiled import Compiled, compile_sums, kept
from mistlab.graph.graph import (
    EXCHANGES,
    JOINS,
    PHASES,
    Beside,
    Collective,
    LayerGraph,
    Operator,
    Phase,
)
from mistlab.graph.layer_types import LayerTypes, graphs_of, type_of
from mistlab.graph.library import graph_of
from mistlab.graph.stored_graph import StoredGraph
from mistlab.graph.sums import Sum, Value, names_in, where
from mistlab.graph.symbols import (
    PLAIN_GRAPH,
    GraphChoice,
    by_graph,
    layer_columns,
    size_columns,
    size_names,
)
from mistlab.graph.treatments import TREATMENTS, Treatment
from mistlab.machine.hardware import AS_ANOTHER, EIGHT_BIT, OPERATOR_CLASSES, Compute, OperatorClass
from mistlab.plan.workload import Workload

CLASSES: tuple[OperatorClass, ...] = (
    *OPERATOR_CLASSES,
    *(name for name in AS_ANOTHER if name != "step"),
)
# The operator classes in which GEMMs that overlap with a tensor-parallel collective are counted a
# second time: here those for a weight's gradient, below those for the gradient of a layer's input.
BESIDE = "beside"
BESIDE_INPUT = "beside input"
BESIDES: Mapping[Beside, str] = {"weights": BESIDE, "input": BESIDE_INPUT}
# Attention kernels are of these operator classes; they overlap with the exchange of keys and values
# between context-parallel ranks.
OF_ATTENTION: tuple[OperatorClass, ...] = (
    *("attention_forward", "attention_backward", "batched_matmul"),
)

# A pass whose GPU work takes g and whose launches take l takes (g^p + l^p)^(1/p) with this exponent
# p, which is close to the longer of both.
JOIN = 6.0

KernelRules = tuple[KernelRule, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pass:
    """The costs of one layer's forward or backward pass, for each candidate: seconds of kernels,
    and messages.

    ``exchanged`` has the number of messages and their total bytes, by the names of ``EXCHANGES``.
    ``beside_s`` is the part of ``compute_s`` that can overlap with messages of each kind.
    """

    compute_s: Floats
    beside_s: Mapping[Beside, Floats]
    exchanged: Mapping[str, tuple[Floats, Floats]]

    def taken(self, rows: Ints) -> Self:
        """Select the candidates with these indices."""
        return type(self)(
            compute_s=self.compute_s[rows],
            beside_s={beside: seconds[rows] for beside, seconds in self.beside_s.items()},
            exchanged={
                name: (messages[rows], size_bytes[rows])
                for name, (messages, size_bytes) in self.exchanged.items()
            },
        )


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerFigures:
    """The costs of one layer for each candidate: its passes, parameters on a rank, and bytes.

    ``experts`` is the part of the parameters that is in experts. ``again`` is the part of the
    forward pass that runs once more before the backward pass. Types of layers with equal passes
    share them.
    """

    passes: Mapping[Phase, Pass]
    again: Pass | None
    parameters: Floats
    experts: Floats
    saved_bytes: Floats
    output_bytes: Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerWork:
    """Functions that compute the operations, bytes, kernels and messages of a model's layers from
    columns of sizes.

    Types of layers whose passes are equal share the expressions of such a pass, under the name of
    the first of these types; ``compiled`` maps each pass of each type to this name. With sequence
    parallelism, layers have the operations of the graph ``split``, if the model has one.
    """

    graph: StoredGraph
    types: tuple[str, ...]
    compiled: Compiled
    rules: KernelRules
    treatments: tuple[tuple[str, Treatment], ...]
    split: StoredGraph | None = None

    @classmethod
    def of(
        cls,
        graph: StoredGraph,
        rules: KernelRules,
        treatments: tuple[tuple[str, Treatment], ...],
        split: StoredGraph | None = None,
    ) -> Self:
        """Compile expressions for the work of a layer graph's layers: operations, bytes,
        messages.
        """
        return cls(
            graph=graph,
            types=LayerTypes.of(graph.pattern).names,
            compiled=_compiled(graph, rules, treatments, size_names()),
            rules=rules,
            treatments=treatments,
            split=split,
        )

    def __call__(self, columns: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Evaluate all expressions, given columns of sizes and of choices that change the graph."""
        values = by_graph(self.compiled, self._other, columns)
        return dict(zip(self.compiled.names, values, strict=True))

    def _other(self, choice: GraphChoice) -> Compiled:
        graph = self.split if self.split is not None and choice.splits_tokens else self.graph
        return _compiled(graph, self.rules, self.treatments, size_names(), choice)

    @property
    def passes(self) -> Sequence[str]:
        """The names of all distinct passes of all types of layers."""
        names: dict[int, str] = {}
        for name, number in self.compiled.numbers.items():
            names.setdefault(number, name)
        return [names[place] for place in sorted(names)]

    def pass_of(self, layer_type: str, phase: str) -> str | None:
        """The name of a compiled pass of a type of layer; None if the type has no such pass."""
        number = self.compiled.numbers.get(f"{layer_type} {phase}")
        return None if number is None else self.passes[number]


AGAIN = "again"


@kept
def _compiled(
    graph: StoredGraph,
    rules: KernelRules,
    treatments: tuple[tuple[str, Treatment], ...],
    columns: tuple[str, ...],
    choice: GraphChoice = PLAIN_GRAPH,
) -> Compiled:
    expressions: dict[str, Value] = {}
    numbers: dict[str, int] = {}
    names: dict[tuple[str, tuple[Operator, ...]], str] = {}
    layers = graphs_of(graph.counts, treatments, choice.exchange, choice.lean)
    # If a plan's choice may change the graph of a type of layer, its passes are compiled under the
    # type's own name, since names must not depend on the choice.
    chosen = {
        type_of(kind, name) for kind in graph.pattern for name, row in treatments if row.is_chosen
    }
    for layer_type, layer in layers.items():
        expressions |= {
            f"{layer_type} parameters": layer.parameter_count,
            f"{layer_type} experts": layer.expert_parameter_count,
            f"{layer_type} saved": layer.saved_bytes,
            f"{layer_type} output": layer.output_bytes,
        }
        for phase, operators in _passes(layer).items():
            name_of_pass = f"{layer_type} {phase}"
            whose = layer_type if layer_type in chosen else layer.name
            name = names.setdefault((whose, operators), name_of_pass)
            if name == name_of_pass:
                expressions |= _exchanges(name, operators)
                for key, work in _work(operators, layer, rules, graph.attention).items():
                    expressions[f"{name} {key}"] = work
            numbers[name_of_pass] = [*names.values()].index(name)
    return compile_sums(expressions, columns=columns, numbers=numbers)


def _exchanges(name: str, operators: Sequence[Operator]) -> Mapping[str, Value]:
    """Expressions for the number and the bytes of a pass's messages, by kind of collective."""
    expressions: dict[str, Value] = {}
    for kind in EXCHANGES:
        messages = [o.read_bytes for o in operators if o.name == kind]
        expressions[f"{name} {kind} messages"] = Sum.of(len(messages))
        expressions[f"{name} {kind} message bytes"] = Sum.total(messages)
    return expressions


def _passes(layer: LayerGraph) -> dict[str, tuple[Operator, ...]]:
    """The operators of a layer's forward and backward pass and of its recomputation, by pass."""
    passes: dict[str, tuple[Operator, ...]] = {phase: layer.of_phase(phase) for phase in PHASES}
    return {**passes, AGAIN: layer.again} if layer.again else passes


def work_of(graph: StoredGraph, rules: KernelRules, split: StoredGraph | None = None) -> LayerWork:
    """The operations, bytes, kernels and messages of a layer graph's layers with an engine's
    kernels.

    ``split`` is the graph under sequence parallelism.
    """
    return LayerWork.of(graph, rules, tuple(TREATMENTS.items()), split)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerModel:
    """Computes the times of a model's layers under one engine on one GPU.

    ``slowdown`` is the factor by which the workload's arithmetic is slower than 16-bit arithmetic,
    for which rates are given; ``of_8_bits`` is the same factor for 8-bit GEMMs without a rate of
    their own.
    """

    work: LayerWork
    compute: Compute
    slowdown: float
    of_8_bits: float = 1.0

    def __call__(self, columns: Mapping[str, Floats]) -> Mapping[str, LayerFigures]:
        """The costs of each type of layer, given columns of sizes and of choices that change the
        graph.
        """
        values, rates = self.work(columns), self.rates()
        passes = {name: self._pass(name, values, rates) for name in self.work.passes}

        def pass_of(layer_type: str, phase: str) -> Pass | None:
            name = self.work.pass_of(layer_type, phase)
            return None if name is None else passes[name]

        return {
            name: LayerFigures(
                passes={phase: one for phase in PHASES if (one := pass_of(name, phase))},
                again=pass_of(name, AGAIN),
                parameters=values[f"{name} parameters"],
                experts=values[f"{name} experts"],
                saved_bytes=values[f"{name} saved"],
                output_bytes=values[f"{name} output"],
            )
            for name in self.work.types
        }

    def rates(self) -> Mapping[str, tuple[float, float]]:
        """The seconds per floating-point operation and per byte, for each operator class."""
        s_per_flop = self.slowdown / self.compute.sustained
        rates: dict[str, tuple[float, float]] = {
            operators: (
                rate.s_per_flop * s_per_flop * self.times_slower(operators),
                rate.s_per_byte,
            )
            for operators in CLASSES
            for rate in (self.compute.rate(operators),)
        }
        matmul = self.compute.rate("matmul")
        of_products = matmul.s_per_flop * s_per_flop, matmul.s_per_byte
        return {**rates, **dict.fromkeys(BESIDES.values(), of_products)}

    def _pass(
        self, name: str, values: Mapping[str, Floats], rates: Mapping[str, tuple[float, float]]
    ) -> Pass:
        _, every = of_classes(name, values, rates)
        seconds = dict(zip(rates, every, strict=True))
        launches_s = values[f"{name} kernels"] * self.compute.launch_s
        exchanged = {
            kind: (values[f"{name} {kind} messages"], values[f"{name} {kind} message bytes"])
            for kind in EXCHANGES
        }
        return Pass(
            compute_s=self._launched(every[: len(CLASSES)].sum(axis=0), launches_s),
            beside_s={
                **{beside: seconds[products] for beside, products in BESIDES.items()},
                "attention": np.sum([seconds[one] for one in OF_ATTENTION], axis=0),
            },
            exchanged={kind: one for kind, one in exchanged.items() if one[0].any()},
        )

    def _launched(self, gpu_s: Floats, launches_s: Floats) -> Floats:
        """The seconds of a pass whose kernels take ``gpu_s`` to run and ``launches_s`` to
        launch.
        """
        if self.compute.host_computes:
            return gpu_s + launches_s
        return _joined(gpu_s, launches_s)

    def times_slower(self, operators: OperatorClass) -> float:
        """The factor by which 8-bit operators are slower than the class whose rate they use."""
        takes = self.compute.given(operators)
        return self.of_8_bits if operators in EIGHT_BIT and takes not in EIGHT_BIT else 1.0


def of_classes(
    name: str, values: Mapping[str, Floats], rates: Mapping[str, tuple[float, float]]
) -> tuple[Floats, Floats]:
    """The floating-point operations and seconds of a pass's kernels, by operator class."""
    flop = np.array([values[f"{name} {one} flop"] for one in rates])
    moved = np.array([values[f"{name} {one} bytes"] for one in rates])
    factors = np.array([*rates.values()])
    return flop, flop * factors[:, :1] + moved * factors[:, 1:]


def _work(
    operators: Sequence[Operator], layer: LayerGraph, rules: KernelRules, attention: str
) -> Mapping[str, Value]:
    """Expressions for the operations, bytes and number of kernels of operators, by class."""
    classes = (*CLASSES, *BESIDES.values())
    terms: dict[str, list[Sum]] = {
        f"{one} {unit}": [] for one in classes for unit in ("flop", "bytes")
    }
    terms["kernels"] = []
    is_batch = where("numpy.greater(b, 1)")
    done = set[KernelRule]()
    for operator in operators:
        if operator.kind == "collective":
            continue
        is_join = operator.name in JOINS
        own_class, rule = (
            class_of(operator),
            rule_of(operator, layer, () if is_join else rules, attention),
        )
        if not rule.runs:
            continue
        moved = operator.read_bytes + operator.written_bytes
        fused_bytes = moved * bytes_factor(rule)
        beside = _goes_on_beside(operator)
        for operator_class in (own_class,) if beside is None else (own_class, BESIDES[beside]):
            terms[f"{operator_class} flop"].append(operator.flop)
            terms[f"{operator_class} bytes"].append(fused_bytes)
        if rule.copies_of_batches:
            terms["memory bytes"].append(_number(rule.copies_of_batches) * is_batch * moved)
        if is_join:
            terms["kernels"].append(kernels_of_join(operator))
        elif rule not in done:
            terms["kernels"].append(_kernels(rule))
        if rule.together:
            done.add(rule)
    return {name: Sum.total(some) for name, some in terms.items()}


def _goes_on_beside(operator: Operator) -> Beside | None:
    """The gradient that a GEMM computes (a weight's, or the layer's input's) if a tensor-parallel
    collective can run at the same time; otherwise None.

    Ranks exchange the gradient of a layer's input while a GEMM computes the gradient of a weight
    whose rows are split over the ranks. They gather the input again while the GEMM for the input's
    gradient runs.
    """
    if operator.kind != "matmul" or operator.phase != "backward":
        return None
    tokens = {"b", "s"}
    first, *_, last = (names_in(size) for size in operator.outputs[0])
    if "tp" in last or tokens & last:
        return None
    if "tp" in first and not tokens & first:
        return "weights"
    return "input" if tokens <= first and "tp" not in first else None


@cache
def bytes_factor(rule: KernelRule) -> Sum:
    """The bytes that an operator's kernel moves as a multiple of those in the layer graph, as an
    expression of sizes.
    """
    if rule.bytes_own_keys is not None:
        return _where_own_keys(_number(rule.bytes_own_keys), _number(rule.bytes_factor))
    return _where_fused(rule, rule.bytes_factor, rule.bytes_unfused)


@cache
def _kernels(rule: KernelRule) -> Sum:
    if rule.bytes_factor == 0:
        return Sum.of(0)
    if rule.bytes_own_keys is None:
        return _where_fused(rule, rule.kernels, rule.kernels + rule.kernels_unfused)
    return _where_own_keys(rule.kernels_a_sequence * Sum.named("b"), Sum.of(rule.kernels))


def _where_own_keys(distinct: Sum, shared: Sum) -> Sum:
    return distinct * where("numpy.equal(k, n)") + shared * where("numpy.not_equal(k, n)")


def _where_fused(rule: KernelRule, fused: float, unfused: float) -> Sum:
    if rule.fused_for == 1:
        return _number(fused)
    left = f"numpy.mod(b*n/tp, {rule.fused_for}), 0"
    return _number(fused) * where(f"numpy.equal({left})") + _number(unfused) * where(
        f"numpy.not_equal({left})"
    )


@cache
def _number(factor: float) -> Sum:
    """A decimal factor as an exact fraction, for use in an expression."""
    return Sum.of(Fraction(str(factor)))


def _joined(gpu_s: Floats, launches_s: Floats) -> Floats:
    """The time of GPU work and launches that overlap: close to the longer of both."""
    longer = np.maximum(gpu_s, launches_s)
    shares = (gpu_s / longer) ** JOIN + (launches_s / longer) ** JOIN
    return np.asarray(longer * shares ** (1 / JOIN))


# Computes the collectives inside layers, and how much of their time GEMMs or attention hide.

# A function that gives the seconds of a collective, for each strategy, from the name of the group
# of ranks, the collective, and the bytes and number of its messages.
Over = Callable[[str, Collective, Floats, Floats], Floats]
# A function that gives the seconds in which ranks exchange tokens for their experts, for each
# strategy, from the bytes and number of messages.
ToExperts = Callable[[Floats, Floats], Floats]


class LayerExchanges:
    """The seconds of the collectives inside layers, for each strategy."""

    def __init__(
        self, over: Over, to_experts: ToExperts, of_several: Callable[[str], Sequence[object]]
    ) -> None:
        self._over = over
        self._to_experts = to_experts
        self._of_several = of_several
        self._found: dict[int, Mapping[Beside | None, Floats]] = {}

    def any_in(self, passes: Sequence[Pass]) -> bool:
        """Whether ranks communicate in any of the passes with these names."""
        names = {name for one in passes for name in one.exchanged}
        return any(self._of_several(EXCHANGES[name].group) for name in names)

    def within(self, groups: Collection[str]) -> LayerExchanges:
        """Select the collectives over the groups of ranks with these names."""

        def of_several(group: str) -> Sequence[object]:
            return self._of_several(group) if group in groups else ()

        return LayerExchanges(self._over, self._to_experts, of_several)

    def unhidden_s(self, layer: LayerFigures, phase: Phase, *, overlaps_products: bool) -> Floats:
        """The seconds of a pass's collectives that arithmetic does not hide, for each strategy.

        A backward pass includes those of its recomputation.
        """
        layer_pass = layer.passes[phase]
        seconds = self.waited_s(layer_pass)
        if phase == "backward":
            if overlaps_products:
                seconds = (
                    seconds
                    - self.hidden_s(layer_pass, "weights")
                    - self.hidden_s(layer_pass, "input")
                )
            if layer.again is not None:
                seconds = seconds + self.waited_s(layer.again)
        return seconds

    def waited_s(self, layer_pass: Pass) -> Floats:
        """The seconds of a pass's collectives that attention does not hide, for each strategy."""
        exchanges = self._by_product(layer_pass)
        if not exchanges:
            return np.zeros_like(layer_pass.compute_s)
        seconds = np.sum([*exchanges.values()], axis=0)
        if "attention" in exchanges:
            seconds = seconds - self.hidden_s(layer_pass, "attention")
        return np.asarray(seconds)

    def hidden_s(self, layer_pass: Pass, beside: Beside) -> Floats:
        """The seconds of a pass's collectives that arithmetic of the kind ``beside`` hides."""
        exchanged_s = self._by_product(layer_pass).get(beside)
        if exchanged_s is None:
            return np.zeros_like(layer_pass.compute_s)
        return np.asarray(np.minimum(exchanged_s, layer_pass.beside_s[beside]))

    def _by_product(self, layer_pass: Pass) -> Mapping[Beside | None, Floats]:
        """The seconds of a pass's collectives, by the kind of arithmetic that can hide them."""
        if id(layer_pass) not in self._found:
            by_product: dict[Beside | None, Floats] = {}
            for name, (messages, size_bytes) in layer_pass.exchanged.items():
                row = EXCHANGES[name]
                if not self._of_several(row.group):
                    # A single rank has nothing to communicate.
                    continue
                if row.group == "experts":
                    seconds = self._to_experts(size_bytes, messages)
                else:
                    seconds = self._over(row.group, row.collective, size_bytes, messages)
                by_product[row.beside] = by_product.get(row.beside, 0.0) + seconds
            self._found[id(layer_pass)] = by_product
        return self._found[id(layer_pass)]


# Computes the costs of layers for many strategies; those with equal sizes are computed once.


def figures_of_layers(
    known: Known[Mapping[str, LayerFigures]],
    layers: LayerModel,
    workload: Workload,
    columns: Mapping[str, NDArray[Any]],
) -> Mapping[str, LayerFigures]:
    """The costs of each type of layer for each strategy; equal sizes are computed once, and
    ``known`` caches them across calls.
    """
    names = layer_columns()
    figures, rows = known(
        [columns[name] for name in names.values()],
        lambda sizes: layers(size_columns(workload, dict(zip(names, sizes, strict=True)))),
    )
    taken: dict[int, Pass] = {}

    def pass_of(layer_pass: Pass) -> Pass:
        # Layer types with the same pass share its result.
        if id(layer_pass) not in taken:
            taken[id(layer_pass)] = layer_pass.taken(rows)
        return taken[id(layer_pass)]

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


# Computes how long blocks with experts wait until the host knows how many tokens each expert gets.


def waits_for_hosts_s(
    workload: Workload,
    operator_s: float,
    layers: Sequence[LayerFigures],
    phase: Phase,
    exchanged_s: Floats,
) -> Floats:
    """The seconds for which the GPU waits for its host in a pass of each type of layer, for each
    strategy.

    In each block with experts, the host waits until the GPU has reported how many tokens each
    expert gets, so it never issues kernels a block ahead. A pass of the block therefore takes the
    longer of GPU time and issue time, even on a rank that has all experts. Only experts of fixed
    capacity need no such wait.

    The host takes ``operator_s`` to issue an operator; the pass's collectives take ``exchanged_s``
    (T, S).
    """
    waits_s = np.zeros_like(exchanged_s)
    if not operator_s or workload.expert_padding:
        return waits_s
    graph = graph_of(workload)
    kinds = LayerTypes.of(graph.pattern).kinds
    # Embedding and head aside, there is a layer type for each kind of block and each way to run it
    # (such as recomputed).
    ways = (len(layers) - 2) // len(kinds)
    for layer_type, layer in enumerate(layers[1:-1], start=1):
        groups = (EXCHANGES[name].group for name in layer.passes[phase].exchanged)
        if "experts" not in groups:
            continue
        operators = graph.operators_of(kinds[(layer_type - 1) // ways])
        computed_s, issued = layer.passes[phase].compute_s, operators[phase]
        if phase == "backward" and layer.again is not None:
            computed_s, issued = computed_s + layer.again.compute_s, sum(operators.values())
        waits_s[layer_type] = np.maximum(
            issued * operator_s - computed_s - exchanged_s[layer_type], 0.0
        )
    return waits_s
