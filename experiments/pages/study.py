"""One run of an experiment: its folder, its result rows as they are made, and in the end a summary
and a page.
"""

import argparse
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Self, TypeVar

from experiments.cli.commandline import DONE, Countdown, as_json, print_json, progress, writable
from experiments.cli.rundir import RunDirectory, command_line, earlier_rows
from experiments.pages.charts import Picture
from experiments.pages.page_tables import IN_A_FILE, write_page
from experiments.pages.tables import TIMING, Row, csv_of

# The folder of the packages of experiments. A package may have files with paragraphs for its result
# pages: published figures, and comments on them.
ROOMS = Path(__file__).parents[1]


def beside(name: str) -> Sequence[str]:
    """The paragraphs in a file of this name in the folder ``beside`` of a package; empty if there
    is no such file.
    """
    texts = (path.read_text(encoding="utf-8") for path in ROOMS.glob(f"*/beside/{name}.md"))
    return next((text.strip().split("\n\n") for text in texts), ())


# One run of an experiment: its result rows as they are made, and in the end a summary, pictures and
# a page.
#
# The run's folder gets ``config.json`` and ``README.md`` (how it was made) at once, ``rows.jsonl``
# row by row, and in the end ``rows.csv``, ``summary.json``, ``report.md`` and the pictures.


Item = TypeVar("Item")

# Options that determine where results are written, but not what they are.
ASIDE = ("out", "json", "page")


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """What an experiment reports: tables, paragraphs and pictures.

    ``words`` are paragraphs and tables in Markdown, which are printed and shown on the page. A
    table after the marker ``IN_A_FILE`` goes to a file beside the page. ``beside`` are paragraphs
    for the page alone: published figures, and why these differ; by default, they are read from the
    file named after the command. ``summary`` is what --json prints in addition to the rows;
    measured times in it must be under the key ``timing``.
    """

    title: str
    words: Sequence[str]
    summary: Mapping[str, Any] = field(default_factory=dict)
    pictures: Sequence[Picture] = ()
    beside: Sequence[str] = ()


@dataclass(slots=True, kw_only=True)
class Study:
    """A run of an experiment under way: its options, its folder, and the result rows made so far.

    ``earlier`` are the rows that a run with the same options left in the folder. A study that
    continues it adds those rows again that are still valid. The other rows stay in the file until
    the study ends, so that no row is lost if it is interrupted.
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
        """Create the folder of the run, before any work is done."""
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
        """The folder of the run, as --out gives it."""
        return self.directory.path

    def path_of(self, name: str) -> Path:
        """The whole path of a file of the run, for a report's words; its page, which others read,
        shows only the last part of a folder that is given by an absolute path.
        """
        return self.path.absolute() / name

    def counted(self, items: Sequence[Item], what: str) -> Iterator[Item]:
        """The items of work one after another, with progress on standard error."""
        countdown = Countdown(what=what, total=len(items), clock=self.clock)
        for item in items:
            yield item
            countdown.step()

    def add(self, row: Row) -> None:
        """Write a result row to the folder at once, so that it is kept if the run is
        interrupted.
        """
        self.rows.append(row)
        if not self.goes_on:
            self._keep(lambda: self.directory.add_row(row))
            return
        if row in self._waiting:
            self._waiting.remove(row)
        self._keep(lambda: self.directory.write_rows([*self.rows, *self._waiting]))

    def add_all(self, rows: Iterable[Row]) -> None:
        """Write result rows to the folder as they are made."""
        for row in rows:
            self.add(row)

    def keep_text(self, name: str, text: str) -> None:
        """Write a further file to the folder of the run; a reader sees the old or the new text."""
        self._keep(lambda: self.directory.write_text(name, text))

    def end(self, report: Report, status: int = DONE) -> int:
        """Write and print the results, even if some cannot be written; returns the exit status."""
        seconds = self.clock() - self._began_s
        # Files are written before anything is printed, since a reader of the output (such as head)
        # may close it early.
        self._keep(lambda: self._write(report, seconds))
        self._publish(report)
        if self.options.json:
            print_json(self._answer(report, seconds))
        else:
            paragraphs = [paragraph for paragraph in report.words if paragraph != IN_A_FILE]
            folder = f"rows, page and pictures: {self.path.absolute()} (another folder: --out DIR)"
            print("\n\n".join([*paragraphs, folder]))
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
        self.directory.write_text("report.md", self._page(report))

    def _publish(self, report: Report) -> None:
        """Write the page, with its pictures, to the path that --page gives; if that fails, report
        it.
        """
        page = self.options.page
        if page is None:
            return
        try:
            write_page(page, self._page(report))
            for name in self._drawn:
                page.with_name(name).write_bytes((self.path / name).read_bytes())
        except OSError as error:
            what = f"warning: --page {page}: cannot be written: {error.strerror}"
            progress(f"{what}: the page is in {self.path}")

    def _page(self, report: Report) -> str:
        """The text of the page, which shows the folder of the run as other machines have it."""
        whole, shown = f"{self.path.absolute()}/", f"{_elsewhere(str(self.path))}/"
        paragraphs = [text.replace(whole, shown) for text in report.words]
        return _page(replace(report, words=paragraphs), self.directory.config, self._drawn)

    def _draw(self, pictures: Sequence[Picture]) -> dict[str, str]:
        """Draw the pictures into the folder of the run; returns their file names with the
        captions.
        """
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
        """Run a function that writes a file; if it fails, that is reported once, and the run goes
        on.
        """
        try:
            write()
        except OSError as error:
            if not self._is_full:
                what = f"{self.path}: cannot be written: {error.strerror}"
                progress(f"warning: {what}: results are printed alone: give another --out")
            self._is_full = True


def _page(report: Report, config: Mapping[str, Any], pictures: Mapping[str, str]) -> str:
    """The text of the page: how it was made, the results, the pictures, and published figures."""
    options = {
        name: _elsewhere(value) for name, value in config["options"].items() if name not in ASIDE
    }
    made = command_line({**config, "options": options})
    blocks = [f"# {report.title}", "Made by", f"```\n{made}\n```", *report.words]
    blocks += [f"![{caption}]({name})" for name, caption in pictures.items()]
    return "\n\n".join([*blocks, *(report.beside or beside(config["command"]))]) + "\n"


def _elsewhere(value: Any) -> Any:
    """The value of an option as it is shown to readers on other machines: of an absolute path only
    the last part.
    """
    is_path = isinstance(value, str) and Path(value).is_absolute()
    return Path(value).name if is_path else value
