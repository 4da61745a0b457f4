"""Reads the cells of a row of a table of runs: whole numbers, numbers and texts, or nothing."""

import math
from collections.abc import Mapping

from mistlab.core.values import FieldError, refuse, shown

# Texts that stand for nothing.
NOTHING = frozenset(
    ("", "nan", "n/a", "na", "null", "-", "?", "unknown", "not stated", "not published")
)

# Columns in which 0 says that a run has none.
NONE_AT_ZERO = frozenset(("experts", "topk", "ep", "etp", "vpp", "cp"))

# No size of a run is larger; the product of a few still is a number.
MOST = 1e9


def is_empty(text: str | None) -> bool:
    """Whether a cell says nothing."""
    return text is None or text.strip().casefold() in NOTHING


def text_of(row: Mapping[str, str], column: str) -> str:
    """The text of a cell; empty if the cell says nothing, or if there is no such column."""
    cell = row.get(column)
    return "" if cell is None or is_empty(cell) else cell.strip()


def number_of(row: Mapping[str, str], column: str) -> float | None:
    """The number in a cell, None for nothing; refuses a text that is no number above 0."""
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
        problem = f"{shown(text)} is no number above 0: give a number without a unit, or nothing"
        refuse(column, problem)
    return number


def count_of(row: Mapping[str, str], column: str) -> int | None:
    """The whole number in a cell, from 1 to ``MOST``; None for nothing."""
    number = number_of(row, column)
    if number is None:
        return None
    if number > MOST:
        refuse(column, f"{number:g} is too large: give at most {MOST:g}, or nothing")
    if number != int(number):
        problem = f"{number:g} is not a whole number: give one, or nothing"
        refuse(column, problem)
    return int(number)


def flag_of(row: Mapping[str, str], column: str) -> bool | None:
    """Whether a cell says yes (1, true) or no (0, false); None for nothing."""
    text = text_of(row, column).casefold()
    if not text:
        return None
    if text in ("1", "1.0", "true", "yes", "on"):
        return True
    if text in ("0", "0.0", "false", "no", "off"):
        return False
    raise FieldError(column, f"{shown(text)} is neither yes nor no: give 1 or 0")
