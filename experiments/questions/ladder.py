"""The ladder from the best plan without savings to the best plan of equal stages."""

import argparse
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

from experiments.cli.commandline import DONE, NoAnswerError
from experiments.cli.live import Live
from experiments.cli.problem import problem_of
from experiments.comparing.bench import BUDGET, Bench
from experiments.frame.charts import Bars
from experiments.frame.numbers_in_words import gib
from experiments.frame.study import Report, Study
from experiments.frame.tables import Row, table_of
from mistlab.cost.iteration_terms import Terms
from mistlab.values.plan import Plan
from mistlab.values.plan_words import plan_words
from mistlab.values.search import Problem
from mistlab.values.space import OffloadRatios, SearchSpace, space_of
from searchers.ladder import Rung, ladder
from searchers.strategies.exhaustive import all_plans

TERMS = {
    "computation_s": "computation",
    "exposed_communication_s": "exposed communication",
    "other_stages_s": "other stages",
    "rest_s": "first, last and step",
}
COARSE = (0.0, 0.5, 1.0)


def climbed(options: argparse.Namespace) -> int:
    """What each way to save memory costs, and what the memory buys: from a bare plan to the best
    one.

    The ladder begins at the best plan that saves nothing: no ZeRO, no recomputation, no
    offloading. Each rung takes one choice over from the best plan of equal stages that saves
    memory as it likes. What rungs cost and gain, term by term, adds up to the difference of the
    two predictions.
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
    """The best plan that saves no memory; where none fits, the one that needs least."""
    space = replace(space_of("3d"), zero=(0,))
    plans = [
        plan
        for plan in all_plans(bench.problem, space)
        if not any(stage.checkpointed_layers for stage in plan.stages)
    ]
    if not plans:
        message = "no plan of equal stages divides these GPUs and this batch: give other numbers"
        raise NoAnswerError(message)
    predictions = bench.predictor.predict_many(plans)
    fitting = [
        (prediction.iteration_s, place)
        for place, prediction in enumerate(predictions)
        if prediction.fits
    ]
    least = [(one.peak_reserved_bytes, place) for place, one in enumerate(predictions)]
    return plans[min(fitting or least)[1]]


def _saving(bench: Bench, options: argparse.Namespace) -> Plan:
    """The best plan of equal stages that saves memory in any way."""
    space = saving_space(quick=options.quick)
    entry = bench.search("mist", space, BUDGET, options.seed, Live(searcher="mist"))
    if entry.answer is None:
        message = "no plan of equal stages fits: give more GPUs, more memory or a smaller model"
        raise NoAnswerError(message)
    return entry.answer[0]


def saving_space(*, quick: bool) -> SearchSpace:
    """Plans of equal stages that save memory alike, in any way; in haste in coarse ratios."""
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
    words = [
        _table(rows),
        changed,
        f"First: {rows[0]['plan']}.",
        f"Last: {rows[-1]['plan']}.",
    ]
    if not rows[0]["fits"]:
        words.append("No plan that saves nothing fits: the first one needs least memory.")
    return Report(
        title="The ladder: what saved memory costs, and what it buys",
        words=words,
        summary={
            "start_s": start_s,
            "end_s": end_s,
            "overhead_s": overhead,
            "gain_s": gain,
            "sum_of_terms_s": sum(row[name] for row in rows for name in TERMS),
        },
        pictures=[_picture(rungs, rows)],
        beside=[BESIDE],
    )


def _longer_s(rows: Sequence[Row], kind: str) -> float:
    """How much longer all rungs of a kind make an iteration."""
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
    """The terms of each rung's iteration, one above the other."""
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


BESIDE = """## Published, and why this differs

Mist (EuroSys 2025) explains tuning as a trade: raising ZeRO, recomputation and offloading costs
time and frees memory; less tensor and pipeline parallelism and larger micro-batches spend the
memory and gain more than was paid. No published figures of single steps are at hand, so there is
none to compare with. Two things can be seen here that a sketch does not show: a saving is worth
nothing by itself (some rungs free nothing where they stand, as ZeRO without data-parallel ranks,
and pay only after the next change), and what a saving costs depends on what else the plan does,
so the rungs are in one possible order of several.

"Bought" names the changes that did not fit before a rung and fit after it. The terms of a rung
are the slowest stage's computation and exposed communication over all micro-batches, the other
stages that a micro-batch passes through, and the rest: first and last micro-batches, sends, and
the optimizer's step. They add up to the difference of the two predictions."""
