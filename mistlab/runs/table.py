"""Reads tables of measured runs: CSV files with one run a row (docs/reference/measured-runs.md)."""

import csv
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mistlab.values.errors import InputError

# Without these columns no row can be answered.
NEEDED = ("layers", "hidden", "heads", "sequence_length", "micro_batch")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table of runs: its number among the runs, its line in the file, and its cells."""

    file: str
    number: int
    line: int
    cells: Mapping[str, str]
    problem: str = ""

    @property
    def where(self) -> str:
        """The place of the row, for messages."""
        return f"{self.file}, line {self.line}"


def rows_of_table(path: Path) -> Iterator[TableRow]:
    """The rows of a table, in order; runs count from 1, lines of the file too.

    A row with more cells than columns comes with its problem. A file that cannot be read as a
    table is refused.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            yield from _rows(path, csv.reader(file))
    except OSError as error:
        message = f"{path}: {error.strerror}: give the path of a CSV file"
        raise InputError(message) from None
    except (UnicodeDecodeError, csv.Error) as error:
        message = f"{path}: {error}: give a CSV file in UTF-8"
        raise InputError(message) from None


def _rows(path: Path, reader: "Iterator[list[str]]") -> Iterator[TableRow]:
    header = [name.strip().casefold() for name in next(reader, [])]
    if not set(header) & set(NEEDED):
        message = f"{path}: no column {', '.join(NEEDED)}: give a table of runs with a header"
        raise InputError(message)
    missing = [name for name in NEEDED if name not in header]
    number = 0
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        number += 1
        problem = ""
        if missing:
            problem = f"the table has no column {', '.join(missing)}: add it"
        elif len(cells) > len(header):
            problem = (
                f"{len(cells)} cells, but the table has {len(header)} columns: put cells with "
                "commas into quotes"
            )
        yield TableRow(
            file=str(path),
            number=number,
            line=getattr(reader, "line_num", number + 1),
            cells=dict(zip(header, cells, strict=False)),
            problem=problem,
        )
