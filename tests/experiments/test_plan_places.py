"""Where the plan of a search is written, and where it is written instead."""

import errno
import os
import tempfile
from pathlib import Path
from typing import Any

import pytest

from experiments import tune
from experiments.cli.commandline import run
from mistlab.job.job import load_job


def tuned(out: Path, options: tuple[str, ...]) -> int:
    return run(tune.main, [*options, "--searcher", "random", "--out", str(out)])


def test_a_folder_in_the_place_of_the_file_is_refused(
    small_options: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tuned(tmp_path, small_options) == 2
    assert "cannot be written: it is a folder: give another plan file" in capsys.readouterr().err


@pytest.mark.parametrize("place", ["a folder that may not be made", "a file that may only be read"])
def test_a_plan_without_a_place_goes_to_a_temporary_folder(
    place: str,
    small_options: tuple[str, ...],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nobody searches for a minute to hear that a folder may only be read."""
    own = tmp_path / "own"
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    out = tmp_path / "kept" / "plan.yaml"
    if place.startswith("a folder"):
        made = Path.mkdir

        def refused(path: Path, *of: Any, **options: Any) -> None:
            if path == out.parent:
                raise OSError(errno.EROFS, "Read-only file system")
            made(path, *of, **options)

        monkeypatch.setattr(Path, "mkdir", refused)
    else:
        out.parent.mkdir()
        out.write_text("mine", encoding="utf-8")
        allowed = os.access
        monkeypatch.setattr(os, "access", lambda path, mode: path != out and allowed(path, mode))
    assert tuned(out, small_options) == 0
    captured = capsys.readouterr()
    assert "results go to " in captured.err
    (written,) = own.rglob("plan.yaml")
    assert captured.out.endswith(f"plan: {written}\n")
    assert load_job(written).plan
    assert not out.exists() or out.read_text(encoding="utf-8") == "mine"
