"""One tuning problem: the plans that searchers find under any view, scored and played alike."""

from collections.abc import Callable
from dataclasses import dataclass, field
from time import perf_counter

import numpy as np

from mistlab.cost.iteration_terms import Terms
from mistlab.cost.named_views import FULL, view_of
from mistlab.engines.engine import Engine
from mistlab.values.plan import Plan
from mistlab.values.prediction import Prediction, Predictor
from mistlab.values.search import Budget, Problem, SearchResult
from mistlab.values.space import SearchSpace
from mistlab.values.stages import StageBatch
from searchers.ledger import Ledger
from searchers.registry import SEARCHERS
from searchers.strategy import Strategy, StrategySearcher
from simulators.events import EventSimulator
from simulators.symbolic import SymbolicPredictor

# Never reached: searches end by themselves, and so alike in every run and on every machine.
BUDGET = Budget(seconds=3600)


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """A search's answer: the plan, what the searcher was told of it, and the whole predictor's
    word."""

    plan: Plan
    seen_s: float
    prediction: Prediction
    result: SearchResult
    wall_s: float

    @property
    def seconds(self) -> float:
        """Seconds of an iteration, by the whole predictor."""
        return self.prediction.iteration_s

    @property
    def terms(self) -> Terms:
        """The terms that add up to these seconds."""
        return Terms.of(self.plan, self.prediction)


@dataclass(slots=True)
class Desk:
    """A problem with predictors and a simulator, each made when it is asked for."""

    problem: Problem
    _seen: dict[str, Predictor] = field(default_factory=dict, init=False)
    _played_s: dict[Plan, float] = field(default_factory=dict, init=False)
    _simulator: EventSimulator | None = field(default=None, init=False)

    def predictor(self, view: str = FULL) -> Predictor:
        """The closed form as seen in a view."""
        if view not in self._seen:
            self._seen[view] = view_of(view).predictor(
                SymbolicPredictor,
                workload=self.problem.workload,
                cluster=self.problem.cluster,
            )
        return self._seen[view]

    def found(
        self,
        searcher: str | Strategy,
        space: SearchSpace,
        *,
        view: str = FULL,
        budget: Budget = BUDGET,
        seed: int = 0,
        listener: Callable[[Ledger], None] | None = None,
    ) -> Found | None:
        """The best plan of a searcher that sees a view; None where no plan fits."""
        strategy = SEARCHERS[searcher] if isinstance(searcher, str) else searcher
        asking = StrategySearcher(
            strategy=strategy, predictor=self.predictor(view), listener=listener
        )
        began_s = perf_counter()
        result = asking.search(self.problem, space, budget, seed)
        wall_s = perf_counter() - began_s
        if result.plan is None or result.prediction is None or not result.prediction.fits:
            return None
        return Found(
            plan=result.plan,
            seen_s=result.prediction.iteration_s,
            prediction=self.predictor().predict(result.plan),
            result=result,
            wall_s=wall_s,
        )

    def played_s(self, plan: Plan) -> float:
        """Seconds of a plan's iteration as the event simulator plays it; each is played once."""
        if self._simulator is None:
            self._simulator = EventSimulator(
                workload=self.problem.workload, cluster=self.problem.cluster
            )
        if plan not in self._played_s:
            self._played_s[plan] = self._simulator.simulate(plan).iteration_s
        return self._played_s[plan]

    def run_by_s(self, engine: Engine, plan: Plan) -> float:
        """Seconds of a plan's iteration if another engine ran it, which no plan need name."""
        whole = SymbolicPredictor(workload=self.problem.workload, cluster=self.problem.cluster)
        counts = np.array([plan.micro_batches])
        return float(whole.iterations(StageBatch.of_plan(plan), counts, engine=engine)[0])
