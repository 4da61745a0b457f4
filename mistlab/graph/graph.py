"""Layer graphs: the operators, saved tensors and peak memory of a model's layers, as expressions in
symbolic sizes.

``runtime.tracing`` makes the graphs from a torch model. They are stored as JSON and read without
torch. A model has three layers: the embedding, one block, which stands for all blocks, and the head
with the loss. All counts are for one micro-batch on one tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from mistlab.graph.sums import names_in, product, sympy, total
from mistlab.schedule.context_ways import GATHER, HEADS, RING

Shape = tuple["sympy.Expr", ...]
Phase = Literal["forward", "backward"]
PHASES: tuple[Phase, ...] = ("forward", "backward")

Kind = Literal[
    "matmul",
    "attention",
    "scan",
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Operator:
    """The work of one kernel: floating-point operations, bytes moved and tensor shapes.

    In products and attention ``flop`` counts two operations for each multiply-add; causal fused
    attention counts half of the square of scores. Other operators count one operation for each
    element. ``read_bytes`` and ``written_bytes`` count each tensor once; a collective's
    ``read_bytes`` is its message.
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
    """A tensor that the forward pass keeps for the backward pass; several views of one storage
    count once.

    ``module`` is the first module that kept it. The layer's input is marked, because a checkpointed
    layer keeps only its input.
    """

    module: str
    shape: Shape
    dtype: str
    size_bytes: sympy.Expr
    is_input: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """A rank's part of one parameter tensor of a layer; the training precision decides how many
    bytes a value has.
    """

    name: str
    shape: Shape

    @property
    def count(self) -> sympy.Expr:
        """The number of this parameter tensor's values on a rank."""
        return product(self.shape)


@dataclass(frozen=True, slots=True, kw_only=True)
class Peak:
    """The bytes in use while one operator of a layer runs, which may be the most of all operators,
    depending on the sizes.

    They count the layer's input, its saved tensors and temporaries and, in the backward pass,
    gradients of activations. They do not count parameters, accumulated gradients of parameters and
    tensors of other layers.
    """

    phase: Phase
    operator: str
    size_bytes: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerGraph:
    """The operators, saved tensors and memory peaks of one layer; ``again`` are the operators that
    are recomputed before its backward pass.
    """

    name: str
    operators: tuple[Operator, ...]
    saved: tuple[SavedTensor, ...]
    parameters: tuple[Parameter, ...]
    peaks: tuple[Peak, ...]
    input_bytes: sympy.Expr
    output_bytes: sympy.Expr
    again: tuple[Operator, ...] = ()

    def of_phase(self, phase: Phase) -> tuple[Operator, ...]:
        """The layer's operators in one phase (forward or backward), in order."""
        return tuple(operator for operator in self.operators if operator.phase == phase)

    @property
    def collectives(self) -> tuple[Operator, ...]:
        """The layer's tensor-parallel collectives in one phase (forward or backward)."""
        return tuple(operator for operator in self.operators if operator.kind == "collective")

    @property
    def parameter_count(self) -> sympy.Expr:
        """The number of the layer's parameters on one rank."""
        return total((one.count for one in self.parameters), like=self.input_bytes)

    @property
    def expert_parameter_count(self) -> sympy.Expr:
        """The number of the layer's expert parameters on one rank; experts have groups of ranks of
        their own.
        """
        counts = [one.count for one in self.parameters]
        return total((one for one in counts if "ep" in names_in(one)), like=self.input_bytes)

    @property
    def saved_bytes(self) -> sympy.Expr:
        """The bytes that the layer keeps for its backward pass, its input included."""
        return total((one.size_bytes for one in self.saved), like=self.input_bytes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Condition:
    """A size that must be a multiple of a divisor for a layer graph to be valid, such as the number
    of heads by that of tensor-parallel ranks.
    """

    size: sympy.Expr
    divisor: sympy.Expr


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelGraph:
    """The layer graphs of a model's embedding, blocks and head, and the conditions on sizes under
    which they hold.

    ``assumptions`` are the comparisons on which the traced code branched, as text. The graph is
    exact if they hold. The conditions must hold in any case. Blocks are alike unless there are
    ``further_blocks`` beside ``block``: then the kinds in ``pattern``, by name, take turns.
    """

    name: str
    attention: str
    precision: str
    embedding: LayerGraph
    block: LayerGraph
    head: LayerGraph
    conditions: tuple[Condition, ...]
    assumptions: tuple[str, ...]
    further_blocks: tuple[LayerGraph, ...] = ()
    pattern: tuple[str, ...] = ("block",)

    @property
    def kinds(self) -> dict[str, LayerGraph]:
        """The layer graphs of the model's kinds of blocks, by the kind's name."""
        return {"block": self.block, **{block.name: block for block in self.further_blocks}}

    @property
    def layers(self) -> tuple[LayerGraph, LayerGraph, LayerGraph]:
        """The layer graphs of the model's embedding, block and head."""
        return self.embedding, self.block, self.head


# Lists the collectives inside layers: the communication operators, which collective each of them
# is, and which ranks take part.


Collective = Literal["all_gather", "reduce_scatter", "all_reduce", "all_to_all"]
# Says which arithmetic overlaps with a collective: GEMMs for weight gradients ("weights") or for a
# layer's input gradient ("input") in a backward pass, or attention.
Beside = Literal["weights", "input", "attention"]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Exchange:
    """A collective inside a layer: its kind, the group of ranks, and the arithmetic that it
    overlaps with.

    ``group`` names the ranks that call it. ``beside`` names the kernels that may run at the same
    time: attention's kernels always do, GEMMs only if the engine's slot table overlaps them with
    collectives.
    """

    collective: Collective
    group: str = "tensor"
    beside: Beside | None = None


EXCHANGES: Mapping[str, Exchange] = {
    "mistlab.all_reduce_": Exchange(collective="all_reduce", beside="weights"),
    # With sequence parallelism, tokens are gathered before GEMMs with split weights and
    # reduce-scattered after them.
    "mistlab.gather_tokens": Exchange(collective="all_gather"),
    "mistlab.gather_again": Exchange(collective="all_gather", beside="input"),
    "mistlab.scatter_tokens": Exchange(collective="reduce_scatter"),
    # With context parallelism, ranks may pass keys and values around a ring; that takes as long as
    # an all-gather.
    "mistlab.ring_keys": Exchange(collective="all_gather", group="context", beside="attention"),
    # Ranks with parts of the sequence may also gather all keys and values, or exchange them for
    # parts of the heads (Ulysses).
    "mistlab.gather_keys": Exchange(collective="all_gather", group="context"),
    "mistlab.scatter_keys": Exchange(collective="reduce_scatter", group="context"),
    "mistlab.exchange_heads": Exchange(collective="all_to_all", group="context"),
    "mistlab.scatter_gradient": Exchange(collective="reduce_scatter", beside="weights"),
    # With expert parallelism, tokens go to the ranks that hold their experts, or to all ranks with
    # a part of the expert.
    "mistlab.all_to_all": Exchange(collective="all_to_all", group="experts"),
    "mistlab.gather_rows": Exchange(collective="all_gather", group="expert tensor"),
    "mistlab.scatter_rows": Exchange(collective="reduce_scatter", group="expert tensor"),
}

# The operators that combine or reorder what context-parallel ranks exchange beside attention, each
# with the way to exchange keys that needs it.
JOINS: Mapping[str, int] = {
    "mistlab.join_parts": RING,
    "mistlab.order_keys": GATHER,
    "mistlab.order_heads": HEADS,
}
