"""The page about slow tests: what their files of results say, and which run again."""

from pathlib import Path

import pytest

from benchmarks import slow_tests
from benchmarks.slow_tests import page, read

XML = """<testsuites><testsuite name="pytest" time="9.5" timestamp="2026-11-02T23:59:00+00:00">
<testcase name="test_a[1|2]" time="3.5" />
<testcase name="test_b" time="0.5"><failure message="assert 1 == 2">x</failure></testcase>
<testcase name="test_c" time="0"><skipped type="s" message="Skipped: no Ray" /></testcase>
</testsuite></testsuites>"""


def test_the_page_counts_failures_and_skips_with_their_reasons(tmp_path: Path) -> None:
    (tmp_path / "a.xml").write_text(XML, encoding="utf-8")
    (tmp_path / "b.xml").write_text(XML.replace("11-02", "11-03"), encoding="utf-8")
    results = [
        read("tests/runtime/test_a.py", tmp_path / "a.xml"),
        read("tests/searchers/test_b.py", tmp_path / "b.xml"),
    ]
    lines = [*page(results, ["tests"], "abc")]
    assert "Run on 2026-11-02 to 2026-11-03 at revision `abc` by" in lines
    assert "make slow" in lines
    assert "| tests/runtime | 1 | 1 | 1 | 1 | 10 |" in lines
    assert "| all | 2 | 2 | 2 | 2 | 19 |" in lines
    assert "| `tests/searchers/test_b.py`, `test_b` | assert 1 == 2 |" in lines
    assert "| 1 | `tests/runtime/test_a.py` | no Ray |" in lines
    assert lines[-6] == "| `tests/runtime/test_a.py`, `test_a[1\\|2]` | 3.5 |"


@pytest.mark.parametrize(("revision", "runs"), [("abc", 1), ("abc-dirty", 2)])
def test_a_file_with_results_of_this_revision_is_not_run_again(
    revision: str, runs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[list[str]] = []

    class Done:
        returncode = 1
        stdout = "tests/mistlab/test_x.py::test_a\n"
        stderr = ""

    def fake(command: list[str], **_: object) -> Done:
        for option in command:
            if option.startswith("--junitxml="):
                calls.append(command)
                Path(option.partition("=")[2]).write_text(XML, encoding="utf-8")
        done = Done()
        done.returncode = 0 if "--collect-only" in command else 1
        return done

    monkeypatch.setattr(slow_tests, "ROOT", tmp_path)
    monkeypatch.setattr(slow_tests, "revision", lambda: revision)
    monkeypatch.setattr(slow_tests.subprocess, "run", fake)
    for _ in range(2):
        assert slow_tests.main(["--page", str(tmp_path / "tests.md")]) == 1
    assert len(calls) == runs
    assert "test_b" in (tmp_path / "tests.md").read_text(encoding="utf-8")
