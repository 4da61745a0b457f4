"""A run of an experiment: its folder, its rows as they are produced, and finally a summary and a
page.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self, TypeVar

from experiments.cli.commandline import DONE, Countdown, as_json, print_json, progress, writable
from experiments.cli.rundir import RunDirectory, command_line, earlier_rows
from experiments.pages.charts import Picture
from experiments.pages.page_tables import IN_A_FILE, write_page
from experiments.pages.tables import TIMING, Row, csv_of

# The packages of experiments, each of which may have paragraphs for its pages of results: published
# figures, and comments.
ROOMS = Path(__file__).parents[1]


def beside(name: str) -> Sequence[str]:
    """The paragraphs in the file of this name in a package's folder ``beside``; empty if there is
    no such file.
    """
    texts = (path.read_text(encoding="utf-8") for path in ROOMS.glob(f"*/beside/{name}.md"))
    return next((text.strip().split("\n\n") for text in texts), ())


# One run of an experiment: its rows as they are produced, and finally a summary, pictures and a
# page.
#
# The run folder gets ``config.json`` and ``README.md`` at once (how it was made), ``rows.jsonl``
# row by row, and finally ``rows.csv``, ``summary.json``, ``report.md`` and its pictures.


Item = TypeVar("Item")

# Options that affect the location of results, not their content.
ASIDE = ("out", "json", "page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """The report of an experiment: its tables, paragraphs and pictures.

    ``words`` are paragraphs and tables in Markdown: they are printed, and stand on the page; after
    ``IN_A_FILE`` a table stands in a file beside the page.
    ``beside`` stands on the page alone: what was published, and why this differs; left out, it is
    the text of the command's name. ``summary`` is what --json prints beside the rows; in it, too,
    what a clock says goes under ``timing``.
    """

    title: str
    words: Sequence[str]
    summary: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    beside: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class Study:
    """A running experiment: its options, its folder, and the rows made so far.

    ``earlier`` are the rows that an equal run left in the folder. A study that goes on adds those
    rows again that still hold. The other rows stay in the file until the study ends, so that no row
    is lost if it is stopped.
    """

    options: argparse.Namespace
    directory: RunDirectory
    earlier: Sequence[Row]
    goes_on: bool = False
    rows: list[Row] = field(default_factory=list)
    clock: Callable[[], float] = time.perf_counter
    _began_s: float = field(default=0.0, init=False)
    _is_full: bool = field(default=False, init=False)
    _waiting: list[Row] = field(default_factory=list, init=False)
    _drawn: dict[str, str] = field(default_factory=dict, init=False)

    @classmethod
    def begin(cls, command: str, options: argparse.Namespace, *, goes_on: bool = False) -> Self:
        """Create the run folder, before any work is done."""
        if options.page is not None:
            writable(options.page, "page", "--page")
        earlier = earlier_rows(options.out, command, vars(options), aside=ASIDE)
        directory = RunDirectory.make(options.out, command, vars(options))
        study = cls(options=options, directory=directory, earlier=earlier, goes_on=goes_on)
        study._began_s = study.clock()
        study._waiting = [*earlier] if goes_on else []
        study._keep(lambda: directory.write_rows(study._waiting))
        return study

    @property
    def path(self) -> Path:
        """A path in the run folder, for further files."""
        return self.directory.path

    def counted(self, items: Sequence[Item], what: str) -> Iterator[Item]:
        """The items of work in sequence, with progress on standard error."""
        countdown = Countdown(what=what, total=len(items), clock=self.clock)
        for item in items:
            yield item
            countdown.step()

    def add(self, row: Row) -> None:
        """Write a row to the folder at once, so that an interrupted run keeps it."""
        self.rows.append(row)
        if not self.goes_on:
            self._keep(lambda: self.directory.add_row(row))
            return
        if row in self._waiting:
            self._waiting.remove(row)
        self._keep(lambda: self.directory.write_rows([*self.rows, *self._waiting]))

    def add_all(self, rows: Iterable[Row]) -> None:
        """Write rows to the folder as they are produced."""
        for row in rows:
            self.add(row)

    def keep_text(self, name: str, text: str) -> None:
        """Write a further file of the run folder atomically."""
        self._keep(lambda: self.directory.write_text(name, text))

    def end(self, report: Report, status: int = DONE) -> int:
        """Write the results, as far as they can be written, and print them; returns the exit
        status.
        """
        seconds = self.clock() - self._began_s
        # Files come first: a reader of the output may close it early, as head does.
        self._keep(lambda: self._write(report, seconds))
        self._publish(report)
        if self.options.json:
            print_json(self._answer(report, seconds))
        else:
            paragraphs = [paragraph for paragraph in report.words if paragraph != IN_A_FILE]
            print("\n\n".join([*paragraphs, f"rows, page and pictures: {self.path}"]))
        return status

    def _answer(self, report: Report, seconds: float) -> dict[str, Any]:
        timing = {**report.summary.get(TIMING, {}), "seconds": seconds}
        return {"rows": [*self.rows], **report.summary, TIMING: timing}

    def _write(self, report: Report, seconds: float) -> None:
        if self._waiting:
            self.directory.write_rows(self.rows)
        self.directory.write_text("rows.csv", csv_of(self.rows))
        answer = as_json(self._answer(report, seconds), indent=1)
        self.directory.write_text("summary.json", f"{answer}\n")
        self._drawn = self._draw(report.pictures)
        self.directory.write_text("report.md", _page(report, self.directory.config, self._drawn))

    def _publish(self, report: Report) -> None:
        """Write the page at the path of --page, with its pictures; a failure is reported."""
        page = self.options.page
        if page is None:
            return
        try:
            write_page(page, _page(report, self.directory.config, self._drawn))
            for name in self._drawn:
                page.with_name(name).write_bytes((self.path / name).read_bytes())
        except OSError as error:
            what = f"warning: --page {page}: cannot be written: {error.strerror}"
            progress(f"{what}: the page is in {self.path}")

    def _draw(self, pictures: Sequence[Picture]) -> dict[str, str]:
        """Draw pictures into the folder; returns their files with their captions."""
        if not pictures:
            return {}
        try:
            from experiments.pages.drawing import drawn, save  # noqa: PLC0415 (needs matplotlib)
        except ModuleNotFoundError as error:
            progress(f"left out: pictures: {error.name} is not installed")
            return {}
        for picture in pictures:
            save(drawn(picture), self.path / f"{picture.name}.svg")
        return {f"{picture.name}.svg": picture.caption for picture in pictures}

    def _keep(self, write: Callable[[], None]) -> None:
        """Run a function that writes; a failure to write is reported once and otherwise ignored."""
        try:
            write()
        except OSError as error:
            if not self._is_full:
                what = f"{self.path}: cannot be written: {error.strerror}"
                progress(f"warning: {what}: results are printed alone: give another --out")
            self._is_full = True


def _page(report: Report, config: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The text of the page: how it was made, the results, pictures, and published figures."""
    options = {
        name: _elsewhere(value) for name, value in config["options"].items() if name not in ASIDE
    }
    made = command_line({**config, "options": options})
    blocks = [f"# {report.title}", "Made by", f"```\n{made}\n```", *report.words]
    blocks += [f"![{caption}]({name})" for name, caption in pictures.items()]
    return "\n\n".join([*blocks, *(report.beside or beside(config["command"]))]) + "\n"


def _elsewhere(value: Any) -> Any:
    """An option's value for readers on other machines: an absolute path is reduced to its last
    part.
    """
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_path else value
