"""How a runtime's kernels differ from the operators of a layer graph.

The graphs are those of this package's own models. A runtime fuses some of their operators into
others and splits some up; a rule says how many bytes its kernels move for each byte that the graph
counts, zero where another kernel does the work on its way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mistlab.machine.compute import OperatorClass
from mistlab.schedule.slot_table import Runtime
from mistlab.symbolic.graph import LayerGraph, Operator

BATCHED = {"aten.bmm", "aten.baddbmm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Bytes that a runtime moves for each that the graph counts; "" and None stand for any.

    ``broadcasts`` is whether an operand has fewer dimensions than another, as a bias does;
    ``adds`` is what an operator adds gradients of: ``weight`` of a linear layer, which a product
    makes, ``vector``, or ``table``, of more dimensions and made otherwise.
    ``copies_of_batches`` are bytes at memory's rate that come on top where a micro-batch has more
    than one sequence. Where ``fused_for`` is given, it holds only where a rank's heads times
    sequences are a multiple of it; elsewhere ``bytes_unfused`` does, with as many kernels on top as
    ``kernels_unfused`` says. Of operators ``together`` one kernel does all of a layer's pass.
    Otherwise an operator is ``kernels``. Where ``bytes_own_keys`` is given, it holds where no heads
    share their keys and values, with ``kernels_a_sequence`` for each sequence of a micro-batch;
    elsewhere ``bytes_factor`` and ``kernels`` do.
    """

    kind: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    attention: str = ""
    adds: str = ""
    broadcasts: bool | None = None
    bytes_factor: float = 1.0
    copies_of_batches: float = 0.0
    fused_for: int = 1
    bytes_unfused: float = 1.0
    kernels_unfused: int = 0
    together: bool = False
    kernels: int = 1
    kernels_a_sequence: int = 0
    bytes_own_keys: float | None = None

    def is_of(self, operator: Operator, layer: LayerGraph, attention: str) -> bool:
        """Whether the rule is about this operator of a layer in a graph with this attention."""
        wanted = (self.kind, self.name, self.module, self.phase, self.attention)
        given = (operator.kind, operator.name, operator.module, operator.phase, attention)
        return (
            all(one in ("", other) for one, other in zip(wanted, given, strict=True))
            and self.adds in ("", _adds(operator, layer))
            and self.broadcasts in (None, _broadcasts(operator))
        )


PLAIN = Rule()

# With the sequence before the batch, as the published systems lay activations out, written-out
# attention needs one copy where this package's models make four, and gradients of fused queries,
# keys and values need not be put together.
_SEQUENCE_FIRST = (
    Rule(
        name="aten.clone", module="attention", phase="forward", attention="math", bytes_factor=0.25
    ),
    Rule(name="aten.cat", module="attention", attention="flash", bytes_factor=0.0),
)
# Gradients are added up inside the product that makes them (Megatron-LM, gradient accumulation
# fusion). The loss is computed in 32 bits: 52 bytes a logit instead of 20.
_FUSED_ACCUMULATION = Rule(kind="accumulate", bytes_factor=0.0)
_LOSS_IN_32_BITS = tuple(
    Rule(kind=kind, module="head", bytes_factor=2.6) for kind in ("elementwise", "reduction")
)
# Operands and result of fused attention are copied from sequence first to batch first and back.
_COPIES_FOR_ATTENTION = Rule(kind="attention", copies_of_batches=2.0)
# A bias, dropout and the residual sum are one kernel, which writes the mask on its way.
_FUSED_RESIDUALS = (
    Rule(name="aten.add", module="", phase="forward", broadcasts=True, bytes_factor=0.0),
    Rule(name="aten.native_dropout", module="dropout", bytes_factor=0.2),
)
# The fused softmax takes whole groups of four; what stands in for it scales, masks, converts to 32
# bits and back in separate kernels.
_SOFTMAX_OF_FOURS = tuple(
    Rule(name=name, fused_for=4, bytes_unfused=unfused, kernels_unfused=12)
    for name, unfused in (
        ("mistlab.causal_softmax", 10.0),
        ("mistlab.causal_softmax_backward", 7.0),
    )
)
# RMSNorm, rotary embedding and SwiGLU as separate operators, partly in 32 bits.
_UNFUSED_LLAMA = (
    Rule(name="mistlab.rms_norm", bytes_factor=6.0),
    Rule(name="mistlab.rms_norm_backward", bytes_factor=5.0),
    Rule(name="mistlab.rotate_", bytes_factor=6.0),
    Rule(name="mistlab.swiglu", bytes_factor=2.5),
    Rule(name="mistlab.swiglu_backward", bytes_factor=2.5),
)
_BASELINE = (
    *_SEQUENCE_FIRST,
    *_FUSED_RESIDUALS,
    *_LOSS_IN_32_BITS,
    _COPIES_FOR_ATTENTION,
    *_UNFUSED_LLAMA,
)

# What this project's runtime does (``runtime``; docs/decisions/0014-engine.md). Rules that are not
# given are those of torch's own operators, of which graphs are.
_MISTLAB = (
    # The product adds (runtime.engine.work.products); one kernel adds vectors
    # (ParameterPlaces.add_vectors).
    Rule(adds="weight", bytes_factor=0.0),
    Rule(adds="vector", together=True),
    # runtime.engine.work.written_out copies neither operands nor results, puts no gradients
    # together and scales inside products, one for each sequence.
    *(
        Rule(name=name, module="attention", attention="math", bytes_own_keys=0.0)
        for name in ("aten.clone", "aten.cat", "aten.mul")
    ),
    *(
        Rule(name=name, module="attention", bytes_own_keys=1.0, kernels_a_sequence=1)
        for name in BATCHED
    ),
    # runtime.models.operators: the graph counts scores read up to each query's own and shares
    # written, 1.5 passes. They are read and written whole; 15 parts in 32 are written before, and 1
    # in 16 is read and written: 2.59 passes, in 8 kernels.
    Rule(name="mistlab.causal_softmax", bytes_factor=83 / 48, kernels=8),
    # What graphs have as one kernel is several here. Of a tensor's halves: rotate_ moves 12 where
    # the graph counts 4, swiglu 5 of 3, its backward pass 11 of 5.
    Rule(name="mistlab.rotate_", bytes_factor=3.0),
    Rule(name="mistlab.swiglu", bytes_factor=5 / 3),
    Rule(name="mistlab.swiglu_backward", bytes_factor=2.2),
)

RULES: Mapping[Runtime, tuple[Rule, ...]] = {
    "mistlab": _MISTLAB,
    "mist": _SEQUENCE_FIRST,
    "megatron": (_FUSED_ACCUMULATION, *_SOFTMAX_OF_FOURS, *_BASELINE),
    "deepspeed": _BASELINE,
}


def class_of(operator: Operator) -> OperatorClass:
    """The class whose rate an operator runs at."""
    if operator.kind == "matmul":
        return "batched_matmul" if operator.name in BATCHED else "matmul"
    if operator.kind == "attention":
        return "attention_forward" if operator.phase == "forward" else "attention_backward"
    return "memory"


def rule_of(operator: Operator, layer: LayerGraph, runtime: Runtime, attention: str) -> Rule:
    """How a runtime's kernels do an operator of a layer."""
    rules = (rule for rule in RULES[runtime] if rule.is_of(operator, layer, attention))
    return next(rules, PLAIN)


def _broadcasts(operator: Operator) -> bool:
    return len({len(shape) for shape in operator.inputs}) > 1


def _adds(operator: Operator, layer: LayerGraph) -> str:
    """What an operator adds gradients of; "" of one that adds none."""
    if operator.kind != "accumulate":
        return ""
    if len(operator.outputs[0]) == 1:
        return "vector"
    products = (one for one in layer.of_phase("backward") if one.kind == "matmul")
    of_weight = (operator.module, operator.outputs)
    return "weight" if of_weight in ((one.module, one.outputs) for one in products) else "table"
