"""Commands that need torch say so before anything else where it is missing."""

from pathlib import Path
from types import ModuleType

import pytest

from experiments import gpu_report, measure_speedup, whole_loop
from experiments.cli import commandline
from experiments.cli.commandline import run


@pytest.mark.parametrize("command", [gpu_report, measure_speedup, whole_loop])
def test_torch_is_named_first_and_nothing_is_made(
    command: ModuleType,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(commandline, "find_spec", lambda _: None)
    out = tmp_path / "results"
    assert run(command.main, ["--out", str(out)]) == 2
    problem = "torch is not installed, and this command needs it: pip install '.[runtime]'"
    assert capsys.readouterr().err == f"error: {problem}\n"
    assert not out.exists()
