"""The program that makes result pages again runs the command that each page names."""

from pathlib import Path

import pytest

from benchmarks import result_pages
from benchmarks.result_pages import command_of, missing_files
from benchmarks.results_index import RESULTS, ROOT

PAGES = sorted((ROOT / RESULTS).glob("*.md"))


def test_most_pages_begin_with_their_command() -> None:
    commands = {page.stem: command_of(page.read_text(encoding="utf-8")) for page in PAGES}
    programs = {name: command[2] for name, command in commands.items() if command is not None}
    assert len(programs) >= 28
    assert programs["motivation"] == "experiments.motivation"
    assert programs["cross-check-wide"] == "experiments.cross_check"


def test_a_command_that_follows_a_table_is_an_example_and_not_the_command_of_the_page() -> None:
    block = "```\npython -m experiments.ladder --seed 0\n```\n"
    assert command_of(f"# A title\n\nMade by\n\n{block}") == [
        *("python", "-m", "experiments.ladder", "--seed", "0")
    ]
    assert command_of(f"# A title\n\n| a | table |\n\n{block}") is None


def test_files_that_a_command_reads_and_that_are_not_here_are_named() -> None:
    command = "python -m experiments.x rows.csv --tables elsewhere --python a=.venv-a/bin/python"
    assert missing_files(command.split()) == [".venv-a/bin/python", "elsewhere", "rows.csv"]
    assert missing_files(["python", "-m", "experiments.x", "docs/results/runs-1.csv"]) == []


@pytest.fixture
def one_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project's root with one result page, whose command is a stand-in."""
    page = tmp_path / RESULTS / "stand-in.md"
    page.parent.mkdir(parents=True)
    page.write_text("```\npython -m experiments.stand_in --seed 7\n```\n\n| 1.25 |\n")
    (tmp_path / "experiments").mkdir()
    monkeypatch.setattr(result_pages, "ROOT", tmp_path)
    return page


def test_a_page_is_written_by_its_command_and_new_figures_are_counted(
    one_page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = one_page.parents[2] / "experiments" / "stand_in.py"
    program.write_text(
        "import pathlib, sys\n"
        "seed, page = sys.argv[2], pathlib.Path(sys.argv[4])\n"
        "assert sys.argv[3] == '--page'\n"
        "page.write_text(page.read_text() + f'| 2.5{seed} |\\n')\n"
    )
    monkeypatch.setattr("sys.argv", ["result_pages", "stand-in"])
    assert result_pages.main() == 0
    assert one_page.read_text().endswith("| 1.25 |\n| 2.57 |\n")
    assert "1 new figures" in capsys.readouterr().out


def test_a_command_that_fails_fails_the_program_and_leaves_the_page(
    one_page: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = one_page.read_text()
    monkeypatch.setattr("sys.argv", ["result_pages"])
    assert result_pages.main() == 1
    assert "stand-in: failed: status 1" in capsys.readouterr().out
    assert one_page.read_text() == before
