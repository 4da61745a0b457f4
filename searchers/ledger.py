"""What a search has asked of its predictor so far, and the best plan that it was shown.

Every searcher asks through a ``Ledger``, so that all are counted alike and end by the same budget.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from mistlab.plan import Engine, Plan
from mistlab.predict import Prediction
from mistlab.search import Budget, Improvement, PlanAndStagePredictor, SearchResult, Status
from mistlab.stages import StageBatch, StageCosts

# As many stage candidates count as one plan.
STAGES_A_PLAN = 1000

Clock = Callable[[], float]


class BudgetSpentError(Exception):
    """The search must end now; what it has found stands in the ledger.

    ``predictions`` are the answers that the budget still allowed, for strategies that keep them.
    """

    def __init__(self, predictions: Sequence[Prediction] = ()) -> None:
        super().__init__()
        self.predictions = predictions


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Counts, keeps the best plan that fits, and ends the search when its budget is spent.

    ``listener`` is told of every answer, for progress.
    """

    predictor: PlanAndStagePredictor
    budget: Budget
    clock: Clock
    listener: "Callable[[Ledger], None] | None" = None
    plan_evaluations: int = 0
    stage_evaluations: int = 0
    best: Plan | None = None
    prediction: Prediction | None = None
    history: list[Improvement] = field(default_factory=list)
    began_s: float = field(init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def wall_s(self) -> float:
        """Seconds since the search began."""
        return self.clock() - self.began_s

    @property
    def best_s(self) -> float:
        """The iteration time of the best plan; infinite before there is one."""
        return float("inf") if self.prediction is None else self.prediction.iteration_s

    @property
    def evaluations_left(self) -> int | None:
        """How many more plans may be predicted; None if only time counts."""
        if self.budget.evaluations is None:
            return None
        used = self.plan_evaluations + self.stage_evaluations / STAGES_A_PLAN
        return max(0, int(self.budget.evaluations - used))

    @property
    def budget_left(self) -> Budget:
        """What is left of the budget, at least a little of each limit."""
        left = self.evaluations_left
        seconds = self.budget.seconds
        return Budget(
            evaluations=None if left is None else max(1, left),
            seconds=None if seconds is None else max(1e-3, seconds - self.wall_s),
        )

    def count(self, *, stages: int) -> None:
        """Count what was asked for elsewhere on behalf of this search."""
        self.stage_evaluations += stages

    def predict(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """What each plan costs; the best that fits is kept. Raises ``BudgetSpentError``."""
        left = self.evaluations_left
        allowed = plans if left is None else plans[:left]
        predictions = self.predictor.predict_many(allowed)
        self.plan_evaluations += len(allowed)
        for plan, prediction in zip(allowed, predictions, strict=True):
            if prediction.fits and prediction.iteration_s < self.best_s:
                self.best, self.prediction = plan, prediction
                self.history.append(
                    Improvement(
                        iteration_s=prediction.iteration_s,
                        plan_evaluations=self.plan_evaluations,
                        stage_evaluations=self.stage_evaluations,
                        wall_s=self.wall_s,
                    )
                )
        self._continue(predictions, is_short=len(allowed) < len(plans))
        return predictions

    def stage_costs(self, batch: StageBatch, *, engine: Engine) -> StageCosts:
        """What each candidate for a stage costs. Raises ``BudgetSpentError``."""
        costs = self.predictor.stage_costs(batch, engine=engine)
        self.stage_evaluations += len(batch)
        self._continue((), is_short=False)
        return costs

    def _continue(self, predictions: Sequence[Prediction], *, is_short: bool) -> None:
        if self.listener is not None:
            self.listener(self)
        seconds = self.budget.seconds
        if is_short or self.evaluations_left == 0 or (seconds and self.wall_s >= seconds):
            raise BudgetSpentError(predictions)

    def result(
        self, status: Status, seed: int, *, lower_bound_s: float | None = None, reason: str = ""
    ) -> SearchResult:
        """How the search ended."""
        gap = None
        if lower_bound_s is not None and self.prediction is not None:
            lower_bound_s = min(lower_bound_s, self.best_s)
            gap = 1 - lower_bound_s / self.best_s
        return SearchResult(
            status=status,
            plan=self.best,
            prediction=self.prediction,
            plan_evaluations=self.plan_evaluations,
            stage_evaluations=self.stage_evaluations,
            wall_s=self.wall_s,
            lower_bound_s=lower_bound_s,
            gap=gap,
            history=tuple(self.history),
            seed=seed,
            reason=reason,
        )
