"""Predictions beside measurements: the errors of answered rows, in groups."""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError
from mistlab.runs.answers import RunAnswer, stage_of
from mistlab.runs.cells import number_of, text_of
from mistlab.runs.table import TableRow


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row's measurements and its answer; None for what was not measured."""

    row: TableRow
    answer: RunAnswer
    measured_s: float | None
    measured_gib: float | None

    @property
    def predicted_s(self) -> float | None:
        """Predicted seconds of an iteration."""
        found = self.answer.prediction
        return None if found is None else found.iteration_s

    @property
    def longest_s(self) -> float | None:
        """The upper bound of the seconds of an iteration."""
        found = self.answer.prediction
        return None if found is None else found.iteration_s_high

    @property
    def predicted_gib(self) -> float | None:
        """The predicted peak that the measured one is held against."""
        if self.answer.prediction is None:
            return None
        kind = self.row.cells.get("memory_kind", "")
        stage = stage_of(self.answer.prediction, kind)
        is_reserved = "reserved" in kind or _logs_reserved(self.row)
        peak = stage.peak_allocated_bytes
        if is_reserved and "allocated" not in kind:
            peak = stage.peak_reserved_bytes
        return peak / GIB_BYTES

    @property
    def time_error(self) -> float | None:
        """The share by which the predicted time is longer than the measured one."""
        return _error(self.predicted_s, self.measured_s)

    @property
    def memory_error(self) -> float | None:
        """The share by which the predicted peak is larger than the measured one."""
        return _error(self.predicted_gib, self.measured_gib)

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured time lies within the predicted bounds."""
        found = self.answer.prediction
        if found is None or self.measured_s is None:
            return None
        return found.iteration_s_low <= self.measured_s <= found.iteration_s_high

    @property
    def failed(self) -> bool:
        """Whether the row tells of a run that failed."""
        return text_of(self.row.cells, "status").casefold().startswith("failed")


def _logs_reserved(row: TableRow) -> bool:
    """Whether the software of a row logs the allocator's peak, and no other: torchtitan does
    (``max_reserved_gib`` in ``components/metrics.py``)."""
    return "torchtitan" in text_of(row.cells, "engine").casefold()


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


# Columns that are only held against the prediction.
MEASURED = ("step_s", "memory_gib")


def check_measured(row: TableRow) -> None:
    """Refuse a row whose measurements are no numbers above 0: left out, they would pass for not
    measured."""
    for column in MEASURED:
        number_of(row.cells, column)


def judged(row: TableRow, answer: RunAnswer) -> Judged:
    """A row with what it measured; of a row that is refused for its measurements, nothing."""
    return Judged(
        row=row,
        answer=answer,
        measured_s=_measured(row.cells, "step_s"),
        measured_gib=_measured(row.cells, "memory_gib"),
    )


def _measured(cells: Mapping[str, str], column: str) -> float | None:
    try:
        return number_of(cells, column)
    except InputError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupErrors:
    """The errors of a group of rows: of times, of memory, and the share within bounds."""

    name: str
    rows: int
    refused: int
    times: int
    mean_time: float | None
    median_time: float | None
    bias: float | None
    inside: float | None
    memories: int
    mean_memory: float | None


def errors_of(name: str, rows: Sequence[Judged]) -> GroupErrors:
    """The errors of a group of rows; a bias above 0 is a prediction that is too long."""
    times = [one.time_error for one in rows if one.time_error is not None]
    memory = [one.memory_error for one in rows if one.memory_error is not None]
    inside = [one.is_inside for one in rows if one.is_inside is not None]
    sizes = [abs(error) for error in times]
    return GroupErrors(
        name=name,
        rows=len(rows),
        refused=sum(one.answer.prediction is None for one in rows),
        times=len(times),
        mean_time=mean(sizes) if sizes else None,
        median_time=median(sizes) if sizes else None,
        bias=median(times) if times else None,
        inside=mean(inside) if inside else None,
        memories=len(memory),
        mean_memory=mean(abs(error) for error in memory) if memory else None,
    )


def groups_of(
    rows: Sequence[Judged], key: Callable[[Judged], str]
) -> Iterator[tuple[str, list[Judged]]]:
    """The rows in groups of an equal key, sorted by it as numbers where it is one."""
    groups: dict[str, list[Judged]] = defaultdict(list)
    for one in rows:
        groups[key(one)].append(one)
    yield from sorted(groups.items(), key=lambda group: _sortable(group[0]))


def _sortable(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text
