"""Tables of rows: as Markdown, which terminals show too, and as comma-separated values."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Row = Mapping[str, Any]

# What a clock says goes under this key of a row; all else is equal in two runs with one seed.
TIMING = "timing"
# A number, with a unit of a few letters or another number after it; or none.
NUMBER = re.compile(r"[-+~]?\$?\d[\d.,]*(e[-+]?\d+)? ?[%\w/]{0,5}( to \S+)?|-|")


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown, its columns as wide as what they hold; columns of numbers to the right.

    >>> print(table(["plan", "s"], [["one", 9.5], ["another", 10.25]]))
    | plan    |     s |
    |---------|------:|
    | one     |   9.5 |
    | another | 10.25 |
    """
    cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
    columns = [*zip(head, *cells, strict=True)]
    widths = [max(map(len, column)) for column in columns]
    right = [all(NUMBER.fullmatch(cell) for cell in column[1:]) for column in columns]
    rule = "|".join(
        f"{'-' * (width + 1)}{':' if to_right else '-'}"
        for width, to_right in zip(widths, right, strict=True)
    )
    first, *others = (
        " | ".join(
            cell.rjust(width) if to_right else cell.ljust(width)
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in (head, *cells)
    )
    return "\n".join([f"| {first} |", f"|{rule}|", *(f"| {line} |" for line in others)])


def csv_of(rows: Sequence[Row]) -> str:
    """Rows as comma-separated values, without their timing; parts of a part have names with dots.

    >>> print(csv_of([{"plan": "a", "cost": {"usd": 2}, "timing": {"s": 3}}, {"plan": "b"}]))
    plan,cost.usd
    a,2
    b,
    <BLANKLINE>
    """
    flat = [dict(_flat(untimed(row))) for row in rows]
    text = io.StringIO()
    head = dict.fromkeys(name for row in flat for name in row)
    writer = csv.DictWriter(text, [*head], restval="", lineterminator="\n")
    writer.writeheader()
    writer.writerows(flat)
    return text.getvalue()


def untimed(row: Row) -> dict[str, Any]:
    """A row without what depends on the clock."""
    return {name: value for name, value in row.items() if name != TIMING}


def _flat(row: Row, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{before}{name}", json.dumps(value)
        else:
            yield f"{before}{name}", value
