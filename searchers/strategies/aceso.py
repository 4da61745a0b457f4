"""Improves plans by relieving their bottlenecks, after Aceso (Liu et al., EuroSys 2024).

The bottleneck of a plan is the stage that exceeds its memory or, if all fit, the stage that takes
longest; and on this stage the resource that it is short of. A move
(``searchers/strategies/moves.py``) uses less of this resource and more of another. Where no single
move makes a better plan, several in a row may: each relieves the bottleneck of the plan before.
Where a row ends, the next best move is tried.

Aceso's paper has moves of operators, micro-batch, degrees and recomputation. Here ZeRO levels and
offloading are moves too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from mistlab.cost.memory import room_of_plan
from mistlab.machine.cluster import Cluster
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction, StagePrediction
from mistlab.values.search import Problem
from mistlab.values.space import SearchSpace
from searchers.ledger import Ledger
from searchers.membership import Members
from searchers.meshes import equal_pipelines, even_layers, orders_of, pipelines
from searchers.savings import bare_stage
from searchers.strategies.moves import Resource, moves
from searchers.strategies.scores import Score, score_of
from searchers.strategy import Ending

# How many moves in a row are tried, and how many plans are followed after each move.
HOPS = (1, 2, 3, 5, 7)
WAYS = 3


def aceso(
    problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
) -> Ending:
    """Relieve bottlenecks, beginning with pipelines of every depth, until no row of moves helps."""
    del draw  # Nothing is left to chance.
    relief = Relief(problem=problem, space=space, ledger=ledger)
    starts = list(initial_plans(problem, space))
    relief.predict(starts)
    starts.sort(key=relief.promise)
    # The most promising pipeline of each depth first, then the others.
    leaders = {plan.num_stages: plan for plan in reversed(starts)}
    plans = list(dict.fromkeys([*leaders.values(), *starts]))
    for hops in HOPS:
        plans = list(dict.fromkeys(relief.relieved(plan, hops) for plan in plans))
        plans.sort(key=relief.score)
    return Ending()


def initial_plans(problem: Problem, space: SearchSpace) -> Iterator[Plan]:
    """Even pipelines that save no memory, each in the first order of the space that it can run."""
    for pipeline in list(equal_pipelines(problem, space)) or [next(pipelines(problem, space))]:
        layers = even_layers(problem.workload.model.layers, pipeline.num_stages)
        count = pipeline.micro_batches
        stages = tuple(
            bare_stage(mesh, own, space) for mesh, own in zip(pipeline.meshes, layers, strict=True)
        )
        for order in orders_of(space, pipeline.num_stages, count, min(layers))[:1]:
            yield Plan(engine=space.engine, micro_batches=count, stages=stages, order=order)


@dataclass(slots=True, kw_only=True)
class Relief:
    """The predictions of plans so far, and how many moves have been followed from each."""

    problem: Problem
    space: SearchSpace
    ledger: Ledger
    members: Members = field(init=False)
    known: dict[Plan, Prediction] = field(default_factory=dict, init=False)
    followed: dict[Plan, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self.members = Members(problem=self.problem, space=self.space)

    def predict(self, plans: Sequence[Plan]) -> None:
        """Predict plans that have no prediction yet. Raises ``BudgetSpentError``."""
        new = [plan for plan in dict.fromkeys(plans) if plan not in self.known]
        self.known |= zip(new, self.ledger.predict(new), strict=True)

    def score(self, plan: Plan) -> Score:
        """The score of a plan that has a prediction."""
        return score_of(plan, self.known[plan], self.problem.cluster)

    def promise(self, plan: Plan) -> float:
        """A plan's time, made longer by its excess of memory, which the next move may relieve."""
        score = self.score(plan)
        return score.iteration_s * (1 + score.excess)

    def relieved(self, plan: Plan, hops: int) -> Plan:
        """The last of several plans, each better than the one before by at most ``hops`` moves."""
        self.followed = {}
        while (better := self._better(plan, self.score(plan), hops)) is not None:
            plan = better
        return plan

    def _better(self, plan: Plan, target: Score, hops: int) -> Plan | None:
        """A plan that is better than the target, after at most ``hops`` moves; None if there is
        none."""
        if self.followed.get(plan, 0) >= hops:
            return None
        self.followed[plan] = hops
        for stage, resource in bottlenecks(plan, self.known[plan], self.problem.cluster):
            ways = [way for way in moves(plan, stage, resource, self.space) if way in self.members]
            self.predict(ways)
            ways.sort(key=self.promise)
            better = next((way for way in ways if self.score(way) < target), None)
            if better is not None:
                return better
            for way in ways[:WAYS]:
                found = self._better(way, target, hops - 1)
                if found is not None:
                    return found
        return None


def bottlenecks(plan: Plan, prediction: Prediction, cluster: Cluster) -> list[tuple[int, Resource]]:
    """The bottlenecks of a plan, the worst first: stages, each with the resource that it is short
    of."""
    if not prediction.fits:
        return _short_of_memory(plan, prediction, cluster)
    found: list[tuple[int, Resource]] = []
    for stage in _slowest(plan, prediction):
        times = prediction.stages[stage]
        waiting_s = plan.micro_batches * times.exposed_communication_s + _once_s(times)
        computing_s = _whole_s(plan, times) - waiting_s
        resources: tuple[Resource, Resource] = ("compute", "communication")
        found += [(stage, r) for r in (resources if computing_s >= waiting_s else resources[::-1])]
    return found


def _short_of_memory(
    plan: Plan, prediction: Prediction, cluster: Cluster
) -> list[tuple[int, Resource]]:
    """The stage that exceeds a GPU's memory most; if all fit, the stage with most on its host."""
    stages = prediction.stages
    reserved = np.array([stage.peak_reserved_bytes for stage in stages])
    excess = reserved - room_of_plan(cluster, plan)
    fullest = int(np.argmax(excess))
    if excess[fullest] > 0:
        return [(fullest, "memory")]
    return [(max(range(len(stages)), key=lambda stage: stages[stage].host_bytes), "host")]


def _slowest(plan: Plan, prediction: Prediction) -> list[int]:
    """The two stages that take longest for all micro-batches."""
    stages = prediction.stages
    order = sorted(range(len(stages)), key=lambda stage: -_whole_s(plan, stages[stage]))
    return order[:2]


def _whole_s(plan: Plan, stage: StagePrediction) -> float:
    return plan.micro_batches * stage.stable_s + _once_s(stage)


def _once_s(stage: StagePrediction) -> float:
    return max(0.0, stage.delta_forward_s) + max(0.0, stage.delta_backward_s)
