"""The command ``predict_runs``: predicts the rows of tables of measured runs, in order, and prints
them as JSON, or a table of errors.
"""

import argparse
import math
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from time import perf_counter

from experiments.cli.commandline import as_options, batch_status, print_json, progress
from experiments.measured.errors import error_lines
from experiments.measured.group_errors import summary
from experiments.runs.configuration import Configuration, configuration_of
from experiments.runs.dialects.dialect import row_of
from experiments.runs.judged import check_measured, judged
from experiments.runs.run_jobs import RunJob, job_of, ways_of
from experiments.runs.run_row import Recomputation
from experiments.runs.run_sureness import (
    RunAnswer,
    answered,
    is_far_too_full,
    keeps_too_much,
    nearly_fills,
)
from experiments.runs.runs_table import TableRow, rows_of_table, text_of
from mistlab import catalog
from mistlab.core.values import InputError, reject
from mistlab.job.job import hardware_from
from mistlab.job.prediction import Prediction
from mistlab.machine.cluster import Profile
from mistlab.machine.hardware import Hardware
from mistlab.plan.dimensions import DIMENSIONS
from mistlab.plan.plan import Plan
from simulators.symbolic import SymbolicPredictor

# The number of rows that are predicted in one batch.
AT_ONCE = 4096
# The seconds between two progress reports.
PATIENCE_S = 2.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnsweredRow:
    """A row of a table of runs, and the predictor's answer."""

    row: TableRow
    answer: RunAnswer


def predict_rows(options: argparse.Namespace) -> int:
    """Predict measured training runs: each row of a table as a plan, beside its measured time and
    memory.

    A row describes one run: model, GPUs, parallel degrees, batch (docs/reference/measured-runs.md
    lists the columns). Cells may be empty; the answer notes what is assumed instead. A row that
    cannot be predicted is refused with the reason. Measured columns are only used to compare them
    with the prediction. Without --json, the command prints errors by table, model, GPUs and
    degrees, and a few runs, each beside its prediction.
    """
    with as_options():
        profile = None if options.profile == "none" else catalog.profile(options.profile)
        hardware = None if options.hardware is None else hardware_from(options.hardware, Path())
    done = RowPredictor(profile, hardware)
    unreadable, kept, is_answered = 0, list[AnsweredRow](), False
    for path in options.tables:
        try:
            for answered in done.answers(path):
                is_answered |= not answered.answer.refused
                if options.json:
                    print_json(mapping_of(answered))
                else:
                    kept.append(answered)
        except InputError as error:
            progress(f"error: {error}")
            unreadable += 1
    if kept:
        print("\n".join(error_lines([(one.row, one.answer) for one in kept])))
        grouped = [judged(one.row, one.answer) for one in kept if one.row.cells.get("group")]
        if grouped:
            print(summary(grouped))
    return batch_status(
        len(options.tables), unreadable, all_answered=is_answered and not unreadable
    )


def mapping_of(answered: AnsweredRow) -> dict[str, object]:
    """A row with its answer as a mapping of plain values, for JSON."""
    peak_of = row_of(answered.row.cells).peak_of
    answer = answered.answer.mapping(peak_of)
    if not answered.answer.refused:
        answer = {**answer, "impossible": [*judged(answered.row, answered.answer).impossible]}
    return {"file": answered.row.file, "row": answered.row.number, **answer}


class RowPredictor:
    """Predicts rows of tables of runs, after ``edit`` has changed each of them; equal
    configurations are predicted only once.
    """

    def __init__(
        self,
        profile: Profile | None = None,
        hardware: Hardware | None = None,
        edit: Callable[[Configuration], Configuration] | None = None,
    ) -> None:
        self._profile, self._hardware, self._edit = profile, hardware, edit
        self._known: dict[Configuration, RunAnswer] = {}
        # The sort key of each configuration: first whether memory is nearly full, then the seconds
        # of an iteration.
        self._ranks: dict[Configuration, tuple[bool, float]] = {}
        self._begun_s = perf_counter()
        self._told_s = self._begun_s

    def answers(self, path: Path) -> Iterator[AnsweredRow]:
        """The predictor's answer to each row of one table, in order."""
        rows = rows_of_table(path)
        if (first := next(rows, None)) is None:
            reject(f"{path}: has no rows below its header: add a line for each run")
        yield from self.answers_of(chain([first], rows))

    def answers_of(self, rows: Iterable[TableRow]) -> Iterator[AnsweredRow]:
        """The answer to each row of several tables, in order."""
        rows = iter(rows)
        while batch := list(islice(rows, AT_ONCE)):
            hardware = "" if self._hardware is None else self._hardware.name
            read = [self._edited(_read(row, hardware)) for row in batch]
            self._predict([one for one in read if isinstance(one, Configuration)])
            for row, outcome in zip(batch, read, strict=True):
                answer = outcome if isinstance(outcome, RunAnswer) else self._known[outcome]
                if answer.refused and not isinstance(outcome, RunAnswer):
                    refused = _as_written(answer.refused, outcome, row)
                    answer = RunAnswer(refused=f"{row.where}: {refused}")
                yield AnsweredRow(row=row, answer=answer)
            self._tell(f"{batch[-1].file}: {batch[-1].number} rows answered")

    def _edited(self, read: Configuration | RunAnswer) -> Configuration | RunAnswer:
        if self._edit is None or isinstance(read, RunAnswer):
            return read
        return self._edit(read)

    def _tell(self, text: str) -> None:
        now_s = perf_counter()
        if now_s - self._told_s > PATIENCE_S:
            self._told_s = now_s
            progress(text)

    def _predict(self, runs: Sequence[Configuration]) -> None:
        """Predict the runs that are not in the cache. If a row leaves choices open, all
        combinations are tried and the best one counts.
        """
        several = {run: ways_of(run) for run in runs if run.unsaid and run not in self._known}
        ways = [way for some in several.values() for way in some]
        self._predict_specified([*(run for run in runs if not run.unsaid), *ways])
        self._known |= {run: self._known[self._best(some)] for run, some in several.items()}

    def _best(self, ways: Sequence[Configuration]) -> Configuration:
        """The fastest of several configurations; those that leave memory free are preferred."""
        return min(ways, key=lambda way: self._ranks.get(way, (True, math.inf)))

    def _predict_specified(self, runs: Sequence[Configuration]) -> None:
        """Predict runs whose rows leave no choice open; runs of the same workload and cluster are
        predicted together.
        """
        instead: dict[Configuration, Configuration] = {}
        together: dict[tuple[int, int], list[tuple[Configuration, RunJob]]] = defaultdict(list)
        for run in dict.fromkeys(runs):
            if run not in self._known:
                try:
                    run_job = job_of(run, self._profile, self._hardware)
                except InputError as error:
                    self._known[run] = RunAnswer(refused=str(error))
                else:
                    key = id(run_job.job.workload), id(run_job.job.cluster)
                    together[key].append((run, run_job))
        for number, group in enumerate(together.values()):
            job = group[0][1].job
            predictor = SymbolicPredictor(workload=job.workload, cluster=job.cluster)
            plans = [run_job.job.plan for _, run_job in group]
            for (run, run_job), outcome in zip(group, _all(predictor, plans), strict=True):
                if not isinstance(outcome, Prediction):
                    self._known[run] = outcome
                elif (other := _otherwise(run, run_job, outcome)) is not None:
                    instead[run] = other
                else:
                    self._known[run] = answered(outcome, run_job)
                    self._ranks[run] = nearly_fills(outcome, run_job), outcome.iteration_s
            self._tell(f"{number + 1} of {len(together)} workloads and clusters predicted")
        if instead:
            self._predict_specified([*instead.values()])
            self._known |= {run: self._known[other] for run, other in instead.items()}


def _otherwise(run: Configuration, run_job: RunJob, prediction: Prediction) -> Configuration | None:
    """The configuration to predict in place of one that does not fit in memory; None if there is no
    such replacement.
    """
    if run.otherwise not in ("", run_job.job.plan.engine) and nearly_fills(prediction, run_job):
        notes = (*run.notes, f"memory is short: engine {run.otherwise}")
        return replace(run, engine=run.otherwise, otherwise="", notes=notes)
    if run.saves_unsaid and run.recompute.way == "none":
        note = ""
        if is_far_too_full(prediction, run_job):
            note = "memory is short by more than half"
        elif keeps_too_much(prediction, run_job):
            note = "a GPU has no room for what blocks keep, whatever else leaves it"
        if note:
            notes = (*run.notes, f"{note}: full recomputation")
            return replace(run, recompute=Recomputation(way="full"), notes=notes)
    return None


# The name of the table column for each dimension, by the dimension's symbol.
COLUMN_OF = {"tp": "tp", "dp": "dp", "cp": "cp", "ep": "ep", "et": "etp", "L": "pp"}
TOO_MUCH = "workload: "


def _as_written(refused: str, run: Configuration, row: TableRow) -> str:
    """A refusal worded for the user of a table: it has the table's columns in place of plan fields,
    and the GPU and engine that the row names in place of those that represent them.
    """
    if refused.startswith(TOO_MUCH):
        model = f"{run.shape.layers:,} layers of hidden {run.shape.hidden:,}"
        problem = refused.removeprefix(TOO_MUCH).partition(":")[0]
        return (
            f"sequence_length: {run.sequence_length:,} in {model} {problem}: lower one of them or "
            "the micro-batch"
        )
    refused = re.sub(
        r"^(?:workload|plan\.stages\[\d+\])\.(\w+)(?=: )",
        lambda found: _column_of(found[1]),
        refused,
    ).replace("by this GPU:", f"by {run.gpus.hardware}:")
    written = text_of(row.cells, "engine") or run.engine
    return re.sub(
        rf"\bengine {re.escape(run.engine)}(?![\w-])", lambda _: f"engine {written}", refused
    )


def _column_of(field: str) -> str:
    row = DIMENSIONS.get(field)
    return field if row is None else COLUMN_OF.get(row.symbol, field)


def _read(row: TableRow, hardware: str) -> Configuration | RunAnswer:
    """The configuration that a row describes, or the reason why it describes none."""
    if row.problem:
        return RunAnswer(refused=f"{row.where}: {row.problem}")
    try:
        check_measured(row)
        return configuration_of(row, hardware)
    except InputError as error:
        return RunAnswer(refused=f"{row.where}: {error}")


def _all(predictor: SymbolicPredictor, plans: Sequence[Plan]) -> Sequence[Prediction | RunAnswer]:
    """The predictions of several plans in one batch; if a plan is refused, each plan is predicted
    by itself.
    """
    try:
        return predictor.predict_many(plans)
    except InputError as error:
        if len(plans) == 1:
            return [RunAnswer(refused=str(error))]
        return [_all(predictor, [plan])[0] for plan in plans]
