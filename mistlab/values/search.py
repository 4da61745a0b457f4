"""A search for the fastest plan: its problem, budget and result, and the Protocol of searchers.

A searcher is built with its predictor and a clock. What it asks of the predictor is a ``Predictor``
for whole plans and a ``StageCostModel`` for columns of candidates for a stage.
"""

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from mistlab.machine.cluster import Cluster
from mistlab.values.errors import refuse
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction, Predictor
from mistlab.values.space import SearchSpace
from mistlab.values.value import bounded, check_fields
from mistlab.values.workload import Workload

if TYPE_CHECKING:
    from mistlab.values.stages import StageBatch, StageCosts

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE", "BUDGET", "REFUSED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """What to find a plan for."""

    workload: Workload
    cluster: Cluster

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """When a search must end, by whichever limit comes first; at least one is given.

    ``evaluations`` counts predictions of plans, and 1,000 stage candidates as one.
    """

    evaluations: int | None = field(default=None, metadata=bounded(minimum=1))
    seconds: float | None = field(default=None, metadata=bounded(above=0))

    def __post_init__(self) -> None:
        check_fields(self)
        if self.evaluations is None and self.seconds is None:
            problem = "missing, and seconds too: give at least one of them"
            refuse("evaluations", problem)


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement:
    """A plan better than all before it: how fast, and what it took to find."""

    iteration_s: float = field(metadata=bounded(above=0))
    plan_evaluations: int = field(metadata=bounded(minimum=0))
    stage_evaluations: int = field(metadata=bounded(minimum=0))
    wall_s: float = field(metadata=bounded(minimum=0))

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A plan that fits and is not the best, as predicted."""

    plan: Plan
    prediction: Prediction

    def __post_init__(self) -> None:
        check_fields(self)


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """How a search ended, and the best plan that it found.

    OPTIMAL: none in the space is faster. FEASIBLE: fits, not proven best. INFEASIBLE: none fits.
    BUDGET: ended by its budget. REFUSED: the searcher cannot take the problem, for ``reason``.
    ``lower_bound_s`` is an iteration time that no plan of the space beats; ``gap`` is how far the
    best plan may be from it, as a share of its time. ``rivals`` are the next best of the plans that
    it asked about, fastest first: all of them where they are few.
    """

    status: Status
    plan: Plan | None = None
    prediction: Prediction | None = None
    plan_evaluations: int = field(metadata=bounded(minimum=0))
    stage_evaluations: int = field(metadata=bounded(minimum=0))
    wall_s: float = field(metadata=bounded(minimum=0))
    lower_bound_s: float | None = field(default=None, metadata=bounded(minimum=0))
    gap: float | None = field(default=None, metadata=bounded(minimum=0))
    history: tuple[Improvement, ...] = ()
    rivals: tuple[Rival, ...] = ()
    seed: int
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.plan is None) != (self.prediction is None):
            problem = "stands without the other of plan and prediction: give both or neither"
            refuse("prediction" if self.plan is None else "plan", problem)
        has_answer = self.prediction is not None and self.prediction.fits
        if self.status in {"OPTIMAL", "FEASIBLE"} and not has_answer:
            problem = f"{self.status} needs a plan that fits: give it, or another status"
            refuse("status", problem)
        if self.status in {"INFEASIBLE", "REFUSED"} and has_answer:
            problem = f"{self.status} has a plan that fits: give FEASIBLE, or leave the plan out"
            refuse("status", problem)


@runtime_checkable
class StageCostModel(Protocol):
    """Whoever predicts single stages, many at a time."""

    def stage_costs(self, batch: "StageBatch", *, engine: str = "mistlab") -> "StageCosts":
        """What each candidate costs."""
        ...


class PlanAndStagePredictor(Predictor, StageCostModel, Protocol):
    """Whoever predicts both, consistently."""


class Searcher(Protocol):
    """Whoever finds plans."""

    def search(
        self, problem: Problem, space: SearchSpace, budget: Budget, seed: int
    ) -> SearchResult:
        """The best plan of the space that the budget allows to find."""
        ...
