"""Seesaw's evaluation: what layouts that change bring over layouts that stay."""

import argparse
import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import geometric_mean, mean
from typing import Any

from experiments.pages.charts import Bars, Lines
from experiments.pages.study import Report, Study
from experiments.pages.tables import Row
from experiments.serve.seesaw_cases import PlayedCase, SeesawCase, SeesawPopulation, population
from experiments.serve.seesaw_words import words_of
from mistlab.serving.changing import LayoutPair

# Requests of a quick run, and its cases.
QUICK_REQUESTS, QUICK_EVERY = 150, 9
# Thresholds that are tried for the best pair.
THRESHOLDS = (0.0, 0.05, 0.2, 0.5)
# The case whose output lengths are varied, and these lengths.
VARIED = ("codellama-34b", "L4", 4, 1000)
OUTPUTS = (25, 50, 100, 200, 400, 800)
VARIED_REQUESTS = 400


def serving(options: argparse.Namespace) -> int:
    """Seesaw's evaluation: layouts that change between reading prompts and decoding, against the
    best layout that stays, by model, GPU and load; each ingredient left out once; when it pays.

    Every static layout and every pair of layouts that fits is played, request by request, so the
    best ones are the best of their spaces. The population is a file of the package.
    """
    study = Study.begin("serving", options)
    of = population()
    if options.quick:
        of = replace(of, requests=QUICK_REQUESTS)
    cases = list(of.cases())[:: QUICK_EVERY if options.quick else 1]
    for case in study.counted(cases, "cases"):
        study.add(case_row(case, options.seed))
    rows = [row for row in study.rows if row["fits"]]
    curve = varied_outputs(of, options.seed, quick=options.quick)
    summary = summary_of(rows)
    summary["gain by output tokens"] = {str(tokens): gain for tokens, gain in curve}
    return study.end(
        Report(
            title="Serving: layouts that change (Seesaw)",
            words=words_of(study.rows, rows, summary, curve),
            summary=summary,
            pictures=[
                Bars(
                    name="serving-gains",
                    caption="Requests a second over the best static layout, by case.",
                    groups=[row["case"] for row in rows],
                    series={
                        "best static layout, same batching": [row["gain"] for row in rows],
                        "best static layout, prompts first": [
                            row["gain_over_prompts_first"] for row in rows
                        ],
                    },
                    y="gain over",
                    marks={"equal": 1.0},
                ),
                Lines(
                    name="serving-outputs",
                    caption=f"Gain by mean output tokens ({VARIED[0]} on {VARIED[2]} {VARIED[1]}).",
                    curves={"": curve},
                    x="output tokens",
                    y="gain",
                ),
            ],
        )
    )


def case_row(case: SeesawCase, seed: int) -> dict[str, Any]:
    """A case, played in all ways; ``fits`` is false where no layout holds its longest request."""
    row: dict[str, Any] = {
        "case": case.name,
        "model": case.model,
        "gpu": case.gpu,
        "gpus": case.count,
        "load": case.load,
    }
    played = PlayedCase(case, seed)
    if not played.clocks:
        return {**row, "fits": False}
    static, first = played.static(mixes=True), played.static(mixes=False)
    stays = max(static, key=lambda layout: static[layout])
    prompts_first = max(first.values())
    rates = {pair: played.played(pair).requests_per_s for pair in played.pairs()}
    best = max(rates, key=lambda pair: rates[pair])
    estimates = {pair: played.estimated(pair) for pair in rates}
    picked = max(estimates, key=lambda pair: estimates[pair])
    tuned = {share: played.played(best, threshold=share) for share in THRESHOLDS}
    share = max(tuned, key=lambda one: tuned[one].requests_per_s)
    run = tuned[share]
    rate = max(run.requests_per_s, rates[best])
    same = [rates[pair] for pair in rates if pair.reading == pair.decoding]
    return {
        **row,
        "fits": True,
        "static": stays.text,
        "static_per_s": static[stays],
        "prompts_first_per_s": prompts_first,
        "pair": best.text,
        "threshold": share,
        "pair_per_s": rate,
        "gain": rate / static[stays],
        "gain_over_prompts_first": rate / prompts_first,
        "changes": run.changes,
        "reading_s": run.reading_s,
        "decoding_s": run.decoding_s,
        "changing_s": run.changing_s,
        "copying_s": run.copying_s,
        "without_resharding": max(same) / static[stays],
        "without_tiers": _without_tiers(played, best) / static[stays],
        "without_thresholds": played.played(best, threshold=1.0).requests_per_s / static[stays],
        "closed_form_pick_over_best": rates[best] / rates[picked],
        "closed_form_ratio": estimates[best] / rates[best],
    }


def _without_tiers(played: PlayedCase, pair: LayoutPair) -> float:
    """Requests a second if what waits has to fit where it is decoded: the host's tier is no larger
    than the GPUs'."""
    changing = played.changing(pair)
    tokens = min(changing.gpu_tokens, changing.host_tokens)
    return played.played(pair, host_tokens=tokens).requests_per_s


def varied_outputs(of: SeesawPopulation, seed: int, *, quick: bool) -> list[tuple[int, float]]:
    """The gain of the best pair over the best static layout, by mean tokens of output."""
    model, gpu, count, prompt = VARIED
    limits = replace(of, requests=QUICK_REQUESTS if quick else VARIED_REQUESTS)
    curve = []
    for output in OUTPUTS[:: 3 if quick else 1]:
        case = SeesawCase(
            model=model,
            gpu=gpu,
            count=count,
            load="varied",
            prompt=prompt,
            output=output,
            population=limits,
        )
        played = PlayedCase(case, seed)
        stays = max(played.static(mixes=True).values())
        changes = max(played.played(pair).requests_per_s for pair in played.pairs())
        curve.append((output, changes / stays))
    return curve


def summary_of(rows: Sequence[Row]) -> dict[str, Any]:
    """Gains over all cases, by GPU and by load, and without each ingredient."""
    gains = [row["gain"] for row in rows]
    first = [row["gain_over_prompts_first"] for row in rows]
    found: dict[str, Any] = {
        "cases": len(rows),
        "gain": {"mean": mean(gains), "least": min(gains), "most": max(gains)},
        "gain over prompts first": {"mean": mean(first), "least": min(first), "most": max(first)},
    }
    for key in ("gpu", "load", "model"):
        for value in dict.fromkeys(row[key] for row in rows):
            chosen = [row["gain"] for row in rows if row[key] == value]
            found[f"gain, {value}"] = geometric_mean(chosen)
    for name in ("without_resharding", "without_tiers", "without_thresholds"):
        found[name.replace("_", " ")] = mean(row[name] for row in rows)
    ratios = [abs(math.log(row["closed_form_ratio"])) for row in rows]
    found["closed form over played, median"] = math.exp(sorted(ratios)[len(ratios) // 2])
    found["closed form's pick over the best"] = mean(
        row["closed_form_pick_over_best"] for row in rows
    )
    return found
