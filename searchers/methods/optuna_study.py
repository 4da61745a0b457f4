"""Search by an Optuna study (a record of trials), in which each trial determines one plan by a
number for each named choice.
"""

import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from hashlib import sha256
from importlib.util import find_spec
from itertools import zip_longest

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, FloatDistribution
from optuna.exceptions import ExperimentalWarning, StorageInternalError
from optuna.samplers import BaseSampler, CmaEsSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.storages import BaseStorage, JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import Trial, TrialState
from sqlalchemy.exc import SQLAlchemyError

from mistlab.core.values import InputError, near_matches, reject, to_mapping
from mistlab.job.search import Problem
from mistlab.plan.dimensions import label_of
from mistlab.plan.plan import Plan
from mistlab.plan.space import SearchSpace
from searchers.meshes import equal_pipelines
from searchers.methods.scores import Score, Scores
from searchers.savings import Chooser, chosen_plan, saving_names
from searchers.strategy import Ending, Ledger

# Lists the names of all choices (Optuna parameters) that the plans of a search space may need.
#
# The names are the same for every plan of the space.


def key_names(problem: Problem, space: SearchSpace) -> list[str]:
    """The names of all choices that any plan of the search space may need; each is a key of a
    trial.
    """
    most = _most_stages(problem, space)
    names = ["micro_batches", *(["order"] if len(space.orders) > 1 else [])]
    names += [f"mesh {stage}" for stage in range(most if space.unequal_meshes else 1)]
    if space.layers_off_balance != 0:
        names += [f"layers {stage}" for stage in range(most - 1)]
    for stage in range(most if space.unequal_stages else 1):
        names += [f"{saving} {stage}" for saving in _savings(space)]
    return names


def _savings(space: SearchSpace) -> Iterator[str]:
    for name in saving_names():
        listed = space.listed(name)
        if listed is None or len(listed) > 1:
            yield label_of(name)


def _most_stages(problem: Problem, space: SearchSpace) -> int:
    if not space.unequal_meshes:
        return max(pipeline.num_stages for pipeline in equal_pipelines(problem, space))
    return min(problem.cluster.num_gpus, problem.workload.model.layers)


# Runs a search as an Optuna study: in each round it asks for several trials, predicts their plans
# together, and tells the study their times.


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampler:
    """A function that makes one of Optuna's samplers, from a seed and the number of keys (choices
    of a plan).

    A sampler that needs a fixed set of keys also gets keys that a plan does not use. A sampler
    without constraints gets longer times for plans that lack memory.
    """

    of_seed: Callable[[int, int], BaseSampler]
    needs_all_keys: bool = False
    knows_constraints: bool = True


def _cmaes(seed: int, keys: int) -> BaseSampler:
    """Optuna's CMA-ES sampler; with a diagonal covariance matrix if decomposing a full one would
    take longer than predicting plans (Ros & Hansen 2008).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ExperimentalWarning)
        return CmaEsSampler(seed=seed, use_separable_cma=keys > MOST_KEYS)


SAMPLERS: Mapping[str, Sampler] = {
    "tpe": Sampler(of_seed=lambda seed, _: TPESampler(seed=seed)),
    "cmaes": Sampler(of_seed=_cmaes, needs_all_keys=True, knows_constraints=False),
    "nsgaii": Sampler(of_seed=lambda seed, _: NSGAIISampler(seed=seed), needs_all_keys=True),
    "random": Sampler(of_seed=lambda seed, _: RandomSampler(seed=seed)),
}
# With at most this many keys (choices of a plan), CMA-ES learns a full covariance matrix rather
# than a diagonal one.
MOST_KEYS = 200
TOGETHER = 16
# If this many batches in a row bring no new plan, the search space counts as exhausted.
SETTLED = 8
# The exceptions that Optuna raises when a study's storage is locked, damaged, or contains no study.
_STORAGE_ERRORS = (SQLAlchemyError, StorageInternalError, OSError, ValueError, LookupError)


class StudyLostError(InputError):
    """Raised when a study can no longer be read or written; the message says what to do."""


def sample(
    problem: Problem,
    space: SearchSpace,
    ledger: Ledger,
    draw: np.random.Generator,
    *,
    sampler: str,
    storage: str | None,
) -> Ending:
    """Sample plans until the budget is spent, or no new plans appear.

    A study that cannot be opened is an ``InputError``. A study that is lost later ends the search.
    """
    with _quiet():
        study = _opened(problem, space, draw, sampler=sampler, storage=storage)
        scores = Scores(ledger=ledger, cluster=problem.cluster)
        try:
            ledger.predict(study.best_plans())
            while scores.repeats < SETTLED:
                _draw_together(study, scores)
        except StudyLostError as lost:
            return Ending(reason=str(lost))
    return Ending()


def _draw_together(study: "PlanStudy", scores: Scores) -> None:
    left = scores.ledger.evaluations_left
    trials: list[Trial] = []
    plans: list[Plan | None] = []
    try:
        for _ in range(TOGETHER if left is None else min(TOGETHER, left)):
            scores.ledger.check_time()
            trials.append(study.ask())
            plans.append(study.plan_of(_asking(trials[-1])))
        scores.of(plans)
    finally:
        # However the search ends, the study gets the scores of all plans that were predicted.
        scores_of_plans = [None if plan is None else scores.known.get(plan) for plan in plans]
        study.tell(trials, scores_of_plans)


def _asking(trial: Trial) -> Callable[[str], float]:
    return lambda name: trial.suggest_float(name, 0, 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanStudy:
    """An Optuna study in which each trial is a vector of numbers, one for each named choice of a
    plan.

    A trial's value is its plan's time, and its constraint the plan's excess of memory.
    """

    problem: Problem
    space: SearchSpace
    study: optuna.Study
    keys: Mapping[str, BaseDistribution]
    storage: str | None
    knows_constraints: bool

    def ask(self) -> Trial:
        """Ask the study for a new trial."""
        with _storage_errors(self.storage):
            return self.study.ask(dict(self.keys))

    def tell(self, trials: Sequence[Trial], scores: Sequence[Score | None]) -> None:
        """End trials with the scores of their plans; a trial whose plan has no score counts as
        failed.
        """
        with _storage_errors(self.storage):
            for trial, score in zip_longest(trials, scores):
                if score is None:
                    self.study.tell(trial, state=TrialState.FAIL)
                    continue
                trial.set_user_attr("fits", score.excess == 0)
                if self.knows_constraints:
                    trial.set_constraint("memory", score.excess)
                    self.study.tell(trial, score.iteration_s)
                else:
                    self.study.tell(trial, score.penalised_s)

    def plan_of(self, key: Callable[[str], float]) -> Plan | None:
        """The plan that a trial's numbers stand for."""
        chooser = Chooser(lambda name, options: min(int(key(name) * options), options - 1))
        return chosen_plan(self.problem, self.space, chooser)

    def best_plans(self) -> list[Plan]:
        """The fastest plan that fits among the trials that the study already had, as a list of one
        plan; an empty list if none fits.
        """
        with _storage_errors(self.storage):
            trials = self.study.get_trials(deepcopy=False, states=[TrialState.COMPLETE])
        fitting = [trial for trial in trials if trial.user_attrs["fits"]]
        best = min(fitting, key=lambda trial: (trial.value, trial.number), default=None)
        plan = None if best is None else self.plan_of(best.params.__getitem__)
        return [] if plan is None else [plan]


def _opened(
    problem: Problem,
    space: SearchSpace,
    draw: np.random.Generator,
    *,
    sampler: str,
    storage: str | None,
) -> PlanStudy:
    chosen = _sampler(sampler)
    with _storage_errors(storage):
        study = optuna.create_study(
            study_name=_name(problem, space, sampler),
            storage=_storage(storage),
            load_if_exists=True,
        )
        # The seed depends on the number of trials, so that a study that is continued does not draw
        # the same plans again.
        seed = (int(draw.integers(2**31)) + len(study.get_trials(deepcopy=False))) % 2**31
    names = key_names(problem, space)
    study.sampler = chosen.of_seed(seed, len(names))
    return PlanStudy(
        problem=problem,
        space=space,
        study=study,
        keys={name: FloatDistribution(0, 1) for name in names if chosen.needs_all_keys},
        storage=storage,
        knows_constraints=chosen.knows_constraints,
    )


def _sampler(name: str) -> Sampler:
    if name not in SAMPLERS:
        reject(f"sampler {name!r} is unknown{near_matches(name, SAMPLERS)}")
    if name == "cmaes" and find_spec("cmaes") is None:
        reject("sampler 'cmaes' needs package cmaes, which is not installed: pip install cmaes")
    return SAMPLERS[name]


def _name(problem: Problem, space: SearchSpace, sampler: str) -> str:
    """The name under which the study is stored; two searches share it only if their problem, search
    space and sampler are equal.
    """
    plain = json.dumps([to_mapping(problem), to_mapping(space)], sort_keys=True)
    return f"{sampler} {space.name} {sha256(plain.encode()).hexdigest()[:16]}"


def _storage(storage: str | None) -> BaseStorage | str | None:
    if storage is None or "://" in storage:
        return storage
    return JournalStorage(JournalFileBackend(storage))


@contextmanager
def _storage_errors(storage: str | None) -> Iterator[None]:
    try:
        yield
    except _STORAGE_ERRORS as error:
        if storage is None:
            raise
        first_line = str(error).partition("\n")[0]
        message = (
            f"storage {storage!r}: {first_line}: if another process uses this study, wait until "
            "that process ends; if the file is damaged, move it away, and a new study is made"
        )
        raise StudyLostError(message) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence Optuna's messages about each study and trial, except errors."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        yield
    finally:
        optuna.logging.set_verbosity(verbosity)
