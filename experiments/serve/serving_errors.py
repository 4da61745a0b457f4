"""The errors of serving predictions for measured runs to which the constants were not fitted."""

import argparse
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np

from experiments.pages.charts import Bars
from experiments.pages.study import Report, Study
from experiments.pages.tables import table
from experiments.serve.served_rows import UNSAID
from experiments.serve.serving_fit import OUTCOMES, LeftOut, left_out, rows_to_fit
from mistlab.core.arrays import Floats

NOUNS = {
    "token_s": "time per output token",
    "first_s": "time to first token",
    "output_per_s": "output tokens a second",
    "requests_per_s": "requests a second",
}
# Two layouts are ranked only if their measured rates differ by more than this share.
CLEARLY = 0.05
QUICK_ROWS = 400


def serving_errors(options: argparse.Namespace) -> int:
    """Measure the errors of serving predictions on rows that the fit left out: by configuration,
    GPU and model; how often bounds hold; and how well layouts with equal GPUs and loads are ranked.
    """
    study = Study.begin("serving_errors", options)
    rows = rows_to_fit(options.tables)
    if options.quick:
        rows = rows[:: max(1, len(rows) // QUICK_ROWS)]
    summary: dict[str, Any] = {"rows": len(rows)}
    for by in options.leave_out:
        apart = left_out(rows, by)
        study.add_all(error_rows(by, apart))
        summary[f"ranking, {by} left out"] = ranking(apart)
    return study.end(report_of(study.rows, summary, options.leave_out))


def report_of(
    errors: Sequence[Mapping[str, Any]], summary: Mapping[str, Any], left: Sequence[str]
) -> Report:
    """The report on the errors of rows left out of the fit, for each way of grouping the rows."""
    ranks = [
        [by, *("-" if one is None else one for one in summary[f"ranking, {by} left out"].values())]
        for by in left
    ]
    head = ["kind", "outcome", "rows", *(f"{by} left out" for by in left)]
    lines = [
        [*(alike[0][name] for name in head[:3]), *map(_shares, alike)]
        for alike in zip(*(_of(errors, by) for by in left), strict=True)
    ]
    rank_head = ["left out", "in tables", "groups", "pairs", "right order", "pick over best"]
    rank_head += ["pairs of one version", "right order"]
    about = (
        f"{summary['rows']} measured runs. Each is predicted by constants fitted to all runs but "
        "those of its group: the median error and, in parentheses, the share inside the bounds, "
        "the 5 and 95 % quantiles of the other groups' errors."
    )
    of_ranks = (
        "Layouts of equal GPUs and load, of one model, precision, GPU and engine, ranked by their "
        "requests a second (derived from both times): pairs that differ by over 5 % in the right "
        "order, and the measured rate of the best over that of the layout predicted best. Some "
        "groups in tables have two layouts only by an empty `dp`, which is read as if it said the "
        "same as the other row: nothing is there to rank. Other pairs compare two versions of an "
        "engine as well as two layouts, so runs of one said version are also ranked apart."
    )
    paragraphs = [about, table(head, lines), of_ranks, table(rank_head, ranks)]
    picture = Bars(
        name="serving-errors",
        caption="Median errors of runs left out of the fit.",
        groups=[f"{row['kind']}: {row['outcome']}" for row in _of(errors, left[0])],
        series={by: [row["median_error"] for row in _of(errors, by)] for by in left},
        y="median error",
        log_y=True,
    )
    title = "Serving: errors of predictions"
    return Report(title=title, words=paragraphs, summary=summary, pictures=[picture])


def _of(errors: Sequence[Mapping[str, Any]], by: str) -> list[Mapping[str, Any]]:
    return [row for row in errors if row["left_out"] == by]


def _shares(row: Mapping[str, Any]) -> str:
    return f"{100 * row['median_error']:.1f}% ({100 * row['coverage']:.0f}%)"


def error_rows(by: str, apart: LeftOut) -> Iterator[dict[str, Any]]:
    """The median errors of rows left out of the fit, by kind of run and predicted figure; and how
    often bounds hold that were made from other groups.
    """
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


def ranking(apart: LeftOut) -> dict[str, float | None]:
    """How well layouts with equal GPUs and loads are ranked: the number of groups, the pairs that
    clearly differ, the share of pairs in the right order, and the mean of the best measured rate
    over the rate of the layout predicted to be best. Pairs are also counted among runs of the same
    stated version.
    """
    groups = list(groups_of_layouts(apart))
    regrets = [
        float(np.max(measured) / measured[int(np.argmax(predicted))])
        for measured, predicted in groups
    ]
    pairs, right = _pairs_in_order(groups)
    alike, alike_right = _pairs_in_order(groups_of_layouts(apart, is_one_version=True))
    return {
        "in_tables": len(list(_grouped(apart, is_as_told=True))),
        "groups": len(groups),
        "pairs": pairs,
        "right_order": _share(right, pairs),
        "pick_over_best": round(float(np.mean(regrets)), 3) if regrets else None,
        "pairs_of_one_version": alike,
        "right_order_of_one_version": _share(alike_right, alike),
    }


def _share(part: int, whole: int) -> float | None:
    return round(part / whole, 3) if whole else None


def _pairs_in_order(groups: Iterable[tuple[Floats, Floats]]) -> tuple[int, int]:
    """How many pairs of layouts have clearly different measured rates, and how many of these pairs
    are predicted in the right order.
    """
    pairs = right = 0
    for measured, predicted in groups:
        for first, second in combinations(range(len(measured)), 2):
            ratio = measured[first] / measured[second]
            if max(ratio, 1 / ratio) > 1 + CLEARLY:
                pairs += 1
                right += int((ratio > 1) == (predicted[first] > predicted[second]))
    return pairs, right


def groups_of_layouts(
    apart: LeftOut, *, is_one_version: bool = False
) -> Iterator[tuple[Floats, Floats]]:
    """The measured and predicted rates of layouts with equal GPUs under one load. If a
    layout was measured several times, the geometric mean counts: over all dates and versions or,
    with ``is_one_version``, over the dates of one version.
    """
    measured, predicted = apart.measured["requests_per_s"], apart.predicted["requests_per_s"]
    for layouts in _grouped(apart, is_one_version=is_one_version):
        yield (
            np.array([np.exp(np.mean(np.log(measured[runs]))) for runs in layouts]),
            np.array([np.exp(np.mean(np.log(predicted[runs]))) for runs in layouts]),
        )


def _grouped(
    apart: LeftOut, *, is_as_told: bool = False, is_one_version: bool = False
) -> Iterator[list[list[int]]]:
    """Yield each load that was measured with several layouts (parallel degrees), as a list of the
    indices of rows for each layout. Only rows with a fixed number of requests in flight count.

    With ``is_as_told``, an unstated degree of attention data parallelism makes a layout of its own.
    With ``is_one_version``, only rows of the same stated version of the engine are compared.
    """
    measured = apart.measured["requests_per_s"]
    groups: dict[Any, dict[Any, list[int]]] = defaultdict(lambda: defaultdict(list))
    for index, row in enumerate(apart.rows):
        if row.kind != "closed loop" or row.prefill or not np.isfinite(measured[index]):
            continue
        version = row.run.version if is_one_version else ""
        if version == UNSAID:
            continue
        layout = row.layout
        same = (layout.model.name, layout.gpu, layout.engine, layout.weights, version)
        load = (row.gpus, round(row.prompt), round(row.output), row.in_flight)
        dp = layout.dp if row.says_dp or not is_as_told else None
        groups[same + load][layout.tp, layout.pp, layout.ep, dp].append(index)
    yield from (list(layouts.values()) for layouts in groups.values() if len(layouts) > 1)
