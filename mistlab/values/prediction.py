"""The predicted cost of a plan, and the Protocol of predictors.

Names and units are those of predictions in JSON. A plan that does not fit has a prediction like any
other, with ``fits`` false.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Protocol

from mistlab.values.errors import refuse
from mistlab.values.plan import Plan
from mistlab.values.value import bounded, check_fields


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByClass:
    """Bytes on one GPU, by class."""

    weights: int = field(metadata=bounded(minimum=0))
    gradients: int = field(metadata=bounded(minimum=0))
    optimizer: int = field(metadata=bounded(minimum=0))
    activations: int = field(metadata=bounded(minimum=0))
    buffers: int = field(metadata=bounded(minimum=0))
    logits: int = field(metadata=bounded(minimum=0))
    temporaries: int = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def total_bytes(self) -> int:
        """The sum over all classes."""
        return sum(getattr(self, entry.name) for entry in fields(self))


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryByPhase:
    """Peak allocated bytes on one GPU in each phase of a step."""

    forward: int = field(metadata=bounded(minimum=0))
    backward: int = field(metadata=bounded(minimum=0))
    step: int = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePrediction:
    """A stage's times for one micro-batch and for the step, and bytes of its fullest GPU.

    ``stable_s`` is the time of a steady forward and backward, or of their host. The deltas are the
    extra times of the first forward and the last backward. ``memory`` splits the highest peak.
    ``host_bytes`` are the bytes that the stage's ranks on one node keep in the node's host memory.
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

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """The predicted iteration of a plan; 90 % of measurements lie within the bounds.

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
            problem = (
                f"{self.iteration_s:g} is outside {self.iteration_s_low:g} to "
                f"{self.iteration_s_high:g}: give bounds around it"
            )
            refuse("iteration_s", problem)

    @property
    def peak_reserved_bytes(self) -> int:
        """The bytes that torch's allocator holds on the fullest GPU."""
        return max(stage.peak_reserved_bytes for stage in self.stages)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The time of the second of two plans as a multiple of the first's.

    ``exceeds_bounds`` says whether the difference is larger than the two plans' bounds leave open.
    """

    ratio: float = field(metadata=bounded(above=0))
    exceeds_bounds: bool

    def __post_init__(self) -> None:
        check_fields(self)


def compared(first: Prediction, second: Prediction) -> Comparison:
    """The comparison of two predictions, whose errors are taken as independent."""
    ratio = second.iteration_s / first.iteration_s
    widths = [
        (one.iteration_s_high - one.iteration_s_low) / (2 * one.iteration_s)
        for one in (first, second)
    ]
    return Comparison(ratio=ratio, exceeds_bounds=abs(math.log(ratio)) > math.hypot(*widths))


class Predictor(Protocol):
    """Predicts plans of one workload on one cluster."""

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan."""
        ...

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """The predicted cost of each plan, in order."""
        ...
