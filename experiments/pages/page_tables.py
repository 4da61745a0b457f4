"""Pages of results on disk: the text, and CSV files beside it with the rows of long tables."""

import csv
import io
import re
from collections.abc import Iterable
from pathlib import Path

# If a table has more rows than this, the page shows the first ones, and a file has all of them.
MOST_ROWS = 16
SHOWN_ROWS = 4
# A comment on its own line that marks the next table: its rows are moved to a file.
IN_A_FILE = "<!-- rows in a file -->"
TABLE = re.compile(
    rf"^(?P<apart>{IN_A_FILE}\n\n)?\|.*\|\n\|[-:| ]+\|\n(?:\|.*\|(?:\n|\Z))+", re.MULTILINE
)


def write_page(page: Path, text: str) -> None:
    """Write a page of results, with the rows of its long tables in ``PAGE-N.csv`` beside it."""
    shown, files = with_rows_apart(text, page.stem)
    for path in page.parent.glob(f"{page.stem}-[0-9]*.csv"):
        path.unlink()
    for name, rows in files.items():
        page.with_name(name).write_text(rows, encoding="utf-8", errors="backslashreplace")
    page.write_text(shown, encoding="utf-8", errors="backslashreplace")


def with_rows_apart(text: str, stem: str) -> tuple[str, dict[str, str]]:
    """The text of a page with only the first rows of each long table, and the contents of the files
    with all rows.

    A table after ``IN_A_FILE`` has no row in the text.

    >>> long = "| n |\\n|--:|\\n" + "".join(f"| {n} |\\n" for n in range(20))
    >>> shown, files = with_rows_apart(long, "squares")
    >>> shown.splitlines()[-1], files["squares-1.csv"].split()[:3]
    ('16 further rows: [all 20](squares-1.csv).', ['n', '0', '1'])
    >>> with_rows_apart(f"{IN_A_FILE}\\n\\n{long}", "squares")[0]
    'Rows in a file: [all 20](squares-1.csv).\\n'
    """
    files: dict[str, str] = {}

    def cut(match: re.Match[str]) -> str:
        apart = match["apart"] or ""
        head, rule, *rows = match.group().removeprefix(apart).rstrip("\n").split("\n")
        if len(rows) <= MOST_ROWS and not apart:
            return match.group()
        name = f"{stem}-{len(files) + 1}.csv"
        files[name] = _csv([head, *rows])
        ending = "\n" if match.group().endswith("\n") else ""
        if apart:
            return f"Rows in a file: [all {len(rows):,}]({name}).{ending}"
        further = f"{len(rows) - SHOWN_ROWS:,} further rows: [all {len(rows):,}]({name})."
        return "\n".join([head, rule, *rows[:SHOWN_ROWS], "", further]) + ending

    return TABLE.sub(cut, text), files


def _csv(lines: Iterable[str]) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for line in lines:
        cells = re.split(r"(?<!\\)\|", line.strip()[1:-1])
        writer.writerow(cell.strip().replace("\\|", "|") for cell in cells)
    return text.getvalue()
