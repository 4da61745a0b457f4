"""The bounds of runs that were left out by groups, and the shares of all kinds of runs."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import chain
from pathlib import Path
from statistics import mean, median

from experiments.cli.commandline import progress, writable
from experiments.pages.tables import narrow
from experiments.runs.judged import Judged
from experiments.runs.run_sureness import Held, Miss, left_out, sureness_of
from experiments.runs.runs_table import TableRow
from mistlab.core.files import write_yaml
from mistlab.core.values import to_mapping
from mistlab.cost.confidence import Shares

# What is left out at once: the runs of one software with an equal cell, or all of a table.
WAYS: Mapping[str, Callable[[TableRow, str], str]] = {
    "model": lambda row, software: f"{software} {row.cells.get('model', '')}",
    "GPUs": lambda row, software: f"{software} {row.cells.get('gpus', '')}",
    "table": lambda row, _: row.file,
}
HEAD = ("", "runs", *(cell for way in WAYS for cell in (f"without its {way}", "width", "score")))
WORDS = """\
## Bounds of runs that were left out

Bounds lie shares of the way below and above what is predicted. The way leads, in logarithms, from
the predicted time to the time of the model's arithmetic at the peak rate: it is short for a run
that uses half of its GPUs' peak, long for a tiny model that waits for its host. Shares belong to
the kind of run, by what is known before it runs: the software, the engine that it is predicted as,
the GPUs, the blocks (without experts, with experts, hybrid, with adapters), the bits of products,
benchmark or training as users do it. A run is expected to be like the runs of its narrowest kind,
or of the next wider one, and so on to all runs. A kind counts as its groups (models of one
software, tables of a kind of any software), all wider ones together as 8 groups. In a kind, a group
of runs counts as the root of their number. 5 % of what is expected lie below the lower bound, 5 %
above the upper one. Shares are stretched by 1.3, and by 0.1 for each doubling of GPUs beyond the
most that were measured of the narrowest kind. No bound lies below the model's arithmetic at peak
rate, and none above 30 times the longest time predicted
([why](../decisions/0041-bounds-by-kind.md)).

Here shares are made without all runs of the same software that have the same model, then the same
number of GPUs, then without the whole table. The first number says how many measurements lie within
such bounds, the second is the upper bound over the lower one (the median). Constants of engines and
hardware are not fitted again without these runs. Bounds that hold for 97 % hold for all of 98 runs
in one of twenty cases: of fewer runs, 100 % does not show that bounds are too wide. The *score* is
the interval score of the logarithms of times: the width, and 20 times what a measurement lies
outside. Of two ways to make bounds of 90 %, the one with the lower mean score is the better one.
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
    lines: list[list[object]] = []
    for name in dict.fromkeys(name for name, *_ in known):
        places = [place for place, (own, *_) in enumerate(known) if own == name]
        rows = [known[place][1] for place in places]
        cells = (_cells(rows, [found[way][place] for place in places]) for way in WAYS)
        lines.append([name, len(places), *chain.from_iterable(cells)])
    yield from (*narrow(HEAD, lines), "")


def _cells(rows: Sequence[Judged], shares: Sequence[Shares | None]) -> list[str]:
    held = [_held(row, some) for row, some in zip(rows, shares, strict=True) if some is not None]
    if not held:
        return [""] * 3
    inside, score = (mean(getattr(one, name) for one in held) for name in ("is_inside", "score"))
    return [f"{inside:.0%}", f"{median(one.width for one in held):.2f}", f"{score:.2f}"]


def _held(row: Judged, shares: Shares) -> Held:
    doubt = row.answer.doubt
    assert doubt is not None
    assert row.measured_s is not None
    return Held.of(row.measured_s, doubt.range.bounds_s(shares))


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
