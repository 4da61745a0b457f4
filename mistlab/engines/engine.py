"""An engine as one value: a system that trains by a plan.

Engines differ in their slot tables, their kernels, the memory that they keep, the bytes that their
optimizer step moves, and the plans that they can run. Predictors, checks, searches and the runtime
all read these facts from the engine's row.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mistlab.engines.engine_memory import EngineMemory
from mistlab.engines.expert_exchange import AT_ONCE, ExpertExchange
from mistlab.engines.host_time import HostTime
from mistlab.engines.kernel_rules import KernelRule
from mistlab.schedule.slot_table import Sends, Template
from mistlab.values.context_ways import RING
from mistlab.values.errors import FieldError, one_of, refuse
from mistlab.values.precision import Optimizer, Precision, saved_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Engine:
    """One engine.

    ``overlapped`` is its slot table with gradients reduced and weights gathered beside the passes,
    ``afterwards`` its slot table with both after the last pass; it has one of them at least.
    ``sends`` is how its stages pass activations on, and a send takes ``send_wait_s`` longer than
    its link. ``kernels`` are the rules by which its kernels differ from a layer graph's operators.
    ``memory`` is what it keeps in each precision that it trains in, ``step_moved`` how many bytes a
    parameter its optimizer's step reads and writes, both with moments of 32 bits; ``optimizers``
    names what it can step with.
    ``cached_share`` is what its allocator holds beyond what tensors take, as a share of what comes
    and goes; None stands for the allocator that a hardware file describes, which is the one of this
    package's own runtime. ``host`` is the time of its host, if that may hold the GPU up; None
    counts launches of kernels alone. Its products, its fused attention and its kernels that move
    bytes keep up ``products_share``, ``attention_share`` and ``memory_share`` of the rates that the
    hardware sustains, which were fitted to other engines' runs; ``shares_on`` has the three by the
    name of a hardware on which they differ, ``eight_bit_on`` that of plain 8-bit products. A run
    takes ``crowded_factor`` times as long where a GPU's memory is nearly full. ``slowest`` names
    the profile of the slowest cluster on which its runs were measured: a cluster without a profile
    may be as slow.

    ``expert_exchange`` is how copies of tokens get to their experts, and ``drops_tokens`` says
    whether experts may have a capacity. ``measured_as`` names the
    engine whose measured runs say how sure this one's times are; empty stands for the engine
    itself.

    The highest ZeRO levels are those without and within a pipeline of several stages. ``offloads``
    says whether states and activations may lie in host memory, ``context_exchanges`` in which ways
    context-parallel ranks exchange keys. Stages run the default order of
    passes and the named ``orders``, or with ``takes_orders`` whatever order a plan gives.
    With ``steps_apart`` no stage waits for another one's step: stages that begin late go on late,
    and an iteration takes as long as the stage that is longest at it.
    ``parts_ends`` says whether the last stages of a pipeline may lack blocks, ``is_for_plans``
    whether plans may name the engine, ``runs_here`` whether this package's runtime executes its
    slot table.
    """

    name: str
    overlapped: Template | None = None
    afterwards: Template | None = None
    sends: Sends = "overlapped"
    send_wait_s: float = 0.0
    kernels: tuple[KernelRule, ...] = ()
    memory: Mapping[Precision, EngineMemory]
    step_moved: Mapping[Precision, int]
    cached_share: float | None = None
    host: HostTime | None = None
    products_share: float = 1.0
    attention_share: float = 1.0
    memory_share: float = 1.0
    shares_on: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    eight_bit_on: Mapping[str, float] = field(default_factory=dict)
    crowded_factor: float = 1.0
    highest_zero: int = 3
    highest_zero_in_pipeline: int = 3
    offloads: bool = False
    context_exchanges: tuple[int, ...] = (RING,)
    takes_orders: bool = False
    orders: tuple[str, ...] = ()
    parts_ends: bool = False
    steps_apart: bool = False
    slowest: str = ""
    expert_exchange: ExpertExchange = AT_ONCE
    measured_as: str = ""
    optimizers: tuple[Optimizer, ...] = ("adamw",)
    drops_tokens: bool = False
    is_for_plans: bool = True
    runs_here: bool = False

    def __post_init__(self) -> None:
        assert self.overlapped is not None or self.afterwards is not None, self.name
        assert self.memory.keys() == self.step_moved.keys(), self.name

    def __hash__(self) -> int:
        return hash(self.name)

    def template(self, *, overlap_communication: bool = True) -> Template:
        """The slot table for plans with or without overlapped communication."""
        wanted, other = self.overlapped, self.afterwards
        if not overlap_communication:
            wanted, other = other, wanted
        template = wanted or other
        assert template is not None
        return replace(template, sends=self.sends, send_wait_s=self.send_wait_s)

    def in_named_order(self) -> "Engine":
        """The engine where passes run in another order than the default one: its host waits for no
        messages."""
        if self.host is None or not self.host.waits_for_sends:
            return self
        return replace(self, host=replace(self.host, waits_for_sends=False))

    def shares(self, hardware: str) -> tuple[float, float, float]:
        """The shares of the rates of products, attention and memory on a hardware."""
        usual = self.products_share, self.attention_share, self.memory_share
        return self.shares_on.get(hardware, usual)

    def memory_in(self, precision: Precision, optimizer: Optimizer = "adamw") -> EngineMemory:
        """The memory that the engine keeps in a precision with an optimizer; refuses those that it
        lacks."""
        if problem := self.precision_problem(precision):
            refuse("workload.precision", problem)
        if problem := self.optimizer_problem(optimizer):
            refuse("workload.optimizer", problem)
        memory = self.memory[precision]
        saved = saved_bytes(optimizer)
        return replace(memory, optimizer=memory.optimizer - saved) if saved else memory

    def step_moved_in(self, precision: Precision, optimizer: Optimizer = "adamw") -> float:
        """The bytes a parameter that a step reads and writes: each moment once and once."""
        return self.step_moved[precision] - 2 * saved_bytes(optimizer)

    def highest_zero_of(self, *, in_pipeline: bool) -> int:
        """The highest ZeRO level that a stage may have."""
        return self.highest_zero_in_pipeline if in_pipeline else self.highest_zero

    def order_problem(self, order: str, *, default: str) -> str:
        """Why the engine cannot run an order of passes; empty if it can."""
        if self.takes_orders or order in (default, *self.orders):
            return ""
        if not self.orders:
            return f"{order}, but engine {self.name} runs {default} alone here: leave it out"
        known = one_of((default, *self.orders))
        return f"{order}, but engine {self.name} does not run it here: give {known}"

    def blocks_problem(self, blocks: Sequence[int]) -> FieldError | None:
        """What is wrong with the blocks of a pipeline's stages, if anything is."""
        for stage, count in enumerate(blocks):
            may_lack_blocks = self.parts_ends and stage > 0 and not any(blocks[stage:])
            if count == 0 and not may_lack_blocks:
                problem = "0 is too small: give a whole number of at least 1"
                return FieldError(f"stages[{stage}].layers", problem)
        return None

    def overlap_problem(
        self, *, overlap_communication: bool, others: Callable[[], Sequence[str]]
    ) -> str:
        """Why a plan cannot turn overlapping off; empty if it can.

        ``others`` gives the engines that allow it.
        """
        if overlap_communication or self.afterwards is not None:
            return ""
        return (
            f"False does not go with engine {self.name}, which always overlaps: leave it out, or "
            f"give engine: {one_of(others())}"
        )

    def precision_problem(self, precision: Precision) -> str:
        """Why the engine cannot train in a precision; empty if it can."""
        if precision in self.memory:
            return ""
        known = one_of([*self.memory])
        return f"{precision}, but engine {self.name} does not train in it: give {known}"

    def optimizer_problem(self, optimizer: Optimizer) -> str:
        """Why the engine cannot step with an optimizer; empty if it can."""
        if optimizer in self.optimizers:
            return ""
        problem = f"{optimizer}, but engine {self.name} keeps moments otherwise"
        return f"{problem}: give {one_of(self.optimizers)}"
