"""Reads the rows of a measurement table, and selects those of one measurement campaign and one
machine.
"""

import csv
import hashlib
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NoReturn

from mistlab.core.values import near_matches, reject

CAMPAIGN = "generation"
HARDWARE = "hardware"

# What an error message about a row tells the user to do.
MEASURE_AGAIN = "measure the row again, or remove it"
ADD_COLUMN = "add it to all rows (docs/reference/measurement-tables.md)"

Row = dict[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Origin:
    """The file from which rows of a measurement table were read, and how many repeated rows were
    dropped.
    """

    path: Path
    sha256: str
    campaign: str = ""
    duplicates: int = 0


def read_rows(
    path: Path,
    needed: Sequence[str],
    campaign: str | None = None,
    hardware: str | None = None,
    *,
    campaign_column: str = CAMPAIGN,
    all_hardware: bool = False,
) -> tuple[Origin, list[tuple[str, Row]]]:
    """Read the distinct rows of one measurement campaign and one machine from a table, each with
    its file and line.

    With ``all_hardware`` the rows of all machines are read.
    """
    content = _bytes_of_file(path)
    rows = _rows(path, content.decode("utf-8", errors="replace"), needed)
    distinct = {tuple(row.items()): (number, row) for number, row in rows}
    chosen = _rows_with(path, list(distinct.values()), campaign_column, campaign, "--campaign")
    if HARDWARE in needed and not all_hardware:
        chosen = _rows_with(path, chosen, HARDWARE, hardware, "--table-hardware")
    origin = Origin(
        path=path,
        sha256=hashlib.sha256(content).hexdigest(),
        campaign=chosen[0][1].get(campaign_column) or "",
        duplicates=len(rows) - len(distinct),
    )
    return origin, [(f"{path}: line {number}", row) for number, row in chosen]


def is_of_machine(row: Row, hardware: str) -> bool:
    """Whether a table row was measured on the machine ``hardware``: this is its name in the row, or
    the first words of that name.
    """
    name = row[HARDWARE]
    return name.startswith(hardware) and not name[len(hardware) :][:1].isalnum()


def _bytes_of_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        reject(f"{path}: cannot be read: {error.strerror}: check the path")


def _rows(path: Path, text: str, needed: Sequence[str]) -> list[tuple[int, dict[str, str]]]:
    reader = csv.DictReader(text.splitlines())
    missing = [name for name in needed if name not in (reader.fieldnames or ())]
    if missing:
        reject(
            f"{path}: column {', '.join(missing)} is missing: give a table with "
            f"{', '.join(needed)} (docs/reference/measurement-tables.md)"
        )
    rows = [(reader.line_num, row) for row in reader]
    if not rows:
        reject(f"{path}: has no rows: give at least one measurement")
    return rows


def _rows_with(
    path: Path, rows: list[tuple[int, Row]], column: str, wanted: str | None, option: str
) -> list[tuple[int, Row]]:
    """Select the rows with the ``wanted`` value in a column; without a wanted value, refuses a
    table with several values there.
    """
    names = sorted({row.get(column) or "" for _, row in rows})
    if wanted is None:
        if len(names) > 1:
            reject(
                f"{path}: column {column} holds {', '.join(names)}, which cannot be fitted "
                f"together: give one of them as {option}"
            )
        return rows
    if wanted not in names:
        reject(f"{path}: {option} {wanted!r} is unknown{near_matches(wanted, names)}")
    return [(number, row) for number, row in rows if (row.get(column) or "") == wanted]


def spread_of(samples: Iterable[Sequence[float]]) -> float | None:
    """How far repeated measurements scatter: their range as a share of their median; None if
    nothing was measured twice.
    """
    spreads = [
        (max(values) - min(values)) / median(values) for values in samples if len(values) > 1
    ]
    return median(spreads) if spreads else None


def positive(where: str, row: Mapping[str, str], name: str) -> float:
    """The number in a column of a table row; refuses a number that is not above zero."""
    value = duration(where, row, name)
    if value == 0:
        refuse_row(where, name, "0 is not positive")
    return value


def duration(where: str, row: Mapping[str, str], name: str) -> float:
    """The number in a column of a table row; refuses a negative number."""
    try:
        value = float(row[name])
    except KeyError:
        refuse_row(where, name, "is missing in the table", ADD_COLUMN)
    except (TypeError, ValueError):
        refuse_row(where, name, f"{row[name]!r} is not a number" if row[name] else "is empty")
    if not math.isfinite(value) or value < 0:
        refuse_row(where, name, f"{value:g} is negative or not finite")
    return value


def refuse_row(where: str, name: str, problem: str, remedy: str = MEASURE_AGAIN) -> NoReturn:
    """Raise an ``InputError`` about the value in one column of a table row."""
    reject(f"{where}: column {name}: {problem}: {remedy}")
