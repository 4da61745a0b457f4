"""Describes a training engine by one value (which tasks overlap, kernel rules, memory, limits), and
lists all engines.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, Self

from mistlab.core.values import FieldError, OnUse, imported, one_of, refuse
from mistlab.schedule.context_ways import RING
from mistlab.schedule.slots import Sends, Template

# The precisions of training: those of GEMMs and activations, and those of AdamW's two moments.


Precision = Literal["fp16", "bf16", "fp32", "tf32", "fp8", "fp4"]
# The precisions whose weights, activations and gradients have 32 bits: GEMMs multiply all of them,
# or in TF32 the 19 bits that tensor cores take.
SINGLE: tuple[Precision, ...] = ("fp32", "tf32")
Optimizer = Literal["adamw", "adamw-bf16", "adamw-8bit"]
# The bits in which gradients are accumulated over micro-batches and reduced over ranks: the
# engine's default ("usual"), 32 or 16.
Sums = Literal["usual", "32bit", "16bit"]

# The number of weights whose 8-bit moments have the same 32-bit scale (Dettmers et al. 2021, arXiv
# 2110.02861).
SCALED_TOGETHER = 256
# The bytes per parameter of AdamW's two moments together; master weights stay in 32 bits.
MOMENTS_BYTES: Mapping[Optimizer, float] = {
    "adamw": 8.0,
    # Moments in bf16, as in DeepSeek V3's training (arXiv 2412.19437, section 3.3.3).
    "adamw-bf16": 4.0,
    "adamw-8bit": 2.0 + 2 * 4 / SCALED_TOGETHER,
}


def saved_bytes(optimizer: Optimizer) -> float:
    """The bytes per parameter that an optimizer with low-precision moments saves over one with
    32-bit moments.
    """
    return MOMENTS_BYTES["adamw"] - MOMENTS_BYTES[optimizer]


# The parts of an engine: memory, host time, expert exchange, kernel rules.
#
# Kernel rules say how an engine's kernels differ from the operators of a layer graph, which is
# traced from this package's own models. An engine fuses some operators and splits others. A rule
# gives the bytes that the engine's kernels move per byte in the graph; zero means that the operator
# is fused into another kernel. ``mistlab.cost.kernels`` finds the rule of an operator.


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineMemory:
    """The memory of a training engine in one precision: bytes per parameter of weights, gradients
    and optimizer states, and buffers.

    States: ``weight``, ``gradient`` and ``optimizer`` are kept all the time, ``step_scratch`` only
    while the rank's part is stepped. Frozen weights of blocks take ``frozen_weight`` bytes instead,
    if this is not 0. Data-parallel ranks reduce ``reduced`` bytes per parameter; 0 stands for as
    many as ``gradient``.

    Buffers: with ``rings``, layers that are gathered or fetched use ring buffers of two entries.
    Without, gradients are reduced through a bucket of ``bucket_elements``, and at most
    ``gathered_elements`` sharded weights stay gathered. If ``gathered_blocks`` is not 0, the
    weights of embedding, head and this many blocks stay gathered instead, and gradients of some
    blocks are whole until they are reduced. Workspaces and buckets take ``fixed_mib`` under any
    plan.

    Blocks keep ``kept_gates`` tensors of the feed-forward network's width beyond those of the layer
    graph. If ranks split tokens, a block keeps ``whole_tensors`` tensors of all tokens until the
    GPU has finished with them; the host is at most ``blocks_ahead`` blocks ahead of the GPU.
    ``kept_by`` says what blocks keep if their operators are not those of the graph (``eager``,
    ``compiled``). GEMMs with quantised frozen weights keep their inputs of ``quantised_inputs``
    micro-batches, although nothing needs them.

    The head needs ``wide_logits`` times the bytes of its logits in addition: one if a 32-bit copy
    takes the place of their 16-bit gradient. With ``whole_logits`` each tensor-parallel rank has
    logits of the whole vocabulary. Logits are computed for ``loss_tokens`` tokens at a time (0
    stands for all); with ``loss_again`` none are kept, and the backward pass computes them again.
    An engine that ``fuses_loss`` reads the logits once in each pass, and writes their gradient over
    them.

    If data-parallel ranks communicate less, ``remembered`` bytes per parameter hold what
    compression has cut off, and ``outer`` bytes, sharded like optimizer states, belong to outer
    steps. A buffer of ``arriving`` bytes per parameter of the largest layer receives another rank's
    message.
    """

    weight: int
    gradient: int
    optimizer: float
    step_scratch: int = 0
    rings: bool = False
    bucket_elements: int = 0
    gathered_elements: int = 0
    gathered_blocks: int = 0
    reduced: int = 0
    kept_gates: int = 0
    whole_tensors: int = 0
    blocks_ahead: int = 0
    kept_by: str = ""
    fixed_mib: int = 0
    wide_logits: int = 0
    whole_logits: bool = False
    frozen_weight: float = 0.0
    quantised_inputs: int = 0
    loss_tokens: int = 0
    loss_again: bool = False
    fuses_loss: bool = False
    remembered: int = 0
    outer: int = 0
    arriving: int = 0

    @property
    def reduced_gradient(self) -> int:
        """The bytes per parameter of the gradients that data-parallel ranks reduce."""
        return self.reduced or self.gradient

    @property
    def bucket_bytes(self) -> int:
        """The bytes of the bucket in which gradients are reduced. It has its full size however few
        weights are trained (``deepspeed/runtime/zero/stage3.py``, ``stage_1_and_2.py``).
        """
        return (self.gradient or self.weight) * self.bucket_elements

    @property
    def kept_weight(self) -> float:
        """The bytes per parameter of block weights as ranks store and all-gather them."""
        return self.frozen_weight or self.weight

    @property
    def sums(self) -> Sums:
        """The bits in which gradients are reduced over ranks ("16bit" or
        "32bit").
        """
        return "16bit" if self.reduced_gradient == HALF_BYTES else "32bit"


HALF_BYTES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class OtherSums:
    """How an engine's memory and optimizer step change if gradients are accumulated in other bits
    than by default.
    """

    memory: EngineMemory
    step_moved: int


@dataclass(frozen=True, slots=True, kw_only=True)
class HostTime:
    """The seconds in which an engine's host launches the kernels of a block, forward and backward.

    A pass of the embedding, or of the head, takes ``end_s``. The GPU does not wait for the host
    while the host is ahead, as it is if passes take longer to compute than to launch. An optimizer
    step always waits for the host: a block's step takes ``step_s`` more, and another
    ``sharded_step_s`` if data-parallel ranks shard it.

    If ``operators`` is not 0, the seconds of passes are for a block with this many operators, and a
    block with more operators takes longer in proportion. Blocks with fewer operators were not
    measured, and are taken to need the same time. Each kernel that context-parallel ranks launch
    beyond those of a single rank takes ``launch_s``.

    A host that ``waits_for_sends`` waits for the GPU after each message between pipeline stages in
    the default order of passes. So it is never a pass ahead, and a micro-batch goes through no
    stage faster than its host issues it.
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
        """The host's launch time for blocks with this mean number of operators."""
        if operators <= self.operators or not self.operators:
            return self
        share = operators / self.operators
        return replace(self, forward_s=self.forward_s * share, backward_s=self.backward_s * share)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertExchange:
    """How an engine's expert-parallel ranks exchange tokens (all-to-all), and what that costs
    beyond transfers.

    At each exchange the GPU waits ``wait_s`` until its host knows how many tokens arrive and sorts
    them by expert; a rank with a single expert has nothing to sort. Each expert of a rank adds
    ``expert_s`` for small kernels. The share ``hidden`` of a transfer overlaps with another
    micro-batch. With ``once_a_node`` a token is sent to each node only once, however many of its
    experts are there, and is forwarded inside the node.

    The host issues one operator of a block with experts in ``operator_s``; 0 means that the host is
    not modelled. In each such block the host learns how many tokens arrive, so it is never a block
    ahead of its GPU: a pass of the block takes at least as long as issuing its operators.

    With ``weights_of_all`` each copy of a token carries the token's routing weights for all experts
    of a node, and ranks first gather which experts all tokens chose.
    """

    wait_s: float = 0.0
    expert_s: float = 0.0
    operator_s: float = 0.0
    hidden: float = 0.0
    once_a_node: bool = False
    weights_of_all: bool = False

    def waits_s(self, experts: float) -> float:
        """The seconds that an exchange of tokens takes beyond their transfer, on a rank with this
        number of experts.
        """
        return (self.wait_s if experts > 1 else 0.0) + experts * self.expert_s


AT_ONCE = ExpertExchange()

# The number of tokens per chunk of logits where this package's runtime computes the loss in chunks.
CHUNK_TOKENS = 4096

BATCHED_PRODUCTS = ("aten.bmm", "aten.baddbmm")


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRule:
    """A rule for the kernels of an engine: which operators of a layer graph it applies to, and how
    many bytes the engine's kernels move per byte of the graph.

    The first nine fields select operators; "" and None match all. ``broadcasts`` says whether the
    operands have different numbers of dimensions, as with a bias. ``adds`` is the kind of parameter
    whose gradient the operator accumulates: the ``weight`` of a linear layer, a ``vector``, or an
    embedding ``table``. ``makes`` is ``weight`` for GEMMs that compute weight gradients. ``behind``
    is the name of the operator that runs just before in the pass, if its operands are not broadcast
    and its output has the shape of this operator's first input.

    The operator moves ``bytes_factor`` times the graph's bytes, in ``kernels`` kernels; with
    ``together`` all operators of the rule are one kernel in a layer's pass. ``copies_of_batches``
    adds memory-bound bytes if a micro-batch has several sequences. If a rank's heads times
    sequences are not a multiple of ``fused_for``, the factor is ``bytes_unfused``, with
    ``kernels_unfused`` kernels more. If each query head has keys and values of its own, the factor
    is ``bytes_own_keys`` (unless it is None), with ``kernels_a_sequence`` kernels for each
    sequence. Without ``runs`` the operator is left out.
    """

    kind: str = ""
    name: str = ""
    module: str = ""
    phase: str = ""
    attention: str = ""
    adds: str = ""
    broadcasts: bool | None = None
    makes: str = ""
    behind: str = ""
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


# The kernel rule of an engine that has one kernel per operator, which moves the bytes of the layer
# graph.
PLAIN = KernelRule()


# A training engine, described by one value.
#
# Engines differ in which tasks overlap, kernels, memory, bytes moved by the optimizer step, and the
# plans that they can run. Predictors, checks, searchers and the runtime all read these facts from
# this value.


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """A training engine, described by facts about its overlap, kernels, memory and limits.

    ``system`` names the engine of which this one is a variant with the same software, or the engine
    itself. ``family`` names the engine whose measured runs give the bounds of predicted times,
    possibly the engine itself. ``slowest`` names the profile of the slowest cluster on which the
    engine was measured: a cluster without a profile may be as slow.

    Overlap: ``overlapped`` is the table of tasks (slot table) in which gradient reductions and
    gathers of weights run beside passes, ``afterwards`` the one in which they follow the last pass;
    an engine has at least one of them. ``sends`` is how stages send activations; a send takes
    ``send_wait_s`` longer than its link needs. ``host`` is the time of a host for which the GPU may
    wait; None means that only kernel launches count. ``expert_exchange`` is how copies of tokens
    reach their experts.

    Kernels: ``kernels`` are the rules by which they differ from a layer graph's operators;
    ``kernels_of_wide_sums`` precede them if 16-bit gradients are accumulated in 32 bits;
    ``kernels_in_32_bits`` replace them where all values have 32 bits, if they differ there. GEMMs,
    fused attention and memory-bound kernels reach ``products_share``, ``attention_share`` and
    ``memory_share`` of the rates that the hardware sustains, which were fitted to other engines'
    runs; ``attention_kernel`` names the kernel to whose runs the share of attention was fitted.
    ``shares_on`` has the three shares for hardware on which they differ, ``eight_bit_on`` the
    share for plain 8-bit GEMMs, both by the hardware's name.

    Memory: for each precision, ``memory`` is what the engine keeps, and ``step_moved`` the bytes
    per parameter that an optimizer step reads and writes, both with 32-bit moments. ``other_sums``
    has both for precisions in which gradients can be accumulated in other bits than by default.
    ``optimizers`` are the optimizers that the engine has, ``usual_precision`` what it trains in
    where nothing else is asked and the GPU has it. ``cached_share`` is what the allocator
    holds beyond tensors, as a share of the bytes that are not held all the time; None means the
    allocator of the hardware file, measured with this package's runtime. A run takes
    ``crowded_factor`` times as long if a GPU's memory is nearly full.

    Limits of plans: ``highest_zero`` and ``highest_zero_in_pipeline`` are the highest ZeRO levels
    without and with several stages. With ``offloads`` states and activations may be in host memory;
    with ``offloads_activations`` all activations of blocks may, but no states.
    ``context_exchanges`` are the ways in which context-parallel ranks may exchange keys. Stages run
    the default order of passes and the named ``orders``, or with ``takes_orders`` any order.
    ``parts_ends`` says whether the last stages may lack blocks, ``orders_axes`` whether
    tensor-parallel ranks may be numbered furthest apart, ``drops_tokens`` whether experts may have
    a capacity, ``runs_lean`` whether blocks may have operators that save fewer bytes. Searches
    choose no plan in which a part of a stage's blocks is recomputed unless an engine
    ``recomputes_some``, or in which ranks divide frozen weights of 8 or 4 bits unless it
    ``divides_quantised``.

    With ``steps_apart`` no stage waits for another stage's optimizer step, so an iteration takes as
    long as that of the slowest stage. ``keeps_masks`` says whether blocks keep dropout masks rather
    than draw them again. A loss in chunks of ``chunk_tokens`` tokens runs the head again in its
    backward pass if ``recomputes_loss``; otherwise the forward pass computes the gradients of
    logits. ``runs_here`` says whether this package's runtime executes the engine's slot table.
    """

    name: str
    system: str
    family: str
    overlapped: Template | None = None
    afterwards: Template | None = None
    sends: Sends = "overlapped"
    send_wait_s: float = 0.0
    kernels: tuple[KernelRule, ...] = ()
    memory: Mapping[Precision, EngineMemory]
    step_moved: Mapping[Precision, int]
    other_sums: Mapping[Precision, OtherSums] = field(default_factory=dict)
    kernels_of_wide_sums: tuple[KernelRule, ...] = ()
    kernels_in_32_bits: tuple[KernelRule, ...] | None = None
    cached_share: float | None = None
    host: HostTime | None = None
    products_share: float = 1.0
    attention_share: float = 1.0
    attention_kernel: str = ""
    memory_share: float = 1.0
    shares_on: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    eight_bit_on: Mapping[str, float] = field(default_factory=dict)
    crowded_factor: float = 1.0
    highest_zero: int = 3
    highest_zero_in_pipeline: int = 3
    offloads: bool = False
    offloads_activations: bool = False
    usual_precision: Precision = "fp16"
    context_exchanges: tuple[int, ...] = (RING,)
    takes_orders: bool = False
    orders: tuple[str, ...] = ()
    keeps_masks: bool = True
    recomputes_loss: bool = False
    chunk_tokens: int = CHUNK_TOKENS
    parts_ends: bool = False
    steps_apart: bool = False
    slowest: str = ""
    expert_exchange: ExpertExchange = AT_ONCE
    optimizers: tuple[Optimizer, ...] = ("adamw",)
    drops_tokens: bool = False
    runs_lean: bool = False
    recomputes_some: bool = True
    divides_quantised: bool = True
    orders_axes: bool = False
    runs_here: bool = False

    def __post_init__(self) -> None:
        assert self.overlapped is not None or self.afterwards is not None, self.name
        assert self.memory.keys() == self.step_moved.keys(), self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def template(self, *, overlap_communication: bool = True) -> Template:
        """Which of an engine's tasks overlap with a layer's forward and backward pass, with or
        without overlapped communication.
        """
        wanted, other = self.overlapped, self.afterwards
        if not overlap_communication:
            wanted, other = other, wanted
        template = wanted or other
        assert template is not None
        return replace(template, sends=self.sends, send_wait_s=self.send_wait_s)

    def in_named_order(self) -> "Engine":
        """A copy of the engine for pipeline schedules other than its default, in which the host
        does not wait for messages.
        """
        if self.host is None or not self.host.waits_for_sends:
            return self
        return replace(self, host=replace(self.host, waits_for_sends=False))

    def shares(self, hardware: str) -> tuple[float, float, float]:
        """The shares of a GPU's measured rates that the engine's GEMMs, attention and memory-bound
        kernels reach.
        """
        usual = self.products_share, self.attention_share, self.memory_share
        return self.shares_on.get(hardware, usual)

    def memory_in(self, precision: Precision, optimizer: Optimizer = "adamw") -> EngineMemory:
        """What the engine keeps in memory in a precision with an optimizer; refuses combinations
        that the engine does not support.
        """
        if problem := self.precision_problem(precision):
            refuse("workload.precision", problem)
        if problem := self.optimizer_problem(optimizer):
            refuse("workload.optimizer", problem)
        memory = self.memory[precision]
        # With frozen weights there may be fewer bytes of optimizer states than low-precision
        # moments would save.
        saved = min(saved_bytes(optimizer), memory.optimizer)
        return replace(memory, optimizer=memory.optimizer - saved) if saved else memory

    def step_moved_in(self, precision: Precision, optimizer: Optimizer = "adamw") -> float:
        """The bytes per parameter that the optimizer step moves; each moment is read once and
        written once.
        """
        return max(0.0, self.step_moved[precision] - 2 * saved_bytes(optimizer))

    def rules_in(self, precision: Precision) -> tuple[KernelRule, ...]:
        """The kernel rules that apply to the engine in a precision."""
        if precision in SINGLE and self.kernels_in_32_bits is not None:
            return self.kernels_in_32_bits
        memory = self.memory[precision]
        is_wide = memory.weight == HALF_BYTES and memory.sums == "32bit"
        return (*self.kernels_of_wide_sums, *self.kernels) if is_wide else self.kernels

    def summing(self, sums: Sums) -> Self:
        """A copy of the engine that accumulates gradients in the given bits, in every precision in
        which it can.
        """
        others = {name: row for name, row in self.other_sums.items() if row.memory.sums == sums}
        return replace(
            self,
            memory={**self.memory, **{name: row.memory for name, row in others.items()}},
            step_moved={
                **self.step_moved,
                **{name: row.step_moved for name, row in others.items()},
            },
        )

    def sums_problem(self, precision: Precision, sums: Sums) -> str:
        """The reason why the engine cannot accumulate gradients of a precision in the given bits;
        empty if it can.
        """
        usual = self.memory[precision].sums
        if sums in ("usual", usual):
            return ""
        other = self.other_sums.get(precision)
        if other is not None and other.memory.sums == sums:
            return ""
        return (
            f"{sums}, but engine {self.name} sums gradients of {precision} in {usual}: leave it out"
        )

    def highest_zero_of(self, *, in_pipeline: bool) -> int:
        """The highest ZeRO level that the engine supports, with or without a pipeline."""
        return self.highest_zero_in_pipeline if in_pipeline else self.highest_zero

    def order_problem(self, order: str, *, default: str) -> str:
        """The reason why the engine cannot run a pipeline schedule; empty if it can."""
        if self.takes_orders or order in (default, *self.orders):
            return ""
        if not self.orders:
            return f"{order}, but engine {self.name} runs only {default} here: leave it out"
        known = one_of((default, *self.orders))
        return f"{order}, but engine {self.name} does not run it here: give {known}"

    def blocks_problem(self, blocks: Sequence[int]) -> FieldError | None:
        """The error that says why the engine cannot run stages with these numbers of blocks; None
        if it can.
        """
        for stage, count in enumerate(blocks):
            may_lack_blocks = self.parts_ends and stage > 0 and not any(blocks[stage:])
            if count == 0 and not may_lack_blocks:
                return FieldError(
                    f"stages[{stage}].layers",
                    "0 is too small: give a whole number of at least 1",
                )
        return None

    def overlap_problem(
        self, *, overlap_communication: bool, others: Callable[[], Sequence[str]]
    ) -> str:
        """The reason why a plan of this engine cannot turn overlapped communication off; empty if
        it can.

        ``others`` gives the engines that allow it.
        """
        if overlap_communication or self.afterwards is not None:
            return ""
        return (
            f"false, but engine {self.name} always overlaps communication: leave it out, or "
            f"give engine: {one_of(others())}"
        )

    def precision_problem(self, precision: Precision) -> str:
        """The reason why the engine cannot train in a precision; empty if it can."""
        if precision in self.memory:
            return ""
        known = one_of([*self.memory])
        return f"{precision}, but engine {self.name} does not train in it: give {known}"

    def optimizer_problem(self, optimizer: Optimizer) -> str:
        """The reason why the engine cannot use an optimizer; empty if it can."""
        if optimizer in self.optimizers:
            return ""
        problem = f"{optimizer}, but engine {self.name} keeps moments otherwise"
        return f"{problem}: give {one_of(self.optimizers)}"


# All engines by name: for each file of an engine family, the engines in it; a new engine is a value
# there, and its name here.
#
# An engine is imported on first use, so listing names costs nothing. Names are in reading order;
# ``fsdp-te`` is the constant ``FSDP_TE``.
_ROWS = (
    ("mistlab", ("mistlab",)),
    ("baselines", ("megatron",)),
    ("megatron_core", ("megatron-core", "megatron-core-fused-loss", "megatron-fsdp")),
    ("megatron_core", ("megatron-bridge", "megatron-bridge-alltoall", "megatron-bridge-eager")),
    ("megatron_core", ("megatron-bridge-graph",)),
    ("baselines", ("zero-bubble", "zero-bubble-waiting", "deepspeed", "deepspeed-pipe", "aceso")),
    ("nanotron", ("nanotron", "nanotron-whole-inputs")),
    ("fsdp", ("fsdp", "fsdp-fused-loss", "fsdp-rowwise", "fsdp-te")),
    ("fsdp", ("fsdp-eager", "fsdp-compiled", "fsdp-compiled-blocks")),
    ("fsdp", ("fsdp-eager-whole-logits", "fsdp-compiled-blocks-whole-logits")),
    ("fsdp", ("fsdp-eager-rowwise", "fsdp-compiled-rowwise", "fsdp-compiled-blocks-rowwise")),
    ("ddp", ("ddp",)),
    ("trainers", ("trainer", "trainer-loop", "trainer-wide-logits", "trainer-autocast")),
    ("trainers", ("deepspeed-trainer", "trainer-fused", "trainer-tiled", "trainer-c", "llmq")),
    ("mistlab", ("mist",)),
)

ENGINES: "MutableMapping[str, Engine]" = OnUse(
    {
        name: imported(f"mistlab.engines.{file}:{name.upper().replace('-', '_')}")
        for file, names in _ROWS
        for name in names
    }
)


def names_for_plans() -> tuple[str, ...]:
    """The names of all engines that a plan may use."""
    return tuple(ENGINES)


def names_that_wait() -> tuple[str, ...]:
    """The names of the engines whose plans may turn overlapped communication off."""
    return tuple(name for name, row in ENGINES.items() if row.afterwards is not None)
