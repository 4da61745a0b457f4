"""Prediction errors of measured runs for each source (a publication or a table): errors of times
and memory peaks, and how often bounds hold that were fitted without the source.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import mean, median

from experiments.pages.study import beside
from experiments.pages.tables import narrow, number
from experiments.runs.dialects.dialect import row_of
from experiments.runs.judged import Judged, separation
from experiments.runs.run_sureness import Held, Miss, left_out
from mistlab.cost.confidence import Spread
from mistlab.engines.engine import ENGINES

# Tables that were compiled from many publications: in these, each publication is a source. Any
# other table is a single source, except for rows that name a group.
OF_PAGES = ("papers_and_readmes", "moe_zoo_ablations_primus_misc", "torchtitan")
# The values of the column ``provenance`` that mark rows whose figures are as published.
AS_PUBLISHED = ("", "published")
# The least number of sources for a kind of runs; with fewer, its spread between sources cannot be
# estimated.
ENOUGH_SOURCES = 5
# Sources that are reported separately: their runs do not count in the mean over all sources.
APART = {
    "functional tests": "tiny models of Megatron's functional tests, which time launches",
    "verification cards": "runs that train as users do, unbalanced and from checkpoints",
    "pipelines of one cluster": "pipelines on the cluster of a profile, which nobody describes",
}


def source_of(table: str, cells: Mapping[str, str]) -> str:
    """The source of a row of a table: the group that the row names, the page that it was taken
    from, or the table itself.
    """
    page = cells.get("source", "") if table in OF_PAGES else ""
    return cells.get("group", "") or page or table


def apart_of(cells: Mapping[str, str]) -> str:
    """The name in ``APART`` under which a row is reported separately; empty for a row that counts
    in the mean.
    """
    row = row_of(cells)
    if row.arguments:
        return "functional tests"
    if not row.benchmark and not row.text("method"):
        return "verification cards"
    is_of_profile = row.engine in ENGINES and ENGINES[row.engine].slowest
    return "pipelines of one cluster" if is_of_profile and (row.count("pp") or 1) > 1 else ""


@dataclass(frozen=True, kw_only=True)
class SourceErrors:
    """The measured runs of one source with their prediction errors. Bounds are fitted to the other
    sources; they are None if that is not possible.
    """

    name: str
    apart: str
    rows: Sequence[Judged]
    held: Sequence[Held | None]

    @cached_property
    def published(self) -> Sequence[float]:
        """The errors of predicted times, for published rows that are not marked as doubtful."""
        return [
            one.time_error for one in self.rows if one.time_error is not None and is_published(one)
        ]

    @cached_property
    def mean_time(self) -> float | None:
        """The mean absolute error of predicted times over published rows; None if none exist."""
        return mean(map(abs, self.published)) if self.published else None

    @cached_property
    def bounded(self) -> Sequence[Held]:
        """The measured times of published rows, each with the bounds of its prediction."""
        pairs = zip(self.rows, self.held, strict=True)
        return [held for one, held in pairs if held is not None and is_published(one)]

    @cached_property
    def peaks(self) -> Sequence[float]:
        """The errors of predicted memory peaks, for runs whose reported peak is of a kind that is
        predicted.
        """
        return [
            run.memory_error
            for run in self.rows
            if run.memory_error is not None and is_peak_of_run(run)
        ]

    @cached_property
    def mean_peak(self) -> float | None:
        """The mean absolute error of predicted memory peaks; None if no peaks were measured."""
        return mean(map(abs, self.peaks)) if self.peaks else None

    @property
    def inside(self) -> float | None:
        """The share of measured times inside the bounds of their predictions; None if there are no
        bounds.
        """
        return mean(one.is_inside for one in self.bounded) if self.bounded else None

    def cells(self) -> list[object]:
        """The table cells that the page shows for the source, such as its mean errors."""
        widths = [one.width for one in self.bounded]
        return [
            f"{self.name} ({self.apart})" if self.apart else self.name,
            len(self.rows),
            len(self.published),
            number(self.mean_time, ".1%", none=""),
            number(_median_size(self.published), ".1%", none=""),
            number(median(self.published) if self.published else None, "+.1%", none=""),
            number(self.inside, ".0%", none=""),
            number(median(widths) if widths else None, ".2f", none=""),
            len(self.peaks) or "",
            number(self.mean_peak, ".1%", none=""),
        ]


HEAD = (
    *("", "runs", "published times", "mean", "median", "bias", "in bounds", "width"),
    *("peaks", "mean error"),
)


def is_published(run: Judged) -> bool:
    """Whether a row has the figures that were published, is not marked as doubtful, and states its
    batch size.
    """
    cells = run.row.cells
    return run.says_batch and cells.get("quality", "") in AS_PUBLISHED and not run.is_doubted


def is_peak_of_run(run: Judged) -> bool:
    """Whether a row states the memory peak of its run, and is not marked as doubtful."""
    return run.says_batch and not run.is_doubted


def _median_size(errors: Sequence[float]) -> float | None:
    return median(map(abs, errors)) if errors else None


Known = tuple[str, Judged, Miss | None]


def errors_by_source(known: Sequence[Known], *, by_rows: bool = False) -> list[SourceErrors]:
    """Prediction errors by source, the largest first; each source's bounds are fitted to all other
    sources.

    With ``by_rows``, each row counts as a source when bounds are fitted.
    """
    misses = [miss for *_, miss in known if miss is not None]
    sources_of = [miss.source for miss in misses]
    if by_rows:
        misses = [replace(miss, source=str(place)) for place, miss in enumerate(misses)]
    spreads = iter(left_out(misses, sources_of))
    groups: dict[tuple[str, str], list[tuple[Judged, Held | None]]] = defaultdict(list)
    for source, row, miss in known:
        held = _held(row, next(spreads)) if miss is not None else None
        groups[source, apart_of(row.row.cells)].append((row, held))
    sources = [
        SourceErrors(
            name=name,
            apart=apart,
            rows=[row for row, _ in pairs],
            held=[held for _, held in pairs],
        )
        for (name, apart), pairs in groups.items()
    ]
    return sorted(sources, key=lambda one: (bool(one.apart), -(one.mean_time or 0.0)))


def _held(row: Judged, spread: Spread | None) -> Held | None:
    doubt = row.answer.doubt
    if spread is None or doubt is None or row.measured_s is None:
        return None
    return Held.of(row.measured_s, doubt.range.bounds_s(spread))


def by_source_lines(known: Sequence[Known], more: Sequence[str] = ()) -> Iterator[str]:
    """A section of the page with prediction errors by source: means over sources, further lines
    ``more``, and a table row for each source.
    """
    sources = errors_by_source(known)
    asked = [one for one in sources if not one.apart]
    yield "\n\n".join(beside("report_runs-by_source")) + "\n"
    yield from (f"- {line}" for line in _sums(asked, [row for _, row, _ in known]))
    yield from (f"- {line}" for line in more)
    for name, description in APART.items():
        yield from (f"- Apart, {description}: {line}" for line in _apart(name, sources))
    yield from ("", *narrow(HEAD, (one.cells() for one in sources)), "")


def _apart(name: str, sources: Sequence[SourceErrors]) -> Iterator[str]:
    group = [one for one in sources if one.apart == name and one.published]
    if group:
        errors = [error for one in group for error in one.published]
        held = [one.is_inside for source in group for one in source.bounded]
        within = f", {mean(held):.0%} within bounds" if held else ""
        yield (
            f"{len(errors)} times, mean error {mean(map(abs, errors)):.1%}, median "
            f"{_median_size(errors):.1%}{within}."
        )


def _sums(asked: Sequence[SourceErrors], every: Sequence[Judged]) -> Iterator[str]:
    """The mean errors over all sources, except those that are reported separately."""
    means = [one.mean_time for one in asked if one.mean_time is not None]
    errors = [error for one in asked for error in one.published]
    if not means:
        return
    yield (
        f"Times: the mean error of a source is {mean(means):.1%} in the mean of {len(means)}, "
        f"{median(means):.1%} in the median; the error of a row is {_median_size(errors):.1%} in "
        f"the median of {len(errors)}."
    )
    held = [one.is_inside for source in asked for one in source.bounded]
    shares = [one.inside for one in asked if one.inside is not None]
    if held:
        yield (
            f"Bounds without a run's source hold for {mean(held):.0%} of rows, and for "
            f"{mean(shares):.0%} of a source's rows in the mean of sources."
        )
    if widths := [one.width for source in _of_known_kinds(asked) for one in source]:
        yield (
            f"Of kinds with {ENOUGH_SOURCES} sources and more, the upper bound is "
            f"{median(widths):.2f} times the lower one in the median of {len(widths)} rows."
        )
    refused = [one for one in every if one.answer.refused]
    of_gpu = sum("hardware: " in one.answer.refused for one in refused)
    yield f"Refused: {len(refused)} rows, of which {of_gpu} for their GPUs."
    if peaks := [one.mean_peak for one in asked if one.mean_peak is not None]:
        yield (
            f"Peaks of memory: the mean error of a source is {mean(peaks):.1%} in the mean of "
            f"{len(peaks)}, {median(peaks):.1%} in the median."
        )
    runs = separation([one for one in every if one.answer.prediction is not None])
    if runs.ran + runs.failed:
        yield (
            f"Run and failed told apart: {runs.share:.1%}; of {runs.ran} runs {runs.ran_right} are "
            f"said to fit, of {runs.failed} that failed {runs.failed_right} are said not to."
        )


def _of_known_kinds(sources: Sequence[SourceErrors]) -> Iterator[Sequence[Held]]:
    """How often measurements lie inside their bounds, for runs of kinds that come from enough
    sources; a kind of run is its software, whatever the version, and other facts about it.
    """
    of_kind: dict[str, set[str]] = defaultdict(set)
    for source in sources:
        for run in source.rows:
            if run.answer.doubt is not None and run.measured_s is not None:
                of_kind[run.answer.doubt.kind.names[0]].add(source.name)
    for source in sources:
        pairs = zip(source.rows, source.held, strict=True)
        yield [
            held
            for run, held in pairs
            if held is not None
            and run.answer.doubt is not None
            and len(of_kind[run.answer.doubt.kind.names[0]]) >= ENOUGH_SOURCES
        ]
