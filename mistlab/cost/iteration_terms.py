"""An iteration taken apart into terms that add up to it.

The slowest stage's computation and exposed communication over all micro-batches, the other stages
that a micro-batch passes through, and the rest: first and last micro-batches, the optimizer's step,
sends, and what an iteration takes besides.
"""

from dataclasses import dataclass, fields
from typing import Self

from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class Terms:
    """An iteration taken apart, or the difference of two."""

    computation_s: float
    exposed_communication_s: float
    other_stages_s: float
    rest_s: float

    @classmethod
    def of(cls, plan: Plan, prediction: Prediction) -> Self:
        """The terms of a plan."""
        slowest = prediction.stages[slowest_stage(prediction)]
        exposed_s = plan.micro_batches * slowest.exposed_communication_s
        steady_s = plan.micro_batches * slowest.stable_s
        others_s = sum(stage.stable_s for stage in prediction.stages) - slowest.stable_s
        return cls(
            computation_s=steady_s - exposed_s,
            exposed_communication_s=exposed_s,
            other_stages_s=others_s,
            rest_s=prediction.iteration_s - steady_s - others_s,
        )

    def __sub__(self, other: Self) -> Self:
        names = [entry.name for entry in fields(self)]
        return type(self)(**{name: getattr(self, name) - getattr(other, name) for name in names})


def slowest_stage(prediction: Prediction) -> int:
    """The stage whose micro-batches take longest."""
    stable = [stage.stable_s for stage in prediction.stages]
    return stable.index(max(stable))
