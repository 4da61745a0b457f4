"""Predicts Mist's published evaluation: each case is searched with the searcher of every compared
system, and the speedups stand beside the published ones.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import product
from typing import Any

from experiments.bench.bench import BUDGET, TERM_WORDS, Bench, Found
from experiments.bench.cases import FAMILIES, Case, case_of, clusters, evaluation, measured, sizes
from experiments.bench.remembered import answers
from experiments.cli.commandline import DONE, NO_ANSWER
from experiments.evaluation.speedup_breakdown import Summary, difference_in_parts
from experiments.pages.charts import Bars
from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row, number, table
from mistlab.engines.mistlab import MIST, MISTLAB
from mistlab.job.search import Budget
from mistlab.plan.named_spaces import space_of
from mistlab.plan.plan_words import plan_line
from mistlab.plan.workload import Attention

# Searches one case of the evaluation with the searcher of each compared system: iteration times,
# plans, and what takes the time.


OURS = "mist"
# The searchers that stand for the compared systems; each searches the space that has its name.
BASELINES = {
    "megatron:published": "Megatron-LM as published",
    "deepspeed:published": "DeepSpeed as published",
    "megatron": "Megatron-LM, tuned",
    "deepspeed": "DeepSpeed, tuned",
    "aceso": "Aceso",
    "aceso:unfused": "Aceso, attention written out",
}
# Aceso is searched without fused attention, since its runtime is a Megatron-LM on torch 1.12, which
# had none.
UNFUSED = "aceso:unfused"
# The features in which Mist's published runtime differs from this project's. Each is also put into
# this project's runtime by itself, to see its effect.
THEIRS = {
    "its sends": replace(MISTLAB, sends=MIST.sends),
    "its kernels": replace(MISTLAB, kernels=MIST.kernels),
    "its step": replace(MISTLAB, step_moved={**MISTLAB.step_moved, **MIST.step_moved}),
}
# Aceso's search ends after this many plans; more plans changed an iteration time by 2 % at most.
ACESO_PLANS, QUICK_ACESO_PLANS = 1000, 200


def searched(case: Case, *, quick: bool, seed: int) -> dict[str, Any]:
    """The result row of a case: the plan of each compared system, and its iteration time."""
    bench = Bench.of(case.problem())
    names = [name for name in (OURS, *BASELINES) if name != UNFUSED]
    best = {name: _found(bench, name, quick=quick, seed=seed) for name in names}
    benches = dict.fromkeys(best, bench)
    if case.attention == "flash":
        benches[UNFUSED] = Bench.of(replace(case, attention="math").problem())
        best[UNFUSED] = _found(benches[UNFUSED], "aceso", quick=quick, seed=seed)
    else:
        benches[UNFUSED], best[UNFUSED] = bench, best["aceso"]
    ours = best[OURS]
    seconds = {name: one.seconds if one else None for name, one in best.items()}
    played = {name: benches[name].played_s(one.plan) if one else None for name, one in best.items()}
    return {
        "case": case.name,
        **asdict(case),
        "gpus": case.num_gpus,
        "seconds": seconds,
        "played_s": played,
        "over": _ratios(seconds),
        "over_played": _ratios(played),
        "by_published_runtime_s": bench.run_by_s(MIST, ours.plan) if ours else None,
        "with_published_s": {
            what: bench.run_by_s(engine, ours.plan) if ours else None
            for what, engine in THEIRS.items()
        },
        "published_over": dict(measured(case)),
        "terms_s": {name: asdict(one.terms) for name, one in best.items() if one},
        "plans": {name: plan_line(one.plan) for name, one in best.items() if one},
        "timing": {name: one.result.wall_s for name, one in best.items() if one},
    }


def _found(bench: Bench, name: str, *, quick: bool, seed: int) -> Found | None:
    plans = QUICK_ACESO_PLANS if quick else ACESO_PLANS
    budget = Budget(evaluations=plans) if name == "aceso" else BUDGET
    return bench.found(name, space_of(name), budget=budget, seed=seed)


def _ratios(seconds: Mapping[str, float | None]) -> dict[str, float | None]:
    """For each baseline, its iteration time divided by that of this project's plan."""
    ours = seconds[OURS]
    return {
        name: None if ours is None or (other := seconds[name]) is None else other / ours
        for name in BASELINES
    }


# Searches every case of the published evaluation, and puts the speedups beside the published ones.


QUICK_SIZES = 2
HEADS = {
    "megatron:published": "Megatron",
    "deepspeed:published": "DeepSpeed",
    "megatron": "Megatron tuned",
    "deepspeed": "DeepSpeed tuned",
    "aceso": "Aceso",
    "aceso:unfused": "Aceso unfused",
}
PUBLISHED = "megatron:published"
AS_PUBLISHED = ("megatron:published", "deepspeed:published")
FIGURES = ("mean", "least", "most", "mean_played", "mean_there", "most_there")


def evaluated(options: argparse.Namespace) -> int:
    """Predict Mist's published evaluation: speedups over two kinds of baselines, case by case.

    The cases are three model families in five sizes on L4 and A100, with fused attention; GPT also
    with unfused attention. Megatron-LM and DeepSpeed are searched twice: as published, with every
    block recomputed, and as a user would tune them. Aceso is searched on its own engine. The plan
    that each search finds is predicted by the closed form and played by the event simulator.
    """
    cases = _cases(options)
    study = Study.begin("end_to_end", options)
    search = partial(searched, quick=options.quick, seed=options.seed)
    study.add_all(row for _, row in answers(study, search, cases, "cases"))
    status = DONE if all(row["seconds"][OURS] for row in study.rows) else NO_ANSWER
    return study.end(report(study.rows), status)


def _cases(options: argparse.Namespace) -> list[Case]:
    """The cases of the evaluation, cluster by cluster: first those with fused attention, then GPT
    models with unfused attention.
    """
    quick = options.quick
    chosen = sizes()[:QUICK_SIZES] if quick else sizes()
    families = FAMILIES[:1] if quick else FAMILIES
    attentions: Sequence[tuple[Attention, Sequence[str]]] = (
        ("flash", families),
        ("math", FAMILIES[:1]),
    )
    return [
        case_of(cluster, family, size, attention)
        for cluster in clusters(options.hardware)
        for attention, of_attention in attentions
        for size, family in product(chosen, of_attention)
        if not (quick and attention == "math")
    ]


def report(rows: Sequence[Row]) -> Report:
    """The report on all cases, made from their result rows."""
    summaries = [*_summaries(rows)]
    return Report(
        title="The evaluation: over baselines as published, and over tuned ones",
        words=[
            (
                "How many times as long as ours each system takes, as predicted; in brackets as "
                "played by the event simulator. *There* our plan is run by the published runtime, "
                "as its measured plans were. *Measured* is what was published; it belongs to the "
                "baselines as published."
            ),
            IN_A_FILE,
            _cases_table(rows),
            "On average over the cases:",
            _summaries_table(summaries),
            (
                "Where the difference lies: what each baseline takes longer in a term than ours, "
                "as a share of our iteration, on average over the cases."
            ),
            _terms_table(rows),
            (
                "Where our runtime and the published one differ: how much longer our plan takes "
                "with one thing of the published runtime in place of ours, and with all of them, "
                "on average over the cases."
            ),
            _runtimes_table(rows),
        ],
        summary={"averages": summaries},
        pictures=[*_pictures(rows)],
    )


def _cases_table(rows: Sequence[Row]) -> str:
    there = ("our plan there: Megatron", "DeepSpeed")
    head = ["case", "GPUs", "ours s", *HEADS.values(), *there, "measured: Megatron", "DeepSpeed"]
    return table(
        head,
        [
            [
                row["case"],
                row["gpus"],
                number(row["seconds"][OURS], ".2f"),
                *(_both(row, name) for name in HEADS),
                *(number(_there(row, name), ".3f") for name in AS_PUBLISHED),
                number(row["published_over"].get("megatron"), ".3f"),
                number(row["published_over"].get("deepspeed"), ".3f"),
            ]
            for row in rows
        ],
    )


def _both(row: Row, name: str) -> str:
    if row["over"][name] is None:
        return "-"
    return f"{row['over'][name]:.3f} ({row['over_played'][name]:.3f})"


def _there(row: Row, name: str) -> float | None:
    """The iteration time of a baseline's plan divided by that of this project's plan, both
    predicted for the published runtime; None if one of them has no plan.
    """
    seconds, ours_s = row["seconds"][name], row["by_published_runtime_s"]
    return None if seconds is None or ours_s is None else seconds / ours_s


def _summaries(rows: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """The average speedup over each baseline: by cluster and attention kernel, and over all
    cases.
    """
    published = {(p["hardware"], p["attention"]): p for p in evaluation()["averages"]}
    places = dict.fromkeys((row["hardware"], row["attention"]) for row in rows)
    for hardware, attention in (*places, (None, None)):
        rows_there = [
            row
            for row in rows
            if (row["hardware"], row["attention"]) == (hardware, attention) or hardware is None
        ]
        for name in BASELINES:
            ratios = [row["over"][name] for row in rows_there if row["over"][name]]
            played = [row["over_played"][name] for row in rows_there if row["over_played"][name]]
            if not ratios:
                continue
            there = Summary.of(
                [one for row in rows_there if (one := _there(row, name)) is not None]
            )
            known = published.get((hardware, attention), {}) if name == PUBLISHED else {}
            if name.startswith("aceso") and hardware is None:
                known = evaluation()["aceso"]
            yield {
                "hardware": hardware,
                "attention": attention,
                "over": name,
                "cases": len(ratios),
                **Summary.of(ratios).mapping(),
                "mean_played": Summary.of(played).mean,
                **{f"{key}_there": value for key, value in there.mapping().items()},
                "published_mean": known.get("mean"),
                "published_most": known.get("most"),
            }


def _summaries_table(summaries: Sequence[Mapping[str, Any]]) -> str:
    head = (
        *("over", "where", "cases", "mean", "least", "most", "played"),
        *("there: mean", "most", "published: mean", "most"),
    )
    return table(
        head,
        [
            (
                BASELINES[summary["over"]],
                " ".join(filter(None, (summary["hardware"], summary["attention"]))) or "all",
                summary["cases"],
                *(number(summary[name], ".3f") for name in FIGURES),
                number(summary["published_mean"], ".2f"),
                number(summary["published_most"], ".2f"),
            )
            for summary in summaries
        ],
    )


def _terms_table(rows: Sequence[Row]) -> str:
    parts = [
        (name, difference_in_parts([(r["terms_s"][OURS], r["terms_s"][name]) for r in having_both]))
        for name in BASELINES
        if (having_both := [row for row in rows if {OURS, name} <= row["terms_s"].keys()])
    ]
    return table(
        ["baseline", *TERM_WORDS.values()],
        [
            [BASELINES[name], *(f"{shares[term]:+.1%}" for term in TERM_WORDS)]
            for name, shares in parts
        ],
    )


def _runtimes_table(rows: Sequence[Row]) -> str:
    places = dict.fromkeys((row["hardware"], row["attention"]) for row in rows)
    lines = []
    for hardware, attention in places:
        pairs = [
            (
                row["seconds"][OURS],
                {**row["with_published_s"], "all": row["by_published_runtime_s"]},
            )
            for row in rows
            if (row["hardware"], row["attention"]) == (hardware, attention) and row["seconds"][OURS]
        ]
        longer = [
            f"{Summary.of([theirs[what] / ours_s for ours_s, theirs in pairs]).mean - 1:+.1%}"
            for what in (*THEIRS, "all")
            if pairs
        ]
        lines += [(f"{hardware} {attention}", *longer)] if pairs else []
    return table(("where", *THEIRS, "all"), lines)


def _pictures(rows: Sequence[Row]) -> Iterator[Bars]:
    for hardware in dict.fromkeys(row["hardware"] for row in rows):
        of_hardware = [row for row in rows if row["hardware"] == hardware]
        short = hardware.partition("-")[0]
        yield Bars(
            name=f"end_to_end-{short}",
            caption=f"Times as long as ours on {hardware}, predicted.",
            groups=[row["case"].partition(" ")[2] for row in of_hardware],
            series={
                HEADS[name]: [row["over"][name] for row in of_hardware]
                for name in ("megatron:published", "megatron", "aceso", "aceso:unfused")
            },
            y="times as long as ours",
            marks={"ours": 1.0},
        )
