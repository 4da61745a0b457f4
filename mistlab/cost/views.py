"""Views: predictors whose answers are changed, such as "fits only with 2 GB free".

A view changes predictions of plans and costs of stages in the same way, so that all searches see
one machine, whichever of the two they ask for.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import final

from mistlab.cost.memory import room_bytes
from mistlab.machine.cluster import Cluster
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction, Predictor
from mistlab.values.search import PlanAndStagePredictor, StageCostModel
from mistlab.values.stages import StageBatch, StageCosts


def _same_prediction(_plan: Plan, prediction: Prediction) -> Prediction:
    return prediction


def _same_costs(_batch: StageBatch, costs: StageCosts) -> StageCosts:
    return costs


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """Changes of a predictor's answers; a function that is not given changes nothing."""

    of_plan: Callable[[Plan, Prediction], Prediction] = _same_prediction
    of_stages: Callable[[StageBatch, StageCosts], StageCosts] = _same_costs


def viewed(predictor: Predictor, view: View) -> Predictor:
    """A predictor with the changes of a view; it has costs of stages if ``predictor`` has."""
    if isinstance(predictor, StageCostModel):
        return _ViewedStages(predictor=predictor, view=view)
    return _ViewedPlans(predictor=predictor, view=view)


def keeping_free(cluster: Cluster, free_bytes: float) -> View:
    """A view in which plans fit only if ``free_bytes`` of every GPU stay free."""
    room = room_bytes(cluster) - free_bytes
    return View(of_plan=partial(_plan_within, room), of_stages=partial(_stages_within, room))


def _plan_within(room: float, _plan: Plan, prediction: Prediction) -> Prediction:
    within = all(stage.peak_reserved_bytes <= room for stage in prediction.stages)
    return replace(prediction, fits=prediction.fits and within)


def _stages_within(room: float, _batch: StageBatch, costs: StageCosts) -> StageCosts:
    return replace(costs, fits=costs.fits & (costs.peak_reserved_bytes <= room))


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ViewedPlans:
    """A predictor of plans, with the changes of a view."""

    predictor: Predictor
    view: View

    def predict(self, plan: Plan) -> Prediction:
        """What the plan costs in this view."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """What each plan costs in this view, in order."""
        predictions = self.predictor.predict_many(plans)
        return [self.view.of_plan(*both) for both in zip(plans, predictions, strict=True)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ViewedStages:
    """A predictor of plans and stages, with the changes of a view."""

    predictor: PlanAndStagePredictor
    view: View

    def predict(self, plan: Plan) -> Prediction:
        """What the plan costs in this view."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """What each plan costs in this view, in order."""
        return _ViewedPlans(predictor=self.predictor, view=self.view).predict_many(plans)

    def stage_costs(self, batch: StageBatch, *, engine: str = "mistlab") -> StageCosts:
        """The costs of each candidate in this view."""
        costs = self.predictor.stage_costs(batch, engine=engine)
        return self.view.of_stages(batch, costs)
