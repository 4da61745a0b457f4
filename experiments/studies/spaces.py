"""The command ``spaces``: searches one problem in several search spaces, each of which contains the
one before it, with equal budgets.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import product
from math import inf
from time import process_time
from typing import Any

from experiments.bench.bench import answer_of
from experiments.bench.cases import Case, case_of, clusters, sizes
from experiments.bench.remembered import Remembered, answers
from experiments.cli.commandline import DONE, as_options
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import TIMING, Row, table
from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan_words import plan_line
from searchers.registry import SEARCHERS
from searchers.strategy import StrategySearcher
from simulators.symbolic import SymbolicPredictor

# The search spaces; each contains those before it.
SPACES = ("3d", "+zero", "+checkpointing", "+offload", "mist", "wide", "everything")
LARGEST = SPACES[-1]
SEARCHER = "mist"
QUICK_SIZES = ("1.3b",)
# Times that differ by less than this share are equal up to rounding errors.
ROUNDING = 1e-9
FAMILIES = ("gpt3", "llama", "falcon")


def spaces(options: argparse.Namespace) -> int:
    """Compare search spaces each of which contains the one before it: does a search of a larger
    space find a worse plan within the same budget?

    Each problem of the published evaluation is searched by the default searcher in nested search
    spaces, with the same budget of evaluations. A larger space contains every plan of a smaller
    one, so a worse plan is the search's fault; such cases are listed. Problems are searched in
    parallel processes.
    """
    if options.families is None:
        options.families = FAMILIES[:1] if options.quick else FAMILIES
    cases = [*_cases(options)]
    with as_options():
        budgets = [Budget(evaluations=count) for count in sorted(set(options.evaluations))]
    study = Study.begin("spaces", options)
    searched = partial(_searched, names=SPACES, seed=options.seed)
    asked = [*product(cases, budgets)]
    # Parallel processes are used only if problems are large: a process needs as long to start as a
    # small problem takes.
    answered = answers(study, searched, asked, "problems", side_by_side=not options.quick)
    study.add_all(row for _, rows in answered for row in rows)
    return study.end(_report(study.rows), DONE)


def _searched(
    asked: tuple[Case, Budget], *, names: Sequence[str], seed: int
) -> Sequence[dict[str, Any]]:
    """The best plan of a problem that is found in each search space within a budget."""
    case, budget = asked
    problem = case.problem()
    predictor = SymbolicPredictor(workload=problem.workload, cluster=problem.cluster)
    remembered = Remembered(predictor=predictor)
    searcher = StrategySearcher(strategy=SEARCHERS[SEARCHER], predictor=remembered)
    rows = []
    for name in names:
        began_s = process_time()
        result = searcher.search(problem, space_of(name), budget, seed)
        answer = answer_of(result)
        rows.append(
            {
                "problem": case.name,
                "gpus": case.num_gpus,
                "budget": budget.evaluations,
                "space": name,
                "iteration_s": answer and answer[1].iteration_s,
                "status": result.status,
                "plan": plan_line(answer[0]) if answer else "",
                TIMING: {"process_s": process_time() - began_s},
            }
        )
    return rows


def _cases(options: argparse.Namespace) -> Iterator[Case]:
    """The problems of Mist's evaluation that have fused attention."""
    for cluster in clusters(options.hardware):
        for family, size in product(options.families, QUICK_SIZES if options.quick else sizes()):
            yield case_of(cluster, family, size, "flash")


def worse(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """The cases in which the plan found in a search space is worse than the plan found in a smaller
    one with the same budget, and by which factor.
    """
    worse_rows = []
    for (problem, budget), times in _by_problem(rows).items():
        best_s, best = inf, ""
        for name, seconds in times.items():
            if best and (seconds is None or seconds > best_s * (1 + ROUNDING)):
                factor = None if seconds is None else seconds / best_s
                where = {"problem": problem, "budget": budget, "space": name}
                worse_rows.append({**where, "smaller": best, "factor": factor})
            elif seconds is not None:
                best_s, best = seconds, name
    return worse_rows


def _by_problem(rows: Sequence[Row]) -> Mapping[tuple[str, int], Mapping[str, float | None]]:
    """For each problem and budget, the seconds of the plan found in each search space."""
    by_problem: dict[tuple[str, int], dict[str, float | None]] = {}
    for row in rows:
        by_problem.setdefault((row["problem"], row["budget"]), {})[row["space"]] = row[
            "iteration_s"
        ]
    return by_problem


def _report(rows: Sequence[Row]) -> Report:
    worse_rows, asked = worse(rows), _by_problem(rows)
    verdict = (
        f"In all {len(asked)} problems `{LARGEST}` ends no worse than any smaller space, and no "
        "other space ends worse than a smaller one."
    )
    if worse_rows:
        named = "; ".join(
            f"{row['problem']} with {row['budget']:,} evaluations, `{row['space']}` "
            + (
                f"by {row['factor'] - 1:.2%} beside `{row['smaller']}`"
                if row["factor"]
                else f"without a plan, `{row['smaller']}` with one"
            )
            for row in worse_rows
        )
        verdict = f"A space ends worse than a smaller one {len(worse_rows)} times: {named}."
    paragraphs = [verdict]
    for budget in dict.fromkeys(row["budget"] for row in rows):
        paragraphs += [
            f"## {budget:,} evaluations",
            "Seconds of an iteration, by space; `*` marks answers that are proven best.",
            _table(rows, budget),
        ]
    last = max(row["budget"] for row in rows)
    return Report(
        title="Spaces side by side",
        words=[*paragraphs, "## What the largest space chooses", IN_A_FILE, _plans(rows, last)],
        summary={"worse": worse_rows, "problems": len(asked)},
        pictures=[*_pictures(asked, last)],
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


def _pictures(
    asked: Mapping[tuple[str, int], Mapping[str, float | None]], budget: int
) -> Iterator[Bars]:
    """A picture for each machine, with the problems on it."""
    times = {problem: own for (problem, count), own in asked.items() if count == budget}
    for machine in dict.fromkeys(problem.partition(" ")[0] for problem in times):
        groups = {
            model: seconds
            for problem, seconds in times.items()
            for of_machine, _, model in [problem.partition(" ")]
            if of_machine == machine
        }
        yield Bars(
            name=f"spaces-{machine.lower()}",
            caption=f"{machine}: times as fast as the best plan of `{SPACES[0]}`, by space.",
            groups=[*groups],
            series={name: [_speedup(own, name) for own in groups.values()] for name in SPACES[1:]},
            y=f"speedup over {SPACES[0]}",
            marks={"equal": 1.0},
        )


def _speedup(by_space: Mapping[str, float | None], name: str) -> float | None:
    first_s, seconds = by_space[SPACES[0]], by_space[name]
    return None if first_s is None or seconds is None else first_s / seconds
