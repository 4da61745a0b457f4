"""The command ``report_runs``: writes the page and the picture that compare predicted with measured
training runs.
"""

import argparse
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from statistics import mean, median

from experiments.cli.commandline import DONE, as_options, progress, writable
from experiments.measured.ablation import ablation_lines
from experiments.measured.by_source import by_source_lines, source_of
from experiments.measured.deliverables import deliverable_lines
from experiments.measured.errors import ERROR_FORMS, error_cells
from experiments.measured.from_datasheets import (
    LentRun,
    datasheet_kind,
    datasheet_lines,
    figure_lines,
    runs_from_datasheets,
)
from experiments.measured.group_errors import group_lines
from experiments.measured.lent_kernels import kernel_lines
from experiments.measured.peaks import known_peaks, peak_lines, peak_misses
from experiments.measured.predict_runs import RowPredictor
from experiments.measured.refitted import without_own_rows
from experiments.pages.page_tables import IN_A_FILE, write_page
from experiments.pages.study import beside
from experiments.pages.tables import narrow
from experiments.runs.dialects.dialect import row_of
from experiments.runs.judged import (
    GroupErrors,
    Judged,
    Ranked,
    errors_of,
    groups_of,
    judged,
    ranked,
    separation,
    spreads,
)
from experiments.runs.run_sureness import Held, Miss, left_out, sureness_of
from experiments.runs.runs_table import TableRow
from mistlab import catalog
from mistlab.core.files import naming, write_yaml
from mistlab.core.values import to_mapping
from mistlab.cost.confidence import Spread

# The picture of measured runs: predicted against measured seconds, with a marker for each table.


# The number of colours, and the marker shapes that distinguish further tables with the same
# colours.
COLOURS, SHAPES = 10, "o^sv"


def draw(tables: Sequence[tuple[str, Sequence[Judged]]], path: Path) -> None:
    """Draw predicted against measured seconds of the runs of all tables, on logarithmic axes."""
    from matplotlib.figure import Figure  # noqa: PLC0415 (only where something is drawn)

    figure = Figure(figsize=(9, 7), layout="constrained")
    axes = figure.add_subplot()
    ends: list[float] = []
    for number, (name, rows) in enumerate(tables):
        pairs = [
            (run.measured_s, run.predicted_s)
            for run in rows
            if run.measured_s is not None and run.predicted_s is not None
        ]
        if pairs:
            measured, predicted = zip(*pairs, strict=True)
            ends += [*measured, *predicted]
            colour, shape = look(number)
            axes.scatter(
                measured,
                predicted,
                s=9,
                alpha=0.6,
                label=f"{name.replace('_', ' ')} ({len(pairs)})",
                color=colour,
                marker=shape,
            )
    if ends:
        low, high = min(ends) / 1.3, max(ends) * 1.3
        for factor, style in ((1.0, "-"), (1.25, ":"), (0.8, ":")):
            axes.plot([low, high], [low * factor, high * factor], style, color="0.4", linewidth=0.9)
        axes.set(xlim=(low, high), ylim=(low, high))
        axes.legend(fontsize=8, loc="upper left", frameon=False)
    axes.set(xscale="log", yscale="log", xlabel="measured seconds of a step")
    axes.set_ylabel("predicted seconds of a step")
    axes.set_title("Predicted over measured; dotted: 25 % too long or too short")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def look(number: int) -> tuple[str, str]:
    """The colour and the marker for the points of a table."""
    return f"C{number % COLOURS}", SHAPES[number // COLOURS % len(SHAPES)]


# The page of measured runs: the prediction errors of every table, by row and by group, and a
# picture.


COLUMNS = ("engine", "hardware", "model", "gpus", "tp", "pp", "micro_batch", "precision")
MOST_GROUPS = 14
# Subsets of an engine's runs, each given by the largest number of GPUs, the largest tensor-parallel
# degree and the largest number of stages.
PARTS = {
    "no pipeline, tp to 8, to 128 GPUs": {"gpus": 128, "tp": 8, "pp": 1},
    "tp to 8, to 128 GPUs": {"gpus": 128, "tp": 8},
    "tp to 8, to 256 GPUs": {"gpus": 256, "tp": 8},
}
# A configuration is a bad choice if it is slower than the best measured one by more than this
# factor.
BAD = 1.3
# The engine of the runs on clusters for which the catalogue has a profile.
ENGINE_OF_PROFILES = "nanotron"
HEAD = ("", "runs", "answered", *ERROR_FORMS)


def report(options: argparse.Namespace) -> int:
    """Write the page and the picture that compare predicted with measured training runs.

    Tables are those of predict_runs (docs/reference/measured-runs.md). For every table, the page
    has the errors over all runs and by group, the share of measurements inside their bounds (also
    inside bounds that were fitted without the run's group), the spread of repeated runs, and the
    refused rows. It compares sources, each with bounds fitted to the others, and shows the errors
    for measured GPUs that are predicted from their datasheets alone; with --kernels, also for
    single kernels. --profile adds the errors under that cluster profile. --ablation adds the errors
    if rows say less, and if each part of the predictor is turned off.
    """
    with as_options():
        profile = None if options.profile == "none" else catalog.profile(options.profile)
    plain = _tables(options.tables, RowPredictor())
    introduction = "\n\n".join(beside("report_runs")).replace("(runs.svg)", f"({options.name}.svg)")
    page = [f"{introduction}\n", *_summary("All tables", plain), *left_out_lines(plain)]
    known = _known(plain)
    fair = without_own_rows(known)
    page += by_source_lines(fair, [*peak_lines(fair)])
    lent = runs_from_datasheets(known)
    page += datasheet_lines(known, lent)
    if options.kernels:
        page += kernel_lines(options.kernels)
    if options.ablation:
        page += ablation_lines(known)
        page += deliverable_lines(known)
        page += figure_lines(known)
    if options.sureness is not None:
        write_sureness(plain, lent, options.sureness)
    if profile is not None:
        pairs = zip(options.tables, plain, strict=True)
        of_cluster = [path for path, table in pairs if _of_profiles([table])]
        under = _tables(of_cluster, RowPredictor(profile))
        page += _summary(f"Under the profile {profile.name}", under)
        page.append(f"The profile: {profile.source}.\n")
        rows = _of_profiles(under)
        page += ["## Runs under the profile\n", *_orders(rows), *_parts("under the profile", rows)]
    page += _parts("without a profile", _of_profiles(plain))
    page += _each(plain)
    path = writable(options.out / f"{options.name}.md", "folder")
    with naming(path):
        write_page(path, "\n".join(page))
    draw(plain, options.out / f"{options.name}.svg")
    progress(f"{path} written")
    return DONE


Tables = list[tuple[str, list[Judged]]]


def _tables(paths: Sequence[Path], predictor: RowPredictor) -> Tables:
    tables: Tables = []
    for path in paths:
        progress(f"{path}: predicting")
        rows = [judged(one.row, one.answer) for one in predictor.answers(path)]
        tables.append((path.stem, rows))
    return tables


def _of_profiles(tables: Tables) -> list[Judged]:
    """The rows of runs on clusters for which the catalogue has a profile, for the engine that these
    profiles are for.
    """
    every = (one for _, rows in tables for one in rows)
    return [one for one in every if row_of(one.row.cells).software == ENGINE_OF_PROFILES]


def _summary(title: str, tables: Tables) -> Iterator[str]:
    yield f"## {title}\n"
    yield from (*_errors(errors_of(name, rows) for name, rows in tables), "")


ORDERS = (
    *("", "tasks", "rank correlation", "first over best", "worst task"),
    *("by bounds: correlation", "first over best", "worst task"),
    *("repeated", "spread", "most", "run and failed told apart"),
)


# The number of columns in a table of rankings, without the columns on repeated and on failed runs.
ORDERED = 7


def _each(tables: Tables) -> Iterator[str]:
    """A section of the page for each table: rankings, repeated runs, failed runs, errors by group
    and by subset, impossible and refused rows.
    """
    yield "\n\n".join(beside("report_runs-each")) + "\n"
    lines = [(name, *_order_cells(rows)) for name, rows in tables]
    orders = narrow(ORDERS, (line for line in lines if any(line[1:])))
    yield from (f"{IN_A_FILE}\n", *orders, "")
    for name, rows in tables:
        yield from group_lines(name, rows)
    parts = [(name, *cells) for name, rows in tables for cells in _part_cells(rows)]
    if parts:
        yield "Errors of the parts of each table, by engine, hardware, model, GPUs and degrees:\n"
        yield from (f"{IN_A_FILE}\n", *narrow(("table", "part", *HEAD[1:]), parts), "")
    yield from _impossible(tables)
    yield from _refused(tables)


def _impossible(tables: Tables) -> Iterator[str]:
    """A list of the measured figures that no run on their rows' GPUs can have; none if there are no
    such figures.
    """
    named = [(f"{name}, line {run.row.line}", run) for name, rows in tables for run in rows]
    figures = [f"- {where}: {reason}" for where, run in named for reason in run.impossible]
    if figures:
        yield from ("Impossible on the GPU that the row names:\n", *figures, "")


def _order_cells(rows: Sequence[Judged]) -> list[str]:
    """The cells for a table's runs: how well predictions rank runs of one task, how much repeated
    runs vary, and how well predictions tell failed runs from others.
    """
    cells: list[str] = []
    for tasks in ([*ranked(rows)], [*ranked(rows, by=lambda one: one.longest_s)]):
        if not tasks:
            cells += [""] * 3
            continue
        regrets = [one.regret for one in tasks]
        correlation = median(one.correlation for one in tasks)
        cells += [f"{correlation:.2f}", f"{median(regrets):.2f}", f"{max(regrets):.2f}"]
    repeated = spreads(rows)
    runs = separation(rows)
    return [
        str(len([*ranked(rows)]) or ""),
        *cells,
        str(len(repeated) or ""),
        *((f"{median(repeated):.1%}", f"{max(repeated):.1%}") if repeated else ("", "")),
        f"{runs.share:.1%}" if any(one.failed for one in rows) else "",
    ]


def _part_cells(rows: Sequence[Judged]) -> Iterator[Sequence[object]]:
    """The prediction errors of a table's runs, grouped by the value of each column that has only a
    few different values.
    """
    for column in COLUMNS:
        groups = [*groups_of(rows, _cell(column))]
        if 1 < len(groups) <= MOST_GROUPS:
            for value, group in groups:
                yield _error_line(errors_of(f"{column} {value or '(empty)'}", group))


def _orders(rows: Sequence[Judged]) -> Iterator[str]:
    """Lines on three questions: how well predictions rank runs of one task, how well they tell
    failed runs from others, and how much repeated runs vary.
    """
    yield from _ranking(rows)
    if any(one.failed for one in rows):
        runs = separation(rows)
        yield (
            f"Run and failed told apart in {runs.share:.1%}: of {runs.ran} runs "
            f"{runs.ran_right} are said to fit, of {runs.failed} that failed "
            f"{runs.failed_right} are said not to.\n"
        )
    if repeated := spreads(rows):
        yield (
            f"Repeated configurations: {len(repeated)}, whose times lie {median(repeated):.1%} "
            f"from their median (the median configuration), {max(repeated):.1%} at most.\n"
        )


def _parts(how: str, rows: Sequence[Judged]) -> Iterator[str]:
    """The prediction errors and rankings in subsets of an engine's runs, such as those on few GPUs,
    so that large clusters do not dominate.
    """
    if not rows:
        return
    yield f"## Parts of the runs of {ENGINE_OF_PROFILES}, {how}\n"
    parts = {name: [one for one in rows if _is_within(one, most)] for name, most in PARTS.items()}
    lines = (
        (*_error_line(errors_of(name, part)), *_order_cells(part)[:ORDERED])
        for name, part in parts.items()
        if part
    )
    yield from (*narrow((*HEAD, *ORDERS[1 : 1 + ORDERED]), lines), "")
    yield from _single_runs(max(parts.values(), key=len))


def _is_within(run: Judged, most: Mapping[str, int]) -> bool:
    """Whether a run is within a subset's limits on GPUs, tensor parallelism and stages; an empty
    cell counts as 1.
    """
    return all(float(run.row.cells.get(name) or 1) <= limit for name, limit in most.items())


def _ranking(rows: Sequence[Judged]) -> Iterator[str]:
    tasks = [*ranked(rows)]
    if tasks:
        by_bound = [*ranked(rows, by=lambda one: one.longest_s)]
        line = (
            f"Order of the runs of one task ({len(tasks)} tasks, each a model and a batch on one "
            f"number of GPUs): {_ranks(tasks)}."
        )
        if _ranks(by_bound) != _ranks(tasks):
            line += f" In the order of upper bounds: {_ranks(by_bound)}."
        yield f"{line}\n"


def _ranks(tasks: Sequence[Ranked]) -> str:
    regrets = [one.regret for one in tasks]
    worst = max(tasks, key=lambda one: one.regret)
    where = f" ({worst.name})" if worst.regret > BAD else ""
    return (
        f"rank correlation {median(one.correlation for one in tasks):.2f} in the median; the first "
        f"run takes {median(regrets):.2f} times the measured best in the median, "
        f"{worst.regret:.2f} times in the worst task{where}"
    )


def _single_runs(rows: Sequence[Judged]) -> Iterator[str]:
    """A sentence on how far the largest regret depends on chance.

    Several runs of a task are predicted nearly as fast as the best; it says how many of them are
    bad choices, and how probable it is that one of these is the predicted best.
    """
    error = errors_of("", rows).median_time
    tasks = [] if error is None else [*ranked(rows, near=error)]
    if tasks:
        near = [regret for one in tasks for regret in one.near]
        bad = sum(regret > BAD for regret in near)
        where = ", ".join(one.name for one in tasks if max(one.near) > BAD)
        luck = 1 - (1 - bad / len(near)) ** len(tasks)
        yield (
            f"A worst regret is a figure of single runs. Of the {len(near)} runs that are "
            f"predicted within the median error ({error:.1%}) of the best run of their task, {bad} "
            f"took more than {BAD} times the measured best{where and f' ({where})'}. With this "
            f"share, one choice in each of {len(tasks)} tasks meets at least one such run in "
            f"{luck:.0%} of all cases, and no order of plans that errs as much avoids it but by "
            "luck.\n"
        )


def _cell(column: str) -> Callable[[Judged], str]:
    return lambda one: one.row.cells.get(column, "")


def _errors(groups: Iterable[GroupErrors]) -> list[str]:
    """The table of prediction errors of groups of runs."""
    return narrow(HEAD, map(_error_line, groups))


def _error_line(group: GroupErrors) -> Sequence[object]:
    return (group.name, group.rows, group.rows - group.refused, *error_cells(group))


def _refused(tables: Tables) -> Iterator[str]:
    """The refused rows of all tables, as the number of rows for each reason."""
    reasons = Counter(
        (name, _fault(run.answer.refused))
        for name, rows in tables
        for run in rows
        if run.answer.refused
    )
    if reasons:
        yield "Refused rows:\n"
        lines = [(name, count, reason) for (name, reason), count in reasons.most_common()]
        yield from (*narrow(("table", "rows", "reason"), lines), "")


def _fault(refused: str) -> str:
    """The reason in a refusal's message, without the row's number, suggestions and the remedy."""
    reason = refused.partition(": ")[2]
    return re.sub(r"( \(did you mean .*?\?\))?: (give|predict) .*", "", reason).replace("|", "\\|")


# Tests the bounds of predictions: how often they hold for groups of rows that the fit left out, and
# the fitted spread of every kind of runs.


# The groups of runs that are left out in turn: all runs of one software that have the same value in
# a column, or a whole table.
WAYS: Mapping[str, Callable[[TableRow, str], str]] = {
    "model": lambda row, software: f"{software} {row.cells.get('model', '')}",
    "GPUs": lambda row, software: f"{software} {row.cells.get('gpus', '')}",
    "table": lambda row, _: row.file,
}
# The groups of runs that are left out in turn, for tables whose rows name groups: the runs of one
# group, one page or one GPU.
OF_GROUPS: Mapping[str, Callable[[TableRow, str], str]] = {
    "group": lambda row, _: row.cells.get("group") or row.file
}


def left_out_lines(tables: Sequence[tuple[str, Sequence[Judged]]]) -> Iterator[str]:
    """A section of the page: for each table, the share of measurements inside bounds that were
    fitted without the measurement's group.
    """
    known = [(name, row, miss) for name, rows in tables for row, miss in _misses(name, rows)]
    misses = [miss for *_, miss in known]
    ways = {**WAYS, **(OF_GROUPS if any(row.row.cells.get("group") for _, row, _ in known) else {})}
    by_way = {
        way: [*left_out(misses, [group(row.row, miss.kind.software) for _, row, miss in known])]
        for way, group in ways.items()
    }
    yield "\n\n".join(beside("report_runs-bounds")) + "\n"
    lines: list[list[object]] = []
    for name in dict.fromkeys(name for name, *_ in known):
        places = [index for index, (own, *_) in enumerate(known) if own == name]
        rows = [known[index][1] for index in places]
        cells = (_cells(rows, [by_way[way][index] for index in places]) for way in ways)
        lines.append([name, len(places), *chain.from_iterable(cells)])
    headings = chain.from_iterable((f"without its {way}", "width", "score") for way in ways)
    yield from (f"{IN_A_FILE}\n", *narrow(("", "runs", *headings), lines), "")


def _cells(rows: Sequence[Judged], spreads: Sequence[Spread | None]) -> list[str]:
    held = [_held(row, some) for row, some in zip(rows, spreads, strict=True) if some is not None]
    if not held:
        return [""] * 3
    inside, score = (mean(getattr(one, name) for one in held) for name in ("is_inside", "score"))
    return [f"{inside:.0%}", f"{median(one.width for one in held):.2f}", f"{score:.2f}"]


def _held(row: Judged, spread: Spread) -> Held:
    doubt = row.answer.doubt
    assert doubt is not None
    assert row.measured_s is not None
    return Held.of(row.measured_s, doubt.range.bounds_s(spread))


def _known(tables: Tables) -> list[tuple[str, Judged, Miss | None]]:
    """Every row of the tables with its source, and how far its measured time is outside the
    predicted range (None if it has no time or no prediction).
    """
    return [
        (source_of(name, row.row.cells), row, miss)
        for name, rows in tables
        for row, miss in _with_misses(name, rows)
    ]


def _misses(table: str, rows: Sequence[Judged]) -> Iterator[tuple[Judged, Miss]]:
    for row, miss in _with_misses(table, rows):
        if miss is not None:
            yield row, miss


def _with_misses(table: str, rows: Sequence[Judged]) -> Iterator[tuple[Judged, Miss | None]]:
    for row in rows:
        doubt, miss = row.answer.doubt, None
        if doubt is not None and row.measured_s is not None:
            miss = Miss(
                kind=doubt.kind,
                source=source_of(table, row.row.cells),
                model=row.row.cells.get("model", ""),
                gpus=doubt.gpus,
                roots=doubt.range.miss(row.measured_s),
            )
        yield row, miss


def write_sureness(tables: Tables, lent: Sequence[LentRun], path: Path) -> None:
    """Write the catalogue's file on the uncertainty of predictions by kind of run, as fitted to
    these tables.
    """
    misses = [miss for name, rows in tables for _, miss in _misses(name, rows)]
    names = ", ".join(name for name, rows in tables if any(True for _ in _misses(name, rows)))
    source = f"{len(misses)} measured runs of tables {names} by experiments.report_runs"
    path = writable(path, "path of a file of spreads")
    sureness = replace(
        sureness_of(misses, source),
        datasheet=datasheet_kind(lent),
        peaks=known_peaks(peak_misses(_known(tables))),
    )
    write_yaml(to_mapping(sureness), path)
    progress(f"{path} written")
