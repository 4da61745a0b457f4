"""Runs the searches of groups of pipelines, one after another or in parallel processes."""

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from math import inf, isclose
from typing import TypeVar

from mistlab.job.prediction import Predictor
from mistlab.job.search import Budget, Problem
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.exact.candidates import Menus, StagePosition
from searchers.exact.groups import Group, LeastWork
from searchers.exact.played_plans import are_all_predicted
from searchers.exact.programme import join_hastily, near_best
from searchers.meshes import Mesh
from searchers.savings import Way
from searchers.strategy import SHORT_LIST, BudgetSpentError, Clock, Ledger

# Calls a function for several arguments, one after another or in parallel processes. They are
# parallel if joblib's context asks for several jobs, as in ``with joblib.parallel_config(n_jobs=2):
# ...``.
#
# joblib is slow to import, so it is not imported here: if no module has imported it, no parallel
# jobs were asked for.


Argument = TypeVar("Argument")
Answer = TypeVar("Answer")


def jobs() -> int:
    """The number of parallel processes that joblib's context asks for."""
    if "joblib" not in sys.modules:
        return 1
    from joblib import effective_n_jobs  # noqa: PLC0415 (takes long to import)

    return int(effective_n_jobs(None))


def in_processes(
    call: Callable[[Argument], Answer], arguments: Sequence[Argument]
) -> Sequence[Answer]:
    """The results of a function for each of the arguments, in their order, computed in several
    processes.
    """
    from joblib import Parallel, delayed  # noqa: PLC0415 (takes long to import)

    answers: Sequence[Answer] = Parallel()(delayed(call)(one) for one in arguments)
    return answers


# Searches groups of pipelines, one after another or in parallel.
#
# joblib's context says where: by default in this process, with ``parallel_config(n_jobs=2)`` in
# processes of this machine, with another backend on a Ray or Dask cluster.


# The type of a function that joins stages into the fastest pipeline of a group, if it is faster
# than an upper bound. It returns the pipeline's closed-form iteration time and its plan, or None.
Joiner = Callable[[Menus, float], tuple[float, Plan] | None]

# After a search with coarse offload ratios, the ratios of a group of pipelines are refined if the
# group's best plan takes at most this factor times the best plan of all. The factors are for
# pipelines of one stage, of stages with equally many GPUs, and of stages with any numbers of GPUs
# (these are the most).
NEAR_ALONE = 1.15
NEAR = 1.05
NEAR_UNEQUAL = 1.02
# The number of rounds in which ratios near those of the best pipelines are tried.
ROUNDS = 3
# A time that a solver of linear programmes adds up differs from a prediction by at most this
# share.
_LAST_DIGITS = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTask:
    """The task of searching one group of pipelines for plans faster than ``limit_s``. If ``way`` is
    given, all stages use that memory-saving strategy.
    """

    problem: Problem
    space: SearchSpace
    group: Group
    work: Mapping[Mesh, LeastWork]
    join: Joiner
    limit_s: float
    coarse_to_fine: bool
    way: Way | None = None

    def solved(self, ledger: Ledger) -> float:
        """The seconds of the best plan of this group of pipelines, or ``limit_s`` if no plan is
        faster. The plan is predicted through the search's ledger, which keeps the best plan.

        Plans that are played pass by pass may take longer than their stages alone say. Where many
        are left then, the seconds are a lower bound of all plans of the group.
        """
        # An estimate of the least work prunes more than a lower bound, but may prune the best
        # pipeline, so it is used only if there is a plan to beat. The first round ignores host
        # memory, which the stages on a node share.
        is_hasty = self.coarse_to_fine and self.limit_s < inf
        work = self._likely_work(ledger) if is_hasty else self.work
        for with_host in (False, True):
            answer = self._joined(self._menus(ledger, work, with_host=with_host))
            if answer is None:
                break
            seconds, plan = answer
            prediction = ledger.predict([plan])[0]
            if prediction.fits:
                # A solver's sum may differ from the prediction in its last digits.
                is_same = isclose(seconds, prediction.iteration_s, rel_tol=_LAST_DIGITS)
                if is_same:
                    return prediction.iteration_s
                return self._least_predicted_s(ledger) or seconds
        return self.limit_s

    def _least_predicted_s(self, ledger: Ledger) -> float | None:
        """The least seconds of all plans of the group, from predictions of those that may be faster
        than ``limit_s``; None if these are many, or if this search does not look at all plans.
        """
        limit_s = min(self.limit_s, ledger.best_s)
        if self.coarse_to_fine or self.join is join_hastily:
            return None
        menus = self._menus(ledger, self.work, with_host=False)
        return min(limit_s, ledger.best_s) if are_all_predicted(menus, limit_s) else None

    def _menus(self, ledger: Ledger, work: Mapping[Mesh, LeastWork], *, with_host: bool) -> Menus:
        return Menus(
            problem=self.problem,
            space=self.space,
            ledger=ledger,
            group=self.group,
            work=work,
            with_host=with_host,
            coarse_to_fine=self.coarse_to_fine,
            way=self.way,
        )

    def _likely_work(self, ledger: Ledger) -> Mapping[Mesh, LeastWork]:
        """An estimate of the least time of a micro-batch on each mesh, which few pipelines
        undercut: that of inner stages with half of an even share of the blocks and coarse ratios.
        Infinite where nothing fits in memory.
        """
        layers, gpus = self.problem.workload.model.layers, self.problem.cluster.num_gpus
        starts = [ranks.start for ranks in self.problem.cluster.ranks_of_groups]
        places = {
            (mesh, start): StagePosition(
                mesh=mesh,
                place_in_node=start,
                layers=max(1, layers * mesh.num_gpus // gpus // 2),
                in_flight=min(self.group.micro_batches, max(1, gpus // mesh.num_gpus // 2)),
                is_first=False,
                is_last=False,
            )
            for mesh in self.group.meshes
            for start in starts
        }
        menus = self._menus(ledger, self.work, with_host=False)
        menus.prepare(places.values(), inf)
        return {
            mesh: LeastWork(
                block_s=min(_least_block_s(menus, places[mesh, start]) for start in starts),
                ends_s=self.work[mesh].ends_s,
            )
            for mesh in self.group.meshes
        }

    @property
    def _near(self) -> float:
        if self.group.num_stages == 1:
            return NEAR_ALONE
        return NEAR_UNEQUAL if self.group.has_unequal_sizes else NEAR

    def _joined(self, menus: Menus) -> tuple[float, Plan] | None:
        if not self.coarse_to_fine:
            return self.join(menus, self.limit_s)
        quick = self._refined(menus)
        if quick is None:
            return None
        limit_s = min(self.limit_s, quick[0])
        answer = None if self.join is join_hastily else self.join(menus, limit_s)
        return quick if answer is None and quick[0] < self.limit_s else answer

    def _refined(self, menus: Menus) -> tuple[float, Plan] | None:
        """The best plan that a beam search finds, after trying offload ratios near those of the
        plans found.
        """
        refined: set[StagePosition] = set()
        limit_s = self._near * self.limit_s
        best = None
        for _ in range(ROUNDS):
            near = near_best(menus, limit_s)
            if not near:
                break
            best = near[0][:2]
            # The other plans are predicted as well, as rivals of the best plan, since the budget
            # may end before a better one is found.
            menus.ledger.predict([plan for _, plan, _ in near[:SHORT_LIST]])
            limit_s = min(limit_s, self._near * best[0])
            places = {place for *_, of_plan in near for place in of_plan}
            if places <= refined:
                break
            menus.refine(places - refined, min(self.limit_s, best[0]))
            refined |= places
        return best


def _least_block_s(menus: Menus, position: StagePosition) -> float:
    return float(menus[position].stable_s.min(initial=inf)) / position.layers


@dataclass(frozen=True, slots=True, kw_only=True)
class _Answer:
    """What another process returns after a search: the time and the plans that it found, and how
    many predictor calls it made.
    """

    seconds: float
    nearest: Sequence[Plan]
    stage_evaluations: int
    is_spent: bool


def solved(tasks: Sequence[GroupTask], ledger: Ledger) -> list[float]:
    """The seconds of each task's best plan; the plans are predicted through the search's ledger,
    which keeps the best plan.
    """
    if len(tasks) <= 1:
        return [task.solved(ledger) for task in tasks]
    budget = ledger.budget_left
    answer = partial(_answer, predictor=ledger.predictor, budget=budget, clock=ledger.clock)
    seconds = []
    for outcome in in_processes(answer, tasks):
        ledger.count(stages=outcome.stage_evaluations)
        ledger.predict(outcome.nearest)
        if outcome.is_spent:
            raise BudgetSpentError
        seconds.append(outcome.seconds)
    return seconds


def _answer(task: GroupTask, predictor: Predictor, budget: Budget, clock: Clock) -> _Answer:
    ledger = Ledger(predictor=predictor, budget=budget, clock=clock)
    seconds, is_spent = task.limit_s, False
    try:
        seconds = task.solved(ledger)
    except BudgetSpentError:
        is_spent = True
    return _Answer(
        seconds=seconds,
        nearest=[one.plan for one in ledger.nearest[:SHORT_LIST]],
        stage_evaluations=ledger.stage_evaluations,
        is_spent=is_spent,
    )
