"""Measures how the time of a search with proof grows with the problem, and how much time each
technique of the search saves (such as pruning), by leaving the technique out.
"""

import argparse
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, fields, replace
from math import inf
from typing import Any

import numpy as np

from experiments.bench.problem import problem_of
from experiments.bench.search_options import space_called
from experiments.cli.commandline import DONE, NO_ANSWER
from experiments.pages.charts import Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table_of
from mistlab import catalog
from mistlab.core.arrays import Floats, Rows
from mistlab.core.values import reject
from mistlab.job.search import Budget, Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.space import OffloadRatios, SearchSpace
from searchers.exact import box_menus, partials, proof
from searchers.exact.hierarchy import Hierarchy
from searchers.exact.partials import Completions
from searchers.registry import SEARCHERS
from searchers.strategy import Ending, Ledger, NeedsStageCosts, Strategy, StrategySearcher
from simulators.symbolic import SymbolicPredictor

# Runs a search with one of its techniques replaced by a weaker one. The search still finds the same
# plan; the techniques only make its proof faster.


# A weaker replacement for a technique of the search: the module or class, the name in it that is
# replaced, and the replacement.
Weaker = tuple[Any, str, Any]


def _nothing(*_: object, **__: object) -> None:
    return None


def _all_rows(columns: Sequence[Floats]) -> Rows:
    """A replacement for pruning: keeps every candidate, also those that another candidate
    dominates.
    """
    return np.arange(len(columns[0]))


# For each technique of the search, the weaker components that replace it. Without lower bounds on
# boxes (all candidates between two given ones), a search runs that lists all strategies.
REMOVED: Mapping[str, Sequence[Weaker]] = {
    "nothing": (),
    "plans found before and on the way": (
        (Hierarchy, "_in_order", lambda *_, **__: ()),
        (proof._GroupProof, "_look_for_plans", _nothing),
    ),
    "what is left of a pipeline": ((Completions, "of", _nothing),),
    "rounding of partial pipelines": ((proof, "GRAIN", 0.0),),
    "dominance between candidates": ((box_menus, "undominated", _all_rows),),
    "dominance between partial pipelines": ((partials, "undominated", _all_rows),),
}
BOXES = "boxes of ratios"
IDEAS = (*REMOVED, BOXES)


@contextmanager
def without(idea: str) -> Iterator[Strategy]:
    """In the ``with`` block, a search runs without one of its techniques."""
    if idea == BOXES:
        yield SEARCHERS["exact"]
        return
    with ExitStack() as stack:
        for where, name, weaker in REMOVED[idea]:
            stack.enter_context(_replaced(where, name, weaker))
        yield NeedsStageCosts(_proven)


def _proven(
    problem: Problem, space: SearchSpace, ledger: Ledger, _draw: np.random.Generator
) -> Ending:
    """A search that uses lower bounds on boxes (all candidates between two given ones) even if
    there are only few memory-saving strategies.
    """
    return Hierarchy.of(problem, space, ledger).proven(tolerance=0.0, seconds=inf)


@contextmanager
def _replaced(where: Any, name: str, weaker: Any) -> Iterator[None]:
    """In the ``with`` block, a name in a module or class has another value."""
    original: Callable[..., Any] = vars(where)[name]
    setattr(where, name, weaker)
    try:
        yield
    finally:
        setattr(where, name, original)


# Measures how a search's time grows with the problem, and how much each technique of the search
# saves: the problems, the result rows and the page.


SECONDS, QUICK_SECONDS = 8.0, 1.0
# The numbers of blocks, of GPUs, and of sequences in a batch for which a search is timed; a quick
# run uses fewer.
LAYERS, GPUS, BATCHES = (8, 16, 32, 64), (1, 2, 4, 8, 16), (8, 16, 32, 64, 128)
# The search spaces for which a search is timed, from the smallest on.
SPACES = ("3d", "+zero", "+checkpointing", "+offload", "mist", "wide")
# The numbers of steps of offload ratios for which a search is timed.
PARTS = (1, 2, 4, 8, 16)
HASTE = 2
# The model of the problem on which techniques of the search are left out.
LARGER = "gpt3-22b"
HEAD = "Searcher `mist` until its plan is proven; one thing differs from row to row."
GPUS_A_NODE = 8
AXES = {
    "blocks": "blocks of the model",
    "GPUs": "GPUs, eight a node",
    "batch": "sequences of a step",
    "space": "space",
    "fineness": "ratios in so many parts",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class GrowthQuestion:
    """A search to be timed: which quantity grows, its value, and the problem."""

    axis: str
    value: int | str
    problem: Problem
    space: SearchSpace


def grown(options: argparse.Namespace) -> int:
    """Measure how the time of a search with proof grows with the problem, and how much time each
    technique of the search saves.

    One quantity of a problem grows at a time: blocks, GPUs, batch, search space, or the number of
    offload ratios. Then each technique is left out by itself, for GPT-3 22B on 32 GPUs. Times are
    CPU seconds on one core.
    """
    default_s = QUICK_SECONDS if options.quick else SECONDS
    seconds = default_s if options.seconds is None else options.seconds
    if seconds <= 0:
        reject(f"--seconds {seconds}: a search needs some time: give more than 0")
    workload, cluster = problem_of(options)
    problem, space = Problem(workload=workload, cluster=cluster), space_called(options.space, None)
    study = Study.begin("search_growth", options)
    asked = [*_asked(problem, space, count=HASTE if options.quick else None)]
    for question in study.counted(asked, "searches"):
        row = searched(SEARCHERS["mist"], question.problem, question.space, seconds)
        study.add({"axis": question.axis, "value": question.value, **row})
    larger = problem if options.quick else pipelined(problem)
    for idea in study.counted(IDEAS, "ideas"):
        with without(idea) as strategy:
            row = searched(strategy, larger, space, seconds)
        study.add({"axis": "without", "value": idea, **row})
    has_plan = any(row["timing"]["iteration_s"] for row in study.rows)
    where = [f"{_problem_text(one)}, space {space.name}" for one in (problem, larger)]
    return study.end(_report(study.rows, where, seconds), DONE if has_plan else NO_ANSWER)


def pipelined(problem: Problem) -> Problem:
    """A larger problem whose best plans are pipelines, on which techniques of the search are left
    out.
    """
    work, cluster = problem.workload, problem.cluster
    work = replace(work, model=catalog.model(LARGER), sequence_length=2048, global_batch=512)
    return Problem(workload=work, cluster=replace(cluster, nodes=4, gpus_per_node=GPUS_A_NODE))


def _problem_text(problem: Problem) -> str:
    work, cluster = problem.workload, problem.cluster
    return (
        f"{work.model.name}, {work.model.layers} blocks, on {cluster.num_gpus} "
        f"{cluster.hardware.name}, sequence {work.sequence_length}, batch {work.global_batch}"
    )


def _asked(problem: Problem, space: SearchSpace, *, count: int | None) -> Iterator[GrowthQuestion]:
    """The searches to be timed for each quantity that grows, at most this many for each."""
    work, cluster = problem.workload, problem.cluster
    for layers in LAYERS[:count]:
        model = replace(work.model, name="", layers=layers)
        deeper = replace(problem, workload=replace(work, model=model))
        yield GrowthQuestion(axis="blocks", value=layers, problem=deeper, space=space)
    for gpus in GPUS[-count:] if count else GPUS:
        nodes, in_node = max(1, gpus // GPUS_A_NODE), min(gpus, GPUS_A_NODE)
        larger = replace(problem, cluster=replace(cluster, nodes=nodes, gpus_per_node=in_node))
        yield GrowthQuestion(axis="GPUs", value=gpus, problem=larger, space=space)
    for batch in BATCHES[:count]:
        longer = replace(problem, workload=replace(work, global_batch=batch))
        yield GrowthQuestion(axis="batch", value=batch, problem=longer, space=space)
    for name in SPACES[:count]:
        yield GrowthQuestion(axis="space", value=name, problem=problem, space=space_of(name))
    for parts in PARTS[:count]:
        yield GrowthQuestion(
            axis="fineness", value=parts, problem=problem, space=in_parts(space, parts)
        )


def in_parts(space: SearchSpace, parts: int) -> SearchSpace:
    """The search space with this many equal steps of each offload ratio between 0 and 1."""
    ratios = tuple(part / parts for part in range(parts + 1))
    kinds = {entry.name: getattr(space.offload, entry.name) for entry in fields(OffloadRatios)}
    finer = {kind: ratios if len(own) > 1 else own for kind, own in kinds.items()}
    return replace(space, offload=OffloadRatios(**finer))


def searched(
    strategy: Strategy, problem: Problem, space: SearchSpace, seconds: float
) -> dict[str, Any]:
    """The result row of a search, with its CPU time; the time to compile expressions is not
    counted.
    """
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    first = StrategySearcher(strategy=SEARCHERS["random"], predictor=predictor)
    first.search(problem, space, Budget(evaluations=1), 0)
    searcher = StrategySearcher(strategy=strategy, predictor=predictor, clock=time.process_time)
    result = searcher.search(problem, space, Budget(seconds=seconds), 0)
    return {
        "timing": {
            "is_proven": result.status in {"OPTIMAL", "INFEASIBLE"},
            "iteration_s": result.prediction.iteration_s if result.prediction else None,
            "search_s": result.wall_s,
            "gap": result.gap,
            "stage_candidates": result.stage_evaluations,
        },
    }


def _report(rows: Sequence[Row], where: Sequence[str], seconds: float) -> Report:
    grown = [row for row in rows if row["axis"] in AXES]
    ideas = [row for row in rows if row["axis"] not in AXES]
    return Report(
        title="How search time grows",
        words=[
            f"{where[0]}. {HEAD} For {seconds:g} s at most.",
            table_of(
                grown,
                ("what grows", lambda row: AXES[row["axis"]]),
                ("value", "{value}"),
                *COLUMNS,
            ),
            _slowest(grown),
            f"Each idea of the search removed alone: {where[1]}.",
            table_of(ideas, ("without", "{value}"), *COLUMNS),
            _worth(ideas),
        ],
        summary={
            "searches": len(rows),
            "timing": {"proven": sum(row["timing"]["is_proven"] for row in rows)},
        },
        pictures=[_picture(grown)],
    )


def _gap(row: Row) -> str:
    timing = row["timing"]
    return "proven" if timing["is_proven"] else number(timing["gap"], ".1%")


COLUMNS = (
    ("seconds", "{timing[search_s]:.2f}"),
    ("gap left", _gap),
    ("stage candidates", "{timing[stage_candidates]:,}"),
    ("iteration s", "{timing[iteration_s]:.3f}"),
)


def _slowest(rows: Sequence[Row]) -> str:
    """For each quantity that grows, the search time at its last value over the search time at its
    first.
    """
    growths = []
    for axis, axis_words in AXES.items():
        first, *_, last = (row for row in rows if row["axis"] == axis)
        seconds = [max(1e-3, row["timing"]["search_s"]) for row in (first, last)]
        growths.append(
            f"{axis_words}, {first['value']} to {last['value']}: {seconds[1] / seconds[0]:.1f}"
        )
    return f"Times as long at the end of each axis as at its beginning: {'; '.join(growths)}."


def _worth(rows: Sequence[Row]) -> str:
    whole, *others = rows
    base_s = max(1e-3, whole["timing"]["search_s"])
    losses = [
        f"{row['value']} {row['timing']['search_s'] / base_s:.1f}"
        + ("" if row["timing"]["is_proven"] else " and not proven")
        for row in others
    ]
    return f"Times as long without: {'; '.join(losses)}."


def _picture(rows: Sequence[Row]) -> Lines:
    curves = {
        label: [
            (float(index), row["timing"]["search_s"])
            for index, row in enumerate(one for one in rows if one["axis"] == axis)
        ]
        for axis, label in AXES.items()
    }
    return Lines(
        name="search_growth",
        caption="Seconds of a search as one thing grows, in the steps of the table.",
        curves=curves,
        x="step of the table",
        y="seconds of one core",
        log_y=True,
    )
