"""The command ``predict_serving``: predicts the rows of tables of measured serving runs; prints
JSON or errors.
"""

import argparse
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.cli.commandline import batch_status, print_json, progress
from experiments.pages.tables import table
from experiments.serve.row_times import RowModel, RowTimes
from experiments.serve.served_rows import RefusedRow, ServedRow, served_rows
from experiments.serve.serving_fit import OUTCOMES, measured_of, outcomes_of
from mistlab.core.values import InputError
from mistlab.serving.engine_constants import bounds_of, fitted_constants

# The names that answers use for the predicted figures.
NAMES = {
    "first_s": "ttft_s",
    "token_s": "tpot_s",
    "requests_per_s": "requests_per_s",
    "output_per_s": "output_tokens_per_s_per_gpu",
}


def predict_serving(options: argparse.Namespace) -> int:
    """Predict measured serving runs: each row of a table is a layout (parallel degrees) and its
    load.

    A table has closed loops (a column concurrency), offline throughput, or runs at a request_rate
    (docs/reference/serving.md lists the columns). Measured columns are only used to compare them
    with the prediction: without --json, the median errors by table are printed. Rows with
    speculative decoding or prefix caching are refused, since neither is modelled.
    """
    unreadable, is_answered = 0, False
    for path in options.tables:
        try:
            rows = list(served_rows(path))
        except InputError as error:
            progress(f"error: {error}")
            unreadable += 1
            continue
        good = [row for row in rows if isinstance(row, ServedRow)]
        times = row_times_of(good)
        is_answered |= bool(good)
        if options.json:
            for answer in answers_of(path, rows, good, times):
                print_json(answer)
        else:
            print("\n".join(error_lines(path, rows, good, times)))
    return batch_status(
        len(options.tables), unreadable, all_answered=is_answered and not unreadable
    )


def row_times_of(rows: Sequence[ServedRow]) -> RowTimes:
    """The predicted times of rows with the constants in the catalogue."""
    if not rows:
        empty = np.zeros(0)
        return RowTimes(
            first_s=empty,
            token_s=empty,
            requests_per_s=empty,
            output_per_s=empty,
            fits=np.zeros(0, dtype=bool),
        )
    return RowModel(rows).times(fitted_constants().of([row.run for row in rows]))


def answers_of(
    path: Path, rows: Sequence[ServedRow | RefusedRow], good: Sequence[ServedRow], times: RowTimes
) -> Iterator[dict[str, Any]]:
    """The answers to the rows of a table as plain values, in order."""
    number_of = {row.number: index for index, row in enumerate(good)}
    outcomes = outcomes_of(times)
    for row in rows:
        where = {"file": str(path), "row": row.number}
        if isinstance(row, RefusedRow):
            yield {**where, "error": row.problem}
        else:
            index = number_of[row.number]
            values = {name: float(outcomes[name][index]) for name in OUTCOMES}
            yield {**where, **answer_of(row, values, fits=bool(times.fits[index]))}


def answer_of(row: ServedRow, values: Mapping[str, float], *, fits: bool) -> dict[str, Any]:
    """The answer to a row: each predicted figure with its bounds, whether the layout fits in
    memory, and the assumptions made.
    """
    answer: dict[str, Any] = {}
    for outcome, name in NAMES.items():
        value = values[outcome] / (row.gpus if outcome == "output_per_s" else 1)
        bounds = bounds_of(row.run, outcome)
        answer[name] = value
        answer[f"{name}_low"], answer[f"{name}_high"] = value * bounds.low, value * bounds.high
    notes = list(row.notes)
    if not fits:
        notes.append(
            "memory is short: the weights and one request do not fit; times as if one request did"
        )
    return {**answer, "fits": fits, "notes": notes}


def error_lines(
    path: Path, rows: Sequence[ServedRow | RefusedRow], good: Sequence[ServedRow], times: RowTimes
) -> Iterator[str]:
    """The median prediction error of a table's rows for each predicted figure, and the reasons why
    other rows were refused, as lines.
    """
    refused = [row for row in rows if isinstance(row, RefusedRow)]
    yield f"{path}: {len(good)} of {len(rows)} rows answered"
    for problem in dict.fromkeys(row.problem for row in refused):
        yield f"  refused: {problem}"
    if not good:
        return
    outcomes, measured = outcomes_of(times), measured_of(good)
    lines = []
    for name in OUTCOMES:
        is_known = np.isfinite(measured[name])
        if is_known.any():
            ratio = outcomes[name][is_known] / measured[name][is_known]
            error = float(np.median(np.abs(ratio - 1)))
            lines.append([NAMES[name], int(is_known.sum()), f"{100 * error:.1f} %"])
    if lines:
        yield table(["outcome", "rows measured", "median error"], lines)
