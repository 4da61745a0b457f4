"""How far predictions of serving runs lie from measurements that the fit never saw."""

import argparse
from collections import defaultdict
from collections.abc import Iterator, Mapping
from itertools import combinations
from typing import Any

import numpy as np

from experiments.pages.study import Report, Study
from experiments.pages.tables import table
from experiments.serve.serving_fit import OUTCOMES, LeftOut, left_out, rows_to_fit
from mistlab.core.arrays import Floats

NOUNS = {
    "token_s": "time per output token",
    "first_s": "time to first token",
    "output_per_s": "output tokens a second",
    "requests_per_s": "requests a second",
}
# Layouts are ranked where their rates differ by more.
CLEARLY = 0.05
QUICK_ROWS = 400


def serving_errors(options: argparse.Namespace) -> int:
    """Errors of predicted serving runs that were left out of the fit: by configuration, by GPU and
    by model, the coverage of bounds, and how layouts of equal GPUs and load are ranked."""
    study = Study.begin("serving_errors", options)
    rows = rows_to_fit(options.tables)
    if options.quick:
        rows = rows[:: max(1, len(rows) // QUICK_ROWS)]
    summary: dict[str, Any] = {"rows": len(rows)}
    errors, ranks = [], []
    for by in options.leave_out:
        apart = left_out(rows, by)
        for row in error_rows(by, apart):
            study.add(row)
            errors.append(row)
        rank = ranking(apart)
        summary[f"ranking, {by} left out"] = rank
        ranks.append([by, *rank.values()])
    head = ["left out", "kind", "outcome", "rows", "median error", "inside bounds"]
    lines = [
        [row[key] for key in ("left_out", "kind", "outcome", "rows")] + _shares(row)
        for row in errors
    ]
    rank_head = ["left out", "groups", "pairs", "right order", "pick over best"]
    about = (
        f"{len(rows)} measured runs. Each is predicted by constants fitted to all runs but those "
        "of its group. Bounds are the 5 and 95 % quantiles of the other groups' errors."
    )
    of_ranks = (
        "Layouts of equal GPUs and load, of one model, precision, GPU and engine, ranked by their "
        "requests a second (derived from both times): pairs that differ by over 5 % in the right "
        "order, and the measured rate of the best over that of the layout predicted best."
    )
    words = [about, table(head, lines), of_ranks, table(rank_head, ranks)]
    return study.end(Report(title="Serving: errors of predictions", words=words, summary=summary))


def _shares(row: Mapping[str, Any]) -> list[str]:
    return [f"{100 * row['median_error']:.1f} %", f"{100 * row['coverage']:.0f} %"]


def error_rows(by: str, apart: LeftOut) -> Iterator[dict[str, Any]]:
    """The median errors of left-out rows by kind of run and outcome, with the share inside the
    bounds that the outcome's other groups give."""
    kinds = np.array([row.kind for row in apart.rows])
    for kind in dict.fromkeys(kinds.tolist()):
        for outcome in OUTCOMES:
            logs = apart.logs(outcome, kinds == kind)
            if len(logs) and not (outcome == "requests_per_s" and kind != "closed loop"):
                yield {
                    "left_out": by,
                    "kind": kind,
                    "outcome": NOUNS[outcome],
                    "rows": len(logs),
                    "median_error": round(float(np.median(np.abs(np.exp(-logs) - 1))), 4),
                    "coverage": round(apart.coverage(outcome), 3),
                }


def ranking(apart: LeftOut) -> dict[str, float]:
    """How layouts of equal GPUs and load are ranked: groups, pairs that clearly differ, the share
    of them in the right order, and the mean of the best rate over that of the pick."""
    pairs = right = 0
    regrets = []
    groups = list(groups_of_layouts(apart))
    for measured, predicted in groups:
        for first, second in combinations(range(len(measured)), 2):
            ratio = measured[first] / measured[second]
            if max(ratio, 1 / ratio) > 1 + CLEARLY:
                pairs += 1
                right += (ratio > 1) == (predicted[first] > predicted[second])
        regrets.append(float(np.max(measured) / measured[int(np.argmax(predicted))]))
    return {
        "groups": len(groups),
        "pairs": pairs,
        "right_order": round(right / max(pairs, 1), 3),
        "pick_over_best": round(float(np.mean(regrets)) if regrets else float("nan"), 3),
    }


def groups_of_layouts(apart: LeftOut) -> Iterator[tuple[Floats, Floats]]:
    """Measured and predicted rates of layouts of equally many GPUs under one load; of runs of a
    layout on several dates and versions the geometric mean."""
    measured, predicted = apart.measured["requests_per_s"], apart.predicted["requests_per_s"]
    groups: dict[Any, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for place, row in enumerate(apart.rows):
        if row.kind != "closed loop" or row.prefill or not np.isfinite(measured[place]):
            continue
        layout = row.layout
        same = (layout.model.name, layout.gpu, layout.engine, layout.weights)
        load = (row.gpus, round(row.prompt), round(row.output), row.in_flight)
        groups[same + load][layout.tp, layout.pp, layout.ep, layout.dp].append(place)
    for layouts in groups.values():
        if len(layouts) > 1:
            yield (
                np.array([np.exp(np.mean(np.log(measured[runs]))) for runs in layouts.values()]),
                np.array([np.exp(np.mean(np.log(predicted[runs]))) for runs in layouts.values()]),
            )
