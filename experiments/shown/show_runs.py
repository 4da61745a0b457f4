"""The command ``show``: makes one page with the reports of finished runs, interactive plots and
tables.
"""

import argparse
import base64
import html
import json
import re
from base64 import b64encode
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from experiments.cli.commandline import DONE, progress
from experiments.cli.rundir import command_line, file_at, read_rows
from experiments.pages.tables import flat_row
from mistlab.core.files import naming, read_json, text_in
from mistlab.core.values import reject

# The most rows on a page; if there are more, a note says that they are left out.
MOST_ROWS = 5_000
# The most bytes of a picture that is embedded in a page.
MOST_PICTURE = 1 << 23


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptRun:
    """A finished run, read from its folder: its configuration, its report in Markdown, its pictures
    by name, its rows without nesting, and the total number of rows.
    """

    path: Path
    command: str
    made: Mapping[str, Any]
    words: str
    pictures: Mapping[str, str]
    rows: Sequence[Mapping[str, Any]]
    all_rows: int

    @classmethod
    def of(cls, path: Path) -> "KeptRun":
        """The run in a folder; refuses a folder without a run."""
        if not path.is_dir():
            reject(f"{path}: is not a folder: give the folder of a run, such as runs/scaling")
        config, report, rows = (path / name for name in ("config.json", "report.md", "rows.jsonl"))
        if not any(file.is_file() for file in (config, report, rows)):
            runs = sorted(one.parent.name for one in path.glob("*/config.json"))
            remedy = f"one of the runs in it: {', '.join(runs[:8])}" if runs else "a run's folder"
            reject(f"{path}: holds no config.json, report.md or rows.jsonl of a run: give {remedy}")
        made = read_json(config) if config.is_file() else {}
        kept_rows = read_rows(rows)
        return cls(
            path=path,
            command=_command(made),
            made=made,
            words=text_in(report) if report.is_file() else "",
            pictures=dict(_pictures(path)),
            rows=[flat_row(row) for row in kept_rows[:MOST_ROWS]],
            all_rows=len(kept_rows),
        )

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return self.path.resolve().name

    @property
    def title(self) -> str:
        """The report's first heading, or the command's name."""
        first = self.words.partition("\n")[0]
        if first.startswith("# "):
            return first.removeprefix("# ")
        return str(self.made.get("command") or self.name)


def _command(made: Mapping[str, Any]) -> str:
    """The command line that a run's configuration records; empty if there is none."""
    if not isinstance(made.get("command"), str) or not isinstance(made.get("options"), Mapping):
        return ""
    return command_line(made)


def _pictures(path: Path) -> Iterator[tuple[str, str]]:
    """The pictures in a folder as data URLs."""
    for file in sorted(path.glob("*.svg")):
        if file.stat().st_size <= MOST_PICTURE:
            content = base64.b64encode(file.read_bytes()).decode()
            yield file.name, f"data:image/svg+xml;base64,{content}"


_PICTURE = re.compile(r'<img alt="([^"]*)" src="([^"]*)" ?/?>')
_PART = re.compile(r"[^a-z0-9]+")


def show(options: argparse.Namespace) -> int:
    """Make one page of finished runs: their reports, pictures and rows, with interactive plots.

    RUN is a folder that a command wrote (--out). The page is one file that needs no other file. The
    rows of each run can be sorted, filtered and plotted: any column over any other, coloured by a
    third. Runs of the same command are also plotted together.
    """
    runs = [KeptRun.of(path) for path in options.runs]
    out = file_at(options.out, "page")
    with naming(out):
        out.write_text(page_of(runs), encoding="utf-8")
    progress(f"{out}: open it in a browser")
    return DONE


def page_of(runs: Sequence[KeptRun]) -> str:
    """The page as the text of an HTML file."""
    folder = files("experiments.shown")
    script = folder.joinpath("show.js").read_text(encoding="utf-8")
    style = folder.joinpath("show.css").read_text(encoding="utf-8")
    # The page allows a single script, by its hash, so that scripts inside a report cannot run.
    allowed = b64encode(sha256(script.encode()).digest()).decode()
    sections = [*_together(runs), *(_section(run, place) for place, run in enumerate(runs))]
    title = runs[0].title if len(runs) == 1 else f"{len(runs)} runs"
    return Template(folder.joinpath("show.html").read_text(encoding="utf-8")).substitute(
        title=html.escape(title),
        allowed=allowed,
        style=style,
        contents="\n".join(_contents(runs)),
        sections="\n".join(sections),
        script=script,
    )


def _contents(runs: Sequence[KeptRun]) -> Iterator[str]:
    """A list of links to the runs, if there are several runs."""
    if len(runs) > 1:
        yield "<nav aria-label='Runs'><ul>"
        for number, run in enumerate(runs):
            yield f'<li><a href="#{_anchor(run, number)}">{html.escape(_called(run))}</a></li>'
        yield "</ul></nav>"


def _together(runs: Sequence[KeptRun]) -> Iterator[str]:
    """A section that shows the rows of several runs of one command side by side."""
    by_command: dict[str, list[KeptRun]] = {}
    for run in runs:
        by_command.setdefault(str(run.made.get("command", "")), []).append(run)
    for command, alike in by_command.items():
        if len(alike) > 1 and any(run.rows for run in alike):
            rows = [{"run": run.name, **row} for run in alike for row in run.rows]
            yield f"<section><h2>All runs of {html.escape(command or 'one kind')}</h2>"
            yield _data(rows, f"{len(alike)} runs together")
            yield "</section>"


def _section(run: KeptRun, number: int) -> str:
    """The section of one run: its configuration, its report and pictures, and its rows."""
    # A report that begins with the command line needs no further line with it.
    is_told = not run.command or run.words
    made = "" if is_told else f'<pre tabindex="0">{html.escape(run.command)}</pre>'
    text, shown = _report_html(run)
    others = [_figure(name, run.pictures[name], name) for name in run.pictures if name not in shown]
    cut = f" (the first {MOST_ROWS:,})" if run.all_rows > MOST_ROWS else ""
    rows = _data(run.rows, f"{run.all_rows:,} rows{cut}") if run.rows else ""
    head = f'<section id="{_anchor(run, number)}"><h2>{html.escape(_called(run))}</h2>'
    versions = _versions(run.made)
    return "\n".join([head, made, text, *others, rows, versions, "</section>"])


def _called(run: KeptRun) -> str:
    return run.title if run.title == run.name else f"{run.title} ({run.name})"


def _anchor(run: KeptRun, number: int) -> str:
    return f"{_PART.sub('-', run.name.lower()).strip('-') or 'run'}-{number}"


def _report_html(run: KeptRun) -> tuple[str, set[str]]:
    """A report as HTML with its pictures, and the names of the pictures that it shows."""
    import markdown  # noqa: PLC0415 (an extra)

    if not run.words:
        return "", set()
    # Reports are Markdown with tables; what looks like HTML in them is shown as text.
    text = re.sub(r"<(?=[a-zA-Z/!])", "&lt;", run.words.partition("\n")[2])
    made = markdown.markdown(text, extensions=["tables", "fenced_code"])
    shown: set[str] = set()

    def picture(match: re.Match[str]) -> str:
        name = html.unescape(match[2])
        if name not in run.pictures:
            return html.escape(match[1])
        shown.add(name)
        return _figure(name, run.pictures[name], html.unescape(match[1]))

    made = _PICTURE.sub(picture, made)
    made = made.replace("<table>", '<div class="wide" tabindex="0"><table>')
    made = made.replace("</table>", "</table></div>")
    for level in (4, 3, 2, 1):
        made = made.replace(f"<h{level}", f"<h{level + 1}").replace(
            f"</h{level}>", f"</h{level + 1}>"
        )
    return made.replace("<pre>", '<pre tabindex="0">'), shown


def _figure(name: str, address: str, caption: str) -> str:
    caption_text = html.escape(caption or name)
    return f'<figure><img alt="{caption_text}" src="{address}"></figure>'


def _data(rows: Sequence[Mapping[str, Any]], caption: str) -> str:
    """The rows of a run as JSON, from which the page's script makes plots and a table."""
    columns = [*dict.fromkeys(name for row in rows for name in row)]
    cells = [[row.get(name) for name in columns] for row in rows]
    plain = json.dumps({"columns": columns, "rows": cells}, separators=(",", ":"))
    # A text in a row must not end the script element of the page.
    safe = plain.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
    return (
        f'<div class="asked" data-caption="{html.escape(caption)}">'
        f'<script type="application/json">{safe}</script>'
        "<noscript>The rows are in rows.jsonl and rows.csv of the run's folder.</noscript></div>"
    )


def _versions(made: Mapping[str, Any]) -> str:
    """The git revision and the software versions of a run."""
    versions = made.get("versions")
    if not isinstance(versions, Mapping):
        return ""
    versions_told = [f"{name} {version}" for name, version in versions.items() if version]
    revision = [f"revision {made['revision']}"] if made.get("revision") else []
    return f'<p class="soft">Made with {html.escape(", ".join([*revision, *versions_told]))}.</p>'
