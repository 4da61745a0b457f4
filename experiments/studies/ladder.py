"""A path of plans from one plan to another, which changes one choice at a time: first choices that
save memory, then choices that spend it.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any

from experiments.bench.bench import BUDGET, TERM_WORDS, Bench
from experiments.bench.problem import problem_of
from experiments.cli.commandline import DONE, NoAnswerError
from experiments.cli.live import Live
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, gib, table_of
from mistlab.cost.pipeline import Terms
from mistlab.job.prediction import Prediction
from mistlab.job.search import Problem
from mistlab.plan.dimensions import (
    DIMENSIONS,
    amount_words,
    counts_of_blocks,
    dimensions_of_axes,
    names_of,
)
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.plan_words import plan_words
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers.meshes import even_layers
from searchers.methods.exhaustive import all_plans
from searchers.savings import alike, saving_names

# Changes one plan into another, one choice at a time: first saves memory, then spends it.
#
# The stages of each plan are equal. A rung is the plan after one more choice of the final plan.
# Rungs that save memory (ZeRO, recomputation, offloading) come in the order of the table of
# dimensions; a rung that spends memory (fewer ranks share a layer or a pipeline, larger
# micro-batches) comes as soon as its plan fits.


# The name of the choice of how many stages a pipeline has, which is not a dimension of a stage.
STAGES = "stages"
SHARED = "data_parallel"

Choices = Mapping[str, float]
Predict = Callable[[Sequence[Plan]], Sequence[Prediction]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Rung:
    """A plan on the path between two plans: the choice that it changes, and by how much that
    changes the iteration time.

    ``terms`` is by how much each term of the iteration time grows over the plan before.
    ``freed_bytes`` is what the fullest GPU need no longer hold. ``bought`` are the changes that did
    not fit before and do now.
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
    """The plans on the path from the first plan, which is included, to the last one."""
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
        change = _change_text(name, rungs[-1].plan, tried[name][0])
        left = [other for other in left if other != name]
        after = _tried(problem, first, here, end, left, predict)
        bought = tuple(
            _change_text(other, tried[name][0], plan)
            for other, (plan, now) in after.items()
            if now.fits and not (other in tried and tried[other][1].fits) and not _saves(other)
        )
        rungs.append(_rung(name, change, *tried[name], rungs[-1], bought if _saves(name) else ()))
    if rungs[-1].plan != last:
        # If no single choice leads on, all remaining choices change at once.
        rungs.append(_rung("rest", "all else at once", last, predict([last])[0], rungs[-1], ()))
    return rungs


def choices_of(plan: Plan) -> dict[str, float]:
    """The choices of a plan whose stages are equal, by name; numbers of blocks are given as shares
    of a stage's blocks.
    """
    stage = plan.stages[0]
    choices: dict[str, float] = {name: stage.value(name) for name in DIMENSIONS}
    choices |= {name: stage.value(name) / stage.layers for name in counts_of_blocks()}
    del choices["layers"], choices[SHARED]
    return {**choices, STAGES: plan.num_stages}


def plan_with(problem: Problem, like: Plan, choices: Choices) -> Plan | None:
    """The plan of equal stages that has these choices; None if they do not divide the GPUs or the
    batch.
    """
    layers, num_stages = problem.workload.model.layers, int(choices[STAGES])
    degrees = [int(choices[name]) for name in dimensions_of_axes() if name != SHARED]
    data, rest = divmod(problem.cluster.num_gpus, num_stages * prod(degrees))
    if rest or data == 0 or num_stages > layers:
        return None
    count, rest = divmod(problem.workload.global_batch, data * int(choices["micro_batch"]))
    if rest or count == 0:
        return None
    shares = even_layers(layers, num_stages)
    values = {name: value for name, value in choices.items() if name in DIMENSIONS}
    values |= {name: round(choices[name] * shares[0]) for name in counts_of_blocks()}
    first = StagePlan.of_values({**values, "layers": shares[0], SHARED: data})
    return Plan(
        engine=like.engine,
        micro_batches=count,
        overlap_communication=like.overlap_communication,
        order=like.order,
        stages=tuple(alike(first, share) for share in shares),
    )


def _in_order() -> Iterator[str]:
    """The names of choices in order: first those that save memory, then those that spend it."""
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
    """For each choice in which two plans still differ, the plan that adopts it from the final
    plan.
    """
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
    """The choice to change next: of choices that spend memory and give a faster plan that fits, the
    fastest. If there is none, the first choice that frees memory; else the first whose plan fits;
    else the first of all.
    """
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
    change: str,
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
        words=change,
        is_saving=_saves(name),
        plan=plan,
        prediction=prediction,
        terms=terms - start,
        freed_bytes=freed_from.peak_reserved_bytes - prediction.peak_reserved_bytes,
        bought=bought,
    )


def _change_text(name: str, before: Plan, after: Plan) -> str:
    """The change of one choice as text, such as "micro batch 1 to 2"."""
    if name == STAGES:
        return f"stages {before.num_stages} to {after.num_stages}"
    first, last = before.stages[0], after.stages[0]
    row = DIMENSIONS[name]
    amounts = [amount_words(name, stage.value(name)) for stage in (first, last)]
    if name in counts_of_blocks():
        amounts = [f"{stage.degree(name)} of {stage.layers}" for stage in (first, last)]
    noun = row.noun.removeprefix("of ") or ("" if row.amount != "{}" else name.replace("_", " "))
    return f"{noun} {amounts[0]} to {amounts[1]}".strip()


# The path from the best plan without memory savings to the best plan of equal stages, one choice at
# a time.


TERMS = {**TERM_WORDS, "other_stages_s": "other stages"}
COARSE = (0.0, 0.5, 1.0)


def climbed(options: argparse.Namespace) -> int:
    """Show what each way to save memory costs, and what the memory that it frees gains: step by
    step from the best plan without savings to the best plan of all.

    The path begins at the best plan without ZeRO, recomputation and offloading. Each step adopts
    one choice of the best plan with equal stages and any memory savings. The gains and losses of
    the steps, term by term, add up to the difference between the two predictions.
    """
    workload, cluster = problem_of(options)
    study = Study.begin("ladder", options)
    bench = Bench.of(Problem(workload=workload, cluster=cluster))
    first = _bare(bench)
    last = _saving(bench, options)
    rungs = ladder(bench.problem, first, last, bench.predictor.predict_many)
    for rung in rungs:
        study.add(_row(rung))
    where = f"{options.model} on {cluster.num_gpus} {cluster.hardware.name}"
    return study.end(_report(rungs, study.rows, where), DONE)


def _bare(bench: Bench) -> Plan:
    """The best plan that saves no memory; if none fits, the plan that needs the least memory."""
    space = replace(space_of("3d"), zero=(0,))
    plans = [
        plan
        for plan in all_plans(bench.problem, space)
        if not any(stage.checkpointed_layers for stage in plan.stages)
    ]
    if not plans:
        batch, gpus = bench.problem.workload.global_batch, bench.problem.cluster.num_gpus
        message = (
            f"--global-batch {batch}: no plan of equal stages divides this batch among the {gpus} "
            f"GPUs of --nodes and --gpus-per-node: give a multiple of {gpus}"
        )
        raise NoAnswerError(message)
    predictions = bench.predictor.predict_many(plans)
    fitting = [
        (prediction.iteration_s, index)
        for index, prediction in enumerate(predictions)
        if prediction.fits
    ]
    least = [(one.peak_reserved_bytes, place) for place, one in enumerate(predictions)]
    return plans[min(fitting or least)[1]]


def _saving(bench: Bench, options: argparse.Namespace) -> Plan:
    """The best plan of equal stages among those that recompute, shard or offload."""
    space = saving_space(quick=options.quick)
    entry = bench.search("mist", space, BUDGET, options.seed, Live(searcher="mist"))
    if entry.answer is None:
        message = (
            f"--model {options.model}: no plan of equal stages fits in the memory of "
            f"{bench.problem.cluster.num_gpus} {bench.problem.cluster.name}: give more --nodes, "
            "--hardware with more memory, or a smaller model"
        )
        raise NoAnswerError(message)
    return entry.answer[0]


def saving_space(*, quick: bool) -> SearchSpace:
    """The search space of plans with equal stages and any memory savings; for a quick run with few
    offload ratios.
    """
    space = replace(
        space_of("+offload"), name="equal stages", unequal_stages=False, zero=(0, 1, 2, 3)
    )
    if not quick:
        return space
    kinds = (entry.name for entry in fields(OffloadRatios))
    return replace(space, offload=OffloadRatios(**dict.fromkeys(kinds, COARSE)))


def _row(rung: Rung) -> Row:
    return {
        "step": rung.words or "the best plan that saves nothing",
        "kind": _kind(rung),
        "iteration_s": rung.prediction.iteration_s,
        "fits": rung.prediction.fits,
        **{name: getattr(rung.terms, name) for name in TERMS},
        "freed_bytes": rung.freed_bytes,
        "fullest_bytes": rung.prediction.peak_reserved_bytes,
        "bought": list(rung.bought),
        "plan": "; ".join(plan_words(rung.plan)),
    }


def _kind(rung: Rung) -> str:
    if not rung.changed:
        return "start"
    return "saves" if rung.is_saving else "spends"


def _report(rungs: Sequence[Rung], rows: Sequence[Row], where: str) -> Report:
    start_s, end_s = rows[0]["iteration_s"], rows[-1]["iteration_s"]
    overhead, gain = (_longer_s(rows, kind) for kind in ("saves", "spends"))
    changed = (
        f"{where}: from {start_s:.3f} s to {end_s:.3f} s, {start_s / end_s:.2f}x. Saving memory "
        f"changed the iteration by {overhead:+.3f} s, spending it by {gain:+.3f} s."
    )
    paragraphs = [
        _table(rows),
        changed,
        f"First: {rows[0]['plan']}.",
        f"Last: {rows[-1]['plan']}.",
    ]
    if not rows[0]["fits"]:
        paragraphs.append("No plan that saves nothing fits: the first one needs least memory.")
    return Report(
        title="The ladder: what saved memory costs, and what it buys",
        words=paragraphs,
        summary={
            "start_s": start_s,
            "end_s": end_s,
            "overhead_s": overhead,
            "gain_s": gain,
            "sum_of_terms_s": sum(row[name] for row in rows for name in TERMS),
        },
        pictures=[_picture(rungs, rows)],
    )


def _longer_s(rows: Sequence[Row], kind: str) -> float:
    """By how much all changes of one kind (those that save memory, or those that spend it) lengthen
    the iteration together.
    """
    longer: list[float] = [row[name] for row in rows for name in TERMS if row["kind"] == kind]
    return sum(longer)


def _table(rows: Sequence[Row]) -> str:
    return table_of(
        rows,
        ("step", "{step}"),
        ("s", "{iteration_s:.3f}"),
        ("longer by s", lambda row: f"{sum(row[name] for name in TERMS):+.3f}"),
        *((head, f"{{{name}:+.3f}}") for name, head in TERMS.items()),
        ("GiB freed", lambda row: gib(row["freed_bytes"], "+.2f")),
        ("bought", lambda row: "; ".join(row["bought"]) or "-"),
    )


def _picture(rungs: Sequence[Rung], rows: Sequence[Row]) -> Bars:
    """A picture of the parts of each plan's iteration time, stacked."""
    terms: list[Any] = [Terms.of(rung.plan, rung.prediction) for rung in rungs]
    assert {entry.name for entry in fields(Terms)} == set(TERMS)
    return Bars(
        name="ladder",
        caption="An iteration's terms on each rung, from the best plan that saves nothing.",
        groups=["start", *(row["step"] for row in rows[1:])],
        series={words: [getattr(one, name) for one in terms] for name, words in TERMS.items()},
        y="iteration (s)",
        stacked=True,
    )
