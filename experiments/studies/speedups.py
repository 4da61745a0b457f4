"""The predicted speedups of search space ``mist`` over the grids of Megatron-LM and DeepSpeed, for
each problem.
"""

import argparse
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from experiments.bench.bench import BUDGET, Bench, Entry
from experiments.bench.cases import (
    ATTENTIONS,
    FAMILIES,
    Case,
    case_of,
    clusters,
    evaluation,
    measured,
    sizes,
)
from experiments.cli.commandline import progress
from experiments.cli.live import Live
from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table
from mistlab.job.search import Problem
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan_words import plan_words
from searchers.savings import contains

GRIDS = ("megatron", "deepspeed")
# How many model sizes a quick run uses.
QUICK = 2


def speedups(options: argparse.Namespace) -> int:
    """Compare predicted and simulated speedups over the grids of Megatron-LM and DeepSpeed with
    published ones.

    Each workload of the published evaluation is searched by mist in its space, and all plans of the
    two baselines' spaces are predicted for their engines. The event simulator plays the best plan
    of each. If the best plan of Megatron's grid is not possible in space mist, mist also searches
    space wide, and the row says so. No constant is fitted to the published figures.
    """
    cases = _cases(options)
    study = Study.begin("speedups", options)
    for case in cases:
        study.add(_row(case, options.seed))
        progress(" | ".join(_cells(study.rows[-1])))
    averages = list(_averages(study.rows, evaluation()["averages"]))
    return study.end(_report(study.rows, averages))


def _cases(options: argparse.Namespace) -> list[Case]:
    first = 1 if options.quick else None
    return [
        case_of(cluster, family, size, attention)
        for cluster in clusters(options.hardware)
        for size in sizes()[: QUICK if options.quick else None]
        for family in FAMILIES[:first]
        for attention in ATTENTIONS[:first]
    ]


def _row(case: Case, seed: int) -> Row:
    problem = case.problem()
    bench = Bench.of(problem)

    def searched(searcher: str, space: str) -> Entry:
        live = Live(searcher=searcher)
        return bench.played(bench.search(searcher, space_of(space), BUDGET, seed, live))

    entries = {"mist": searched("mist", "mist")}
    entries |= {name: searched(name, name) for name in GRIDS}
    is_outside = _is_outside(problem, entries["megatron"])
    if is_outside:
        entries["wide"] = searched("mist", "wide")
    published = measured(case)
    return {
        "hardware": case.hardware,
        "model": case.model,
        "attention": case.attention,
        "gpus": case.num_gpus,
        **{f"{name}_s": _predicted_s(entry) for name, entry in entries.items()},
        **{f"{name}_played_s": entry.simulated_s for name, entry in entries.items()},
        **{f"over_{name}": _over(entries, name, "mist", _predicted_s) for name in GRIDS},
        **{f"over_{name}_played": _over(entries, name, "mist", _played_s) for name in GRIDS},
        "grid_is_outside": is_outside,
        "wide_over_megatron": _over(entries, "megatron", "wide", _predicted_s),
        "wide_over_megatron_played": _over(entries, "megatron", "wide", _played_s),
        **{f"measured_over_{name}": published.get(name) for name in GRIDS},
        "plans": {
            name: "; ".join(plan_words(entry.answer[0]))
            for name, entry in entries.items()
            if entry.answer is not None
        },
        "fits": entries["mist"].answer is not None,
    }


def _is_outside(problem: Problem, grid: Entry) -> bool:
    """Whether the best plan of a grid, run by this package's engine, is not in search space
    ``mist``. The ZeRO level of a single rank is ignored, since it shards nothing.
    """
    if grid.answer is None:
        return False
    plan, space = grid.answer[0], space_of("mist")
    stages = tuple(
        replace(stage, zero=min(space.zero)) if stage.data_parallel == 1 else stage
        for stage in plan.stages
    )
    return not contains(problem, space, replace(plan, engine=space.engine, stages=stages))


def _predicted_s(entry: Entry) -> float | None:
    return None if entry.answer is None else entry.answer[1].iteration_s


def _played_s(entry: Entry) -> float | None:
    return entry.simulated_s


def _over(
    entries: Mapping[str, Entry],
    slower: str,
    faster: str,
    seconds: Callable[[Entry], float | None],
) -> float | None:
    slower_s, faster_s = (
        seconds(entries[name]) if name in entries else None for name in (slower, faster)
    )
    return None if slower_s is None or faster_s is None else slower_s / faster_s


def _averages(rows: Sequence[Row], published: Sequence[Row]) -> Iterator[Row]:
    """The average speedup over Megatron-LM's grid: for each published average, over the same cases;
    and over all other cases.
    """
    for hardware in dict.fromkeys([*(row["hardware"] for row in rows), None]):
        for attention in (*ATTENTIONS, None):
            chosen = [
                row
                for row in rows
                if hardware in (None, row["hardware"]) and attention in (None, row["attention"])
            ]
            ratios = [row["over_megatron"] for row in chosen if row["over_megatron"]]
            played = [row["over_megatron_played"] for row in chosen if row["over_megatron_played"]]
            if ratios and (hardware is None) == (attention is None):
                known = [
                    p for p in published if (p["hardware"], p["attention"]) == (hardware, attention)
                ]
                yield {
                    "hardware": hardware,
                    "attention": attention,
                    "workloads": len(ratios),
                    "mean": sum(ratios) / len(ratios),
                    "least": min(ratios),
                    "most": max(ratios),
                    "mean_played": sum(played) / len(played),
                    "least_played": min(played),
                    "published_mean": known[0]["mean"] if known else None,
                    "published_most": known[0]["most"] if known else None,
                }


# The table columns with speedups: the heading of each, and its name in a result row.
RATIOS = (
    ("over Megatron", "over_megatron"),
    ("played", "over_megatron_played"),
    ("in wide", "wide_over_megatron"),
    ("measured", "measured_over_megatron"),
    ("over DeepSpeed", "over_deepspeed"),
    ("measured", "measured_over_deepspeed"),
)
HEAD = ("workload", "GPUs", "mist s", *(head for head, _ in RATIOS))


def _report(rows: Sequence[Row], averages: Sequence[Row]) -> Report:
    return Report(
        title="Speedups over the grids of Megatron-LM and DeepSpeed",
        words=[table(HEAD, map(_cells, rows)), *map(_sentence, averages)],
        summary={"averages": averages},
        pictures=[*_pictures(rows)],
    )


def _sentence(row: Row) -> str:
    of = " ".join(filter(None, (row["hardware"], row["attention"]))) or "all"
    beside = ""
    if row["published_mean"]:
        beside = f"; published {row['published_mean']}x, at most {row['published_most']}x"
    return (
        f"Over Megatron-LM, {of}: {row['mean']:.2f}x on average, {row['least']:.2f}x to "
        f"{row['most']:.2f}x; played {row['mean_played']:.2f}x, {row['least_played']:.2f}x at "
        f"least{beside}."
    )


def _pictures(rows: Sequence[Row]) -> Iterator[Bars]:
    """A picture for each kind of hardware and of attention."""
    for where in dict.fromkeys((row["hardware"], row["attention"]) for row in rows):
        chosen = [row for row in rows if (row["hardware"], row["attention"]) == where]
        hardware, attention = where
        yield Bars(
            name=f"speedups-{hardware.partition('-')[0]}-{attention}",
            caption=f"Predicted speedups over the grids, {hardware}, {attention} attention.",
            groups=[row["model"] for row in chosen],
            series={
                "over Megatron-LM": [row["over_megatron"] for row in chosen],
                "over DeepSpeed": [row["over_deepspeed"] for row in chosen],
            },
            y="speedup",
            marks={"equal": 1.0},
        )


def _workload(row: Row) -> str:
    return f"{row['hardware'].split('-')[0]} {row['model']}, {row['attention']}"


def _cells(row: Row) -> list[str]:
    ratios = (number(row[name], ".2f", "x") for _, name in RATIOS)
    return [_workload(row), str(row["gpus"]), number(row["mist_s"], ".2f"), *ratios]
