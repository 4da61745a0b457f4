"""A benchmark problem for searchers: all of them ask the same predictor, from which an effect such
as overlap may be hidden, and their plans run in the same event simulator.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate
from math import inf
from time import perf_counter, process_time
from typing import Self

import numpy as np

from mistlab.core.arrays import Floats
from mistlab.cost.memory import allocator_of, room_of_plan
from mistlab.cost.pipeline import Terms
from mistlab.engines.engine import Engine
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction, Predictor
from mistlab.job.search import TOLD_APART, Budget, Problem, SearchResult, StageCostModel
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.stages.stage_batch import StageBatch
from searchers.registry import SEARCHERS
from searchers.savings import Chooser, chosen_plan
from searchers.strategy import INTERRUPTED, ROUNDING, Ledger, Strategy, StrategySearcher
from simulators.events import EventSimulator
from simulators.registry import PREDICTORS
from simulators.symbolic import SymbolicPredictor
from simulators.views import FULL, view_of

# The time limit of a search, too large to be ever reached: searches end by themselves, so that
# results do not depend on the machine.
BUDGET = Budget(seconds=3600)
# The column headings for the parts that add up to an iteration's time (``Terms``).
TERM_WORDS = {
    "computation_s": "computation",
    "exposed_communication_s": "exposed communication",
    "other_stages_s": "passing other stages",
    "rest_s": "first, last and step",
}
# The searcher whose plan is the baseline of speedups: it searches as a typical engineer would.
BASELINE = "megatron"

# Of the plans whose predicted times are close to the best plan's, as many of the nearest are
# simulated as have at most this many tasks together, which take about five seconds.
MOST_TASKS = 500_000
# A search's best plan is not simulated if it has more tasks than this, which take half a minute.
MOST_TASKS_OF_BEST = 5_000_000
# About how many tasks the event simulator runs for a block and a micro-batch: its passes,
# communication and copies to and from the host.
TASKS_A_BLOCK = 6

# The Pareto frontier is pruned when this many points (plans) have been collected.
MOST_POINTS = 4096


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Point:
    """A plan that a search predicted, as a point: its time, and the memory of its fullest GPU."""

    iteration_s: float
    memory_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlayedRival:
    """A plan whose predicted time is slightly above the best one's, with its simulated seconds;
    None if it and the plans nearer to the best one have too many tasks to simulate.
    """

    plan: Plan
    prediction: Prediction
    simulated_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """The plan that a search found: the search's result, by the predictor that the searcher asked,
    and the plan's prediction by the full predictor.
    """

    plan: Plan
    seen_s: float
    prediction: Prediction
    result: SearchResult

    @property
    def seconds(self) -> float:
        """The iteration time in seconds that the full predictor gives for the plan found."""
        return self.prediction.iteration_s

    @property
    def terms(self) -> Terms:
        """The parts that add up to the plan's iteration time, such as exposed communication."""
        return Terms.of(self.plan, self.prediction)


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """The result of one searcher, with the iteration times of its plans in the event simulator.

    ``front`` are the plans that the search predicted and that no other plan beats in both time and
    memory. ``rivals`` are plans whose order by time the closed form and the event simulator may see
    differently. ``cpu_s`` are the CPU seconds of the search. ``is_played`` says that the answer is
    the rival that is fastest in the event simulator, rather than the plan with the best predicted
    time.
    """

    searcher: str
    space: SearchSpace
    result: SearchResult
    simulated_s: float | None
    front: tuple[Point, ...]
    rivals: tuple[PlayedRival, ...] = ()
    playing_s: float = 0.0
    cpu_s: float = 0.0
    is_played: bool = False

    @property
    def answer(self) -> tuple[Plan, Prediction] | None:
        """The searcher's best plan that fits in memory, with its prediction; None if there is
        none.
        """
        if self.is_played and self.faster is not None:
            return self.faster.plan, self.faster.prediction
        return answer_of(self.result)

    @property
    def answer_simulated_s(self) -> float | None:
        """The seconds of an iteration of the searcher's best plan in the event simulator; None if
        it was not simulated.
        """
        return self.faster.simulated_s if self.is_played and self.faster else self.simulated_s

    @property
    def faster(self) -> PlayedRival | None:
        """The rival that is fastest in the event simulator, if it is not the plan that is predicted
        to be fastest; otherwise None.
        """
        if self.simulated_s is None:
            return None
        played = [
            (rival.simulated_s, index)
            for index, rival in enumerate(self.rivals)
            if rival.simulated_s is not None and rival.simulated_s < self.simulated_s
        ]
        return self.rivals[min(played)[1]] if played else None

    @property
    def rivals_played(self) -> int:
        """How many of the rivals were simulated."""
        return sum(rival.simulated_s is not None for rival in self.rivals)

    @property
    def faster_by(self) -> float:
        """By what share the plan that is fastest in the event simulator beats the plan that is
        predicted to be fastest, both simulated.
        """
        if self.simulated_s is None or self.faster is None or self.faster.simulated_s is None:
            return 0.0
        return 1 - self.faster.simulated_s / self.simulated_s

    @property
    def is_interrupted(self) -> bool:
        """Whether the search was interrupted, rather than ended by itself or by its budget."""
        return self.result.reason == INTERRUPTED


@dataclass(slots=True, kw_only=True)
class Front:
    """Collects the Pareto frontier of the plans that a search predicts: least time and least
    memory.
    """

    outside_bytes: float
    points: list[Point] = field(default_factory=list)

    def see(self, _plan: Plan, prediction: Prediction) -> None:
        """Add the time and the memory of a plan that was predicted."""
        memory_bytes = round(prediction.peak_reserved_bytes + self.outside_bytes)
        self.points.append(Point(iteration_s=prediction.iteration_s, memory_bytes=memory_bytes))
        if len(self.points) > MOST_POINTS:
            self.points = list(front_of(self.points))


@dataclass(slots=True, kw_only=True)
class Bench:
    """A problem with the predictor and the event simulator that all searchers are compared by.

    Searchers ask the predictor ``asked``, which is ``predictor`` with the effects of a view hidden.
    The plans that they find are then predicted by ``predictor`` itself.
    """

    problem: Problem
    predictor: Predictor
    asked: Predictor
    simulator: EventSimulator
    _seen: dict[str, Predictor] = field(default_factory=dict, init=False)
    _simulated_s: dict[Plan, float] = field(default_factory=dict, init=False)

    @classmethod
    def of(cls, problem: Problem, predictor: str = "symbolic", view: str = FULL) -> Self:
        """The bench of a problem. Searchers ask one of the predictors in ``PREDICTORS``, from which
        effects may be hidden (a view of ``VIEWS``).
        """
        workload, cluster = problem.workload, problem.cluster
        maker, seen = PREDICTORS[predictor], view_of(view)
        whole = maker(workload=workload, cluster=cluster)
        return cls(
            problem=problem,
            predictor=whole,
            asked=whole
            if view == FULL
            else seen.predictor(maker, workload=workload, cluster=cluster),
            simulator=EventSimulator(workload=workload, cluster=cluster),
        )

    @property
    def outside_bytes(self) -> float:
        """The bytes of a GPU's memory that PyTorch's allocator does not get: those of the CUDA
        context and of communicators.
        """
        return allocator_of(self.problem.cluster).outside_bytes

    def room_bytes(self, plan: Plan) -> Floats:
        """The bytes that PyTorch's allocator may reserve on a GPU of each stage."""
        return room_of_plan(self.problem.cluster, plan)

    def job(self, plan: Plan) -> Job:
        """A plan with its workload and cluster."""
        return Job(workload=self.problem.workload, cluster=self.problem.cluster, plan=plan)

    def warm_up(self, space: SearchSpace) -> None:
        """Compile the expressions of a space's engines, so that no searcher's time includes it."""
        for engine_space in space.of_engines:
            plan = chosen_plan(self.problem, engine_space, Chooser(lambda _, options: 0))
            if plan is not None:
                self.asked.predict(plan)
                if isinstance(self.asked, StageCostModel):
                    self.asked.stage_costs(StageBatch.of_plan(plan), engine=engine_space.engine)

    def search(
        self,
        name: str,
        space: SearchSpace,
        budget: Budget,
        seed: int,
        listener: Callable[[Ledger], None],
    ) -> Entry:
        """Run one searcher. A plan found while some effects were hidden is predicted again by the
        full predictor.
        """
        front = Front(outside_bytes=self.outside_bytes)
        searcher = StrategySearcher(
            strategy=SEARCHERS[name],
            predictor=self.asked,
            listener=listener,
            watcher=front.see,
        )
        began_s = process_time()
        result = searcher.search(self.problem, space, budget, seed)
        cpu_s = process_time() - began_s
        return Entry(
            searcher=name,
            space=space,
            result=result if self.asked is self.predictor else self._rescored(result),
            simulated_s=None,
            front=front_of(front.points),
            cpu_s=cpu_s,
        )

    def _rescored(self, result: SearchResult) -> SearchResult:
        """A search result whose plans are predicted again by the full predictor. Proofs of the
        search that relied on the predictor with hidden effects are dropped.
        """
        if result.plan is None:
            return result
        plans = [result.plan, *(rival.plan for rival in result.rivals)]
        first, *others = self.predictor.predict_many(plans)
        rivals = [
            replace(rival, prediction=own) for rival, own in zip(result.rivals, others, strict=True)
        ]
        return replace(
            result,
            status="FEASIBLE" if result.status == "OPTIMAL" else result.status,
            prediction=first,
            rivals=tuple(rivals),
            lower_bound_s=None,
            gap=None,
        )

    def played(self, entry: Entry) -> Entry:
        """A searcher's result with the simulated times of its best plan and of plans close to it,
        which may be faster in the event simulator; equal plans are simulated once.
        """
        plan, prediction = entry.result.plan, entry.result.prediction
        if plan is None or prediction is None or entry.simulated_s is not None:
            return entry
        began_s = perf_counter()
        near = [
            rival
            for rival in entry.result.rivals
            if rival.prediction.iteration_s <= prediction.iteration_s * (1 + TOLD_APART)
        ]
        tasks = accumulate(_tasks(rival.plan) for rival in near)
        return replace(
            entry,
            simulated_s=self.played_s(plan) if _tasks(plan) <= MOST_TASKS_OF_BEST else None,
            rivals=tuple(
                PlayedRival(
                    plan=rival.plan,
                    prediction=rival.prediction,
                    simulated_s=self.played_s(rival.plan) if so_far <= MOST_TASKS else None,
                )
                for rival, so_far in zip(near, tasks, strict=True)
            ),
            playing_s=perf_counter() - began_s,
        )

    def found(
        self,
        searcher: str | Strategy,
        space: SearchSpace,
        *,
        view: str | None = FULL,
        budget: Budget = BUDGET,
        seed: int = 0,
    ) -> Found | None:
        """The plan that a searcher finds with a closed form from which a view hides effects
        (without a view, with the bench's own predictor); None if no plan fits.
        """
        strategy = SEARCHERS[searcher] if isinstance(searcher, str) else searcher
        asked = self.predictor if view is None else self.seen(view)
        asking = StrategySearcher(strategy=strategy, predictor=asked)
        result = asking.search(self.problem, space, budget, seed)
        answer = answer_of(result)
        if answer is None:
            return None
        plan, prediction = answer
        return Found(
            plan=plan,
            seen_s=prediction.iteration_s,
            prediction=self.predictor.predict(plan),
            result=result,
        )

    def seen(self, view: str) -> Predictor:
        """The closed form with the effects of a view hidden. A view predicts plans and stages but
        lacks the predictor's further methods, so a search may prove less with it.
        """
        if view not in self._seen:
            work, cluster = self.problem.workload, self.problem.cluster
            self._seen[view] = view_of(view).predictor(
                SymbolicPredictor, workload=work, cluster=cluster
            )
        return self._seen[view]

    def run_by_s(self, engine: Engine, plan: Plan) -> float:
        """The iteration time in seconds that a plan would have if another engine ran it."""
        whole = SymbolicPredictor(workload=self.problem.workload, cluster=self.problem.cluster)
        counts = np.array([plan.micro_batches])
        return float(whole.iterations(StageBatch.of_plan(plan), counts, engine=engine)[0])

    def played_s(self, plan: Plan) -> float:
        """The seconds of an iteration of a plan in the event simulator; equal plans are played
        once.
        """
        if plan not in self._simulated_s:
            self._simulated_s[plan] = self.simulator.simulate(plan).iteration_s
        return self._simulated_s[plan]


def answer_of(result: SearchResult) -> tuple[Plan, Prediction] | None:
    """The plan that a search found, with its prediction; None if it does not fit."""
    plan, prediction = result.plan, result.prediction
    if plan is None or prediction is None or not prediction.fits:
        return None
    return plan, prediction


def decided(entry: Entry) -> Entry:
    """The searcher's result in which the best plan is the one that is fastest in the event
    simulator, among plans that the closed form cannot tell apart.
    """
    return replace(entry, is_played=entry.faster is not None)


def judged(entries: Sequence[Entry]) -> Entry | None:
    """The searcher's result after its best plan has been decided by the event simulator; None if no
    plan fits.

    If a search proved that its plan has the best predicted time, the answer is whichever of this
    plan and its rivals is fastest in the event simulator, so it depends on the problem alone. If
    nothing is proven, the rivals are those plans of all entries whose predicted times are too close
    to the best one to tell them apart.
    """
    answered = [entry for entry in entries if entry.answer is not None]
    if not answered:
        return None
    best_s = min(map(_predicted_s, answered))
    proven = [decided(entry) for entry in answered if entry.result.status == "OPTIMAL"]
    if provers := [one for one in proven if _predicted_s(one) <= best_s * (1 + ROUNDING)]:
        return min(provers, key=lambda entry: entry.answer_simulated_s or inf)
    near_s = best_s * (1 + TOLD_APART)
    near = [decided(entry) for entry in answered if _predicted_s(entry) <= near_s]
    return min(near, key=lambda entry: (entry.answer_simulated_s or inf, _predicted_s(entry)))


def _predicted_s(entry: Entry) -> float:
    assert entry.result.prediction is not None
    return entry.result.prediction.iteration_s


def _tasks(plan: Plan) -> int:
    """An upper estimate of how many tasks an iteration of the plan has in the event simulator."""
    return TASKS_A_BLOCK * plan.micro_batches * plan.layers


def front_of(points: Sequence[Point]) -> tuple[Point, ...]:
    """The Pareto frontier of points (each the time and memory of a plan), fastest first."""
    front: list[Point] = []
    for point in sorted(points):
        if not front or point.memory_bytes < front[-1].memory_bytes:
            front.append(point)
    return tuple(front)
