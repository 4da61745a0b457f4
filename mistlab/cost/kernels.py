"""Finds the rule of an engine for an operator of a layer graph, and the operator's class."""

from collections.abc import Sequence

from mistlab.engines.engine_parts import BATCHED_PRODUCTS, PLAIN, KernelRule
from mistlab.machine.compute import OperatorClass
from mistlab.symbolic.eight_bit import DTYPE, DTYPE_OF_4
from mistlab.symbolic.exchanges import JOINS
from mistlab.symbolic.graph import LayerGraph, Operator
from mistlab.symbolic.sums import Sum, names_in, where
from mistlab.values.context_ways import LAUNCHES


def class_of(operator: Operator) -> OperatorClass:
    """The class of an operator, which has a rate in hardware files."""
    if operator.kind == "matmul":
        return _class_of_product(operator)
    if operator.kind == "scan":
        return "scan"
    if operator.kind == "attention":
        return "attention_forward" if operator.phase == "forward" else "attention_backward"
    return "memory"


def _class_of_product(operator: Operator) -> OperatorClass:
    if operator.name in BATCHED_PRODUCTS:
        return "batched_matmul"
    if operator.dtype == DTYPE_OF_4:
        return "matmul_4bit"
    is_grouped = operator.name.startswith("mistlab.grouped_product")
    if operator.dtype == DTYPE:
        return "grouped_matmul_8bit" if is_grouped else "matmul_8bit"
    return "grouped_matmul" if is_grouped else "matmul"


def rule_of(
    operator: Operator, layer: LayerGraph, rules: Sequence[KernelRule], attention: str
) -> KernelRule:
    """The first of an engine's rules that matches an operator of a layer.

    ``attention`` is the attention of the layer's graph.
    """
    about = (rule for rule in rules if _is_about(rule, operator, layer, attention))
    return next(about, PLAIN)


def _is_about(rule: KernelRule, operator: Operator, layer: LayerGraph, attention: str) -> bool:
    wanted = (rule.kind, rule.name, rule.module, rule.phase, rule.attention)
    given = (operator.kind, operator.name, operator.module, operator.phase, attention)
    return (
        all(one in ("", other) for one, other in zip(wanted, given, strict=True))
        and rule.adds in ("", _adds(operator, layer))
        and rule.broadcasts in (None, _broadcasts(operator))
        and (not rule.makes or makes_weight_gradient(operator))
    )


def makes_weight_gradient(operator: Operator) -> bool:
    """Whether an operator is a product of a backward pass whose result has no token dimension."""
    if operator.kind != "matmul" or operator.phase != "backward":
        return False
    return not any({"b", "s"} & names_in(size) for size in operator.outputs[0])


def _broadcasts(operator: Operator) -> bool:
    return len({len(shape) for shape in operator.inputs}) > 1


def _adds(operator: Operator, layer: LayerGraph) -> str:
    """Whose gradients an operator adds: a weight's, a vector's or a table's; "" if it adds none."""
    if operator.kind != "accumulate":
        return ""
    if len(operator.outputs[0]) == 1:
        return "vector"
    products = (one for one in layer.of_phase("backward") if one.kind == "matmul")
    of_weight = (operator.module, operator.outputs)
    return "weight" if of_weight in ((one.module, one.outputs) for one in products) else "table"


def kernels_of_join(operator: Operator) -> Sum:
    """The kernels, messages among them, that context parallelism adds to a pass."""
    of_way = LAUNCHES[JOINS[operator.name]]
    launches = of_way.forward if operator.phase == "forward" else of_way.backward
    kernels: Sum = launches.beside(Sum.named("cp") + Sum.of(-1))
    return where("numpy.greater(cp, 1)") * kernels
