"""Tables of prediction errors for single measured runs, and for groups of them: by table, model,
number of GPUs and parallel degrees.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from experiments.pages.tables import aligned, number, yes_no
from experiments.runs.judged import GroupErrors, Judged, errors_of, groups_of, judged
from experiments.runs.run_sureness import RunAnswer
from experiments.runs.runs_table import TableRow, count_of

# The figures that a table shows for a group of runs, such as mean errors, each with its heading and
# number format.
ERROR_FORMS = {
    "mean": ("mean_time", ".1%"),
    "median": ("median_time", ".1%"),
    "bias": ("bias", "+.1%"),
    "in bounds": ("inside", ".0%"),
    "memory": ("mean_memory", ".1%"),
}
HEAD = ("", "rows", "refused", *ERROR_FORMS)
COLUMNS = ("model", "gpus", "tp", "pp")
# If a table has more runs than this, its single runs are not shown, only groups of them.
MOST_ROWS = 40
ROW_HEAD = (
    *("row", "model", "gpus", "tp", "pp", "measured s", "predicted s", "90 % within", "error"),
    *("measured GiB", "predicted GiB", "fits"),
)


def error_lines(rows: Sequence[tuple[TableRow, RunAnswer]]) -> list[str]:
    """The tables of prediction errors, and the reasons why rows were refused, as lines."""
    every = [judged(row, answer) for row, answer in rows]
    groups = [
        (one.name, str(one.rows), str(one.refused), *error_cells(one)) for one in _groups(every)
    ]
    lines = aligned([HEAD, *groups])
    predicted = [one for one in every if one.answer.prediction is not None]
    if 0 < len(predicted) <= MOST_ROWS:
        lines += ["", *aligned([ROW_HEAD, *map(_row_cells, predicted)])]
    return [*lines, *_changed(predicted), *_impossible(predicted), *_refusals(every)]


def _row_cells(run: Judged) -> tuple[str, ...]:
    """The cells of a row: the run's measured time and memory peak, and the predicted ones."""
    prediction = run.answer.prediction
    assert prediction is not None
    return (
        str(run.row.number),
        *(run.row.cells.get(column, "") for column in COLUMNS),
        number(run.measured_s, ".3f", none=""),
        number(run.predicted_s, ".3f", none=""),
        f"{prediction.iteration_s_low:.3f} to {prediction.iteration_s_high:.3f}",
        number(run.time_error, "+.1%", none=""),
        number(run.measured_gib, ".1f", none=""),
        number(run.predicted_gib, ".1f", none=""),
        yes_no(prediction.fits),
    )


def _groups(every: Sequence[Judged]) -> Iterator[GroupErrors]:
    for file, rows in groups_of(every, lambda run: run.row.file):
        yield errors_of(Path(file).name, rows)
        possible = [run for run in rows if not run.impossible]
        if len(possible) < len(rows):
            yield errors_of("  without impossible rows", possible)
        for column in COLUMNS:
            for value, group in groups_of(rows, lambda run: run.row.cells.get(column, "")):  # noqa: B023 (used at once)
                yield errors_of(f"  {column} {value or '(empty)'}", group)


def error_cells(group: GroupErrors) -> list[str]:
    """The cells with the prediction errors of a group of runs; empty if it has no measurements."""
    return [number(getattr(group, name), form, none="") for name, form in ERROR_FORMS.values()]


def _changed(predicted: Sequence[Judged]) -> Iterator[str]:
    """A line on the rows that were predicted with another batch size than they state, because the
    stated size is not a multiple of the micro-batches of all replicas.
    """
    changed = [
        f"{run.row.where} ({batch} as {run.answer.sequences})"
        for run in predicted
        if (batch := count_of(run.row.cells, "global_batch")) not in (None, run.answer.sequences)
    ]
    if changed:
        more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
        yield (
            f"global_batch is not a multiple of micro_batch x dp, rounded up: {changed[0]}{more}"
        )


def _impossible(predicted: Sequence[Judged]) -> Iterator[str]:
    """A line for each measured figure that is impossible on the GPUs of its row."""
    for run in predicted:
        yield from (f"impossible: {run.row.where}: {reason}" for reason in run.impossible)


def _refusals(every: Sequence[Judged]) -> Iterator[str]:
    """A line for each reason why rows were refused, with the number of the first row that was
    refused for it.
    """
    reasons: dict[str, list[str]] = {}
    for run in every:
        if run.answer.refused:
            where, _, reason = run.answer.refused.partition(": ")
            reasons.setdefault(reason, []).append(where)
    for reason, places in reasons.items():
        more = f" and {len(places) - 1} more" if len(places) > 1 else ""
        yield f"refused: {places[0]}{more}: {reason}"
