"""The types of predictions of plans and of measurements, which have the same fields; and the
interface of predictors.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Protocol, Self

from mistlab.core.values import Checked, bounded, check_fields, name_in, refuse, shown
from mistlab.engines.engine import names_for_plans
from mistlab.plan.plan import Plan

# Splits the iteration time of a GPU by cause, into parts that add up to it.


_SECONDS = bounded(minimum=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StepParts(Checked):
    """The seconds of an iteration on one GPU, by what the GPU does or waits for; their sum is the
    iteration time.

    ``arithmetic_s`` is the model's own arithmetic at the peak rate. ``products_s`` and
    ``attention_s`` are how much longer GEMMs and attention take, ``memory_bound_s`` is the time of
    memory-bound operators, whose arithmetic does not count, and ``recomputation_s`` that of
    recomputed kernels.

    Communication and copies count only where no arithmetic hides them: exchanges inside layers, by
    group of ranks; reductions and gathers of data parallelism; averaging of weights by ranks that
    step independently (``averaging_s``); sends between stages; copies of offloading. ``hosts_s`` is
    how long the GPU waits because kernels are launched late, ``step_s`` the optimizer step. A GPU
    waits for its pipeline as long as the busiest stage does (``bubble_s``), and longer by
    ``imbalance_s``.
    """

    arithmetic_s: float = field(metadata=_SECONDS)
    products_s: float = field(metadata=_SECONDS)
    attention_s: float = field(metadata=_SECONDS)
    memory_bound_s: float = field(metadata=_SECONDS)
    recomputation_s: float = field(metadata=_SECONDS)
    tensor_exchange_s: float = field(metadata=_SECONDS)
    context_exchange_s: float = field(metadata=_SECONDS)
    expert_exchange_s: float = field(metadata=_SECONDS)
    data_parallel_s: float = field(metadata=_SECONDS)
    averaging_s: float = field(metadata=_SECONDS)
    sends_s: float = field(metadata=_SECONDS)
    copies_s: float = field(metadata=_SECONDS)
    hosts_s: float = field(metadata=_SECONDS)
    step_s: float = field(metadata=_SECONDS)
    imbalance_s: float = field(metadata=_SECONDS)
    bubble_s: float = field(metadata=_SECONDS)

    @property
    def total_s(self) -> float:
        """The iteration time: the sum of all parts."""
        return float(sum(getattr(self, name) for name in PARTS))


PARTS = tuple(entry.name for entry in fields(StepParts))


@dataclass(frozen=True, slots=True, kw_only=True)
class BindingTier(Checked):
    """The network tier (such as the links between nodes) that limits the messages of one part of
    the breakdown.
    """

    part: str
    tier: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Breakdown:
    """The breakdown of an iteration's time: the mean over all GPUs, and the breakdown of one GPU in
    each stage.

    ``busiest_stage`` waits for no other stage but in the bubble, or waits least. ``tiers`` bind its
    communication.
    """

    parts: StepParts
    busiest_stage: int = field(metadata=bounded(minimum=0))
    stages: tuple[StepParts, ...]
    tiers: tuple[BindingTier, ...] = ()

    @classmethod
    def of(cls, stages: tuple[StepParts, ...], gpus: tuple[int, ...]) -> Self:
        """The breakdown of an iteration, from that of one GPU of each stage, and the number of GPUs
        of each stage.
        """
        shares = [count / sum(gpus) for count in gpus]
        mean = {
            name: sum(share * getattr(one, name) for share, one in zip(shares, stages, strict=True))
            for name in PARTS
        }
        imbalance = [one.imbalance_s for one in stages]
        return cls(
            parts=StepParts(**mean), busiest_stage=imbalance.index(min(imbalance)), stages=stages
        )


# Defines the predicted cost of a plan, and the interface of predictors. A plan that does not fit in
# memory is predicted like any other, with ``fits`` false.


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByClass(Checked):
    """Bytes on one GPU by what they hold: weights, gradients, optimizer states, activations and so
    on.
    """

    weights: int = field(metadata=bounded(minimum=0))
    gradients: int = field(metadata=bounded(minimum=0))
    optimizer: int = field(metadata=bounded(minimum=0))
    activations: int = field(metadata=bounded(minimum=0))
    buffers: int = field(metadata=bounded(minimum=0))
    logits: int = field(metadata=bounded(minimum=0))
    temporaries: int = field(metadata=bounded(minimum=0))

    @property
    def total_bytes(self) -> int:
        """The total bytes on one GPU: weights, gradients, optimizer states, activations and the
        rest.
        """
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByPhase(Checked):
    """Peak allocated bytes on one GPU in each phase of a training step: forward, backward and
    optimizer step.
    """

    forward: int = field(metadata=bounded(minimum=0))
    backward: int = field(metadata=bounded(minimum=0))
    step: int = field(metadata=bounded(minimum=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction(Checked):
    """The predicted times of one stage, for a micro-batch and for the optimizer step, and the
    memory of the stage's fullest GPU.

    ``stable_s`` is the time of a steady forward and backward pass, or the host's time to issue them
    if that is longer. The deltas are the extra times of the first forward and the last backward
    pass. ``memory`` divides the highest memory peak by kind of content. ``host_bytes`` are the
    bytes that the stage's ranks on one node keep in the node's host memory.
    """

    stable_s: float = field(metadata=bounded(minimum=0))
    delta_forward_s: float
    delta_backward_s: float
    step_s: float = field(metadata=bounded(minimum=0))
    exposed_communication_s: float = field(metadata=bounded(minimum=0))
    peak_allocated_bytes: int = field(metadata=bounded(minimum=0))
    peak_reserved_bytes: int = field(metadata=bounded(minimum=0))
    host_bytes: int = field(metadata=bounded(minimum=0))
    memory: MemoryByClass
    memory_by_phase: MemoryByPhase


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted iteration time and memory of a plan; 90 % of measured iteration times lie
    within the bounds.

    ``mfu`` is the model's own arithmetic as a share of the GPUs' peak. ``notes`` name assumptions
    of the prediction that were never measured.
    """

    iteration_s: float = field(metadata=bounded(above=0))
    iteration_s_low: float = field(metadata=bounded(minimum=0))
    iteration_s_high: float = field(metadata=bounded(above=0))
    tokens_per_s: float = field(metadata=bounded(above=0))
    mfu: float = field(metadata=bounded(minimum=0))
    fits: bool
    predictor: str
    notes: tuple[str, ...] = ()
    stages: tuple[StagePrediction, ...]

    def __post_init__(self) -> None:
        check_fields(self)
        if not self.iteration_s_low <= self.iteration_s <= self.iteration_s_high:
            refuse(
                "iteration_s",
                f"{self.iteration_s:g} is outside its bounds {self.iteration_s_low:g} to "
                f"{self.iteration_s_high:g}: give iteration_s_low and iteration_s_high around it",
            )

    @property
    def peak_reserved_bytes(self) -> int:
        """The bytes that torch's allocator reserves on the fullest GPU."""
        return max(stage.peak_reserved_bytes for stage in self.stages)

    def lasting(self, times: float, **others: Any) -> Self:
        """A copy of the prediction with its iteration time multiplied by ``times``, and other
        fields replaced.
        """
        return replace(
            self,
            iteration_s=self.iteration_s * times,
            iteration_s_low=self.iteration_s_low * times,
            iteration_s_high=self.iteration_s_high * times,
            tokens_per_s=self.tokens_per_s / times,
            mfu=self.mfu / times,
            **others,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison(Checked):
    """The factor by which a second plan is slower than a first one, and whether the difference
    exceeds the predictions' bounds.

    ``exceeds_bounds`` says whether the difference is larger than the two plans' bounds leave open.
    """

    ratio: float = field(metadata=bounded(above=0))
    exceeds_bounds: bool


def compared(first: Prediction, second: Prediction) -> Comparison:
    """Compare the iteration times of two predictions, treating their errors as independent."""
    ratio = second.iteration_s / first.iteration_s
    widths = [
        (prediction.iteration_s_high - prediction.iteration_s_low) / (2 * prediction.iteration_s)
        for prediction in (first, second)
    ]
    return Comparison(ratio=ratio, exceeds_bounds=abs(math.log(ratio)) > math.hypot(*widths))


class Predictor(Protocol):
    """The interface of predictors: predicts the cost of plans of one workload on one cluster."""

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan."""
        ...

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """The predicted cost of each plan, in order."""
        ...


# Defines the measured cost of a plan, with the names and units of a prediction.


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment(Checked):
    """The device and the software of a measurement; a field is empty if it is unknown."""

    device: str
    num_devices: int = field(metadata=bounded(minimum=1))
    python: str = ""
    torch: str = ""
    cuda: str = ""
    driver: str = ""
    revision: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Clocks(Checked):
    """A GPU's clock rates at one moment, the highest rate of its SM clock, and its power limit."""

    sm_mhz: float = field(metadata=bounded(above=0))
    memory_mhz: float = field(metadata=bounded(above=0))
    most_sm_mhz: float | None = field(default=None, metadata=bounded(above=0))
    power_limit_w: float | None = field(default=None, metadata=bounded(above=0))

    @property
    def words(self) -> str:
        """A GPU's clock rates in MHz, and its power limit, as text."""
        most = "" if self.most_sm_mhz is None else f" of {self.most_sm_mhz:g}"
        power = "" if self.power_limit_w is None else f", at most {self.power_limit_w:g} W"
        return f"SM {self.sm_mhz:g}{most} MHz, memory {self.memory_mhz:g} MHz{power}"

    def moved_from(self, earlier: "Clocks") -> float:
        """The largest relative change of the SM or memory clock since an earlier moment."""
        sm, memory = self.sm_mhz / earlier.sm_mhz, self.memory_mhz / earlier.memory_mhz
        return max(abs(sm - 1), abs(memory - 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMeasurement(Checked):
    """The measured times and memory of a stage, named as in ``StagePrediction``; None if
    unknown.
    """

    stable_s: float | None = field(default=None, metadata=bounded(minimum=0))
    delta_forward_s: float | None = None
    delta_backward_s: float | None = None
    step_s: float | None = field(default=None, metadata=bounded(minimum=0))
    exposed_communication_s: float | None = field(default=None, metadata=bounded(minimum=0))
    peak_allocated_bytes: int | None = field(default=None, metadata=bounded(minimum=0))
    peak_reserved_bytes: int | None = field(default=None, metadata=bounded(minimum=0))
    host_bytes: int | None = field(default=None, metadata=bounded(minimum=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """The measured iterations of a plan; a run that exhausted GPU memory has no samples.

    ``iteration_s`` is the median of ``samples_s``, and 90 % of the samples lie between the two
    bounds. ``clocks`` are the first GPU's clocks before and after the samples, if its driver tells
    them.
    """

    iteration_s: float | None = field(metadata=bounded(above=0))
    iteration_s_low: float | None = field(metadata=bounded(above=0))
    iteration_s_high: float | None = field(metadata=bounded(above=0))
    tokens_per_s: float | None = field(metadata=bounded(above=0))
    mfu: float | None = field(metadata=bounded(minimum=0))
    fits: bool
    engine: str = field(metadata=name_in(names_for_plans))
    stages: tuple[StageMeasurement, ...]
    samples_s: tuple[float, ...] = field(metadata=bounded(above=0))
    environment: Environment
    clocks: tuple[Clocks, ...] = ()

    def __post_init__(self) -> None:
        check_fields(self)
        if self.fits and not self.samples_s:
            refuse("samples_s", "0 samples, but fits is true: give at least one sample")
        if self.samples_s and not self.fits:
            refuse(
                "samples_s",
                f"{len(self.samples_s)} samples, but fits is false: give no samples, or fits: true",
            )
        for name in ("iteration_s", "iteration_s_low", "iteration_s_high", "tokens_per_s", "mfu"):
            if (getattr(self, name) is None) == self.fits:
                refuse(
                    name,
                    f"{shown(getattr(self, name))}, but fits is {shown(self.fits)}: "
                    f"{'give the measured value' if self.fits else 'leave it null'}",
                )
