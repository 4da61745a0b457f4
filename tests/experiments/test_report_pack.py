"""A report as one file: whole, carried elsewhere, gone on with, refused when it is no report."""

import zipfile
from pathlib import Path

import pytest

from experiments import gpu_report
from experiments.cli.commandline import DONE, WRONG_USAGE, run
from experiments.gpu_reports.gpu_report import NAME, begin, pack
from experiments.gpu_reports.report_page import figures_of
from experiments.training.plan_runs import RunRows
from tests.experiments.test_gpu_report import FEW, Runner, report, reported

pytestmark = pytest.mark.usefixtures("predicted_once")


def contents(folder: Path) -> dict[str, bytes]:
    return {
        one.relative_to(folder).as_posix(): one.read_bytes()
        for one in folder.rglob("*")
        if one.is_file() and one.name != NAME
    }


def test_a_folder_goes_on_elsewhere_as_it_was(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    assert report(here, Runner(), FEW[:2]).work()
    figures_of(here, FEW[:2], RunRows(path=here / "runs.jsonl").said)
    begin(there, pack(here))
    assert contents(there) == contents(here)
    runner = Runner()
    assert report(there, runner).work()
    assert runner.ran == [plan.name for plan in FEW[2:]]
    # What is made is the same, wherever it is made.
    reported(here, Runner())
    reported(there, Runner())
    assert contents(there) == contents(here)


def test_a_folder_with_nothing_but_the_packed_report_begins_from_it(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    there.mkdir()
    reported(here, Runner())
    pack(here).rename(there / NAME)
    begin(there, None)
    assert contents(there) == contents(here)


def test_what_has_begun_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert report(here, Runner(), FEW[:1]).work()
    assert report(there, Runner(), FEW[:2]).work()
    before = contents(there)
    begin(there, pack(here))
    assert contents(there) == before
    assert "has begun already" in capsys.readouterr().err


def test_only_files_of_a_report_are_written(tmp_path: Path) -> None:
    packed, folder = tmp_path / "a.zip", tmp_path / "folder"
    folder.mkdir()
    with zipfile.ZipFile(packed, "w") as file:
        for name in ("../runs.jsonl", "/runs.jsonl", "a/b.yaml", "tables/../../c.csv", "x.py"):
            file.writestr(name, "no")
        file.writestr("runs.jsonl", "")
    begin(folder, packed)
    assert contents(tmp_path) == {"a.zip": packed.read_bytes(), "folder/runs.jsonl": b""}


@pytest.mark.parametrize("content", [None, b"no zip", b"PK"])
def test_what_is_no_report_is_refused(
    tmp_path: Path, content: bytes | None, capsys: pytest.CaptureFixture[str]
) -> None:
    packed, out = tmp_path / "a.zip", tmp_path / "out"
    if content is not None:
        packed.write_bytes(content)
    arguments = ["--out", str(out), "--from", str(packed), "--draw"]
    assert run(gpu_report.main, arguments) == WRONG_USAGE
    assert "give as --from the report.zip in an --out folder" in capsys.readouterr().err
    assert contents(out) == {}


def test_a_damaged_file_leaves_nothing_behind(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    reported(here, Runner())
    content = bytearray(pack(here).read_bytes())
    content[len(content) // 2] ^= 255
    damaged = tmp_path / "damaged.zip"
    damaged.write_bytes(content)
    assert run(gpu_report.main, ["--out", str(there), "--from", str(damaged), "--draw"])
    assert contents(there) == {}


def test_page_and_pictures_are_drawn_elsewhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    assert report(here, Runner()).work()
    assert not (here / "README.md").exists()
    arguments = ["--out", str(there), "--from", str(pack(here)), "--draw"]
    assert run(gpu_report.main, arguments) == DONE
    assert f"written: {there / 'README.md'}" in capsys.readouterr().out
    names = set(contents(there))
    assert {"README.md", "times.svg", "memory.svg"} <= names
