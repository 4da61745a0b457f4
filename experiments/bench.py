"""A problem on which searchers are tried: all ask one predictor, one simulator plays answers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from mistlab.cost.memory import allocator_of, room_bytes
from mistlab.job import Job
from mistlab.plan import Engine, Plan
from mistlab.predict import Prediction
from mistlab.search import Budget, PlanAndStagePredictor, Problem, SearchResult
from mistlab.space import SearchSpace
from mistlab.stages import StageBatch, StageCosts
from searchers.choices import Chooser, chosen_plan
from searchers.ledger import Ledger
from searchers.registry import SEARCHERS
from searchers.strategy import INTERRUPTED, StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

# What an engineer would try, which speedups are over.
BASELINE = "megatron"

# A front is thinned out when so many points have gathered.
MOST_POINTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """A plan that a search asked about: its time, and what its fullest GPU must hold."""

    iteration_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One searcher's result, and what the event simulator says of it.

    ``front`` are the plans it asked about that no other beats in both time and memory.
    """

    searcher: str
    space: SearchSpace
    result: SearchResult
    simulated_s: float | None
    front: tuple[Point, ...]

    @property
    def answer(self) -> tuple[Plan, Prediction] | None:
        """The best plan that fits."""
        plan, prediction = self.result.plan, self.result.prediction
        if plan is None or prediction is None or not prediction.fits:
            return None
        return plan, prediction

    @property
    def is_interrupted(self) -> bool:
        """Whether it was stopped before it had ended by itself or by its budget."""
        return self.result.reason == INTERRUPTED


@dataclass(slots=True, kw_only=True)
class Watched:
    """A predictor that remembers the front of the plans that it was asked about."""

    predictor: PlanAndStagePredictor
    outside_bytes: float
    points: list[Point] = field(default_factory=list)

    def predict(self, plan: Plan) -> Prediction:
        """What the plan costs."""
        return self.predict_many([plan])[0]

    def predict_many(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """What each plan costs, in order."""
        predictions = self.predictor.predict_many(plans)
        self.points += [
            Point(
                iteration_s=prediction.iteration_s,
                memory_bytes=round(fullest_bytes(prediction) + self.outside_bytes),
            )
            for prediction in predictions
        ]
        if len(self.points) > MOST_POINTS:
            self.points = list(front_of(self.points))
        return predictions

    def stage_costs(self, batch: StageBatch, *, engine: Engine = "mistlab") -> StageCosts:
        """What each candidate for a stage costs."""
        return self.predictor.stage_costs(batch, engine=engine)


@dataclass(slots=True, kw_only=True)
class Bench:
    """A problem, and whom all searchers ask about it."""

    problem: Problem
    predictor: SymbolicPredictor
    simulator: EventSimulator
    _simulated_s: dict[Plan, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, problem: Problem) -> Self:
        """The bench of a problem."""
        workload, cluster = problem.workload, problem.cluster
        return cls(
            problem=problem,
            predictor=SymbolicPredictor(workload=workload, cluster=cluster),
            simulator=EventSimulator(workload=workload, cluster=cluster),
        )

    @property
    def outside_bytes(self) -> float:
        """Bytes of a GPU that are not torch's."""
        return allocator_of(self.problem.cluster).outside_bytes

    @property
    def room_bytes(self) -> float:
        """Bytes of a GPU that torch's allocator may hold."""
        return room_bytes(self.problem.cluster)

    def job(self, plan: Plan) -> Job:
        """A plan with what it is for."""
        return Job(workload=self.problem.workload, cluster=self.problem.cluster, plan=plan)

    def warm_up(self, space: SearchSpace) -> None:
        """Compile what a space's engine needs, so that no searcher's clock runs meanwhile."""
        plan = chosen_plan(self.problem, space, Chooser(lambda _, options: 0))
        if plan is not None:
            self.predictor.predict(plan)
            self.predictor.stage_costs(StageBatch.of_plan(plan), engine=space.engine)

    def search(
        self,
        name: str,
        space: SearchSpace,
        budget: Budget,
        seed: int,
        listener: Callable[[Ledger], None],
    ) -> Entry:
        """Let one searcher search."""
        watched = Watched(predictor=self.predictor, outside_bytes=self.outside_bytes)
        searcher = StrategySearcher(strategy=SEARCHERS[name], predictor=watched, listener=listener)
        result = searcher.search(self.problem, space, budget, seed)
        return Entry(
            searcher=name,
            space=space,
            result=result,
            simulated_s=None,
            front=front_of(watched.points),
        )

    def played(self, entry: Entry) -> Entry:
        """An entry with what the event simulator says of its plan; equal plans are played once."""
        plan = entry.result.plan
        if plan is None or entry.simulated_s is not None:
            return entry
        if plan not in self._simulated_s:
            self._simulated_s[plan] = self.simulator.simulate(plan).iteration_s
        return replace(entry, simulated_s=self._simulated_s[plan])


def fullest_bytes(prediction: Prediction) -> int:
    """What torch's allocator holds on the fullest GPU."""
    return max(stage.peak_reserved_bytes for stage in prediction.stages)


def front_of(points: Sequence[Point]) -> tuple[Point, ...]:
    """Those that no other beats in both time and memory, fastest first."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point.memory_bytes < front[-1].memory_bytes:
            front.append(point)
    return tuple(front)
