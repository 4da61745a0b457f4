"""What a search for the fastest plan takes (a problem and a budget) and returns (a result), and the
interface of searchers.

A searcher is made with a predictor and a clock. It uses the predictor as a ``Predictor`` of whole
plans, and as a ``StageCostModel`` of columns of candidates for a stage.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

from mistlab.core.arrays import Bools
from mistlab.core.values import Checked, bounded, check_fields, refuse
from mistlab.job.prediction import Prediction, Predictor
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.plan.workload import Workload

if TYPE_CHECKING:
    from mistlab.stages.stage_batch import StageBatch, StageCosts, StageSeconds, StagesInOrder


# With at least this many recomputed blocks, and at least one that is not, recomputing one more
# changes only how often each combination of neighbouring layers occurs, not which ones occur.
FEWEST_ALIKE = 2

# Closed form and event simulator differ by less than this share on 95 % of plans
# (docs/results/cross-check.md, cross-check-wide.md), so they may rank two plans differently whose
# times differ by less.
TOLD_APART = 0.005
# The most rivals of a proven plan that a search returns: those that cannot be told from it.
MOST_NEAR = 64

Status = Literal["OPTIMAL", "FEASIBLE", "INFEASIBLE", "BUDGET", "REFUSED"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem(Checked):
    """The workload and the cluster for which a plan is wanted."""

    workload: Workload
    cluster: Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """The limits of a search, which ends at the first limit that it reaches; at least one limit is
    given.

    ``evaluations`` counts each predicted plan as one, and 1,000 stage candidates as one.
    ``seconds`` are of a wall clock, or with ``clock`` "cpu" those that the process had a core.
    """

    evaluations: int | None = field(default=None, metadata=bounded(minimum=1))
    seconds: float | None = field(default=None, metadata=bounded(above=0))
    clock: Literal["wall", "cpu"] = "wall"

    def __post_init__(self) -> None:
        check_fields(self)
        if self.evaluations is None and self.seconds is None:
            refuse("evaluations", "missing, and seconds too: give at least one of them")


@dataclass(frozen=True, slots=True, kw_only=True)
class Improvement(Checked):
    """A plan that was better than all before it in a search: its predicted time, and the
    evaluations and seconds spent until then.
    """

    iteration_s: float = field(metadata=bounded(above=0))
    plan_evaluations: int = field(metadata=bounded(minimum=0))
    stage_evaluations: int = field(metadata=bounded(minimum=0))
    wall_s: float = field(metadata=bounded(minimum=0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival(Checked):
    """A plan that a search predicted, which fits in memory but is slower than the best plan."""

    plan: Plan
    prediction: Prediction


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The outcome of a search: its status, its lower bound, and the best plan that it found.

    OPTIMAL: no plan in the space is faster. FEASIBLE: the plan fits, but is not proven best.
    INFEASIBLE: no plan fits. BUDGET: the budget ended the search. REFUSED: the searcher cannot take
    the problem, for ``reason``. ``lower_bound_s`` is an iteration time that no plan of the space
    can beat; ``gap`` is the distance of the best plan from it, as a share of the plan's time.
    ``rivals`` are the next best plans that the search asked about, fastest first: a few, or of a
    proven plan up to ``MOST_NEAR`` that cannot be told from it. ``gpus`` are the numbers of GPUs
    that plans of the search might use: the whole cluster's, and parts of it.
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
    gpus: tuple[int, ...] = ()
    seed: int
    reason: str = ""

    def __post_init__(self) -> None:
        check_fields(self)
        if (self.plan is None) != (self.prediction is None):
            given, other = "plan", "prediction"
            if self.plan is None:
                given, other = other, given
            refuse(given, f"is given without {other}: give both or neither")
        has_answer = self.prediction is not None and self.prediction.fits
        if self.status in {"OPTIMAL", "FEASIBLE"} and not has_answer:
            refuse("status", f"{self.status} needs a plan that fits: give it, or another status")
        if self.status in {"INFEASIBLE", "REFUSED"} and has_answer:
            refuse(
                "status",
                f"{self.status} has a plan that fits: give FEASIBLE, or leave the plan out",
            )


@runtime_checkable
class StageCostModel(Protocol):
    """The interface of predictors of single stages: predicts the costs of many candidates for a
    stage in one call.
    """

    def stage_costs(self, batch: "StageBatch", *, engine: str = "mistlab") -> "StageCosts":
        """The costs of each candidate for a stage."""
        ...


@runtime_checkable
class StageBoundModel(StageCostModel, Protocol):
    """The interface of predictors that also give lower bounds of stages' costs, for all candidates
    with choices in given ranges.
    """

    def stage_bounds(
        self, least: "StageBatch", most: "StageBatch", *, engine: str = "mistlab"
    ) -> "StageCosts | None":
        """Lower bounds of the costs of all candidates whose choices lie between those of ``least``
        and ``most``; None if the engine has no such bounds.

        The result's ``fits`` says whether any of these candidates may fit in memory.

        ``least`` and ``most`` differ in positive offload ratios, and in numbers of recomputed
        blocks from ``FEWEST_ALIKE`` to one block less than all.
        """
        ...

    def part_seconds(
        self, least: "StageBatch", most: "StageBatch | None" = None, *, engine: str = "mistlab"
    ) -> "StageSeconds":
        """The times of parts of a model (chunks of stages), for orders of passes other than 1F1B.

        With ``most``, lower bounds over all candidates between ``least`` and ``most``.
        """
        ...

    def stage_fits(
        self,
        batch: "StageBatch",
        in_order: "StagesInOrder | None" = None,
        *,
        engine: str = "mistlab",
        of_others: bool = False,
    ) -> "Bools":
        """Whether each candidate for a stage fits in the memory of its GPUs.

        More recomputed blocks (from one on) or larger offload ratios (above zero) never need more
        memory.

        With ``in_order`` candidates hold what stages in these places hold, and the rule does not
        always hold. So ``of_others`` asks whether a candidate may fit that has smaller positive
        ratios, or recomputes fewer blocks.
        """
        ...


class PlanAndStagePredictor(Predictor, StageCostModel, Protocol):
    """The interface of predictors of both whole plans and single stages, whose predictions
    agree.
    """


class Searcher(Protocol):
    """The interface of searchers, which search for the fastest plan."""

    def search(
        self, problem: Problem, space: SearchSpace, budget: Budget, seed: int
    ) -> SearchResult:
        """Search a space for the fastest plan, within a budget."""
        ...


# The time until a search's plan was good enough, from its history of improvements.


def seconds_until(history: Sequence[Improvement], iteration_s: float) -> float | None:
    """The seconds until a search first had a plan with at most this iteration time; None if it
    never had.

    >>> steps = [(9.0, 1.0), (8.0, 4.0)]
    >>> history = [
    ...     Improvement(iteration_s=s, plan_evaluations=1, stage_evaluations=0, wall_s=wall_s)
    ...     for s, wall_s in steps
    ... ]
    >>> seconds_until(history, 8.5), seconds_until(history, 7.0)
    (4.0, None)
    """
    return next((one.wall_s for one in history if one.iteration_s <= iteration_s), None)


def to_equal_quality(
    first: Sequence[Improvement], second: Sequence[Improvement]
) -> tuple[float, float] | None:
    """The seconds that each of two searches took until it had a plan as good as the worse of their
    best plans; None if either found no plan.
    """
    if not first or not second:
        return None
    reached_s = max(first[-1].iteration_s, second[-1].iteration_s)
    seconds = [seconds_until(history, reached_s) for history in (first, second)]
    assert seconds[0] is not None
    assert seconds[1] is not None
    return seconds[0], seconds[1]
