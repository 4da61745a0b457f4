"""Makes predictors that leave out an effect, or model another machine, such as one on which nothing
overlaps; each change is called a view.

A view changes predictions of plans and costs of stages consistently, so that all searches see the
same machine, whichever of the two they ask for. Some views change the cluster for which the
predictor is made. Others change the times of stages; a plan's time then changes by the same factor
as the longest chain of these times. ``view_of`` gives the views that have names.

Axes: C candidates, S stages.
"""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Protocol, final

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.core.values import near_matches, reject
from mistlab.cost.pipeline import iteration_s
from mistlab.job.prediction import Prediction, Predictor, StagePrediction
from mistlab.job.search import PlanAndStagePredictor, StageCostModel
from mistlab.machine.cluster import Cluster
from mistlab.machine.slowdowns import SHARED_SETS, GroupSlowdowns, Interference, Slowdown
from mistlab.plan.plan import Plan
from mistlab.plan.workload import Workload
from mistlab.stages.stage_batch import StageBatch, StageCosts, StageSeconds, StageTimes, times_of


class PredictorMaker(Protocol):
    """A function that makes a predictor for a workload on a cluster."""

    def __call__(self, *, workload: Workload, cluster: Cluster) -> Predictor:
        """Make a predictor of plans for this workload on this cluster."""
        ...


def _same_cluster(cluster: Cluster) -> Cluster:
    return cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """How a view changes the extra time of a stage's first and last passes beyond steady ones.

    It removes the extra time, and adds ``spread`` times an even share of it to every micro-batch: 0
    adds nothing, 1 the even share, so that all micro-batches together have the whole extra time.
    """

    spread: float

    def times(self, seconds: StageSeconds, micro_batches: Floats) -> StageSeconds:
        """The times of stages with ``micro_batches``, changed as the view requires."""
        share = self.spread / np.maximum(micro_batches, 1) * (micro_batches > 0)
        nothing = np.zeros(len(micro_batches))
        forward_s, backward_s = share * seconds.delta_forward_s, share * seconds.delta_backward_s
        return replace(
            seconds,
            forward_s=np.maximum(seconds.forward_s + forward_s, 0.0),
            backward_s=np.maximum(seconds.backward_s + backward_s, 0.0),
            through_forward_s=np.maximum(seconds.through_forward_s + forward_s, 0.0),
            through_backward_s=np.maximum(seconds.through_backward_s + backward_s, 0.0),
            issued_end_s=seconds.issued_backward_late_s,
            **dict.fromkeys(times_of("edge", "wait"), nothing),
        )

    def stage(self, stage: StagePrediction, micro_batches: int) -> StagePrediction:
        """The prediction of one stage, changed as the view requires."""
        extra_s = stage.delta_forward_s + stage.delta_backward_s
        stable_s = max(0.0, stage.stable_s + self.spread * extra_s / micro_batches)
        return replace(stage, stable_s=stable_s, delta_forward_s=0.0, delta_backward_s=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """How a view changes a predictor and its predictions, such as by leaving out an effect; by
    default it changes nothing.

    ``of_cluster`` changes the cluster for which the predictor is made, ``extras`` the extra times
    of first and last passes.
    """

    of_cluster: Callable[[Cluster], Cluster] = _same_cluster
    extras: Extras | None = None

    def predictor(
        self, maker: PredictorMaker, *, workload: Workload, cluster: Cluster
    ) -> Predictor:
        """Make a predictor for the workload and the cluster, changed by this view."""
        return viewed(maker(workload=workload, cluster=self.of_cluster(cluster)), self)


def viewed(predictor: Predictor, view: View) -> Predictor:
    """Make a predictor whose predictions are changed by a view; it predicts single stages too if
    ``predictor`` does.
    """
    if isinstance(predictor, StageCostModel):
        return _ViewedStages(predictor=predictor, view=view)
    return _ViewedPlans(predictor=predictor, view=view)


@dataclass(frozen=True, slots=True, kw_only=True)
class _ViewedPlans:
    """A predictor of plans that a view has changed."""

    predictor: Predictor
    view: View

    def predict(self, plan: Plan) -> Prediction:
        """The predicted cost of a plan under this view."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """The predicted costs of several plans under this view, in order."""
        predictions = self.predictor.predict_many(plans)
        if (extras := self.view.extras) is None:
            return predictions
        both = list(zip(plans, predictions, strict=True))
        if isinstance(self.predictor, StageCostModel):
            times = _by_chains(self.predictor, plans, extras)
        else:
            times = [_by_stages(one, plan, extras) for plan, one in both]
        return [
            _lasting(prediction, plan, of_plan, extras)
            for (plan, prediction), of_plan in zip(both, times, strict=True)
        ]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class _ViewedStages(_ViewedPlans):
    """A predictor of plans and single stages that a view has changed."""

    predictor: PlanAndStagePredictor

    def stage_costs(self, batch: StageBatch, *, engine: str = "mistlab") -> StageCosts:
        """The costs of each candidate stage under this view."""
        costs = self.predictor.stage_costs(batch, engine=engine)
        if (extras := self.view.extras) is not None:
            costs = replace(costs, seconds=extras.times(costs.seconds, batch.micro_batches))
        return costs


def _lasting(prediction: Prediction, plan: Plan, times: float, extras: Extras) -> Prediction:
    """A prediction whose iteration takes ``times`` as long, with its stages changed as the view
    requires.
    """
    stages = tuple(extras.stage(stage, plan.micro_batches) for stage in prediction.stages)
    return prediction.lasting(times, stages=stages)


def _by_chains(predictor: StageCostModel, plans: Sequence[Plan], extras: Extras) -> list[float]:
    """The factor by which a view changes the time of each plan, computed from its critical path of
    passes.
    """
    times = np.empty(len(plans))
    alike: dict[tuple[str, int], list[int]] = defaultdict(list)
    for number, plan in enumerate(plans):
        alike[plan.engine, plan.num_stages].append(number)
    for (engine, _), places in alike.items():
        batch = StageBatch.of_plans([plans[place] for place in places])
        seconds = predictor.stage_costs(batch, engine=engine).seconds
        micro_batches = np.array([plans[place].micro_batches for place in places])
        full_s, seen_s = (
            iteration_s(StageTimes.of(of_stages, len(places), -1), micro_batches)
            for of_stages in (seconds, extras.times(seconds, batch.micro_batches))
        )
        times[places] = seen_s / full_s
    return [*times.tolist()]


def _by_stages(prediction: Prediction, plan: Plan, extras: Extras) -> float:
    """The factor by which a view changes the time of a plan, computed from its predicted stages
    only: from the slowest stage, and the extra time of first and last passes.
    """
    rounds = plan.micro_batches + plan.num_stages - 1
    slowest_s = max(stage.stable_s for stage in prediction.stages)
    extra_s = max(
        0.0, *(stage.delta_forward_s + stage.delta_backward_s for stage in prediction.stages)
    )
    seen = (extras.stage(stage, plan.micro_batches) for stage in prediction.stages)
    return rounds * max(stage.stable_s for stage in seen) / (rounds * slowest_s + extra_s)


# Named views: ``serial`` and ``ideal`` predict a machine on which nothing overlaps, or on which
# streams do not slow one another down; ``average`` and ``blind`` spread the extra time of the first
# and last micro-batch over all of them, or drop it.


def _sharing(cluster: Cluster, *, taking_turns: bool) -> Cluster:
    """The cluster with other slowdown factors, as if streams took turns or did not slow one another
    down.

    If n streams take turns, each runs at an n-th of its speed.
    """
    slowdowns = tuple(
        Slowdown(
            streams=streams, factors=(float(len(streams) if taking_turns else 1),) * len(streams)
        )
        for streams in SHARED_SETS
    )
    alike = GroupSlowdowns(gpus_in_node=1, nodes=1, slowdowns=slowdowns)
    interference = Interference(groups=(alike,))
    others = tuple(
        replace(group, hardware=replace(group.hardware, interference=interference))
        for group in cluster.others
    )
    hardware = replace(cluster.hardware, interference=interference)
    return replace(cluster, hardware=hardware, others=others)


def _taking_turns(cluster: Cluster) -> Cluster:
    return _sharing(cluster, taking_turns=True)


def _undisturbed(cluster: Cluster) -> Cluster:
    return _sharing(cluster, taking_turns=False)


FULL = "full"
VIEWS: Mapping[str, View] = {
    FULL: View(),
    "serial": View(of_cluster=_taking_turns),
    "ideal": View(of_cluster=_undisturbed),
    "average": View(extras=Extras(spread=1.0)),
    "blind": View(extras=Extras(spread=0.0)),
}


def view_of(name: str) -> View:
    """The view with this name; refuses an unknown name."""
    if name not in VIEWS:
        reject(f"view {name!r} is unknown{near_matches(name, VIEWS)}")
    return VIEWS[name]
