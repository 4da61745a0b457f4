"""Skips are told, and in CI those that nobody has named fail the run."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.skips import LACKING, OPTION, SKIPS, Skip

ROOT = Path(__file__).parents[1]
HOOKS = "from tests.conftest import pytest_addoption, pytest_configure\n"
OF_A_TEST = """
import pytest

def test_runs():
    assert True

def test_left_out():
    pytest.skip("Ray is on holiday")
"""
OF_A_FILE = "import pytest\npytest.importorskip('triton.of.nobody')\n"
OF_A_SHELL = """
import pytest

@pytest.mark.parametrize("number", [2])
def test_a_signal_ends_it(number):
    pytest.skip("started in the background, where nobody looks")
"""


def run(
    folder: Path, text: str, *options: str, name: str = "test_it.py"
) -> subprocess.CompletedProcess[str]:
    """A run of pytest over one file of tests beside this project's hooks."""
    (folder / "conftest.py").write_text(HOOKS, encoding="utf-8")
    path = folder / name
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    quiet = ("-p", "no:cacheprovider", "-p", "no:benchmark", f"--rootdir={folder}")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", *quiet, *options, str(path)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


def test_a_stranger_is_told_what_was_left_out_and_what_to_install(tmp_path: Path) -> None:
    done = run(tmp_path, OF_A_TEST)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "1 of test_it.py: Ray is on holiday\n    to run: make extras\n" in done.stdout


@pytest.mark.parametrize(
    ("text", "test"), [(OF_A_TEST, "test_it.py::test_left_out"), (OF_A_FILE, "test_it.py")]
)
def test_a_skip_that_nobody_named_fails_the_run(text: str, test: str, tmp_path: Path) -> None:
    assert_failed_by(run(tmp_path, text, OPTION), test)


def test_workers_tell_of_their_skips(tmp_path: Path) -> None:
    other = tmp_path / "test_other.py"
    other.write_text(OF_A_FILE, encoding="utf-8")
    done = run(tmp_path, OF_A_TEST, OPTION, "-n", "2", str(other))
    assert_failed_by(done, "test_it.py::test_left_out", "test_other.py")


def assert_failed_by(done: subprocess.CompletedProcess[str], *tests: str) -> None:
    assert done.returncode == 1, done.stdout + done.stderr
    for test in tests:
        refusal = f"FAILED: {test} was skipped for a reason that tests/skips.py does not"
        assert refusal in done.stdout


def test_a_named_skip_and_one_that_may_be_lacking_do_not(tmp_path: Path) -> None:
    done = run(tmp_path, OF_A_SHELL, OPTION, name="tests/test_warm_python.py")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "    a shell that starts a job in the background" in done.stdout
    assert run(tmp_path, OF_A_TEST, OPTION, LACKING, "Ray").returncode == 0


@pytest.mark.parametrize("row", SKIPS, ids=lambda row: row.tests)
def test_a_row_names_tests_that_are_there(row: Skip) -> None:
    path, _, name = row.tests.partition("::")
    text = (ROOT / path).read_text(encoding="utf-8")
    assert re.search(rf"^def {name}", text, re.MULTILINE) if name else "def test_" in text
