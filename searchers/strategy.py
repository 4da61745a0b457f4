"""A strategy is one function that asks a ledger and returns how it ended; this makes it a searcher.

The rest of a ``Searcher`` is the same for all: it counts, keeps the best plan, ends with the
budget, and keeps what was found when it is interrupted.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from math import inf
from time import perf_counter
from typing import Self, final

import numpy as np

from mistlab.schedule.orders import DEFAULT_ORDER
from mistlab.symbolic.library import graph_of
from mistlab.values.prediction import Predictor
from mistlab.values.search import Budget, Problem, SearchResult, StageCostModel, Status
from mistlab.values.space import SearchSpace
from searchers.ledger import BudgetSpentError, Clock, Ledger, Watcher
from searchers.room import ways_listed
from searchers.why_empty import why_empty

INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How a strategy ended. Without ``status``, it is FEASIBLE if the ledger has a plan, else
    BUDGET.

    ``lower_bound_s`` is an iteration time that no plan of the space beats.
    """

    status: Status | None = None
    lower_bound_s: float | None = None
    reason: str = ""

    @classmethod
    def of(cls, ledger: Ledger, bound_s: float) -> Self:
        """How a search ended after which no plan of the space beats a time."""
        if ledger.best is None:
            is_empty = bound_s == inf
            return cls(status="INFEASIBLE") if is_empty else cls(reason=NOT_FOUND)
        if ledger.is_best(bound_s):
            return cls(status="OPTIMAL", lower_bound_s=ledger.best_s)
        return cls(status="FEASIBLE", lower_bound_s=bound_s or None)


# A strategy gets the problem, the space, the ledger to ask, and a source of randomness.
Strategy = Callable[[Problem, SearchSpace, Ledger, np.random.Generator], Ending]

# The reason that there is no plan where not all of a space was searched.
NOT_FOUND = "no plan was found that fits, which does not prove that there is none"
# The reason to refuse a search whose predictor predicts only whole plans.
NO_STAGE_COSTS = "asks for costs of single stages, which the predictor does not give"
# The reason to refuse a search for a model whose kinds of blocks take turns.
TAKING_TURNS = (
    "asks for costs of single stages wherever they begin, and this model has blocks of several "
    "kinds: ask a searcher of whole plans, such as aceso or optuna"
)
# Reasons to refuse a search of a space with other orders than the one that has a formula: of a
# strategy that never looks at them, and of one that does where it has bounds for them.
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
    """Marks a strategy that asks for costs of single stages, which not every predictor gives.

    Other strategies ask only for predictions of whole plans. ``takes_orders`` says whether it looks
    at orders of passes without a formula, too.
    """

    strategy: Strategy
    takes_orders: bool = False

    def __call__(
        self, problem: Problem, space: SearchSpace, ledger: Ledger, draw: np.random.Generator
    ) -> Ending:
        """Run the strategy; it ends by returning, or by the budget."""
        return self.strategy(problem, space, ledger, draw)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class StrategySearcher:
    """A strategy as a ``Searcher``."""

    strategy: Strategy
    predictor: Predictor
    clock: Clock = perf_counter
    listener: Callable[[Ledger], None] | None = None
    watcher: Watcher | None = None

    def search(
        self, problem: Problem, space: SearchSpace, budget: Budget, seed: int
    ) -> SearchResult:
        """The best plan of the space that can be found within the budget."""
        ledger = Ledger(
            predictor=self.predictor,
            budget=budget,
            clock=self.clock,
            listener=self.listener,
            watcher=self.watcher,
        )
        if isinstance(self.strategy, NeedsStageCosts):
            if not isinstance(self.predictor, StageCostModel):
                return ledger.result("REFUSED", seed, reason=NO_STAGE_COSTS)
            if len(graph_of(problem.workload).pattern) > 1:
                return ledger.result("REFUSED", seed, reason=TAKING_TURNS)
            if space.orders != (DEFAULT_ORDER,) and not self.strategy.takes_orders:
                return ledger.result("REFUSED", seed, reason=NO_ORDERS)
        try:
            if reason := why_empty(problem, space):
                return ledger.result("INFEASIBLE", seed, reason=reason)
            ending = in_engines(self.strategy, problem, space, ledger, np.random.default_rng(seed))
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


def in_engines(
    strategy: Strategy,
    problem: Problem,
    space: SearchSpace,
    ledger: Ledger,
    draw: np.random.Generator,
) -> Ending:
    """The best plan of all engines of a space: each engine is a branch with a bound of its own.

    Branches share what is left of the budget evenly, and the best plan so far, which leaves out
    much of the branches to come. Those with fewer ways to save memory come first, since they leave
    most of their share to others.
    """
    branches = sorted(space.of_engines, key=ways_listed)
    if len(branches) == 1:
        return strategy(problem, branches[0], ledger, draw)
    bounds, refusals = [], []
    for place, own in enumerate(branches):
        heard, ending = [0.0], Ending()
        share, part = 1 / (len(branches) - place), ledger.for_part(lambda plan: plan, heard.append)
        with suppress(BudgetSpentError), ledger.for_share(share), part:
            if why_empty(problem, own):
                ending = Ending(status="INFEASIBLE")
            else:
                ending = strategy(problem, own, ledger, draw)
        if ending.status == "REFUSED":
            refusals.append(f"engine {own.engine}: {ending.reason}")
        heard.append(inf if ending.status == "INFEASIBLE" else ending.lower_bound_s or 0.0)
        bounds.append(max(heard))
    if len(refusals) == len(branches):
        return Ending(status="REFUSED", reason=refusals[0])
    if min(bounds) < inf:
        ledger.bounded(min(bounds))
    if ledger.evaluations_left == 0 or ledger.seconds_left == 0:
        raise BudgetSpentError
    return replace(Ending.of(ledger, min(bounds)), reason="; ".join(refusals))


def _no_plan_in_time(ledger: Ledger) -> str:
    """That the budget ended a search before it had a plan that fits."""
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
