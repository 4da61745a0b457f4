"""Tables of measured runs: their columns, and how cells are read as numbers and texts."""

import csv
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mistlab.core.values import FieldError, refuse, reject, shown

# Reads the cells of tables of runs: as whole numbers, numbers, texts, or nothing.


# Texts that mean that a cell is empty.
NOTHING = frozenset(
    ("", "nan", "n/a", "na", "null", "-", "?", "unknown", "not stated", "not published")
)

# Columns in which 0 means that the model or the plan does not have the feature.
NONE_AT_ZERO = frozenset(("experts", "topk", "ep", "etp", "vpp", "cp"))

# The largest size that is accepted; products of a few such numbers are still finite.
MOST = 1e9


def is_empty(text: str | None) -> bool:
    """Whether a cell is empty, or contains a word such as "none"."""
    return text is None or text.strip().casefold() in NOTHING


def text_of(row: Mapping[str, str], column: str) -> str:
    """The text of a cell; empty if the cell is empty, or if the table does not have the column."""
    cell = row.get(column)
    return "" if cell is None or is_empty(cell) else cell.strip()


def number_of(row: Mapping[str, str], column: str) -> float | None:
    """The number in a cell, None if it is empty; refuses text, and numbers that are not
    positive.
    """
    text = text_of(row, column)
    if text in ("", "none"):
        return None
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if number == 0 and column in NONE_AT_ZERO:
        return None
    if not math.isfinite(number) or number <= 0:
        refuse(
            column,
            f"{shown(text)} is not a number above 0: give a number without a unit, or leave "
            "it empty",
        )
    return number


def count_of(row: Mapping[str, str], column: str) -> int | None:
    """The whole number in a cell, from 1 to ``MOST``; None if the cell is empty."""
    number = number_of(row, column)
    if number is None:
        return None
    if number > MOST:
        digits = f"{number:,.0f}" if number < MOST**2 else f"{number:g}"
        refuse(column, f"{digits} is too large: give at most {MOST:,.0f}, or leave it empty")
    if number != int(number):
        near = max(1, round(number))
        refuse(
            column,
            f"{number:g} is not a whole number: give one such as {near}, or leave it empty",
        )
    return int(number)


def counts_of(text: str) -> list[int]:
    """The whole numbers in a text such as 7+9+9+9."""
    return [int(count) for count in text.split("+")]


def flag_of(row: Mapping[str, str], column: str) -> bool | None:
    """The yes (1, true) or no (0, false) in a cell; None if the cell is empty."""
    text = text_of(row, column).casefold()
    if not text:
        return None
    if text in ("1", "1.0", "true", "yes", "on"):
        return True
    if text in ("0", "0.0", "false", "no", "off"):
        return False
    raise FieldError(column, f"{shown(text)} is neither yes nor no: give 1 or 0")


# Reads tables of measured runs: CSV files with one run per row (docs/reference/measured-runs.md).


# The columns in which every row must have a value.
NEEDED = ("sequence_length",)
# A table that has none of these columns is not a table of runs.
TOLD_BY = (*NEEDED, "model", "layers", "hidden", "heads")


@dataclass(frozen=True, slots=True, kw_only=True)
class TableRow:
    """A row of a table of runs: its number, its line in the file, and its cells."""

    file: str
    number: int
    line: int
    cells: Mapping[str, str]
    problem: str = ""

    @property
    def where(self) -> str:
        """The table and the line of a row, for messages."""
        return f"{self.file}, line {self.line}"


def rows_of_table(
    path: Path, needed: Sequence[str] = NEEDED, told_by: Sequence[str] = TOLD_BY
) -> Iterator[TableRow]:
    """The rows of a table in order; rows and lines are numbered from 1.

    Cells are separated by commas or, if the header has no comma, by semicolons or tabs. A row that
    cannot be read comes with its problem; a file that is not a table is refused.
    """
    try:
        with path.open(encoding="utf-8-sig", errors="surrogateescape", newline="") as file:
            header = file.readline()
            file.seek(0)
            reader = csv.reader(file, delimiter=_delimiter(header))
            yield from _rows(path, reader, needed, told_by)
    except OSError as error:
        reject(f"{path}: {error.strerror}: give the path of a CSV file")
    except csv.Error as error:
        reject(f"{path}: {error}: give a CSV file in UTF-8")


def _delimiter(header: str) -> str:
    return next((one for one in ",;\t" if one in header), ",")


def _rows(
    path: Path, reader: "Iterator[list[str]]", needed: Sequence[str], told_by: Sequence[str]
) -> Iterator[TableRow]:
    header = _header(path, next(reader, []), told_by)
    missing = [name for name in needed if name not in header]
    number = 0
    for cells in reader:
        if not any(cell.strip() for cell in cells):
            continue
        number += 1
        yield TableRow(
            file=str(path),
            number=number,
            line=getattr(reader, "line_num", number + 1),
            cells=dict(zip(header, cells, strict=False)),
            problem=_problem(cells, len(header), missing),
        )


def _header(path: Path, cells: Sequence[str], told_by: Sequence[str]) -> list[str]:
    """The names of a table's columns; refuses a table that is not a table of runs."""
    header = [name.strip().casefold() for name in cells]
    twice = sorted({name for name in header if name and header.count(name) > 1})
    problem = ""
    if not any(header):
        problem = "is empty"
    elif not all(map(_is_text, header)):
        problem = "is not UTF-8"
    elif not set(header) & set(told_by):
        problem = f"has none of the columns {', '.join(told_by)}"
    elif twice:
        problem = f"its header has column {', '.join(twice)} twice"
    if problem:
        reject(f"{path}: {problem}: give a table of runs in UTF-8, with a header")
    return header


def _problem(cells: Sequence[str], columns: int, missing: Sequence[str]) -> str:
    """The reason why a row cannot be read; empty if it can."""
    if missing:
        return f"the table has no column {', '.join(missing)}: add it"
    if len(cells) > columns:
        problem = f"{len(cells)} cells, but the table has {columns} columns"
        return f"{problem}: put cells with commas into quotes"
    if len(cells) < columns and any("\n" in cell for cell in cells):
        lines = 1 + sum(cell.count("\n") for cell in cells)
        return f"{len(cells)} of {columns} cells in {lines} lines: close the quote of the last cell"
    if not all(map(_is_text, cells)):
        return "a cell is not UTF-8: save the table in UTF-8"
    return ""


def _is_text(cell: str) -> bool:
    """Whether all bytes of a cell were valid text; the reader replaces invalid bytes by lone
    surrogates.
    """
    return cell.isascii() or not any("\ud800" <= letter <= "\udfff" for letter in cell)
