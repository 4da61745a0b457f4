"""What a plan costs, as predicted: ``Prediction``, and the Protocol of whoever predicts.

Names and units are those of the JSON that predictions are written as. A plan that does not fit is a
prediction like any other, with ``fits`` false.
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
    """Bytes on one GPU, by what they hold."""

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
        """All classes together."""
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
    """One stage: times of one micro-batch and of the step, and bytes of its fullest GPU.

    ``stable_s`` is a steady forward and backward; the deltas are what the first forward and the
    last backward take beyond it. ``memory`` splits the highest peak. ``host_bytes`` is what the
    stage's ranks on one node keep in its host memory.
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
    """One iteration of a plan; ``iteration_s`` lies in its bounds with 90 % confidence.

    ``mfu`` is the share of the GPUs' peak that the model's own arithmetic makes up; ``notes`` say
    what the prediction rests on that was never measured.
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """How many times longer the second of two plans takes than the first, and whether that is more
    than the bounds of the two leave open."""

    ratio: float = field(metadata=bounded(above=0))
    exceeds_bounds: bool

    def __post_init__(self) -> None:
        check_fields(self)


def compared(first: Prediction, second: Prediction) -> Comparison:
    """Two plans beside one another; errors of the two are taken as independent."""
    ratio = second.iteration_s / first.iteration_s
    widths = [
        (one.iteration_s_high - one.iteration_s_low) / (2 * one.iteration_s)
        for one in (first, second)
    ]
    return Comparison(ratio=ratio, exceeds_bounds=abs(math.log(ratio)) > math.hypot(*widths))


class Predictor(Protocol):
    """Whoever predicts plans of one workload on one cluster."""

    def predict(self, plan: Plan) -> Prediction:
        """What the plan costs."""
        ...

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """What each plan costs, in order."""
        ...
