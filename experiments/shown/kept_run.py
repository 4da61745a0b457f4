"""What the folder of a run holds, as far as it is there: its command, words, pictures and rows."""

import base64
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from experiments.cli.rundir import command_line, read_rows
from experiments.pages.tables import flat_row
from mistlab.core.files import read_json, text_in
from mistlab.core.values import InputError

# Rows beyond these are left out of a page, which says so.
MOST_ROWS = 5_000
# The largest picture that is put into a page.
MOST_PICTURE = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A run's folder: how it was made, the words of its report in Markdown, pictures by name, rows
    without nested values, and how many rows it has in all."""

    path: Path
    command: str
    made: Mapping[str, Any]
    words: str
    pictures: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    all_rows: int

    @classmethod
    def of(cls, path: Path) -> "KeptRun":
        """The run in a folder; a folder that holds no run is refused."""
        if not path.is_dir():
            message = f"{path}: is no folder: give the folder of a run, such as runs/scaling"
            raise InputError(message)
        config, report, rows = (path / name for name in ("config.json", "report.md", "rows.jsonl"))
        if not any(file.is_file() for file in (config, report, rows)):
            runs = sorted(one.parent.name for one in path.glob("*/config.json"))
            inside = f"; runs lie in it: {', '.join(runs[:8])}" if runs else ""
            message = f"{path}: holds no config.json, report.md or rows.jsonl of a run{inside}"
            raise InputError(message)
        made = read_json(config) if config.is_file() else {}
        found = read_rows(rows)
        return cls(
            path=path,
            command=_command(made),
            made=made,
            words=text_in(report) if report.is_file() else "",
            pictures=dict(_pictures(path)),
            rows=[flat_row(row) for row in found[:MOST_ROWS]],
            all_rows=len(found),
        )

    @property
    def name(self) -> str:
        """The folder's name."""
        return self.path.resolve().name

    @property
    def title(self) -> str:
        """The report's first heading, or the command's name."""
        first = self.words.partition("\n")[0]
        if first.startswith("# "):
            return first.removeprefix("# ")
        return str(self.made.get("command") or self.name)


def _command(made: Mapping[str, Any]) -> str:
    """The command line that a configuration was written for, if it says so."""
    if not isinstance(made.get("command"), str) or not isinstance(made.get("options"), Mapping):
        return ""
    return command_line(made)


def _pictures(path: Path) -> Iterator[tuple[str, str]]:
    """The pictures of a folder as addresses that hold them."""
    for file in sorted(path.glob("*.svg")):
        if file.stat().st_size <= MOST_PICTURE:
            content = base64.b64encode(file.read_bytes()).decode()
            yield file.name, f"data:image/svg+xml;base64,{content}"
