"""Searching groups of pipelines, one after another or side by side.

joblib's context says where: nothing here in one process, ``parallel_config(n_jobs=2)`` in processes
of this machine, another backend on a Ray or Dask cluster.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from joblib import Parallel, delayed

from mistlab.plan import Plan
from mistlab.search import Budget, PlanAndStagePredictor, Problem
from mistlab.space import SearchSpace
from searchers.bounds import Work
from searchers.groups import Group
from searchers.join import join as join_exactly
from searchers.ledger import BudgetSpentError, Clock, Ledger
from searchers.menu import Menus
from searchers.meshes import Mesh

# Joins the stages of a group to the fastest pipeline that takes less than a limit: its time as the
# chains have it, and the plan.
Joiner = Callable[[Menus, float], tuple[float, Plan] | None]

# How much slower than the best plan a group may be, with coarse ratios, to be looked at closely.
NEAR = 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """A group of pipelines, and the time below which its plans are wanted."""

    problem: Problem
    space: SearchSpace
    group: Group
    work: Mapping[Mesh, Work]
    join: Joiner
    limit_s: float
    coarse_to_fine: bool

    def solved(self, ledger: Ledger) -> float:
        """The time of the best plan, as the chains have it, once the ledger has seen it; the limit
        if there is none."""
        # Stages of one node share its host memory: it is followed once a plan does not fit for it.
        for with_host in (False, True):
            menus = Menus(
                problem=self.problem,
                space=self.space,
                ledger=ledger,
                group=self.group,
                work=self.work,
                with_host=with_host,
                coarse_to_fine=self.coarse_to_fine,
            )
            found = self._joined(menus)
            if found is None:
                break
            seconds, plan = found
            if ledger.predict([plan])[0].fits:
                return seconds
        return self.limit_s

    def _joined(self, menus: Menus) -> tuple[float, Plan] | None:
        if not self.coarse_to_fine:
            return self.join(menus, self.limit_s)
        coarse = join_exactly(menus, NEAR * self.limit_s)
        if coarse is None:
            return None
        # The budget may end before there is a better one.
        menus.ledger.predict([coarse[1]])
        limit_s = min(self.limit_s, coarse[0])
        menus.refine(limit_s)
        found = self.join(menus, limit_s)
        return coarse if found is None and coarse[0] < self.limit_s else found


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What a process found, and what it asked its predictor."""

    seconds: float
    best: Plan | None
    stage_evaluations: int
    is_spent: bool


def solved(tasks: Sequence[GroupTask], ledger: Ledger) -> list[float]:
    """The times of the best plans of tasks, all of which the ledger has seen."""
    if len(tasks) <= 1:
        return [task.solved(ledger) for task in tasks]
    budget = ledger.budget_left
    answers: Iterable[_Answer] = Parallel()(
        delayed(_answer)(task, ledger.predictor, budget, ledger.clock) for task in tasks
    )
    seconds = []
    for answer in answers:
        ledger.count(stages=answer.stage_evaluations)
        if answer.best is not None:
            ledger.predict([answer.best])
        if answer.is_spent:
            raise BudgetSpentError
        seconds.append(answer.seconds)
    return seconds


def _answer(
    task: GroupTask, predictor: PlanAndStagePredictor, budget: Budget, clock: Clock
) -> _Answer:
    ledger = Ledger(predictor=predictor, budget=budget, clock=clock)
    seconds, is_spent = task.limit_s, False
    try:
        seconds = task.solved(ledger)
    except BudgetSpentError:
        is_spent = True
    return _Answer(
        seconds=seconds,
        best=ledger.best,
        stage_evaluations=ledger.stage_evaluations,
        is_spent=is_spent,
    )
