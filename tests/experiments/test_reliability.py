"""Time lost to failures on the command line: figures, no progress, and what is refused."""

import json
from pathlib import Path

import pytest

from experiments import reliability
from experiments.cli.commandline import run


def test_the_default_run_beside_a_published_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(reliability.main, ["--quick", "--json", "--out", str(tmp_path)]) == 0
    answer = json.loads(capsys.readouterr().out)
    asked = answer["rows"][0]
    assert asked["failures"] == pytest.approx(175, abs=0.1)
    assert asked["hours_between_failures"] == pytest.approx(8.2, abs=0.05)
    assert answer["goodput_closed_over_played"] == pytest.approx(1, abs=0.02)
    assert asked["goodput"] == asked["closed"]["work"]
    lost = (1 - asked["goodput"]) * 992 * 60 * 24
    assert asked["lost_gpu_hours"] == pytest.approx(lost)
    around = [row for row in answer["rows"] if row["kind"] == "interval"]
    best = max(around, key=lambda row: row["goodput"])
    assert best["interval_s"] == pytest.approx(answer["best_interval_s"])
    sizes = [row["goodput"] for row in answer["rows"] if row["kind"] == "size"]
    assert sizes == sorted(sizes, reverse=True)
    faster = [row for row in answer["rows"] if row["kind"] == "checkpoint"]
    lost = [row["lost_gpu_hours"] for row in (asked, *faster)]
    assert lost == sorted(lost, reverse=True)
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    assert "16,384 H100 was interrupted unexpectedly 419 times in 54 days, once in 3.1 h" in page
    assert "84.8% of its time" in page


def test_a_rate_that_leaves_no_progress_is_said(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--gpu-hours-between-failures", "1", "--out", str(tmp_path)]
    assert run(reliability.main, arguments) == 1
    text = capsys.readouterr().out
    assert "No progress: one of 992 GPUs fails every 3.6 s" in text
    assert "inf" not in text
    assert run(reliability.main, [*arguments, "--json"]) == 1
    asked = json.loads(capsys.readouterr().out)["rows"][0]
    assert (asked["makes_progress"], asked["goodput"], asked["lost_gpu_hours"]) == (False, 0, None)


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--gpus", "0", "--gpus: 0 is too small"),
        ("--gpu-hours-between-failures", "0", "--gpu-hours-between-failures: 0.0 is too small"),
        ("--checkpoint-s", "-1", "--checkpoint-s: -1.0 is too small"),
        ("--detection-s", "-1", "--detection-s: -1.0 is too small"),
        ("--restart-s", "nan", "--restart-s: nan is not"),
        ("--days", "0", "--days: 0.0 is not above 0"),
        ("--days", "inf", "--days: inf is not"),
        ("--days", "9" * 30, "--days: 1e+30 is too large: give at most 10,000"),
        ("--runs", "0", "--runs: 0 is not above 0"),
        ("--interval-s", "-5", "--interval-s: -5.0 is not above 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(reliability.main, [option, value, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()
