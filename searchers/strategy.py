"""What all searchers share: the type of a strategy, and a ledger that counts predictor calls and
keeps the best plan so far.
"""

from bisect import insort
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from math import ceil, inf
from time import perf_counter, process_time
from typing import Self, TypeVar, cast, final

import numpy as np

from mistlab.core.arrays import Bools
from mistlab.graph.library import graph_of
from mistlab.job.prediction import Prediction, Predictor
from mistlab.job.search import (
    MOST_NEAR,
    TOLD_APART,
    Budget,
    Improvement,
    Problem,
    Rival,
    SearchResult,
    StageBoundModel,
    StageCostModel,
    Status,
)
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.stages.stage_batch import StageBatch, StageCosts, StageSeconds, StagesInOrder
from searchers.parts import parts_of
from searchers.savings import ways_listed, why_empty

# Every searcher calls the predictor through a ``Ledger``, so that all searchers are counted alike
# and end with the same budget.


# When a budget counts evaluations, this many candidates for stages count as one plan.
STAGES_A_PLAN = 1000
# How many plans are predicted between two checks of the clock, unless a budget of seconds is nearly
# spent: 32 take a tenth longer per plan than 64.
PLANS_AT_ONCE = 32
# The first plans with a number of stages and micro-batches take up to ten times as long as later
# ones.
TIMES_OF_NEW_KINDS = 10
# How many candidates for stages are predicted between two checks of the clock. Candidates with
# distinct ratios take up to 50 microseconds each, and twice as long with more of them per batch.
STAGES_AT_ONCE = 1 << 14
# When seconds run out, at least this many are: fewer take hardly less time.
FEWEST_STAGES = 256
# The best plan and its rivals, the next best; a ledger keeps ``MOST_NEAR`` rivals of a proven one.
SHORT_LIST = 5
# Times that differ by less than this share are equal up to rounding errors.
ROUNDING = 1e-9

Clock = Callable[[], float]
Watcher = Callable[[Plan, Prediction], object]
Answer = TypeVar("Answer")


class BudgetSpentError(Exception):
    """Raised when the budget is spent and the search must end; the ledger then has the best plan so
    far.

    ``predictions`` are the last ones that the budget allowed, for strategies that keep predictions.
    """

    def __init__(self, predictions: Sequence[Prediction] = ()) -> None:
        super().__init__()
        self.predictions = predictions


@dataclass(slots=True, kw_only=True)
class Ledger:
    """Counts predictor calls, keeps the best plan that fits, and ends the search when its budget is
    spent.

    ``listener`` is called with every answer and every better lower bound, to show progress;
    ``watcher`` with every plan that is predicted. ``bound_s`` is a lower bound of the iteration
    times of all plans, on every number of GPUs (``gpus``) that is searched.
    """

    predictor: Predictor
    budget: Budget
    clock: Clock
    listener: "Callable[[Ledger], None] | None" = None
    watcher: "Watcher | None" = None
    bound_s: float = 0.0
    plan_evaluations: int = 0
    stage_evaluations: int = 0
    best: Plan | None = None
    prediction: Prediction | None = None
    gpus: tuple[int, ...] = ()
    history: list[Improvement] = field(default_factory=list)
    nearest: list[Rival] = field(default_factory=list)
    said: "Callable[[Plan], Plan] | None" = None
    hears: "Callable[[float], object] | None" = None
    began_s: float = field(init=False)
    _plan_s: float = field(default=0.0, init=False)
    _stage_s: float = field(default=0.0, init=False)

    def __post_init__(self) -> None:
        self.began_s = self.clock()

    @property
    def wall_s(self) -> float:
        """The seconds since the search began."""
        return self.clock() - self.began_s

    @property
    def best_s(self) -> float:
        """The iteration time of the best plan so far; infinite before there is one."""
        return float("inf") if self.prediction is None else self.prediction.iteration_s

    def is_best(self, bound_s: float) -> bool:
        """Whether the best plan so far is optimal, if no plan of the search space takes less than
        ``bound_s``.
        """
        return bound_s >= self.best_s * (1 - ROUNDING)

    @property
    def gap(self) -> float | None:
        """The share of the best plan's time by which another plan might still be faster; None as
        long as no lower bound is known.
        """
        return max(0.0, 1 - self.bound_s / self.best_s) if self.bound_s and self.best else None

    def best_of(self, engine: str) -> list[Plan]:
        """The plans of one engine among the few fastest plans that the ledger keeps."""
        few = self.nearest[:SHORT_LIST]
        return [one.plan for one in few if one.plan.engine == engine]

    def bounded(self, bound_s: float) -> None:
        """Record a lower bound of the iteration times of all plans of the search space."""
        if self.said is None:
            self.bound_s = max(self.bound_s, bound_s)
        elif self.hears is not None:
            self.hears(bound_s)
        if self.listener is not None:
            self.listener(self)

    @property
    def evaluations_left(self) -> int | None:
        """How many plans may still be predicted; None if the budget limits only time."""
        if self.budget.evaluations is None:
            return None
        used = self.plan_evaluations + self.stage_evaluations / STAGES_A_PLAN
        return max(0, int(self.budget.evaluations - used))

    @property
    def budget_left(self) -> Budget:
        """What is left of the budget; each limit leaves a little even if it is spent."""
        left = self.evaluations_left
        return Budget(
            evaluations=None if left is None else max(1, left),
            seconds=None if self.budget.seconds is None else max(1e-3, self.seconds_left),
        )

    @property
    def seconds_left(self) -> float:
        """The seconds left of the budget; infinite if it limits only evaluations."""
        seconds = self.budget.seconds
        return inf if seconds is None else max(0.0, seconds - self.wall_s)

    def check_time(self) -> None:
        """Raise ``BudgetSpentError`` if the budget's seconds are spent.

        Long work without predictor calls must call this from time to time.
        """
        if self.seconds_left == 0:
            raise BudgetSpentError

    @contextmanager
    def for_seconds(self, seconds: float) -> Iterator[None]:
        """In the ``with`` block, limit the search to this many of the budget's seconds."""
        budget = self.budget
        ends_s = self.wall_s + seconds
        if ends_s < (inf if budget.seconds is None else budget.seconds):
            self.budget = replace(budget, seconds=ends_s)
        try:
            yield
        finally:
            self.budget = budget

    @contextmanager
    def for_share(self, share: float) -> Iterator[None]:
        """In the ``with`` block, limit the search to a share of what is left of the budget."""
        budget, left = self.budget, self.evaluations_left
        if budget.evaluations is not None and left is not None:
            spent = budget.evaluations - left
            self.budget = replace(budget, evaluations=spent + ceil(share * left))
        try:
            with self.for_seconds(share * self.seconds_left):
                yield
        finally:
            self.budget = budget

    def count(self, *, stages: int) -> None:
        """Count candidates for stages that another process evaluated for this search."""
        self.stage_evaluations += stages

    def predict(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        """Predict plans, and keep the best that fits. Raises ``BudgetSpentError``."""
        left = self.evaluations_left
        allowed = plans if left is None else plans[:left]
        predictions: list[Prediction] = []
        while True:
            start, began_s = len(predictions), self.wall_s
            together = allowed[start : start + self._plans_in_time]
            predictions += self._predicted(together)
            self._plan_s = (self.wall_s - began_s) / max(1, len(together))
            is_last = len(predictions) == len(allowed)
            self._continue(predictions, is_short=is_last and len(allowed) < len(plans))
            if is_last:
                return predictions

    @property
    def _plans_in_time(self) -> int:
        """How many plans are predicted before the next look at the clock: ``PLANS_AT_ONCE``, or
        fewer if the seconds left would not suffice for that many plans of a new kind.
        """
        if self.budget.seconds is None or not self._plan_s:
            return PLANS_AT_ONCE
        in_time = self.seconds_left / (self._plan_s * TIMES_OF_NEW_KINDS)
        return max(1, int(min(PLANS_AT_ONCE, in_time)))

    def predict_fastest(
        self, plans: Iterable[tuple[float, Plan]], *, most_waiting: float = inf
    ) -> None:
        """Predict plans in ascending order of their lower bounds until no further one can beat the
        best.

        Stages on a node share its host memory and its network, so only a prediction shows whether a
        plan fits, and how much longer than its bound it takes because sends wait for one another.
        After ``most_waiting`` plans that take longer, one more is predicted.
        """
        waiting = 0
        for least_s, plan in plans:
            if least_s >= self.best_s or waiting > most_waiting:
                break
            prediction = self.predict([plan])[0]
            if prediction.fits and prediction.iteration_s <= least_s * (1 + ROUNDING):
                break
            waiting += prediction.fits

    def _predicted(self, plans: Sequence[Plan]) -> Sequence[Prediction]:
        if self.said is not None:
            plans = [self.said(plan) for plan in plans]
        predictions = self.predictor.predict_many(plans)
        self.plan_evaluations += len(plans)
        for plan, prediction in zip(plans, predictions, strict=True):
            self._shortlist(plan, prediction)
            if self.watcher is not None:
                self.watcher(plan, prediction)
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
        return predictions

    def _shortlist(self, plan: Plan, prediction: Prediction) -> None:
        """Keep a plan if it is one of the fastest; of equally fast ones the earlier ranks first."""
        is_full = len(self.nearest) > MOST_NEAR
        if not prediction.fits or (
            is_full and prediction.iteration_s >= self.nearest[-1].prediction.iteration_s
        ):
            return
        if all(plan != known.plan for known in self.nearest):
            rival = Rival(plan=plan, prediction=prediction)
            insort(self.nearest, rival, key=lambda one: one.prediction.iteration_s)
            del self.nearest[MOST_NEAR + 1 :]

    @contextmanager
    def for_part(
        self, restate: Callable[[Plan], Plan], hears: Callable[[float], object] | None = None
    ) -> Iterator[None]:
        """In the ``with`` block, search a part of the search space; ``restate`` turns its plans
        into plans of the whole space. Lower bounds of the part do not hold for the whole space, so
        they are passed to ``hears``.
        """
        before = self.said, self.hears
        self.said, self.hears = restate, hears
        try:
            yield
        finally:
            self.said, self.hears = before

    def stage_costs(self, batch: StageBatch, *, engine: str) -> StageCosts:
        """The cost of each candidate for a stage. Raises ``BudgetSpentError``."""
        # Whether the predictor has stage costs was tested when the search began, since the test is
        # too slow for every call.
        model = cast("StageCostModel", self.predictor)
        parts = self._in_parts(lambda some: model.stage_costs(some, engine=engine), batch)
        return parts[0] if len(parts) == 1 else StageCosts.joined(parts)

    def stage_bounds(self, least: StageBatch, most: StageBatch, *, engine: str) -> StageCosts:
        """Lower bounds of the costs of all candidates for stages whose choices lie between those of
        ``least`` and ``most``, row by row. Raises ``BudgetSpentError``.
        """
        model = cast("StageBoundModel", self.predictor)

        def bounds(least: StageBatch, others: StageBatch) -> StageCosts:
            costs = model.stage_bounds(least, others, engine=engine)
            assert costs is not None, f"engine {engine} has no bounds"
            return costs

        parts = self._in_parts(bounds, least, most)
        return parts[0] if len(parts) == 1 else StageCosts.joined(parts)

    def part_seconds(
        self, least: StageBatch, most: StageBatch | None = None, *, engine: str
    ) -> StageSeconds:
        """The times of stages' chunks (parts of the model), for schedules other than 1F1B. If
        ``most`` is given, they are lower bounds over all candidates between ``least`` and ``most``.
        Raises ``BudgetSpentError``.
        """
        model = cast("StageBoundModel", self.predictor)
        batches = (least,) if most is None else (least, most)
        parts = self._in_parts(partial(model.part_seconds, engine=engine), *batches)
        return parts[0] if len(parts) == 1 else StageSeconds.joined(parts)

    def stage_fits(
        self,
        batch: StageBatch,
        in_order: StagesInOrder | None = None,
        *,
        engine: str,
        of_others: bool = False,
    ) -> Bools:
        """Whether each candidate for a stage fits in the memory of its GPUs. With ``of_others``,
        true also if it might fit with smaller ratios or fewer recomputed blocks. Raises
        ``BudgetSpentError``.
        """
        model = cast("StageBoundModel", self.predictor)
        ask = partial(model.stage_fits, engine=engine, of_others=of_others)
        batches = (batch,) if in_order is None else (batch, in_order)
        return np.concatenate(self._in_parts(ask, *batches))

    def _in_parts(
        self, ask: Callable[..., Answer], *batches: StageBatch | StagesInOrder
    ) -> list[Answer]:
        """Call the predictor with some of the candidates at a time; returns the answers for all of
        them.
        """
        rows, begin = len(batches[0]), 0
        answers: list[Answer] = []
        while begin < rows or not answers:
            end, began_s = min(rows, begin + self._stages_in_time(rows - begin)), self.wall_s
            part = np.arange(begin, end)
            is_all = len(part) == rows
            answers.append(ask(*batches) if is_all else ask(*(one.chosen(part) for one in batches)))
            self.stage_evaluations += len(part)
            self._stage_s = (self.wall_s - began_s) / max(FEWEST_STAGES, len(part))
            self._continue((), is_short=False)
            begin = end
        return answers

    def _stages_in_time(self, rows: int) -> int:
        """How many of ``rows`` candidates for stages are predicted before the next look at the
        clock: ``STAGES_AT_ONCE``, or fewer if these would take more than half of the seconds left.
        """
        at_once = ceil(rows / (-(-rows // STAGES_AT_ONCE) or 1))
        if self.budget.seconds is None or not self._stage_s:
            return at_once
        in_time = self.seconds_left / 2 / self._stage_s
        return int(min(at_once, max(FEWEST_STAGES, in_time)))

    def _continue(self, predictions: Sequence[Prediction], *, is_short: bool) -> None:
        if self.listener is not None:
            self.listener(self)
        if is_short or self.evaluations_left == 0 or self.seconds_left == 0:
            raise BudgetSpentError(predictions)

    def result(
        self, status: Status, seed: int, *, lower_bound_s: float | None = None, reason: str = ""
    ) -> SearchResult:
        """The best plan and lower bound of the search so far, also if the search was stopped."""
        gap = None
        if lower_bound_s is not None and self.prediction is not None:
            lower_bound_s = min(lower_bound_s, self.best_s)
            gap = 1 - lower_bound_s / self.best_s
        near_s = self.best_s * (1 + TOLD_APART) if status == "OPTIMAL" else 0.0
        near = [one for one in self.nearest if one.prediction.iteration_s <= near_s]
        rivals = near if len(near) > SHORT_LIST else self.nearest[:SHORT_LIST]
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
            rivals=tuple(one for one in rivals if one.plan != self.best),
            gpus=self.gpus,
            seed=seed,
            reason=reason,
        )


# Makes a searcher from a strategy: a function that asks a ledger for predictions and returns how
# the search ended. All searchers share the rest: predictor calls are counted, the best plan is
# kept, the budget ends the search, and an interrupted search returns the best plan so far.


INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a search ended. Without a ``status``, it is FEASIBLE if the ledger has a plan, otherwise
    BUDGET.

    ``lower_bound_s`` is an iteration time that no plan of the space beats.
    """

    status: Status | None = None
    lower_bound_s: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, ledger: Ledger, bound_s: float) -> Self:
        """How a search ended that has shown that no plan of the search space takes less than
        ``bound_s``.
        """
        if ledger.best is None:
            is_empty = bound_s == inf
            return cls(status="INFEASIBLE") if is_empty else cls(reason=NOT_FOUND)
        if ledger.is_best(bound_s):
            return cls(status="OPTIMAL", lower_bound_s=ledger.best_s)
        return cls(status="FEASIBLE", lower_bound_s=bound_s or None)


# A strategy: a function of the problem, the search space, the ledger and a random generator, which
# searches and returns how it ended.
Strategy = Callable[[Problem, SearchSpace, Ledger, np.random.Generator], Ending]

# The reason that a search gives for having no plan, if it did not look at every plan.
NOT_FOUND = "no plan was found that fits, which does not prove that there is none"
# The reason for refusing a predictor that predicts whole plans but not the costs of single stages.
NO_STAGE_COSTS = "asks for costs of single stages, which the predictor does not give"
# The reason for refusing a model whose kinds of blocks alternate.
TAKING_TURNS = (
    "asks for costs of single stages wherever they begin, and this model has blocks of several "
    "kinds: ask a searcher of whole plans, such as aceso or optuna"
)
# The reasons for refusing a space with schedules other than 1F1B: the first if the searcher never
# searches such schedules, the second if the predictor has no lower bounds for them.
NO_ORDERS = (
    f"joins stages of pipelines of {DEFAULT_ORDER}, and this space has other orders: ask mist, or "
    "a searcher of whole plans, such as aceso or optuna"
)
OTHER_ORDERS = (
    f"joins stages of pipelines of {DEFAULT_ORDER}, and has no bounds for the other orders of this "
    "space and engine: ask a searcher of whole plans, such as aceso or optuna"
)


@final
@dataclass(frozen=True, slots=True)
class NeedsStageCosts:
    """Marks a strategy that needs the costs of single stages, which not every predictor gives.

    Other strategies ask only for predictions of whole plans. ``takes_orders`` says whether the
    strategy also searches schedules other than 1F1B; ``takes_ranges`` says for which spaces it
    accepts models whose kinds of blocks alternate.
    """

    strategy: Strategy
    takes_orders: bool = False
    takes_ranges: Callable[[SearchSpace], bool] | None = None

    def __call__(
        self, problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
    ) -> Ending:
        """Run the strategy until it returns or the budget is spent."""
        return self.strategy(problem, space, ledger, draw)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySearcher:
    """A ``Searcher`` that runs one strategy within the budget."""

    strategy: Strategy
    predictor: Predictor
    clock: Clock = perf_counter
    listener: Callable[[Ledger], None] | None = None
    watcher: Watcher | None = None

    def search(
        self, problem: Problem, space: SearchSpace, budget: Budget, seed: int
    ) -> SearchResult:
        """Find the best plan of the search space within the budget."""
        space = space.beside(problem.workload.reduction).holding(problem.workload.base)
        ledger = Ledger(
            predictor=self.predictor,
            budget=budget,
            clock=process_time if budget.clock == "cpu" else self.clock,
            listener=self.listener,
            watcher=self.watcher,
        )
        if isinstance(self.strategy, NeedsStageCosts):
            if not isinstance(self.predictor, StageCostModel):
                return ledger.result("REFUSED", seed, reason=NO_STAGE_COSTS)
            turns = len(graph_of(problem.workload).pattern) > 1
            takes_ranges = self.strategy.takes_ranges
            if turns and not (takes_ranges is not None and takes_ranges(space)):
                return ledger.result("REFUSED", seed, reason=TAKING_TURNS)
            if space.orders != (DEFAULT_ORDER,) and not self.strategy.takes_orders:
                return ledger.result("REFUSED", seed, reason=NO_ORDERS)
        try:
            empty = why_empty(problem, space)
            parts = parts_of(problem, has_plans=not empty)
            whole = () if empty else (problem,)
            problems = [*whole, *(part for part in parts if not why_empty(part, space))]
            if not problems:
                return ledger.result("INFEASIBLE", seed, reason=empty)
            ledger.gpus = tuple(one.cluster.num_gpus for one in problems)
            draw = np.random.default_rng(seed)
            ending = in_branches(self.strategy, problems, space, ledger, draw)
            ending = replace(ending, reason="; ".join(filter(None, (empty, ending.reason))))
        except BudgetSpentError:
            ending = Ending(status="BUDGET", lower_bound_s=ledger.bound_s or None)
        except KeyboardInterrupt:
            bound_s = ledger.bound_s or None
            ending = Ending(status="BUDGET", lower_bound_s=bound_s, reason=INTERRUPTED)
        status = ending.status or ("BUDGET" if ledger.best is None else "FEASIBLE")
        reason = ending.reason
        if status == "BUDGET" and ledger.best is None and not reason:
            reason = _no_plan_in_time(ledger)
        return ledger.result(status, seed, lower_bound_s=ending.lower_bound_s, reason=reason)


def in_branches(
    strategy: Strategy,
    problems: Sequence[Problem],
    space: SearchSpace,
    ledger: Ledger,
    draw: np.random.Generator,
) -> Ending:
    """Search a space for each engine, and on each part of the cluster, as branches with lower
    bounds of their own.

    The branches share the remaining budget evenly. They also share the best plan so far, which
    prunes later branches. Engines with fewer memory-saving strategies come first, since they leave
    most of their share of the budget to others; parts of the cluster come last.
    """
    engines = sorted(space.of_engines, key=ways_listed)
    branches = [(problem, own) for problem in problems for own in engines]
    if len(branches) == 1:
        return strategy(*branches[0], ledger, draw)
    bounds, refusals = [], []
    for number, (problem, branch_space) in enumerate(branches):
        heard, ending = [0.0], Ending()
        share, part = 1 / (len(branches) - number), ledger.for_part(lambda plan: plan, heard.append)
        with suppress(BudgetSpentError), ledger.for_share(share), part:
            if why_empty(problem, branch_space):
                ending = Ending(status="INFEASIBLE")
            else:
                ending = strategy(problem, branch_space, ledger, draw)
        if ending.status == "REFUSED":
            refusals.append(f"engine {branch_space.engine}: {ending.reason}")
        heard.append(inf if ending.status == "INFEASIBLE" else ending.lower_bound_s or 0.0)
        bounds.append(max(heard))
    if len(refusals) == len(branches):
        return Ending(status="REFUSED", reason=refusals[0])
    if min(bounds) < inf:
        ledger.bounded(min(bounds))
    ending = Ending.of(ledger, min(bounds))
    if ending.status != "OPTIMAL" and (ledger.evaluations_left == 0 or ledger.seconds_left == 0):
        raise BudgetSpentError
    return replace(ending, reason="; ".join(refusals))


def _no_plan_in_time(ledger: Ledger) -> str:
    """The reason that a search gives if the budget ended before it found a plan that fits."""
    limits = []
    if ledger.budget.seconds is not None:
        limits.append(f"{ledger.budget.seconds:g} s")
    if ledger.budget.evaluations is not None:
        limits.append(f"{ledger.budget.evaluations:,} evaluations")
    return (
        f"no plan in time: the budget of {' and '.join(limits)} was spent when "
        f"{ledger.plan_evaluations:,} plans and {ledger.stage_evaluations:,} stage candidates had "
        "been predicted, and no plan that fits was among them: give a larger budget"
    )
