"""Fits the constants of serving engines to measured runs, and predicts the rows that a fit leaves
out.

Axes: C rows.
"""

import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import permutations
from pathlib import Path

import numpy as np

from experiments.cli.commandline import progress
from experiments.serve.row_times import RowModel, RowTimes
from experiments.serve.served_rows import ServedRow, served_rows
from mistlab.calibration.serving_constants import SPREADS, MeasuredRuns, fitted_constants_of
from mistlab.core.arrays import Bools, Floats
from mistlab.serving.engine_constants import EngineConstants

# The number of folds of the cross-validation that leaves out whole configurations.
FOLDS = 5
OUTCOMES = ("token_s", "first_s", "output_per_s", "requests_per_s")
# The quantiles of errors on rows left out of the fit that become the bounds.
TAILS = (0.05, 0.95)
# If the time per token falls by more than this factor as the load grows, the runs cannot both be in
# a steady state. Repeated runs differ by less; limits from 1.2 to 1.5 drop the same runs of the
# given tables.
FALLS = 1.3


def rows_to_fit(tables: Sequence[Path]) -> list[ServedRow]:
    """The rows that a fit may use: those that are measured and certainly without speculative
    decoding.
    """
    return [
        row
        for table in tables
        for row in served_rows(table)
        if isinstance(row, ServedRow) and row.is_sure and _is_measured(row)
    ]


def _is_measured(row: ServedRow) -> bool:
    return any(one is not None for one in (row.first_s, row.token_s, row.output_per_s))


def measured_of(rows: Sequence[ServedRow]) -> dict[str, Floats]:
    """The measured figures of rows, NaN if not measured. With a fixed number of requests in flight,
    the request rate follows from the two latencies; otherwise rates follow from output tokens.
    """

    def column(values: Iterator[float | None]) -> Floats:
        return np.array([np.nan if value is None else value for value in values])

    by_outcome = {name: column(getattr(row, name) for row in rows) for name in OUTCOMES[:3]}
    in_flight = np.array([row.in_flight for row in rows])
    output = np.array([row.output for row in rows])
    closed = np.array([row.kind == "closed loop" for row in rows])
    loop = in_flight / (by_outcome["first_s"] + np.maximum(output - 1, 1) * by_outcome["token_s"])
    rate = np.where(closed, loop, by_outcome["output_per_s"] / output)
    return {**by_outcome, "requests_per_s": rate}


def contradicted(rows: Sequence[ServedRow]) -> set[int]:
    """Rows of one layout and kind of load whose time per token clearly falls when more requests are
    in flight, which is impossible in a steady state.
    """
    layouts: dict[object, list[int]] = defaultdict(list)
    for index, row in enumerate(rows):
        if row.kind == "closed loop" and row.token_s is not None:
            key = (row.run, row.layout, row.prefill, row.workers, row.prompt, row.output)
            layouts[key].append(index)
    places_found: set[int] = set()
    for places in layouts.values():
        runs = [(rows[place].in_flight, rows[place].token_s or 0.0) for place in places]
        pairs = permutations(runs, 2)
        if any(few < many and slow > FALLS * fast for (few, slow), (many, fast) in pairs):
            places_found.update(places)
    return places_found


def constants_of_rows(every: Sequence[ServedRow]) -> EngineConstants:
    """The constants fitted to rows, without rows that contradict others."""
    left = contradicted(every)
    rows = [row for place, row in enumerate(every) if place not in left]
    model = RowModel(rows)
    measured = measured_of(rows)
    return fitted_constants_of(
        MeasuredRuns(
            runs=[row.run for row in rows],
            measured={name: measured[name] for name in SPREADS},
            times=lambda by: outcomes_of(model.times(by)),
        )
    )


def predicted_by(rows: Sequence[ServedRow], constants: EngineConstants) -> dict[str, Floats]:
    """The figures that are predicted for rows with the given constants."""
    return outcomes_of(RowModel(rows).times(constants.of([row.run for row in rows])))


def outcomes_of(times: RowTimes) -> dict[str, Floats]:
    """The predicted figures (latencies and rates) that follow from the predicted times of rows."""
    return {name: getattr(times, name) for name in OUTCOMES}


# For each option that names a way of grouping rows, a function that returns a row's group; each
# group is left out of a fit.
GROUPS: Mapping[str, Callable[[ServedRow], str]] = {
    "configuration": lambda row: str(zlib.crc32(row.configuration.encode()) % FOLDS),
    "gpu": lambda row: row.layout.gpu,
    "model": lambda row: row.layout.model.name,
}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LeftOut:
    """Measured rows, the figures that a fit to all groups but the row's own predicts for them, and
    the group of each row.
    """

    rows: Sequence[ServedRow]
    groups: Sequence[str]
    predicted: Mapping[str, Floats]
    measured: Mapping[str, Floats]

    def logs(self, outcome: str, mask: Bools | None = None) -> Floats:
        """The logarithms of measured over predicted figures, for rows whose figure was measured."""
        logs = np.log(self.measured[outcome] / self.predicted[outcome])
        keep = np.isfinite(logs) if mask is None else np.isfinite(logs) & mask
        return np.asarray(logs[keep])

    def quantiles(self, outcome: str) -> tuple[float, float]:
        """The factors from a prediction to its lower and upper bound, estimated from all rows."""
        return _tails(self.logs(outcome))

    def coverage(self, outcome: str) -> float:
        """The share of measurements that lie inside bounds estimated from the errors of the other
        groups of rows.
        """
        groups = np.array(self.groups)
        inside, total = 0, 0
        for group in dict.fromkeys(self.groups):
            inner, others = self.logs(outcome, groups == group), self.logs(outcome, groups != group)
            if len(inner) and len(others):
                low, high = np.log(_tails(others))
                inside += int(np.sum((inner >= low) & (inner <= high)))
                total += len(inner)
        return inside / total if total else float("nan")


def _tails(logs: Floats) -> tuple[float, float]:
    low, high = np.exp(np.quantile(logs, TAILS))
    return float(low), float(high)


def left_out(rows: Sequence[ServedRow], by: str) -> LeftOut:
    """Each group of rows, predicted by a fit to all other rows."""
    group_of = GROUPS[by]
    groups = [group_of(row) for row in rows]
    columns = {name: np.full(len(rows), np.nan) for name in OUTCOMES}
    for group in sorted(set(groups)):
        kept = [row for row, own in zip(rows, groups, strict=True) if own != group]
        index = np.array([place for place, own in enumerate(groups) if own == group])
        predicted = predicted_by([rows[place] for place in index], constants_of_rows(kept))
        for name, column in columns.items():
            column[index] = predicted[name]
        progress(f"left out {by} {group}: {len(index)} rows")
    return LeftOut(rows=rows, groups=groups, predicted=columns, measured=measured_of(rows))
