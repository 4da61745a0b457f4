"""A layer graph: what the layers of a model do and hold, as expressions in symbolic sizes.

Made by tracing a torch model (``runtime.tracing``), stored as JSON, read without torch. A model is
three layers: the embedding, one block (they are alike) and the head with the loss. All counts are
for one micro-batch on one tensor-parallel rank.
"""

from dataclasses import dataclass
from typing import Literal

import sympy

Shape = tuple[sympy.Expr, ...]
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")
LAYERS = ("embedding", "block", "head")

Kind = Literal[
    "matmul",
    "attention",
    "normalization",
    "softmax",
    "elementwise",
    "reduction",
    "gather",
    "copy",
    "fill",
    "accumulate",
    "collective",
    "other",
]
KINDS: tuple[Kind, ...] = Kind.__args__  # type: ignore[attr-defined]


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """One kernel's worth of work.

    ``flop`` counts a multiply-add as two in products and attention (half of the square where
    attention is causal and fused), and one an element elsewhere. ``read_bytes`` and
    ``written_bytes`` are each tensor once; a collective's ``read_bytes`` is its message.
    """

    name: str
    kind: Kind
    phase: Phase
    module: str
    dtype: str
    inputs: tuple[Shape, ...]
    outputs: tuple[Shape, ...]
    flop: sympy.Expr
    read_bytes: sympy.Expr
    written_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedTensor:
    """A storage that the forward pass keeps for the backward pass, counted once.

    ``module`` is where it was kept first; the layer's own input is marked, since checkpointing
    keeps that alone.
    """

    module: str
    shape: Shape
    dtype: str
    size_bytes: sympy.Expr
    is_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A parameter's share on one rank; its bytes follow from the precision of training."""

    name: str
    shape: Shape

    @property
    def count(self) -> sympy.Expr:
        """Number of values."""
        return sympy.expand(sympy.prod(self.shape))


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """Bytes alive while an operator runs; for some sizes the largest of its phase.

    Counts the layer's input, what it saved and its temporaries, in the backward pass also the
    gradients that flow; parameters, their accumulated gradients and other layers' tensors not.
    """

    phase: Phase
    operator: str
    size_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """The work and memory of one layer."""

    name: str
    operators: tuple[Operator, ...]
    saved: tuple[SavedTensor, ...]
    parameters: tuple[Parameter, ...]
    peaks: tuple[Peak, ...]
    input_bytes: sympy.Expr
    output_bytes: sympy.Expr

    def of_phase(self, phase: Phase) -> tuple[Operator, ...]:
        """The operators of one phase, in order."""
        return tuple(operator for operator in self.operators if operator.phase == phase)

    @property
    def collectives(self) -> tuple[Operator, ...]:
        """What tensor parallelism adds."""
        return tuple(operator for operator in self.operators if operator.kind == "collective")

    @property
    def parameter_count(self) -> sympy.Expr:
        """Number of parameters on one rank."""
        return sympy.Add(*(parameter.count for parameter in self.parameters))

    @property
    def saved_bytes(self) -> sympy.Expr:
        """Bytes kept for the backward pass, the layer's input included."""
        return sympy.Add(*(tensor.size_bytes for tensor in self.saved))


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A size that must divide by another for the graph to mean anything."""

    size: sympy.Expr
    divisor: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The three layers of a model, and where their expressions hold.

    ``assumptions`` are the comparisons on which the traced code branched, as text: the graph is
    exact wherever they hold, and the conditions must hold everywhere.
    """

    name: str
    attention: str
    precision: str
    embedding: LayerGraph
    block: LayerGraph
    head: LayerGraph
    conditions: tuple[Condition, ...]
    assumptions: tuple[str, ...]

    @property
    def layers(self) -> tuple[LayerGraph, LayerGraph, LayerGraph]:
        """Embedding, block, head."""
        return self.embedding, self.block, self.head
