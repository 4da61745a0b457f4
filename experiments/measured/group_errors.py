"""Prediction errors of tables with groups of runs, each group counted once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
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
    """Means over groups: of mean errors of times and peaks, and of shares inside bounds."""

    time_groups: int
    time: float | None
    inside: float | None
    memory_groups: int
    memory: float | None


def counted_once(groups: Sequence[GroupErrors]) -> CountedOnce:
    """Means over the groups' means; a group without such measurements is left out."""
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
    """The page's lines on a table's groups; none without the column."""
    if not any(one.row.cells.get("group") for one in rows):
        return
    groups = [*groups_of(rows, lambda one: one.row.cells.get("group", ""))]
    errors = [errors_of(group, some) for group, some in groups]
    yield f"{name}. {summary(rows)}\n"
    cells = (_cells(one, some) for one, (_, some) in zip(errors, groups, strict=True))
    yield from (f"{IN_A_FILE}\n", *narrow(HEAD, cells), "")


def summary(rows: Sequence[Judged]) -> str:
    """A sentence on errors with each group counted once, and on how well runs that ran are told
    from runs that failed. Peaks that the table doubts are counted separately.
    """
    every, errors = _of_groups(rows), _of_groups([one for one in rows if not one.is_doubted])
    errors = replace(every, memory=errors.memory, memory_groups=errors.memory_groups)
    doubted = sum(one.is_doubted and one.memory_error is not None for one in rows)
    more = "" if every.memory is None else f"{every.memory:.1%} of {every.memory_groups} with them"
    aside = f" without {doubted} rows marked SUSPECT ({more})" if doubted else ""
    apart = separation(rows)
    times = (
        "no times" if errors.time is None else f"times {errors.time:.1%} of {errors.time_groups}"
    )
    peaks = "no peaks" if errors.memory is None else f"peaks {errors.memory:.1%}"
    inside = "" if errors.inside is None else f", {errors.inside:.0%} of times within bounds"
    return (
        f"Groups counted once: {times} groups{inside}; {peaks} of {errors.memory_groups} groups"
        f"{aside}. "
        f"Run and failed told apart in {apart.share:.1%} ({apart.ran_right} of {apart.ran}, "
        f"{apart.failed_right} of {apart.failed})."
    )


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
