"""The frame of experiments: what a run leaves, what it says, and what it survives."""

import argparse
import doctest
import errno
import json
import shlex
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from experiments import survey
from experiments.cli.command import experiment
from experiments.cli.commandline import parser_of, run
from experiments.pages import groups, page_tables, tables
from experiments.pages import tables as numbers_in_words
from experiments.pages.charts import Bars, Lines
from experiments.pages.study import Report, Study, beside
from experiments.pages.tables import table, untimed

SIZES = (1, 2, 3)


def squares(options: argparse.Namespace, spoil: str = "") -> int:
    """A small experiment: draws nothing, and is spoilt in the middle if asked to."""
    study = Study.begin("survey", options)
    for size in study.counted(SIZES, "sizes"):
        if spoil and size == 2:
            shutil.rmtree(study.path)
        study.add({"size": size, "of": {"square": size**2}, "timing": {"s": study.clock()}})
    curve = [(row["size"], row["of"]["square"]) for row in study.rows]
    return study.end(
        Report(
            title="Squares",
            words=[table(["size", "square"], curve), "They grow."],
            summary={"largest": curve[-1][1]},
            pictures=[
                Lines(name="lines", caption="A curve.", curves={"squares": curve}, x="n", y="n2"),
                Bars(
                    name="bars",
                    caption="Bars.",
                    groups=["one", "two"],
                    series={"a": [1, None], "b": [2, 3]},
                    y="s",
                    number=".1f",
                    marks={"published": 1.5},
                ),
            ],
            beside=["Published: 9."],
        )
    )


def options_of(*arguments: str) -> argparse.Namespace:
    return parser_of("survey", None, **experiment("survey")).parse_args(arguments)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.is_file()}


def test_a_run_leaves_rows_a_summary_pictures_and_a_page(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "docs" / "squares.md"
    assert squares(options_of("--out", str(tmp_path / "run"), "--page", str(page), "--json")) == 0
    captured = capsys.readouterr()
    answer = json.loads(captured.out)
    files = files_of(tmp_path / "run")
    assert files.keys() == {
        *("config.json", "README.md", "rows.jsonl", "rows.csv", "summary.json", "report.md"),
        *("lines.svg", "bars.svg"),
    }
    rows = [json.loads(line) for line in files["rows.jsonl"].splitlines()]
    assert rows == answer["rows"]
    assert [row["of"]["square"] for row in rows] == [1, 4, 9]
    assert answer["largest"] == 9
    assert answer["timing"]["seconds"] >= 0
    assert json.loads(files["summary.json"]) == answer
    assert files["rows.csv"].decode() == "size,of.square\n1,1\n2,4\n3,9\n"
    text = files["report.md"].decode()
    for said in ("# Squares", "     9 |", "They grow.", "![A curve.](lines.svg)", "Published: 9."):
        assert said in text
    assert "python -m experiments.survey --seed 0\n" in text
    assert page.read_text(encoding="utf-8") == text
    assert page.with_name("bars.svg").read_bytes() == files["bars.svg"]
    assert "sizes: 3 of 3" in captured.err


def test_a_reader_that_stops_costs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def closed(*_: object, **__: object) -> None:
        raise BrokenPipeError

    monkeypatch.setattr("builtins.print", closed)
    monkeypatch.setattr("experiments.pages.study.Countdown.step", lambda _: None)
    with pytest.raises(BrokenPipeError):
        squares(options_of("--out", str(tmp_path)))
    assert {"rows.csv", "report.md", "lines.svg", "summary.json"} <= files_of(tmp_path).keys()


def test_two_runs_are_equal_but_for_their_timing(tmp_path: Path) -> None:
    for name in ("one", "two"):
        squares(options_of("--out", str(tmp_path / name)))
    one, two = (files_of(tmp_path / name) for name in ("one", "two"))
    for name in ("rows.csv", "report.md", "lines.svg", "bars.svg"):
        assert one[name] == two[name]
    rows = [[json.loads(line) for line in files["rows.jsonl"].splitlines()] for files in (one, two)]
    assert rows[0] != rows[1]
    assert [*map(untimed, rows[0])] == [*map(untimed, rows[1])]


def test_the_line_of_the_readme_makes_the_rows_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "a folder"
    small = ["--model", "llama-350m", "--gpus-per-node", "2", "--sequence-length", "1024"]
    assert run(survey.main, [*small, "--quick", "--out", str(out)]) == 0
    before = (out / "rows.jsonl").read_bytes()
    line = (out / "README.md").read_text(encoding="utf-8").split("`")[1]
    shutil.rmtree(out)
    _, _, module, *arguments = shlex.split(line)
    assert module == "experiments.survey"
    assert run(survey.main, arguments) == 0
    assert (out / "rows.jsonl").read_bytes() == before
    capsys.readouterr()


def test_arguments_without_a_name_come_first_in_the_line(tmp_path: Path) -> None:
    parser = parser_of("squares", None, **experiment("squares"))
    parser.add_argument("plans", type=Path, nargs="*")
    parser.set_defaults(arguments=["plans"])
    Study.begin("squares", parser.parse_args(["a b.yaml", "c.yaml", "--out", str(tmp_path)]))
    line = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"python -m experiments.squares 'a b.yaml' c.yaml --seed 0 --out {tmp_path}`" in line


def test_a_folder_that_cannot_be_made_is_said_and_results_go_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    assert squares(options_of("--out", str(tmp_path / "file" / "run"))) == 0
    captured = capsys.readouterr()
    assert (
        f"warning: --out {tmp_path / 'file' / 'run'}: Not a directory: results go" in captured.err
    )
    (other,) = tmp_path.glob("mistlab-*")
    assert (other / "rows.csv").exists()
    assert f"rows, page and pictures: {other}" in captured.out


def test_the_folder_of_results_is_told_by_its_whole_path_and_pages_leave_folders_above_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert squares(options_of("--out", "runs/few")) == 0
    told = capsys.readouterr().out
    assert f"pictures: {tmp_path / 'runs' / 'few'} (another folder: --out DIR)\n" in told
    for out in ("runs/few", str(tmp_path / "runs" / "few")):
        published = tmp_path / "page.md"
        study = Study.begin("survey", options_of("--out", out, "--page", str(published)))
        study.add({"size": 1})
        # Users are told a file that they can open, readers of the page the folder's name.
        report = Report(title="A plan", words=[f"The plan is {study.path_of('plan.yaml')}."])
        assert study.end(report) == 0
        assert f"The plan is {tmp_path}/runs/few/plan.yaml." in capsys.readouterr().out
        shown = out.removeprefix(f"{tmp_path}/runs/")
        for page in (published, study.path / "report.md"):
            assert f"The plan is {shown}/plan.yaml." in page.read_text(encoding="utf-8")


def test_a_folder_that_goes_away_is_said_once_and_the_answer_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert squares(options_of("--out", str(tmp_path / "run")), spoil="all of it") == 0
    captured = capsys.readouterr()
    assert captured.err.count("cannot be written") == 1
    assert "|    3 |      9 |" in captured.out


@pytest.mark.parametrize("name", ["rows.jsonl", "config.json"])
def test_a_folder_that_is_half_written_is_said_and_filled_again(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = options_of("--out", str(tmp_path))
    squares(options)
    whole = files_of(tmp_path)
    (tmp_path / name).write_bytes(whole[name][:-9])
    capsys.readouterr()
    study = Study.begin("survey", options)
    assert "made again" in capsys.readouterr().err
    sizes = [row["size"] for row in study.earlier]
    assert sizes == ([1, 2] if name == "rows.jsonl" else [])
    assert squares(options) == 0
    assert files_of(tmp_path)["rows.csv"] == whole["rows.csv"]


def test_rows_of_other_options_are_not_taken_up(tmp_path: Path) -> None:
    squares(options_of("--out", str(tmp_path)))
    assert len(Study.begin("survey", options_of("--out", str(tmp_path), "--json")).earlier) == 3
    squares(options_of("--out", str(tmp_path)))
    assert not Study.begin("survey", options_of("--out", str(tmp_path), "--seed", "1")).earlier


def test_without_matplotlib_pictures_are_left_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "experiments.pages.drawing", raising=False)
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert squares(options_of("--out", str(tmp_path))) == 0
    assert "left out: pictures: matplotlib is not installed" in capsys.readouterr().err
    assert "lines.svg" not in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_a_page_that_becomes_unwritable_is_named_and_costs_nothing_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out, page = tmp_path / "run", tmp_path / "docs" / "squares.md"
    write = Path.write_text

    def refused(path: Path, *of: Any, **options: Any) -> int:
        if path == page:
            raise OSError(errno.EROFS, "Read-only file system")
        return write(path, *of, **options)

    monkeypatch.setattr(Path, "write_text", refused)
    assert squares(options_of("--out", str(out), "--page", str(page))) == 0
    captured = capsys.readouterr()
    assert (
        f"--page {page}: cannot be written: Read-only file system: the page is in" in captured.err
    )
    assert f"warning: {out}" not in captured.err
    assert (out / "report.md").is_file()


def test_a_page_that_cannot_be_written_is_refused_before_any_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(arguments: Sequence[str]) -> int:
        return squares(options_of(*arguments))

    out: Any = tmp_path / "run"
    assert run(main, ["--out", str(out), "--page", str(tmp_path)]) == 2
    assert f"--page {tmp_path}: cannot be written: it is a folder" in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize("module", [groups, numbers_in_words, page_tables, tables])
def test_the_examples_of_printers_hold(module: ModuleType) -> None:
    done = doctest.testmod(module)
    assert (done.failed, done.attempted > 0) == (0, True)


def test_every_text_beside_results_is_where_its_command_looks() -> None:
    """A text has the name of a command of its room, or one that the room asks for."""
    root = Path(__file__).parents[2]
    for path in root.glob("experiments/**/beside/*.md"):
        room = "".join(one.read_text(encoding="utf-8") for one in path.parents[1].glob("*.py"))
        asked = f'Study.begin("{path.stem}", ' in room or f'beside("{path.stem}")' in room
        assert asked or f'beside="{path.stem}"' in room, path
        assert beside(path.stem)
    assert beside("no command") == ()
