"""Scores of plans, for strategies that also learn from plans that do not fit in memory."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from mistlab.cost.memory import fullest_host, room_of_plan
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan
from searchers.strategy import BudgetSpentError, Ledger

# The penalty for a plan that does not fit: for memory lacking as large as one GPU's, this many
# times the plan's time is added to it.
_TIMES_A_MEMORY = 10


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Score:
    """How good a plan is: compared first by the memory that it lacks, as a share of a GPU's memory,
    then by its time; smaller is better.
    """

    excess: float
    iteration_s: float

    @property
    def penalised_s(self) -> float:
        """The score as seconds: the plan's time if it fits in memory; otherwise at least twice that
        time, and longer the more memory it lacks.
        """
        if self.excess == 0:
            return self.iteration_s
        return self.iteration_s * (2 + _TIMES_A_MEMORY * self.excess)


def score_of(plan: Plan, prediction: Prediction, cluster: Cluster) -> Score:
    """The score of a predicted plan: the memory that it lacks and its iteration time."""
    excess = 0.0 if prediction.fits else _excess(plan, prediction, cluster)
    return Score(excess=excess, iteration_s=prediction.iteration_s)


def _excess(plan: Plan, prediction: Prediction, cluster: Cluster) -> float:
    reserved = np.array([stage.peak_reserved_bytes for stage in prediction.stages])
    over = np.maximum(0.0, reserved / room_of_plan(cluster, plan) - 1)
    gpus = np.array([stage.num_gpus for stage in plan.stages])
    of_stage = np.array([stage.host_bytes for stage in prediction.stages])
    of_rank = of_stage / np.minimum(gpus, cluster.gpus_per_node)
    host = fullest_host(of_rank, gpus, cluster)
    # If sizes do not divide evenly, the predicted bytes have no meaning; such a plan counts as
    # lacking one GPU's memory.
    return sum(over.tolist()) + max(0.0, host - 1) or 1.0


@dataclass(slots=True, kw_only=True)
class Scores:
    """Scores of the plans that a strategy samples; each plan is predicted only once.

    ``repeats`` counts the latest calls in a row that had no new plan.
    """

    ledger: Ledger
    cluster: Cluster
    known: dict[Plan, Score] = field(default_factory=dict)
    repeats: int = 0

    def of(self, plans: Sequence[Plan | None]) -> list[Score | None]:
        """The score of each plan, None where the plan is None. Raises ``BudgetSpentError``."""
        drawn = dict.fromkeys(plan for plan in plans if plan is not None)
        new = [plan for plan in drawn if plan not in self.known]
        self.repeats = 0 if new else self.repeats + 1
        try:
            self._keep(new, self.ledger.predict(new))
        except BudgetSpentError as spent:
            self._keep(new, spent.predictions)
            raise
        return [None if plan is None else self.known[plan] for plan in plans]

    def _keep(self, plans: Sequence[Plan], predictions: Sequence[Prediction]) -> None:
        # If the budget has ended, the last of the plans have no predictions.
        for plan, prediction in zip(plans, predictions, strict=False):
            self.known[plan] = score_of(plan, prediction, self.cluster)
