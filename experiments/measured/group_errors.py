"""Mean prediction errors of tables whose rows name groups of runs; every group counts once, however
many runs it has.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import mean, median

from experiments.pages.page_tables import IN_A_FILE
from experiments.pages.tables import narrow
from experiments.runs.judged import (
    GroupErrors,
    Judged,
    errors_of,
    groups_of,
    separation,
)

HEAD = ("group", "runs", "answered", "times", "mean", "bias", "in bounds", "peaks", "mean", "bias")


@dataclass(frozen=True, slots=True, kw_only=True)
class CountedOnce:
    """Means over groups of runs, in which each group counts once: the mean errors of times and of
    memory peaks, and the mean share of measurements inside bounds.
    """

    time_groups: int
    time: float | None
    inside: float | None
    memory_groups: int
    memory: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figure:
    """For times or for memory peaks, the names of the fields with the error (in ``Judged``), with
    the mean error, and with the number of groups (in ``CountedOnce``).
    """

    error: str
    mean: str
    groups: str


TIMES = Figure(error="time_error", mean="time", groups="time_groups")
PEAKS = Figure(error="memory_error", mean="memory", groups="memory_groups")


def counted_once(groups: Sequence[GroupErrors]) -> CountedOnce:
    """The mean over groups of each group's mean error. For times, or for memory peaks, only groups
    that measured them count.
    """
    times = [one.mean_time for one in groups if one.mean_time is not None]
    inside = [one.inside for one in groups if one.inside is not None]
    peaks = [one.mean_memory for one in groups if one.mean_memory is not None]
    return CountedOnce(
        time_groups=len(times),
        time=mean(times) if times else None,
        inside=mean(inside) if inside else None,
        memory_groups=len(peaks),
        memory=mean(peaks) if peaks else None,
    )


def group_lines(name: str, rows: Sequence[Judged]) -> Iterator[str]:
    """Lines of the page on the groups of a table's runs; none if the table has no column of
    groups.
    """
    if not any(one.row.cells.get("group") for one in rows):
        return
    groups = [*groups_of(rows, lambda one: one.row.cells.get("group", ""))]
    errors = [errors_of(group, some) for group, some in groups]
    yield f"{name}. {summary(rows)}\n"
    cells = (_cells(one, some) for one, (_, some) in zip(errors, groups, strict=True))
    yield from (f"{IN_A_FILE}\n", *narrow(HEAD, cells), "")


def summary(rows: Sequence[Judged]) -> str:
    """Sentences on a table's runs: their mean errors with every group counted once, of all rows and
    without impossible and doubtful ones; and how well predictions tell runs that succeeded from
    runs that failed.
    """
    inside = _of_groups(rows).inside
    of_inside = "" if inside is None else f", {inside:.0%} of times within bounds"
    apart = separation(rows)
    return (
        f"Groups counted once: times {_means(rows, TIMES)}{of_inside}; "
        f"peaks {_means(rows, PEAKS)}. "
        f"Run and failed told apart in {apart.share:.1%} ({apart.ran_right} of {apart.ran}, "
        f"{apart.failed_right} of {apart.failed})."
    )


def _means(rows: Sequence[Judged], figure: Figure) -> str:
    """The mean error over all groups, of times or of memory peaks, as text. In brackets, if there
    are such rows: the mean without impossible rows, and the mean also without rows that their table
    marks as doubtful.
    """
    measured = [one for one in rows if getattr(one, figure.error) is not None]
    possible = [one for one in measured if not one.impossible]
    sure = [one for one in possible if not one.is_doubted]
    remarks = []
    if left := len(measured) - len(possible):
        remarks.append(f"{_mean(possible, figure)} without {left} impossible")
    if left := len(possible) - len(sure):
        also = "also " if remarks else ""
        remarks.append(f"{_mean(sure, figure)} {also}without {left} marked SUSPECT")
    return _mean(measured, figure) + (f" ({'; '.join(remarks)})" if remarks else "")


def _mean(rows: Sequence[Judged], figure: Figure) -> str:
    means = _of_groups(rows)
    error: float | None = getattr(means, figure.mean)
    groups = getattr(means, figure.groups)
    return "of no group" if error is None else f"{error:.1%} of {groups} groups"


def _of_groups(rows: Sequence[Judged]) -> CountedOnce:
    grouped = groups_of(rows, lambda one: one.row.cells["group"])
    return counted_once([errors_of(name, some) for name, some in grouped])


def _cells(group: GroupErrors, rows: Sequence[Judged]) -> list[str]:
    peaks = [row.memory_error for row in rows if row.memory_error is not None]
    return [
        group.name,
        str(group.rows),
        str(group.rows - group.refused),
        *_errors(group.times, group.mean_time, group.bias),
        "" if group.inside is None else f"{group.inside:.0%}",
        *_errors(group.memories, group.mean_memory, median(peaks) if peaks else None),
    ]


def _errors(count: int, size: float | None, bias: float | None) -> list[str]:
    if size is None or bias is None:
        return ["", "", ""]
    return [str(count), f"{size:.1%}", f"{bias:+.1%}"]
