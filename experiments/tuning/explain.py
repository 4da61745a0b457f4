"""Explains why a plan is best: what limits its stages, and why similar plans and the next best plan
are slower.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, Self

import numpy as np

from experiments.bench.bench import BASELINE, Bench, Entry
from experiments.bench.problem import lacking_bytes, largest
from mistlab.cost.breakdown import breakdown_of
from mistlab.cost.memory import host_bytes_over
from mistlab.cost.pipeline import Terms, slowest_stage
from mistlab.job.prediction import Breakdown, Comparison, Prediction, compared
from mistlab.job.search import Problem
from mistlab.plan.dimensions import change_words, counts_of_blocks, names_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.space import SearchSpace
from searchers.meshes import mesh_of, meshes, micro_batch_counts
from simulators.symbolic import NAME as CLOSED_FORM

# Finds plans of a search space that differ from a plan in one choice and save less memory.
#
# One choice of a stage is lowered to its next value: the number of recomputed blocks, the ZeRO
# level, or an offload ratio. If all stages must be alike, the choice is lowered on all of them. Or
# micro-batches become twice as large and half as many.


Step = Callable[[StagePlan], StagePlan]


@dataclass(frozen=True, slots=True, kw_only=True)
class Neighbour:
    """A plan that differs from another in one choice, and a description of the difference."""

    change: str
    plan: Plan


def neighbours(plan: Plan, problem: Problem, space: SearchSpace) -> list[Neighbour]:
    """All plans that differ from a plan in one choice and save less memory."""
    return [*_less_saving(plan, space), *_larger_micro_batches(plan, problem, space)]


def _less_saving(plan: Plan, space: SearchSpace) -> Iterator[Neighbour]:
    # If all stages must be alike, the largest one determines how many blocks each stage recomputes
    # or offloads.
    layers = [stage.layers for stage in plan.stages]
    places = range(plan.num_stages) if space.unequal_stages else (layers.index(max(layers)),)
    for stage_number in places:
        for what, step in _steps(plan.stages[stage_number], plan.num_stages, space):
            if space.unequal_stages:
                where = f"stage {stage_number}"
                stages = [
                    step(stage) if index == stage_number else stage
                    for index, stage in enumerate(plan.stages)
                ]
            else:
                where = "every stage"
                stages = [step(stage) for stage in plan.stages]
            yield Neighbour(change=f"{what} on {where}", plan=replace(plan, stages=tuple(stages)))


def _steps(stage: StagePlan, num_stages: int, space: SearchSpace) -> Iterator[tuple[str, Step]]:
    # Numbers of recomputed or offloaded blocks are lowered first, then ZeRO levels and offload
    # ratios.
    for name in (*counts_of_blocks(), *names_of("savings")):
        now = stage.value(name)
        choices = space.choices(
            name, layers=stage.layers, degree=stage.degree, in_pipeline=num_stages > 1
        )
        lower = max((choice for choice in choices if choice < now), default=None)
        if lower is not None:
            yield change_words(name, now, lower), partial(_stepping, name, lower)


def _stepping(name: str, value: float, stage: StagePlan) -> StagePlan:
    most = stage.layers if name in counts_of_blocks() else value
    return stage.with_values({name: min(value, most)})


def _larger_micro_batches(plan: Plan, problem: Problem, space: SearchSpace) -> Iterator[Neighbour]:
    half, rest = divmod(plan.micro_batches, 2)
    if rest or half not in micro_batch_counts(problem, space):
        return
    allowed = {*meshes(problem, space, half)}
    stages = [replace(stage, micro_batch=2 * stage.micro_batch) for stage in plan.stages]
    if all(mesh_of(stage) in allowed for stage in stages):
        yield Neighbour(
            change=f"{half} micro-batches twice as large instead of {plan.micro_batches}",
            plan=replace(plan, micro_batches=half, stages=tuple(stages)),
        )


# Tells why a plan is best: what limits its stages, why the next best plan is slower, and which
# faster plans do not fit.
#
# An iteration's time is the sum of: computation and exposed communication of the slowest stage over
# all micro-batches; the other stages that a micro-batch passes through; and the rest (first and
# last micro-batches, the optimizer step, sends, costs of the iteration as a whole).


# A stage is limited by communication if at least this share of its time is exposed communication.
TELLING_SHARE = 0.1

Limit = Literal["compute", "exposed communication", "memory"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StageLimit:
    """What limits the speed of a stage: computation, communication or memory.

    The limit is ``memory`` if saving less memory would make the plan faster but does not fit on the
    stage.
    """

    limit: Limit
    compute_s: float
    exposed_communication_s: float
    share_of_slowest: float
    memory_bytes: int
    room_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Loser:
    """A slower plan: by how much and in which parts of the iteration it is slower, and whether the
    difference exceeds the error bounds.

    ``slowest_stage`` is the slower plan's slowest stage; ``longer_by`` is by how much each of that
    stage's terms is longer.
    """

    searcher: str
    comparison: Comparison
    slowest_stage: int
    longer_by: Terms

    @classmethod
    def of(cls, best: Entry, other: Entry) -> Self:
        """Compare the result of a search with the best result; both must have plans."""
        assert best.answer is not None
        assert other.answer is not None
        return cls(
            searcher=other.searcher,
            comparison=compared(best.answer[1], other.answer[1]),
            slowest_stage=slowest_stage(other.answer[1]),
            longer_by=Terms.of(*other.answer) - Terms.of(*best.answer),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Rejected:
    """A plan that differs from the best one in one choice and would be faster, but does not fit.

    ``stage`` and ``phase`` say where most memory is missing, ``memory_class`` which kind of tensor
    takes more memory there than in the best plan. If host memory is short, stage and phase are
    None.
    """

    change: str
    faster_by_s: float
    stage: int | None
    phase: str | None
    memory_class: str
    over_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Why:
    """All reasons why the best plan is best; None for a kind of reason that does not apply.

    ``baseline`` compares with the plan of Megatron's grid, ``same`` are other searchers that found
    the best plan. ``missed`` is a change that fits and would make the plan faster, if no search
    proved the plan best. ``breakdown`` says what GPUs spend their time on, if the closed form
    predicts the plan.
    """

    searcher: str
    stages: tuple[StageLimit, ...]
    runner_up: Loser | None
    baseline: Comparison | None
    same: tuple[str, ...]
    rejected: Rejected | None
    missed: str | None
    breakdown: Breakdown | None


def best_of(entries: Sequence[Entry]) -> Entry | None:
    """The search result with the fastest plan (of equally fast ones the first); None if no search
    found a plan.
    """
    answered = [entry for entry in entries if entry.answer is not None]
    return min(answered, key=_predicted_s, default=None)


def explain(best: Entry, entries: Sequence[Entry], bench: Bench) -> Why:
    """Explain why the best plan of several search results is the best."""
    assert best.answer is not None
    plan, prediction = best.answer
    around = neighbours(plan, bench.problem, best.space)
    predictions = bench.predictor.predict_many([one.plan for one in around])
    faster = sorted(
        (
            (predicted_change.iteration_s, neighbour.change, neighbour.plan, predicted_change)
            for neighbour, predicted_change in zip(around, predictions, strict=True)
            if predicted_change.iteration_s < prediction.iteration_s
        ),
        key=lambda found: found[:2],
    )
    rejected = [
        _rejected(change, (plan, prediction), (other, predicted_change), bench)
        for _, change, other, predicted_change in faster
        if not predicted_change.fits
    ]
    short = {
        index
        for _, _, other, predicted_change in faster
        for index, over in enumerate(lacking_bytes(bench.problem.cluster, other, predicted_change))
        if over > 0
    }
    others = [entry for entry in entries if entry is not best and entry.answer is not None]
    return Why(
        searcher=best.searcher,
        stages=_limits(prediction, short, bench.room_bytes(plan).tolist()),
        runner_up=_runner_up(best, others),
        baseline=_baseline(prediction, others),
        same=tuple(entry.searcher for entry in others if entry.result.plan == plan),
        rejected=rejected[0] if rejected else None,
        missed=next((change for _, change, _, found in faster if found.fits), None),
        breakdown=breakdown_of(bench.job(plan), prediction.iteration_s)
        if prediction.predictor == CLOSED_FORM
        else None,
    )


def _runner_up(best: Entry, others: Sequence[Entry]) -> Loser | None:
    """The result with the next best plan that differs from the best one; if possible, from a search
    of the same space.
    """
    losers = [entry for entry in others if entry.result.plan != best.result.plan]
    alike = [entry for entry in losers if entry.space == best.space]
    runner_up = min(alike or losers, key=_predicted_s, default=None)
    return None if runner_up is None else Loser.of(best, runner_up)


def _baseline(best: Prediction, others: Sequence[Entry]) -> Comparison | None:
    answers = [entry.answer for entry in others if entry.searcher == BASELINE]
    return compared(best, answers[0][1]) if answers and answers[0] else None


def _predicted_s(entry: Entry) -> float:
    assert entry.answer is not None
    return entry.answer[1].iteration_s


def _limits(
    prediction: Prediction, short: set[int], room: Sequence[float]
) -> tuple[StageLimit, ...]:
    slowest_s = max(stage.stable_s for stage in prediction.stages)
    limits = []
    for index, stage in enumerate(prediction.stages):
        exposed_s = stage.exposed_communication_s
        limit: Limit = "compute"
        if index in short:
            limit = "memory"
        elif exposed_s > TELLING_SHARE * stage.stable_s:
            limit = "exposed communication"
        limits.append(
            StageLimit(
                limit=limit,
                compute_s=stage.stable_s - exposed_s,
                exposed_communication_s=exposed_s,
                share_of_slowest=stage.stable_s / slowest_s,
                memory_bytes=stage.peak_reserved_bytes,
                room_bytes=round(room[index]),
            )
        )
    return tuple(limits)


def _rejected(
    change: str, best: tuple[Plan, Prediction], other: tuple[Plan, Prediction], bench: Bench
) -> Rejected:
    (_, prediction), (plan, changed) = best, other
    over = lacking_bytes(bench.problem.cluster, plan, changed)
    stage_index = int(np.argmax(over))
    faster_by_s = prediction.iteration_s - changed.iteration_s
    if over[stage_index] <= 0:
        return Rejected(
            change=change,
            faster_by_s=faster_by_s,
            stage=None,
            phase=None,
            memory_class="host memory",
            over_bytes=round(host_bytes_over(plan, changed, bench.problem.cluster)),
        )
    here, there = prediction.stages[stage_index], changed.stages[stage_index]
    grown = {
        entry.name: getattr(there.memory, entry.name) - getattr(here.memory, entry.name)
        for entry in fields(there.memory)
    }
    return Rejected(
        change=change,
        faster_by_s=faster_by_s,
        stage=stage_index,
        phase=largest(there.memory_by_phase)[0],
        memory_class=max(grown, key=lambda name: grown[name]),
        over_bytes=round(over[stage_index]),
    )
