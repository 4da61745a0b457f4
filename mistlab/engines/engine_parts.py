"""The parts of an engine's row: its memory, its host, its experts' exchange, its kernels' rules.

Rules tell the differences between an engine's kernels and the operators of a layer graph. Graphs
are made from this package's own models. An engine fuses some of their operators and splits others.
A rule says how many bytes the engine's kernels move for each byte in the graph; zero means that
another kernel does the work as well. ``mistlab.cost.kernels`` finds the rule of an operator.
"""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """An engine's memory in one precision, in bytes for each parameter unless said otherwise.

    ``weight``, ``gradient`` and ``optimizer`` are kept all the time, ``step_scratch`` only while
    the rank's part is stepped. With ``rings`` layers come and go through rings of two buffers.
    Without rings, gradients are reduced through a bucket of ``bucket_elements``, and at most
    ``gathered_elements`` sharded weights stay gathered. The head needs ``wide_logits`` times the
    bytes of its logits more: one where a 32-bit copy takes the place of their 16-bit gradient.

    Data-parallel ranks reduce ``reduced`` bytes a parameter, if this is not as wide as the
    gradients that are kept. Blocks keep ``kept_gates`` tensors of the feed-forward network's width
    more than their graphs do. Where ranks split tokens, a block keeps ``whole_tensors`` tensors of
    all tokens until the GPU is done with them; the host is ahead of it by at most ``blocks_ahead``
    blocks. ``kept_by`` says what blocks keep where their operators are not the graph's (``eager``,
    ``compiled``). Workspaces and buckets take ``fixed_mib`` whatever the plan.
    """

    weight: int
    gradient: int
    optimizer: float
    step_scratch: int = 0
    rings: bool = False
    bucket_elements: int = 0
    gathered_elements: int = 0
    reduced: int = 0
    kept_gates: int = 0
    whole_tensors: int = 0
    blocks_ahead: int = 0
    kept_by: str = ""
    fixed_mib: int = 0
    wide_logits: int = 0

    @property
    def reduced_gradient(self) -> int:
        """Bytes a parameter that data-parallel ranks reduce."""
        return self.reduced or self.gradient


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """Seconds in which the host issues a block's forward pass, and its backward pass.

    A pass of the embedding, or of the head, takes ``end_s``. The GPU never waits for the host as
    long as the host is ahead, which it is wherever passes compute for longer. A step waits for the
    host always: a block's step takes ``step_s`` more, and another ``sharded_step_s`` if
    data-parallel ranks divide it.

    Where ``operators`` is not 0, the seconds of passes are those of a block with so many operators,
    and a block with more takes longer in proportion. Blocks with fewer were not measured, and take
    as long. Each kernel that context-parallel ranks launch beyond those of a single rank takes
    ``launch_s``.

    A host that ``waits_for_sends`` waits for the GPU after each message between the stages of a
    pipeline, if they run in the default order. So it is never a pass ahead, and a micro-batch goes
    through no stage faster than its host issues it.
    """

    forward_s: float
    backward_s: float
    end_s: float = 0.0
    step_s: float = 0.0
    sharded_step_s: float = 0.0
    operators: int = 0
    launch_s: float = 0.0
    waits_for_sends: bool = False

    def of_blocks(self, operators: float) -> Self:
        """The time of a host whose blocks have so many operators, in the mean."""
        if operators <= self.operators or not self.operators:
            return self
        share = operators / self.operators
        return replace(self, forward_s=self.forward_s * share, backward_s=self.backward_s * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """The exchanges of an engine between ranks with different experts.

    At each exchange the GPU waits ``wait_s`` for its host, which has to know how many rows come,
    and sorts them by the rank's experts; where a rank has one expert there is nothing to sort.
    ``expert_s`` is the time of the small kernels that each of a rank's experts needs for itself,
    for each exchange. Of the bytes' time the share ``hidden`` goes on beside another micro-batch.
    With ``once_a_node`` a token goes to each node once, however many of its experts are there, and
    is passed on inside the node.

    ``operator_s`` is the time in which the host issues one operator of a block with experts. It
    learns how many rows come in each such block, so it is never a block ahead of its GPU: a pass of
    the block takes as long as its operators do. 0 counts no host.

    With ``weights_of_all`` a copy takes the token's weights of all experts of a node with it, and
    ranks tell one another which experts all of their tokens chose.
    """

    wait_s: float = 0.0
    expert_s: float = 0.0
    operator_s: float = 0.0
    hidden: float = 0.0
    once_a_node: bool = False
    weights_of_all: bool = False

    def waits_s(self, experts: float) -> float:
        """Seconds of an exchange beyond its bytes' time, for a rank with so many experts."""
        return (self.wait_s if experts > 1 else 0.0) + experts * self.expert_s


AT_ONCE = ExpertExchange()

BATCHED_PRODUCTS = ("aten.bmm", "aten.baddbmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """The bytes that an engine moves for each byte in the graph, for matching operators.

    The first eight fields choose operators; "" and None match any. ``broadcasts`` says whether an
    operand has fewer dimensions than another, as a bias does. ``adds`` says whose gradients the
    operator adds: those of a linear layer's ``weight``, of a ``vector``, or of a ``table``.
    ``makes`` is ``weight`` for products that make gradients of weights.

    The operator moves ``bytes_factor`` times the graph's bytes, in ``kernels`` kernels; operators
    ``together`` are one kernel in a layer's pass. ``copies_of_batches`` adds bytes at the memory's
    rate if a micro-batch has more than one sequence. If a rank's heads times sequences are no
    multiple of ``fused_for``, ``bytes_unfused`` takes the place of ``bytes_factor``, with
    ``kernels_unfused`` kernels more. If no heads share their keys and values, ``bytes_own_keys``
    takes its place (unless it is None), with ``kernels_a_sequence`` kernels for each sequence.
    An operator that is not ``runs`` is left out.
    """

    kind: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    attention: str = ""
    adds: str = ""
    broadcasts: bool | None = None
    makes: str = ""
    bytes_factor: float = 1.0
    copies_of_batches: float = 0.0
    fused_for: int = 1
    bytes_unfused: float = 1.0
    kernels_unfused: int = 0
    together: bool = False
    kernels: int = 1
    kernels_a_sequence: int = 0
    bytes_own_keys: float | None = None
    runs: bool = True


# The rule of torch's own operators: one kernel, and the graph's bytes.
PLAIN = KernelRule()
