"""The bounds of runs that were left out by groups, and the shares of all kinds of runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import mean, median

from experiments.cli.commandline import progress, writable
from mistlab.runs.judged import Judged
from mistlab.runs.sureness import LeftOut, Miss, left_out, sureness_of
from mistlab.runs.table import TableRow
from mistlab.values.datafile import write_yaml
from mistlab.values.value import to_mapping

# What is left out at once: the runs of one software with an equal cell, or all of a table.
WAYS: Mapping[str, Callable[[TableRow, str], str]] = {
    "model": lambda row, software: f"{software} {row.cells.get('model', '')}",
    "GPUs": lambda row, software: f"{software} {row.cells.get('gpus', '')}",
    "table": lambda row, _: row.file,
}
HEAD = (
    "| | runs | " + " | ".join(f"without its {way} | width" for way in WAYS) + " |\n"
    "|---|---|" + "---|---|" * len(WAYS)
)
WORDS = """\
## Bounds of runs that were left out

Bounds lie a share of the way below and above what is predicted. The way leads, in logarithms, from
the predicted time to the time of the model's arithmetic at the peak rate: it is short for a run
that uses half of its GPUs' peak, long for a tiny model that waits for its host. The share belongs
to the kind of run, by what is known before it runs: the software, the engine that it is predicted
as, the GPUs, the blocks (without experts, with experts, hybrid, with adapters), the bits of
products, benchmark or training as users do it. 90 % of the measured runs of a kind lie within its
share. A kind of one software counts from 8 runs of 2 models on, and takes part of the share of the
next wider kind, the more the fewer its models are. In kinds of an engine, or of any engine, each
table with 8 runs counts as much, of however many rows it is, and experts and hybrid blocks are one
kind. Runs of no measured kind take the share of the least sure table. Shares are stretched by 1.35,
and by 0.1 for each doubling of GPUs beyond the most that were measured of the kind
([why](../decisions/0041-bounds-by-kind.md)).

Here shares are made without all runs of the same software that have the same model, then the same
number of GPUs, then without the whole table. The first number says how many measurements lie within
such bounds, the second is the upper bound over the lower one (the median). Constants of engines and
hardware are not fitted again without these runs. Bounds that hold for 97 % hold for all of 98 runs
in one of twenty cases: of fewer runs, 100 % does not show that bounds are too wide.
"""


def left_out_lines(tables: Sequence[tuple[str, Sequence[Judged]]]) -> Iterator[str]:
    """The section of a page: for each table how many measurements lie within bounds that were made
    without their group."""
    known = [(name, row, miss) for name, rows in tables for row, miss in _misses(name, rows)]
    misses = [miss for *_, miss in known]
    found = {
        way: [*left_out(misses, [group(row.row, miss.kind.software) for _, row, miss in known])]
        for way, group in WAYS.items()
    }
    yield WORDS
    yield HEAD
    for name in dict.fromkeys(name for name, *_ in known):
        places = [place for place, (own, *_) in enumerate(known) if own == name]
        cells = [_cells([found[way][place] for place in places], places, known) for way in WAYS]
        yield f"| {name} | {len(places)} | {' | '.join(cells)} |"
    yield ""


def _cells(
    some: Sequence[LeftOut | None], places: Sequence[int], known: Sequence[tuple[str, Judged, Miss]]
) -> str:
    widths, insides = [], []
    for one, place in zip(some, places, strict=True):
        doubt = known[place][1].answer.doubt
        assert doubt is not None
        if one is not None:
            widths.append(doubt.range.width(one.share))
            insides.append(one.is_inside)
    return f"{mean(insides):.0%} | {median(widths):.2f}" if insides else " | "


def _misses(table: str, rows: Sequence[Judged]) -> Iterator[tuple[Judged, Miss]]:
    for row in rows:
        doubt = row.answer.doubt
        if doubt is not None and row.measured_s is not None:
            miss = Miss(
                kind=doubt.kind,
                table=table,
                model=row.row.cells.get("model", ""),
                gpus=doubt.gpus,
                share=doubt.range.miss(row.measured_s),
            )
            yield row, miss


def write_sureness(tables: Sequence[tuple[str, Sequence[Judged]]], path: Path) -> None:
    """Write the shares of all kinds of runs in tables, for the catalogue."""
    misses = [miss for name, rows in tables for _, miss in _misses(name, rows)]
    names = ", ".join(name for name, rows in tables if any(True for _ in _misses(name, rows)))
    source = f"{len(misses)} measured runs of tables {names} by experiments.report_runs"
    path = writable(path, "path of a file of shares")
    write_yaml(to_mapping(sureness_of(misses, source)), path)
    progress(f"{path} written")
