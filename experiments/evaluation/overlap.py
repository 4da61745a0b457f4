"""Compares predictors that each ignore an effect such as overlap (views): whether their times are
ordered as expected on random plans, and how fast their favourite plans really are.
"""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from experiments.bench.bench import Bench
from experiments.bench.cases import Case, case_of, clusters
from experiments.bench.remembered import answers
from experiments.cli.commandline import DONE, NO_ANSWER
from experiments.evaluation.speedup_breakdown import Summary
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, table
from mistlab.core.values import reject
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan import Plan
from mistlab.plan.plan_words import plan_line
from mistlab.schedule.placement import spread_shares
from searchers.methods.published import published
from searchers.savings import Chooser, chosen_plan
from simulators.views import FULL, VIEWS

# Predicts random plans with each effect hidden in turn (a view of the predictor), to check that the
# views' times are in the expected order.


# The search spaces from which random plans are drawn in turn; together they contain all engines.
SPACES = ("mist", "wide", "mist", "megatron", "mist", "deepspeed", "mist", "aceso")
# Times that differ by less than this share count as equal.
ROUNDING = 1e-9
# Pairs of views (predictors that ignore an effect); the times of the first must be at least those
# of the second.
ORDER = (("serial", "full"), ("full", "ideal"))


def drawn(bench: Bench, count: int, seed: int) -> list[Plan]:
    """Random plans for a problem; they need not fit in memory, since that does not affect their
    times.
    """
    draw = np.random.default_rng(seed)
    chooser = Chooser(lambda _, options: int(draw.integers(options)))
    plans: list[Plan] = []
    while len(plans) < count:
        plan = chosen_plan(bench.problem, space_of(SPACES[len(plans) % len(SPACES)]), chooser)
        plans += [] if plan is None else [plan]
    return plans


def ordered(case: Case, count: int, seed: int) -> dict[str, Any]:
    """The result row of a case: on how many random plans the views' times contradict the expected
    order, and by how much they differ.
    """
    bench = Bench.of(case.problem())
    plans = drawn(bench, count, seed)
    seconds = {
        view: np.array([one.iteration_s for one in bench.seen(view).predict_many(plans)])
        for view in VIEWS
    }
    broken = {
        f"{more} < {less}": int((seconds[more] < seconds[less] * (1 - ROUNDING)).sum())
        for more, less in ORDER
    }
    return {
        "chapter": "order",
        "case": case.name,
        "plans": count,
        "broken": broken,
        "over_full": {view: _spread(seconds[view] / seconds["full"]) for view in VIEWS},
    }


def _spread(ratios: Sequence[float] | np.ndarray) -> dict[str, float]:
    least, median, most = np.quantile(ratios, [0, 0.5, 1])
    return {"least": float(least), "median": float(median), "most": float(most)}


# Compares views (closed forms that ignore an effect such as overlap) in two ways: the order of
# their times, and the full prediction of each view's best plan.


SIZES, QUICK_SIZES = ("1.3b", "2.7b", "7b"), ("1.3b",)
QUICK_PLANS = 100
# The views of the predictor that ignore some effect.
PARTIAL = tuple(view for view in VIEWS if view != FULL)
# Mist's published search and its modifications, by name, with the options of each.
VARIANTS: Mapping[str, Mapping[str, bool]] = {
    "published": {},
    "true frontiers": {"weighted": False},
    "longest chain": {"by_chains": True},
    "both": {"weighted": False, "by_chains": True},
}
# Result rows by the name of a case and the name of a view or search.
Winners = Mapping[tuple[str, str], Row]


@dataclass(frozen=True, slots=True, kw_only=True)
class OverlapQuestion:
    """A case of the evaluation, and on how many random plans views are compared."""

    case: Case
    plans: int
    seed: int


def overlapped(options: argparse.Namespace) -> int:
    """Show what ignoring an effect costs: searches whose predictor ignores overlap, or the extra
    time of first and last micro-batches, and how slow the plans are that they choose.

    A view is a predictor with an effect hidden: streams take turns (serial), or do not slow one
    another down (ideal); extra time of the first and last micro-batches is spread over all
    micro-batches (average) or dropped (blind); or nothing is hidden (full). The plan that each
    search chooses is judged by the full predictor and the event simulator. On random plans, the
    times must be serial >= full >= ideal. The last table shows what the published search gains from
    exact Pareto frontiers and from the longest chain of the pipeline.
    """
    if options.plans < 1:
        reject(f"--plans {options.plans}: no plans to compare: give at least 1")
    chosen = QUICK_SIZES if options.quick else SIZES
    places = clusters(options.hardware)[: 1 if options.quick else None]
    cases = [case_of(place, "gpt3", size, "flash") for size in chosen for place in places]
    count = min(options.plans, QUICK_PLANS) if options.quick else options.plans
    asked = [
        OverlapQuestion(case=case, plans=max(1, share), seed=options.seed)
        for case, share in zip(cases, spread_shares(count, len(cases)), strict=True)
    ]
    study = Study.begin("overlap", options)
    study.add_all(row for _, rows in answers(study, compared, asked, "cases") for row in rows)
    return study.end(report(study.rows), DONE if _holds(study.rows) else NO_ANSWER)


def compared(asked: OverlapQuestion) -> list[dict[str, Any]]:
    """The result rows of a case: the order of times on random plans, the best plan of each view,
    and the best plan of each search.
    """
    bench = Bench.of(asked.case.problem())
    return [
        ordered(asked.case, asked.plans, asked.seed),
        *(_winner(bench, asked, view) for view in VIEWS),
        *(_published(bench, asked, name) for name in VARIANTS),
    ]


def _winner(bench: Bench, asked: OverlapQuestion, view: str) -> dict[str, Any]:
    best = bench.found("mist", space_of("mist"), view=view, seed=asked.seed)
    row = {"chapter": "winners", "case": asked.case.name, "view": view}
    if best is None:
        return row
    return {
        **row,
        "seen_s": best.seen_s,
        "full_s": best.seconds,
        "played_s": bench.played_s(best.plan),
        "plan": plan_line(best.plan),
        "timing": {"search_s": best.result.wall_s},
    }


def _published(bench: Bench, asked: OverlapQuestion, name: str) -> dict[str, Any]:
    best = bench.found(published(**VARIANTS[name]), space_of("mist"), seed=asked.seed)
    row = {"chapter": "published search", "case": asked.case.name, "search": name}
    if best is None:
        return row
    return {
        **row,
        "full_s": best.seconds,
        "plan": plan_line(best.plan),
        "timing": {"search_s": best.result.wall_s},
    }


def _of(rows: Sequence[Row], chapter: str, key: str) -> dict[tuple[str, str], Row]:
    return {
        (row["case"], row[key]): row
        for row in rows
        if row["chapter"] == chapter and "full_s" in row
    }


def _holds(rows: Sequence[Row]) -> bool:
    """Whether the views' times are in the expected order on all random plans, and no view's best
    plan is faster than that of the full view.
    """
    winners = _of(rows, "winners", "view")
    in_order = not any(sum(row["broken"].values()) for row in rows if row["chapter"] == "order")
    return in_order and all(
        row["full_s"] >= winners[case, FULL]["full_s"] * (1 - 1e-9)
        for (case, _), row in winners.items()
        if (case, FULL) in winners
    )


def report(rows: Sequence[Row]) -> Report:
    """The report on all cases, made from their result rows."""
    orders = [row for row in rows if row["chapter"] == "order"]
    winners, searches = _of(rows, "winners", "view"), _of(rows, "published search", "search")
    cases = [*dict.fromkeys(case for case, view in winners if view == FULL)]
    slower = {
        (case, view): winners[case, view]["full_s"] / winners[case, FULL]["full_s"] - 1
        for case, view in winners
        if (case, FULL) in winners
    }
    count = sum(row["plans"] for row in orders)
    broken = sum(sum(row["broken"].values()) for row in orders)
    beaten = [key for key, share in slower.items() if share < -1e-9]
    return Report(
        title="What it costs not to know",
        words=[
            (
                f"Of {count:,} random plans {broken} break the order serial >= full >= ideal. How "
                "many times as long plans take in a view as they do:"
            ),
            table(("view", "least", "median of cases", "most"), _spreads(orders)),
            (
                "What searches find in each view, by the whole predictor: how much slower than "
                "the plan that is found with it (as played in brackets). "
                f"{len(beaten)} of {len(slower)} beat it."
            ),
            _winners_table(winners, cases),
            (
                "The published search, and what is gained by true frontiers in place of weighted "
                "sums, by the longest chain in place of the published objective, and by both: "
                "how much slower each one's plan is than that of `mist`."
            ),
            IN_A_FILE,
            _searches_table(searches, winners, cases),
        ],
        summary={"plans": count, "broken": broken, "beaten": len(beaten)},
        pictures=[
            Bars(
                name="overlap",
                caption="How much slower the plan is that a search finds in a view, in percent.",
                groups=cases,
                series={
                    view: [
                        None if (share := slower.get((case, view))) is None else 100 * share
                        for case in cases
                    ]
                    for view in PARTIAL
                },
                y="slower than with the whole predictor (%)",
            )
        ],
    )


def _spreads(orders: Sequence[Row]) -> list[tuple[str, ...]]:
    return [
        (
            view,
            f"{min(row['over_full'][view]['least'] for row in orders):.3f}",
            f"{Summary.of([row['over_full'][view]['median'] for row in orders]).mean:.3f}",
            f"{max(row['over_full'][view]['most'] for row in orders):.3f}",
        )
        for view in PARTIAL
    ]


def _winners_table(winners: Winners, cases: Sequence[str]) -> str:
    """A table of how much slower each view's best plan is than the full view's; in brackets the
    same by the event simulator.
    """

    def slower(case: str, view: str) -> str:
        row, whole = winners.get((case, view)), winners[case, FULL]
        if row is None:
            return "-"
        return f"{_slower(row, whole, 'full_s')} ({_slower(row, whole, 'played_s')})"

    return table(
        ("case", "full s", *PARTIAL),
        [
            (case, f"{winners[case, FULL]['full_s']:.3f}", *(slower(case, one) for one in PARTIAL))
            for case in cases
        ],
    )


def _searches_table(searches: Winners, winners: Winners, cases: Sequence[str]) -> str:
    """A table of how much slower the plan of each published search is than that of ``mist``."""
    return table(
        ("case", *VARIANTS),
        [
            (
                case,
                *(
                    _slower(row, winners[case, FULL], "full_s")
                    if (row := searches.get((case, name)))
                    else "-"
                    for name in VARIANTS
                ),
            )
            for case in cases
        ],
    )


def _slower(row: Row, whole: Row, by: str) -> str:
    return f"{row[by] / whole[by] - 1:+.2%}"
