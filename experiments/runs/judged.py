"""Compares predictions with measurements: errors by group of runs, and rankings of the runs of one
workload.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import mean, median

from experiments.runs.dialects.dialect import row_of
from experiments.runs.driver_memory import context_bytes
from experiments.runs.impossible import impossible_figures
from experiments.runs.run_sureness import RunAnswer
from experiments.runs.runs_table import TableRow, number_of, text_of
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError

# Compares predictions with measurements: the errors of predicted rows, by group.


@dataclass(frozen=True, slots=True, kw_only=True)
class Judged:
    """A row's measurements and its prediction; figures that were not measured are None."""

    row: TableRow
    answer: RunAnswer
    measured_s: float | None
    measured_gib: float | None

    @property
    def predicted_s(self) -> float | None:
        """The predicted seconds of an iteration."""
        prediction = self.answer.prediction
        return None if prediction is None else prediction.iteration_s

    @property
    def longest_s(self) -> float | None:
        """The upper bound of the predicted seconds of an iteration."""
        prediction = self.answer.prediction
        return None if prediction is None else prediction.iteration_s_high

    @property
    def predicted_gib(self) -> float | None:
        """The predicted memory peak of the kind (allocated or reserved) that was measured."""
        if self.answer.prediction is None:
            return None
        row = row_of(self.row.cells)
        index = self.answer.place_of(row.peak_of)
        stage = self.answer.prediction.stages[index]
        peak = stage.peak_reserved_bytes if row.reserved else stage.peak_allocated_bytes
        outside = 0.0
        if row.of_driver and self.answer.buffers_bytes:
            outside = context_bytes(row) + self.answer.buffers_bytes[index]
        return (peak + outside) / GIB_BYTES

    @property
    def time_error(self) -> float | None:
        """The relative error of the predicted time."""
        return _error(self.predicted_s, self.measured_s)

    @property
    def memory_error(self) -> float | None:
        """The relative error of the predicted memory peak."""
        return _error(self.predicted_gib, self.measured_gib)

    @property
    def is_inside(self) -> bool | None:
        """Whether the measured time is inside the predicted bounds."""
        prediction = self.answer.prediction
        if prediction is None or self.measured_s is None:
            return None
        return prediction.iteration_s_low <= self.measured_s <= prediction.iteration_s_high

    @property
    def says_batch(self) -> bool:
        """Whether the row states its micro-batch size, or a batch from which it follows."""
        return any(self.row.cells.get(name) for name in ("micro_batch", "global_batch"))

    @property
    def is_doubted(self) -> bool:
        """Whether the row's table marks its figures as doubtful."""
        return row_of(self.row.cells).doubted

    @property
    def impossible(self) -> tuple[str, ...]:
        """For each measured figure that no run on the row's GPUs can have, why."""
        gib = _measured(self.row.cells, "memory_gib")
        figures = self.measured_s, gib
        return (
            *impossible_figures(
                self.row.cells, self.answer.limits, *figures, self.answer.sequences
            ),
        )

    @property
    def failed(self) -> bool:
        """Whether the row reports that the run failed."""
        return row_of(self.row.cells).failed


def _error(predicted: float | None, measured: float | None) -> float | None:
    return None if predicted is None or measured is None else predicted / measured - 1


# The columns with measurements, which are never used for a prediction.
MEASURED = ("step_s", "memory_gib")


def check_measured(row: TableRow) -> None:
    """Refuse a row with a measurement that is not a positive number; otherwise it would seem not to
    have been measured.
    """
    for column in MEASURED:
        number_of(row.cells, column)


def judged(row: TableRow, answer: RunAnswer) -> Judged:
    """A row with its measurements; without them if they are the reason why the row was refused."""
    return Judged(
        row=row,
        answer=answer,
        measured_s=_seconds(row.cells, answer),
        measured_gib=_peak_gib(row.cells),
    )


def _peak_gib(cells: Mapping[str, str]) -> float | None:
    """The measured memory peak; None if it was not measured. For a peak that was rounded up to a
    whole number, the middle of the range that it stands for.
    """
    gib = _measured(cells, "memory_gib")
    return gib - 0.5 if gib is not None and row_of(cells).rounded_up else gib


def _seconds(cells: Mapping[str, str], answer: RunAnswer) -> float | None:
    """The measured seconds of a step, or those that follow from a throughput or from the time of a
    micro-batch. None if the sequence length is missing or, in a table that says how lengths are
    known, not exact.
    """
    step_s = _measured(cells, "step_s")
    if row_of(cells).lengths not in ("", "exact") or not cells.get("sequence_length"):
        return None
    rate = _measured(cells, "tokens_per_s_per_gpu")
    if step_s is None and rate is not None:
        tokens = answer.sequences * (_measured(cells, "sequence_length") or 0.0)
        gpus = answer.doubt.gpus if answer.doubt is not None else 1
        return tokens / (rate * gpus) or None
    micro_s = _measured(cells, "micro_s")
    if step_s is None and micro_s is not None:
        return micro_s * (_measured(cells, "grad_accumulation") or 1.0)
    return step_s


def _measured(cells: Mapping[str, str], column: str) -> float | None:
    try:
        return number_of(cells, column)
    except InputError:
        return None


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupErrors:
    """The prediction errors of a group of rows: those of times and of memory peaks, and the share
    of measurements inside bounds.
    """

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
    """The prediction errors of a group of rows; a positive bias means that predictions are too
    long.
    """
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
    """Groups rows by a key; groups are in the order of their keys (by value if these are
    numbers).
    """
    groups: dict[str, list[Judged]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    yield from sorted(groups.items(), key=lambda group: _sortable(group[0]))


def _sortable(text: str) -> tuple[float, str]:
    try:
        return float(text), ""
    except ValueError:
        return float("inf"), text


# Tells how well predictions rank runs, how well they tell runs that fit from runs that failed, and
# how far repeated measurements differ.


# A group with fewer runs than this is not ranked.
FEWEST = 5
# Columns that say what is trained and on which GPUs (the task). Runs that agree in them are
# alternatives of one another.
TASK = (
    *("model", "gpus", "hardware", "gpus_per_node", "layers", "hidden", "heads", "kv_heads", "ffn"),
    *("vocab", "experts", "topk", "sequence_length", "global_batch", "precision"),
)
# Columns that determine the configuration of a run.
CONFIGURATION = (
    *("engine", "hardware", "gpus", "gpus_per_node", "model", "layers", "hidden", "heads"),
    *("kv_heads", "ffn", "vocab", "sequence_length", "global_batch", "micro_batch", "tp", "pp"),
    *("vpp", "cp", "ep", "dp", "zero", "sequence_parallel", "recompute", "offload", "precision"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranked:
    """How well predictions rank the runs of a task: the rank correlation of predicted and measured
    times (-1 to 1); and the regret, the measured time of the run predicted to be fastest over the
    best measured time.

    ``near`` has the same ratio (measured time over the best one) for all runs that are predicted
    about as fast as that run.
    """

    name: str
    runs: int
    correlation: float
    regret: float
    near: tuple[float, ...]


def predicted_s(run: Judged) -> float | None:
    """The predicted seconds of a run, by which runs are ranked."""
    return run.predicted_s


def ranked(
    rows: Iterable[Judged],
    *,
    by: Callable[[Judged], float | None] = predicted_s,
    near: float = 0.0,
) -> Iterator[Ranked]:
    """For each task, how well its runs are ranked if they are ordered by the seconds that ``by``
    returns.

    A run is about as fast as the best one if its predicted time is longer by at most the share
    ``near``.
    """
    groups: dict[tuple[str, ...], list[tuple[float, float]]] = defaultdict(list)
    for run in rows:
        seconds = by(run)
        if seconds is not None and run.measured_s is not None:
            group = tuple(text_of(run.row.cells, name) for name in TASK)
            groups[group].append((seconds, run.measured_s))
    for (model, gpus, *_), pairs in sorted(groups.items()):
        predicted, measured = zip(*pairs, strict=True)
        if len(pairs) >= FEWEST and len({*predicted}) > 1 < len({*measured}):
            best, limit = min(measured), min(predicted) * (1 + near)
            yield Ranked(
                name=f"{model} on {gpus} GPUs",
                runs=len(pairs),
                correlation=_correlation(_ranks(predicted), _ranks(measured)),
                regret=min(pairs)[1] / best,
                near=tuple(took / best for seconds, took in pairs if seconds <= limit),
            )


def _ranks(numbers: Sequence[float]) -> list[float]:
    """The rank of each number; equal numbers get the mean of their ranks."""
    places: dict[float, list[int]] = defaultdict(list)
    for rank, number in enumerate(sorted(numbers)):
        places[number].append(rank)
    return [mean(places[number]) for number in numbers]


def _correlation(first: Sequence[float], other: Sequence[float]) -> float:
    middles = mean(first), mean(other)
    pairs = [(a - middles[0], b - middles[1]) for a, b in zip(first, other, strict=True)]
    spreads = [sum(pair[place] ** 2 for pair in pairs) for place in (0, 1)]
    return float(sum(a * b for a, b in pairs) / (spreads[0] * spreads[1]) ** 0.5)


@dataclass(frozen=True, slots=True, kw_only=True)
class Separation:
    """Of the runs that succeeded, how many are predicted to fit in memory; of those that failed,
    how many are predicted not to fit.
    """

    ran: int
    ran_right: int
    failed: int
    failed_right: int

    @property
    def share(self) -> float:
        """The share of runs for which it is predicted correctly whether they fit in memory."""
        return (self.ran_right + self.failed_right) / (self.ran + self.failed)


def separation(rows: Sequence[Judged]) -> Separation:
    """How well the prediction that a run fits in memory tells runs that succeeded from runs that
    failed; a refused row counts as wrong.
    """
    ran = [one for one in rows if not one.failed]
    failed = [one for one in rows if one.failed]
    says = {True: [one for one in ran if _fits(one) is True]}
    says[False] = [one for one in failed if _fits(one) is False]
    return Separation(
        ran=len(ran),
        ran_right=len(says[True]),
        failed=len(failed),
        failed_right=len(says[False]),
    )


def _fits(run: Judged) -> bool | None:
    return None if run.answer.prediction is None else run.answer.prediction.fits


def spreads(rows: Iterable[Judged]) -> list[float]:
    """For each configuration that was measured repeatedly, the mean absolute deviation of its times
    from their median, as a share of the median.
    """
    times: dict[tuple[str, ...], list[float]] = defaultdict(list)
    for run in rows:
        if run.measured_s is not None:
            times[_configuration(run.row.cells)].append(run.measured_s)
    return [
        mean(abs(time / median(seconds) - 1) for time in seconds)
        for seconds in times.values()
        if len(seconds) > 1
    ]


def _configuration(cells: Mapping[str, str]) -> tuple[str, ...]:
    return tuple(text_of(cells, name) for name in CONFIGURATION)
