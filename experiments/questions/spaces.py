"""One problem searched in spaces that contain one another, within equal budgets."""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from time import process_time
from typing import Any

from experiments.bars.cases import Case, case_of, clusters, sizes
from experiments.bars.short_words import in_short
from experiments.cli.commandline import DONE, as_options
from experiments.frame.charts import Bars
from experiments.frame.study import Report, Study
from experiments.frame.tables import TIMING, Row, table
from mistlab.values.search import Budget
from mistlab.values.space import space_of
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

# Each space has all plans of those before it.
SPACES = ("3d", "+zero", "+checkpointing", "+offload", "mist", "wide", "everything")
LARGEST = SPACES[-1]
SEARCHER = "mist"
QUICK_SIZES = ("1.3b", "2.7b")
# Times that differ by less than this share are equal but for rounding.
ROUNDING = 1e-9


def spaces(options: argparse.Namespace) -> int:
    """Search every problem in every space, print and write the tables."""
    cases = [*_cases(options)]
    with as_options():
        budgets = [Budget(evaluations=count) for count in sorted(set(options.evaluations))]
    study = Study.begin("spaces", options)
    searches = [*product(cases, budgets)]
    for case, budget in study.counted(searches, "problems"):
        problem = case.problem()
        predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
        searcher = StrategySearcher(strategy=SEARCHERS[SEARCHER], predictor=predictor)
        for name in SPACES:
            began_s = process_time()
            found = searcher.search(problem, space_of(name), budget, options.seed)
            fits = found.prediction is not None and found.prediction.fits
            study.add(
                {
                    "problem": case.name,
                    "gpus": case.num_gpus,
                    "budget": budget.evaluations,
                    "space": name,
                    "iteration_s": found.prediction.iteration_s
                    if fits and found.prediction is not None
                    else None,
                    "status": found.status,
                    "plan": in_short(found.plan) if fits and found.plan is not None else "",
                    TIMING: {"process_s": process_time() - began_s},
                }
            )
    return study.end(_report(study.rows), DONE)


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """The problems of the evaluation, with fused attention."""
    for cluster in clusters(options.hardware):
        for family, size in product(options.families, QUICK_SIZES if options.quick else sizes()):
            yield case_of(cluster, family, size, "flash")


def worse(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Where a smaller space's answer is better than the largest one's within the same budget, and
    by which factor."""
    found = []
    for (problem, budget), times in _by_problem(rows).items():
        last_s = times[LARGEST]
        for name, seconds in times.items():
            if seconds is not None and (last_s is None or last_s > seconds * (1 + ROUNDING)):
                factor = None if last_s is None else last_s / seconds
                found.append(
                    {"problem": problem, "budget": budget, "space": name, "factor": factor}
                )
    return found


def _by_problem(rows: Sequence[Row]) -> Mapping[tuple[str, int], Mapping[str, float | None]]:
    """The seconds of each space's answer, by problem and budget."""
    found: dict[tuple[str, int], dict[str, float | None]] = {}
    for row in rows:
        found.setdefault((row["problem"], row["budget"]), {})[row["space"]] = row["iteration_s"]
    return found


def _report(rows: Sequence[Row]) -> Report:
    found, asked = worse(rows), _by_problem(rows)
    verdict = f"In all {len(asked)} searches `{LARGEST}` ends no worse than any smaller space."
    if found:
        named = "; ".join(
            f"{one['problem']} with {one['budget']:,} evaluations, `{one['space']}`"
            + (f" by {one['factor'] - 1:.2%}" if one["factor"] else " alone has a plan")
            for one in found
        )
        verdict = f"A smaller space ends better than `{LARGEST}` {len(found)} times: {named}."
    words = [verdict]
    for budget in dict.fromkeys(row["budget"] for row in rows):
        words += [
            f"## {budget:,} evaluations",
            "Seconds of an iteration, by space; `*` marks answers that are proven best.",
            _table(rows, budget),
        ]
    last = max(row["budget"] for row in rows)
    return Report(
        title="Spaces side by side",
        words=[*words, "## What the largest space chooses", _plans(rows, last)],
        summary={"worse": found, "searches": len(asked)},
        pictures=[_picture(asked, last)],
        beside=[BESIDE],
    )


def _table(rows: Sequence[Row], budget: int) -> str:
    by_problem: dict[str, list[str]] = {}
    for row in rows:
        if row["budget"] == budget:
            mark = "*" if row["status"] == "OPTIMAL" else ""
            cell = "-" if row["iteration_s"] is None else f"{row['iteration_s']:.4g}{mark}"
            by_problem.setdefault(row["problem"], []).append(cell)
    return table(("problem", *SPACES), [(name, *cells) for name, cells in by_problem.items()])


def _plans(rows: Sequence[Row], budget: int) -> str:
    chosen = [row for row in rows if row["budget"] == budget and row["space"] == LARGEST]
    return table(("problem", "plan"), [(row["problem"], row["plan"] or "-") for row in chosen])


def _picture(asked: Mapping[tuple[str, int], Mapping[str, float | None]], budget: int) -> Bars:
    times = {problem: own for (problem, count), own in asked.items() if count == budget}

    def speedup(own: Mapping[str, float | None], name: str) -> float | None:
        first_s, seconds = own[SPACES[0]], own[name]
        return None if first_s is None or seconds is None else first_s / seconds

    return Bars(
        name="spaces",
        caption=f"How many times as fast as the best plan of `{SPACES[0]}`, by space.",
        groups=[*times],
        series={name: [speedup(own, name) for own in times.values()] for name in SPACES[1:]},
        y=f"speedup over {SPACES[0]}",
        marks={"equal": 1.0},
    )


BESIDE = """## Published, and why this differs

Nobody publishes how a search fares as its space grows under one budget. Mist (EuroSys 2025) gives
the speedups that features bring one after another, which the page of the
[breakdown](speedup-breakdown.md) has beside ours.

Budgets are in evaluations: a plan is one, and a thousand stage candidates are one. So equal runs
end alike on a quiet machine; on a very busy one, proofs may end by the clock, after 60 s. A budget
that ends the search of a small space too may end it earlier in a large one, which spends a few
evaluations on other plans. A dash is where nothing of a space fits."""
