"""Compares searchers on several problems with several random seeds: how good their plans are within
a budget.
"""

import argparse
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import Any

import numpy as np

from experiments.bench.bench import Bench
from experiments.bench.cases import Case
from experiments.bench.remembered import answers
from experiments.bench.search_options import searchers_called
from experiments.cli.commandline import DONE, NO_ANSWER
from experiments.pages.charts import Lines
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table, table_of
from mistlab.core.values import near_matches, reject
from mistlab.engines.engine import Precision
from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from mistlab.plan.workload import Attention
from searchers.registry import SEARCHERS
from searchers.strategy import STAGES_A_PLAN, StrategySearcher


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityProblem(Case):
    """A problem (model and cluster), and the search space that all searchers use for it."""

    attention: Attention = "flash"
    space: str
    precision: Precision = "bf16"

    @property
    def words(self) -> str:
        """A short description of the problem."""
        return (
            f"{self.model}, {self.nodes} x {self.gpus_per_node} {self.hardware}, sequence "
            f"{self.sequence_length}, batch {self.global_batch}, space {self.space}"
        )


def _on_l4(model: str, nodes: int, gpus: int, batch: int, space: str) -> QualityProblem:
    return QualityProblem(
        model=model,
        hardware="l4-24gb",
        nodes=nodes,
        gpus_per_node=gpus,
        sequence_length=2048,
        global_batch=batch,
        space=space,
        precision="fp16",
    )


# The problems, by the names that ``--problems`` takes; the first is the default problem of other
# commands.
PROBLEMS: Mapping[str, QualityProblem] = {
    "default": replace(_on_l4("gpt3-2.7b", 1, 4, 8, "mist"), sequence_length=4096),
    "7b-l4": _on_l4("gpt3-7b", 1, 8, 128, "mist"),
    "22b-l4": _on_l4("gpt3-22b", 4, 8, 512, "mist"),
    "uneven": _on_l4("gpt3-2.7b", 1, 4, 64, "aceso"),
    "llama-a100": QualityProblem(
        model="llama-7b",
        hardware="a100-40gb",
        nodes=1,
        gpus_per_node=8,
        sequence_length=4096,
        global_batch=128,
        space="mist",
    ),
    "llama-h100": QualityProblem(
        model="llama3-8b",
        hardware="h100-80gb",
        nodes=1,
        gpus_per_node=8,
        sequence_length=8192,
        global_batch=64,
        space="megatron-core",
    ),
}
# For a quick run, the number of problems, of seeds, and of evaluations per search.
QUICK_PROBLEMS, QUICK_SEEDS, QUICK_EVALUATIONS = 2, 2, 100
# Searchers that draw random numbers: each runs once for every seed, all others run only once.
DRAWING = ("optuna", "optuna:cmaes", "optuna:nsgaii", "optuna:random", "rl", "random")
# The searcher that proves the best plan of a problem, and its budget in CPU seconds.
REFERENCE, REFERENCE_S = "mist", 120.0
# The number of budgets for which the picture shows the gaps of plans.
PLACES = 60
# The largest gap to the best known plan that the picture shows.
LARGEST_GAP = 0.5


@dataclass(frozen=True, slots=True, kw_only=True)
class QualityQuestion:
    """A search to run: its searcher, problem, seed and budget. Without a number of evaluations, the
    budget is in CPU seconds; without either, the search is the one that proves the best plan.
    """

    name: str
    searcher: str
    seed: int
    evaluations: int | None
    cpu_seconds: float | None

    @property
    def budget(self) -> Budget:
        """The budget of the search, in evaluations or in CPU time."""
        if self.evaluations is None and self.cpu_seconds is None:
            return Budget(seconds=REFERENCE_S)
        return Budget(evaluations=self.evaluations, seconds=self.cpu_seconds)


def compared(options: argparse.Namespace) -> int:
    """Compare how good a plan each searcher finds within each budget, on several problems with
    several seeds.

    All searchers ask the closed form, within one budget: evaluations (1,000 stage candidates count
    as one) or CPU seconds. Each problem's optimum is proven by a separate search. The gap to it is
    reported as the median, minimum and maximum over seeds, and drawn over evaluations and seconds.
    Rows with budgets in seconds differ from run to run.
    """
    names = searchers_called(options.searchers.split(","))
    asked = [*_asked(options, names)]
    study = Study.begin("search_quality", options)
    study.add_all(row for _, row in answers(study, searched, asked, "searches"))
    status = DONE if any(row["iteration_s"] for row in study.rows) else NO_ANSWER
    return study.end(report(study.rows, names), status)


def _asked(options: argparse.Namespace, names: Sequence[str]) -> Iterator[QualityQuestion]:
    problems = options.problems.split(",")
    for problem in problems:
        if problem not in PROBLEMS:
            reject(f"--problems: {problem!r} is unknown{near_matches(problem, PROBLEMS)}")
    if options.seeds < 1:
        reject(f"--seeds {options.seeds}: a search needs a seed: give at least 1")
    evaluations, seeds = options.evaluations, options.seeds
    if options.quick:
        problems, seeds = problems[:QUICK_PROBLEMS], min(seeds, QUICK_SEEDS)
        evaluations = min(evaluations, QUICK_EVALUATIONS)
    cpu_seconds = options.cpu_seconds
    if (budget := evaluations if cpu_seconds is None else cpu_seconds) <= 0:
        option = "--evaluations" if cpu_seconds is None else "--cpu-seconds"
        reject(f"{option}: {budget:g} is not above 0: give each search a budget, such as 1000")
    for problem in problems:
        reference = QualityQuestion(
            name=problem, searcher=REFERENCE, seed=0, evaluations=None, cpu_seconds=None
        )
        yield reference
        for name in names:
            for seed in range(seeds if name in DRAWING else 1):
                yield replace(
                    reference,
                    searcher=name,
                    seed=options.seed + seed,
                    evaluations=evaluations if cpu_seconds is None else None,
                    cpu_seconds=cpu_seconds,
                )


def searched(asked: QualityQuestion) -> dict[str, Any]:
    """The result row of a search, with its CPU time."""
    of = PROBLEMS[asked.name]
    bench, space = Bench.of(of.problem(of.precision)), space_of(of.space)
    bench.warm_up(space)
    searcher = StrategySearcher(
        strategy=SEARCHERS[asked.searcher], predictor=bench.predictor, clock=time.process_time
    )
    result = searcher.search(bench.problem, space, asked.budget, asked.seed)
    is_reference = asked.evaluations is None and asked.cpu_seconds is None
    return {
        "problem": asked.name,
        "words": of.words,
        "searcher": asked.searcher,
        "seed": asked.seed,
        "is_reference": is_reference,
        "status": result.status,
        "iteration_s": result.prediction.iteration_s if result.prediction else None,
        "bound_s": result.lower_bound_s if is_reference else None,
        "evaluations": _evaluations(result.plan_evaluations, result.stage_evaluations),
        "history": [
            [_evaluations(point.plan_evaluations, point.stage_evaluations), point.iteration_s]
            for point in result.history
        ],
        "timing": {
            "cpu_s": result.wall_s,
            "history": [[one.wall_s, one.iteration_s] for one in result.history],
        },
    }


def _evaluations(plans: int, stages: int) -> float:
    return plans + stages / STAGES_A_PLAN


def report(rows: Sequence[Row], names: Sequence[str]) -> Report:
    """The report: how good the plans are that each searcher found, and how fast it found them."""
    proven = {row["problem"]: row for row in rows if row["is_reference"]}
    best_s = {problem: _best_s(rows, problem) for problem in proven}
    searched_rows = [row for row in rows if not row["is_reference"]]
    figures = [
        _searcher_row(
            problem,
            name,
            [row for row in searched_rows if _key(row) == (problem, name)],
            best_s[problem],
        )
        for problem in proven
        for name in names
    ]
    return Report(
        title="Who finds how good a plan within a budget",
        words=[
            "The problems, and the optimum that is proven of each apart:",
            table_of(
                proven.values(),
                ("problem", "{problem}"),
                ("is", "{words}"),
                ("best s", "{iteration_s:.3f}"),
                ("proof", _proof_words),
                ("CPU s", "{timing[cpu_s]:.1f}"),
            ),
            (
                "How much longer a searcher's plan takes than the optimum: the median over seeds, "
                "and in brackets the least and the most. A number after a stroke is how many of "
                "the seeds found no plan. Searchers that draw nothing run once."
            ),
            table(
                ("problem", *names),
                [
                    (problem, *(_gap_words(one) for one in figures if one["problem"] == problem))
                    for problem in proven
                ],
            ),
            "The processor's seconds of the same searches, in the median over seeds:",
            IN_A_FILE,
            table(
                ("problem", *names),
                [
                    (
                        problem,
                        *(
                            number(figure["timing"]["cpu_s"], ".2f")
                            for figure in figures
                            if figure["problem"] == problem
                        ),
                    )
                    for problem in proven
                ],
            ),
        ],
        summary={"searchers": figures},
        pictures=[
            _picture(searched_rows, best_s, names, by_clock=by_clock) for by_clock in (False, True)
        ],
    )


def _best_s(rows: Sequence[Row], problem: str) -> float | None:
    """The iteration time of the best plan known for a problem; it is optimal if a search has proven
    it.
    """
    every = [row["iteration_s"] for row in rows if row["problem"] == problem]
    return min((seconds for seconds in every if seconds), default=None)


def _key(row: Row) -> tuple[str, str]:
    return row["problem"], row["searcher"]


def _searcher_row(
    problem: str, name: str, rows: Sequence[Row], best_s: float | None
) -> dict[str, Any]:
    """The results of one searcher on one problem, summarised over seeds."""
    gaps = sorted(_gap(row["iteration_s"], best_s) for row in rows)
    plans = [gap for gap in gaps if gap < inf]
    median = float(np.median(gaps))
    return {
        "problem": problem,
        "searcher": name,
        "seeds": len(rows),
        "without_plan": len(gaps) - len(plans),
        "median_gap": median if median < inf else None,
        "least_gap": plans[0] if plans else None,
        "most_gap": plans[-1] if plans else None,
        "statuses": sorted({row["status"] for row in rows}),
        "timing": {"cpu_s": float(np.median([row["timing"]["cpu_s"] for row in rows]))},
    }


def _gap(seconds: float | None, best_s: float | None) -> float:
    """By what share an iteration time exceeds that of the best plan known."""
    if seconds is None or best_s is None:
        return inf
    return max(0.0, seconds / best_s - 1)


def _proof_words(row: Row) -> str:
    if row["status"] == "OPTIMAL":
        return "proven"
    if row["iteration_s"] and row["bound_s"]:
        return f"at most {1 - row['bound_s'] / row['iteration_s']:.1%} from the best"
    return "none"


def _gap_words(figures: Mapping[str, Any]) -> str:
    if figures["statuses"] == ["REFUSED"]:
        return "refuses"
    if figures["least_gap"] is None:
        return "no plan"
    median = "-" if figures["median_gap"] is None else f"{figures['median_gap']:.2%}"
    spread = (
        f" ({figures['least_gap']:.2%} to {figures['most_gap']:.2%})"
        if figures["seeds"] > 1
        else ""
    )
    missing = f" / {figures['without_plan']}" if figures["without_plan"] else ""
    return f"{median}{spread}{missing}"


def _picture(
    rows: Sequence[Row],
    best_s: Mapping[str, float | None],
    names: Sequence[str],
    *,
    by_clock: bool,
) -> Lines:
    """A picture of the gaps to the best plan known at every budget: the median over seeds, and then
    over problems.
    """

    def history(row: Row) -> Sequence[Sequence[float]]:
        points: Sequence[Sequence[float]] = (row["timing"] if by_clock else row)["history"]
        return points

    spent = [at for row in rows for at, _ in history(row) if at > 0]
    ends = [row["timing"]["cpu_s"] if by_clock else row["evaluations"] for row in rows]
    places = np.geomspace(min(spent, default=0.5), max([1.0, *ends]), PLACES)
    curves = {}
    for name in names:
        points = []
        for budget in places.tolist():
            medians = [
                float(np.median([_gap_at(history(row), budget, of) for row in of_problem]))
                for problem, of in best_s.items()
                if (of_problem := [row for row in rows if _key(row) == (problem, name)])
            ]
            median = float(np.median(medians)) if medians else inf
            if median < inf:
                points.append((budget, 100 * min(median, LARGEST_GAP)))
        if points:
            curves[name] = points
    what = "processor's seconds" if by_clock else "evaluations"
    return Lines(
        name="search_quality-seconds" if by_clock else "search_quality",
        caption=(
            f"The gap to the optimum after so many {what}: the median over problems, and over "
            f"seeds of each; from where half of the problems have a plan. Gaps above "
            f"{LARGEST_GAP:.0%} are drawn there."
        ),
        curves=curves,
        x=what,
        y="longer than the optimum (%)",
        log_x=True,
    )


def _gap_at(history: Sequence[Sequence[float]], budget: float, best_s: float | None) -> float:
    """The gap of the best plan that a search had found by the time it had used this budget."""
    reached = [seconds for at, seconds in history if at <= budget]
    return _gap(min(reached), best_s) if reached else inf
