"""How an engine's kernels differ from the operators of a layer graph.

The graphs are those of this package's own models. An engine fuses some of their operators into
others and splits some up; a rule says how many bytes its kernels move for each byte that the graph
counts, zero where another kernel does the work on its way.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from mistlab.compute import OperatorClass
from mistlab.plan import Engine
from mistlab.symbolic.graph import Operator

BATCHED = {"aten.bmm", "aten.baddbmm"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """Bytes that an engine moves for each that the graph counts; "" and None stand for any.

    ``broadcasts`` is whether an operand has fewer dimensions than another, as a bias does.
    ``copies_of_batches`` are bytes at memory's rate that come on top where a micro-batch has more
    than one sequence. Where ``fused_for`` is given, it holds only where a rank's heads times
    sequences are a multiple of it; elsewhere ``bytes_unfused`` does, with as many kernels on top as
    ``kernels_unfused`` says.
    """

    kind: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    attention: str = ""
    broadcasts: bool | None = None
    bytes_factor: float = 1.0
    copies_of_batches: float = 0.0
    fused_for: int = 1
    bytes_unfused: float = 1.0
    kernels_unfused: int = 0

    def is_of(self, operator: Operator, attention: str) -> bool:
        """Whether the rule is about this operator in a graph with this attention."""
        wanted = (self.kind, self.name, self.module, self.phase, self.attention)
        given = (operator.kind, operator.name, operator.module, operator.phase, attention)
        return all(
            one in ("", other) for one, other in zip(wanted, given, strict=True)
        ) and self.broadcasts in (None, _broadcasts(operator))


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

RULES: Mapping[Engine, tuple[Rule, ...]] = {
    "mistlab": _SEQUENCE_FIRST,
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


def _broadcasts(operator: Operator) -> bool:
    return len({len(shape) for shape in operator.inputs}) > 1


def rule_of(operator: Operator, engine: Engine, attention: str) -> Rule:
    """How an engine's kernels do an operator."""
    rules = (rule for rule in RULES[engine] if rule.is_of(operator, attention))
    return next(rules, PLAIN)
