"""Climbs from one plan to another, one choice at a time: first save memory, then spend it.

Both plans have equal stages. A rung takes one choice over from the plan at the end. Rungs that save
memory (ZeRO, recomputation, offloading) come in the order of the table of dimensions; a rung that
spends memory (fewer ranks share a layer or a pipeline, larger micro-batches) comes as soon as its
plan fits.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from mistlab.cost.pipeline import Terms
from mistlab.job.prediction import Prediction
from mistlab.job.search import Problem
from mistlab.plan.dimensions import DIMENSIONS, amount_words, counts_of_blocks, names_of
from mistlab.plan.mesh import dimensions_of_axes
from mistlab.plan.plan import Plan, StagePlan
from searchers.meshes import even_layers
from searchers.savings import alike, saving_names

# The number of stages, which is a choice of the pipeline and not of a stage.
STAGES = "stages"
SHARED = "data_parallel"

Choices = Mapping[str, float]
Predict = Callable[[Sequence[Plan]], Sequence[Prediction]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A plan of the ladder: the choice that it changed, and what it gained and lost.

    ``terms`` is what an iteration takes longer than on the rung before, term by term.
    ``freed_bytes`` is what the fullest GPU need no longer hold. ``bought`` are the changes that did
    not fit before.
    """

    changed: str
    words: str
    is_saving: bool
    plan: Plan
    prediction: Prediction
    terms: Terms
    freed_bytes: int
    bought: tuple[str, ...]


def ladder(problem: Problem, first: Plan, last: Plan, predict: Predict) -> list[Rung]:
    """The rungs from the first plan, which has a rung of its own, to the last."""
    here, end = choices_of(first), choices_of(last)
    prediction = predict([first])[0]
    rungs = [_rung("", "", first, prediction, None, ())]
    left = [name for name in _in_order() if here.get(name) != end.get(name)]
    while left:
        tried = _tried(problem, first, here, end, left, predict)
        name = _chosen(tried, rungs[-1].prediction)
        if name is None:
            break
        here = {**here, name: end[name]}
        words = _words(name, rungs[-1].plan, tried[name][0])
        left = [other for other in left if other != name]
        after = _tried(problem, first, here, end, left, predict)
        bought = tuple(
            _words(other, tried[name][0], plan)
            for other, (plan, now) in after.items()
            if now.fits and not (other in tried and tried[other][1].fits) and not _saves(other)
        )
        rungs.append(_rung(name, words, *tried[name], rungs[-1], bought if _saves(name) else ()))
    if rungs[-1].plan != last:
        # No single choice leads on: the rest is changed at once.
        rungs.append(_rung("rest", "all else at once", last, predict([last])[0], rungs[-1], ()))
    return rungs


def choices_of(plan: Plan) -> dict[str, float]:
    """The choices of a plan of equal stages; counts of blocks as shares of a stage's blocks."""
    stage = plan.stages[0]
    choices: dict[str, float] = {name: stage.value(name) for name in DIMENSIONS}
    choices |= {name: stage.value(name) / stage.layers for name in counts_of_blocks()}
    del choices["layers"], choices[SHARED]
    return {**choices, STAGES: plan.num_stages}


def plan_with(problem: Problem, like: Plan, choices: Choices) -> Plan | None:
    """The plan of equal stages that has these choices; None if they do not divide GPUs or batch."""
    layers, num_stages = problem.workload.model.layers, int(choices[STAGES])
    degrees = [int(choices[name]) for name in dimensions_of_axes() if name != SHARED]
    data, rest = divmod(problem.cluster.num_gpus, num_stages * prod(degrees))
    if rest or data == 0 or num_stages > layers:
        return None
    count, rest = divmod(problem.workload.global_batch, data * int(choices["micro_batch"]))
    if rest or count == 0:
        return None
    shares = even_layers(layers, num_stages)
    own = {name: value for name, value in choices.items() if name in DIMENSIONS}
    own |= {name: round(choices[name] * shares[0]) for name in counts_of_blocks()}
    first = StagePlan.of_values({**own, "layers": shares[0], SHARED: data})
    return Plan(
        engine=like.engine,
        micro_batches=count,
        overlap_communication=like.overlap_communication,
        order=like.order,
        stages=tuple(alike(first, share) for share in shares),
    )


def _in_order() -> Iterator[str]:
    """The names of choices: those that save memory, then those that spend it."""
    yield from (name for name in DIMENSIONS if _saves(name))
    yield from (name for name in names_of("mesh") if name != SHARED)
    yield STAGES


def _saves(name: str) -> bool:
    return name in saving_names()


def _tried(
    problem: Problem,
    like: Plan,
    here: Choices,
    end: Choices,
    names: Sequence[str],
    predict: Predict,
) -> dict[str, tuple[Plan, Prediction]]:
    """The plans in which one more choice is the last plan's, by name."""
    plans = {
        name: plan
        for name in names
        if (plan := plan_with(problem, like, {**here, name: end[name]})) is not None
    }
    predictions = predict([*plans.values()]) if plans else []
    return {
        name: (plan, prediction)
        for (name, plan), prediction in zip(plans.items(), predictions, strict=True)
    }


def _chosen(tried: Mapping[str, tuple[Plan, Prediction]], now: Prediction) -> str | None:
    """The choice to change next: the fastest of the choices that spend memory, fit and gain time;
    else the first that frees memory; else the first that fits; else the first."""
    gains = [
        (prediction.iteration_s, name)
        for name, (_, prediction) in tried.items()
        if not _saves(name) and prediction.fits and prediction.iteration_s < now.iteration_s
    ]
    if gains:
        return min(gains)[1]
    held = {name: one.peak_reserved_bytes for name, (_, one) in tried.items()}
    frees = [name for name in held if _saves(name) and held[name] < now.peak_reserved_bytes]
    fits = [name for name, (_, one) in tried.items() if one.fits]
    return next(iter([*frees, *fits, *tried]), None)


def _rung(
    name: str,
    words: str,
    plan: Plan,
    prediction: Prediction,
    before: Rung | None,
    bought: tuple[str, ...],
) -> Rung:
    terms = Terms.of(plan, prediction)
    start = terms if before is None else Terms.of(before.plan, before.prediction)
    freed_from = prediction if before is None else before.prediction
    return Rung(
        changed=name,
        words=words,
        is_saving=_saves(name),
        plan=plan,
        prediction=prediction,
        terms=terms - start,
        freed_bytes=freed_from.peak_reserved_bytes - prediction.peak_reserved_bytes,
        bought=bought,
    )


def _words(name: str, before: Plan, after: Plan) -> str:
    """A change in words: "micro batch 1 to 2"."""
    if name == STAGES:
        return f"stages {before.num_stages} to {after.num_stages}"
    first, last = before.stages[0], after.stages[0]
    row = DIMENSIONS[name]
    amounts = [amount_words(name, stage.value(name)) for stage in (first, last)]
    if name in counts_of_blocks():
        amounts = [f"{stage.degree(name)} of {stage.layers}" for stage in (first, last)]
    noun = row.noun.removeprefix("of ") or ("" if row.amount != "{}" else name.replace("_", " "))
    return f"{noun} {amounts[0]} to {amounts[1]}".strip()
