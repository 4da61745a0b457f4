"""Tables of rows as Markdown, text and CSV; and numbers with units, rounded in the same way
everywhere.
"""

import csv
import io
import json
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from string import Formatter
from typing import Any

from mistlab.core.units import GIB_BYTES
from mistlab.job.prediction import Prediction
from mistlab.plan.plan import Plan

# Numbers with their units (times, memory, rates and bounds), which all commands format in the same
# way.


# The text that stands for a missing number.
NONE = "-"


def number(value: float | None, form: str, unit: str = "", *, none: str = NONE) -> str:
    """A number formatted by a specification such as ``.2f``, with its unit.

    >>> number(1234.5, ",.1f", " s"), number(None, ".2f")
    ('1,234.5 s', '-')
    """
    return none if value is None else f"{value:{form}}{unit}"


def gib(size_bytes: float | None, form: str = ".2f") -> str:
    """A number of bytes in GiB, without the unit."""
    return number(None if size_bytes is None else size_bytes / GIB_BYTES, form)


def yes_no(fact: object) -> str:
    """True or false as the text of a table cell."""
    return "yes" if fact else "no"


def rate_words(plan: Plan, prediction: Prediction) -> str:
    """An iteration's time with its bounds, the tokens per second of all GPUs and of one GPU, and
    MFU, as text.
    """
    tokens = prediction.tokens_per_s
    return (
        f"{prediction.iteration_s:.3f} s an iteration (90 % of measurements: "
        f"{prediction.iteration_s_low:.3f} to {prediction.iteration_s_high:.3f}), "
        f"{tokens:,.0f} tokens/s, {tokens / plan.num_gpus:,.0f} a GPU, MFU {prediction.mfu:.0%}"
    )


def brief_words(prediction: Prediction) -> str:
    """An iteration's time, the memory of the fullest GPU, and whether the plan fits, as text."""
    fits = "fits" if prediction.fits else "does not fit"
    held = gib(prediction.peak_reserved_bytes, ".1f")
    return f"{prediction.iteration_s:.3f} s an iteration, {held} GiB on a GPU, {fits}"


def played_words(simulated_s: float | None) -> str:
    """An iteration's time by the event simulator, as text."""
    return "too many tasks to play" if simulated_s is None else f"{simulated_s:.3f} s"


# Tables of rows: as Markdown, which is also readable in terminals; as text; and as comma-separated
# values.


Row = Mapping[str, Any]
# The cells of a table column: a format with names of the row's fields, or a function of the row.
Cell = str | Callable[[Any], object]

# The key under which a row has its measured times; all else in the row is the same in two runs with
# one seed.
TIMING = "timing"
# Matches a number, with a short unit or a second number behind it, or the dash for a missing
# number.
NUMBER = re.compile(r"[-+~]?\$?\d[\d.,]*(e[-+]?\d+)? ?[%\w/]{0,5}( to \S+)?|-|")


def table(head: Sequence[str], lines: Iterable[Sequence[object]]) -> str:
    """A table in Markdown with aligned columns; columns of numbers are right-aligned.

    >>> print(table(["plan", "s"], [["one", 9.5], ["another", 10.25]]))
    | plan    |     s |
    |---------|------:|
    | one     |   9.5 |
    | another | 10.25 |
    """
    cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
    columns = [*zip(head, *cells, strict=True)]
    right = [
        index
        for index, column in enumerate(columns)
        if all(NUMBER.fullmatch(cell) for cell in column[1:])
    ]
    first, *others = _justified([head, *cells], lambda place: place in right)
    rule = "|".join(
        f"{'-' * (len(cell) + 1)}{':' if column in right else '-'}"
        for column, cell in enumerate(first)
    )
    top, *body = (f"| {' | '.join(line)} |" for line in (first, *others))
    return "\n".join([top, f"|{rule}|", *body])


def table_of(rows: Iterable[Any], *columns: tuple[str, Cell]) -> str:
    """A Markdown table of rows, given the heading and the cell format of each column; None is shown
    as a dash.

    >>> row = {"plan": "one", "times": {"s": 9.5}}
    >>> print(table_of([row], ("plan", "{plan}"), ("s", "{times[s]:.2f}")))
    | plan |    s |
    |------|-----:|
    | one  | 9.50 |
    """
    cells = [cell for _, cell in columns]
    return table(
        [head for head, _ in columns],
        (
            [_CELLS.vformat(c, (), row) if isinstance(c, str) else c(row) for c in cells]
            for row in rows
        ),
    )


def item(text: str) -> str:
    """An item of a Markdown list, wrapped at 100 columns.

    >>> print(item("a row"))
    - a row
    """
    return textwrap.fill(
        f"- {text}",
        width=100,
        subsequent_indent="  ",
        break_on_hyphens=False,
        break_long_words=False,
    )


def narrow(head: Sequence[str], lines: Iterable[Sequence[object]]) -> list[str]:
    """The lines of a Markdown table whose columns are not padded, for pages with many rows."""
    texts = [f"| {' | '.join(map(str, line))} |" for line in lines]
    return [f"| {' | '.join(head).lstrip()} |", f"|{'---|' * len(head)}", *texts]


def aligned(lines: Sequence[Sequence[str]], *, left: Container[int] = (0,)) -> list[str]:
    """The lines of a table as text; the columns ``left`` are aligned on the left, all others on the
    right.

    >>> aligned([["", "s"], ["stage 0", "12.5"]])
    ['            s', 'stage 0  12.5']
    """
    return ["  ".join(line).rstrip() for line in _justified(lines, lambda at: at not in left)]


def _justified(
    lines: Sequence[Sequence[str]], to_right: Callable[[int], bool]
) -> Iterator[list[str]]:
    """The lines of a table whose columns are as wide as their widest cells."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    for line in lines:
        yield [
            cell.rjust(width) if to_right(column) else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]


class _Cells(Formatter):
    """Formats the fields of a row, which may be a mapping or an object with attributes."""

    def get_value(self, key: int | str, args: Sequence[Any], kwargs: Any) -> Any:
        """The value of the row's field with this name."""
        return kwargs[key] if isinstance(kwargs, Mapping) else getattr(kwargs, str(key))

    def format_field(self, value: Any, format_spec: str) -> str:
        """The value of a field, formatted by its specification; a dash if it is missing."""
        return number(value, format_spec)


_CELLS = _Cells()


def csv_of(rows: Sequence[Row]) -> str:
    """Rows as comma-separated values, without measured times; the names of nested keys are joined
    with dots.

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


def flat_row(row: Row) -> dict[str, Any]:
    """A row without nesting: names of nested keys are joined with dots, lists become text."""
    return dict(_flat(row))


def untimed(row: Row) -> dict[str, Any]:
    """A row without the fields that differ from run to run because they are measured times."""
    return {name: value for name, value in row.items() if name != TIMING}


def _flat(row: Row, before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in row.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}.")
        elif isinstance(value, list | tuple):
            yield f"{before}{name}", json.dumps(value)
        else:
            yield f"{before}{name}", value
