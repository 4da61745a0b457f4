"""Shows how much each column of a table of measured runs matters: the prediction errors of each
source if a group of columns is left empty.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import mean

from experiments.measured.by_source import Known, apart_of, is_peak_of_run, is_published
from experiments.measured.predict_runs import RowPredictor
from experiments.pages.study import beside
from experiments.pages.tables import narrow, number
from experiments.runs.judged import Judged, judged

# Groups of columns by subject. A row whose engine is left empty is predicted with a common engine.
# The column ``quality`` is never emptied, since it selects the rows that count.
GROUPS: Mapping[str, tuple[str, ...]] = {
    "engine": ("engine",),
    "attention kernel": ("attention_kernel",),
    "network and nodes": ("network", "gpus_per_node"),
    "experts' products and dispatcher": ("experts_by", "dispatcher"),
    "recomputation and offload": ("recompute", "offload"),
    "notes": ("notes",),
}
HEAD = (
    *("without", "runs told", "sources told", "mean error of these", "without it"),
    *("all sources", "without it", "peaks", "without it", "refused"),
)


def ablation_lines(known: Sequence[Known]) -> Iterator[str]:
    """A section of the page: prediction errors by source with and without each group of columns."""
    rows = [(source, row) for source, row, _ in known if not apart_of(row.row.cells)]
    yield "\n\n".join(beside("report_runs-ablation")) + "\n"
    lines = [_line(name, columns, rows) for name, columns in GROUPS.items()]
    yield from (*narrow(HEAD, lines), "")


def _line(name: str, columns: Sequence[str], rows: Sequence[tuple[str, Judged]]) -> list[object]:
    """The table row for a group of columns: errors over the sources that fill these columns, and
    over all sources.
    """
    indices = [index for index, (_, row) in enumerate(rows) if _tells(row, columns)]
    empty = dict.fromkeys(columns, "")
    asked = (rows[index][1].row for index in indices)
    answers = RowPredictor().answers_of(replace(row, cells={**row.cells, **empty}) for row in asked)
    without = [*rows]
    for index, answered in zip(indices, answers, strict=True):
        source, row = rows[index]
        # The prediction from fewer columns is compared with what was measured for the whole row.
        again = judged(row.row, answered.answer)
        without[index] = source, replace(again, measured_s=row.measured_s)
    telling = {rows[index][0] for index in indices}
    figures = [
        _mean(variant, telling if is_part else None, peaks=peaks)
        for is_part, peaks in ((True, False), (False, False), (False, True))
        for variant in (rows, without)
    ]
    refused = sum(without[index][1].answer.prediction is None for index in indices)
    cells = [number(figure, ".1%", none="") for figure in figures]
    return [name, len(indices), len(telling), *cells, refused or ""]


def _tells(row: Judged, columns: Sequence[str]) -> bool:
    return row.answer.prediction is not None and any(row.row.cells.get(name) for name in columns)


def _mean(
    rows: Sequence[tuple[str, Judged]], sources: set[str] | None, *, peaks: bool
) -> float | None:
    """The mean absolute error of published times, or of memory peaks: each source's mean, averaged
    over sources. None if there are no errors.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for source, row in rows:
        error = row.memory_error if peaks else row.time_error
        counts = is_peak_of_run(row) if peaks else is_published(row)
        if error is not None and counts and (sources is None or source in sources):
            errors[source].append(abs(error))
    return mean(map(mean, errors.values())) if errors else None
