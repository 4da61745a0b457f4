"""What a report says of strict runs, of losses and of clocks that move."""

from pathlib import Path
from typing import Any

import pytest

from experiments.gpu_reports.report_checks import LOSS_TOLERANCE
from experiments.gpu_reports.report_page import figures_of
from experiments.gpu_reports.report_plans import ReportPlan
from experiments.training.plan_runs import RunRows
from tests.experiments.test_gpu_report import CHECKS, FEW, Runner, page_of, report, reported

pytestmark = pytest.mark.usefixtures("predicted_once")


@pytest.mark.parametrize("drift", [1e-9, 1e-2])
def test_strict_runs_must_have_equal_losses(
    tmp_path: Path, drift: float, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = [plan for plan in CHECKS if plan.stage is None]
    summary = reported(tmp_path, Runner(drifts={whole[-1].name: drift}), CHECKS)
    (one,) = summary["differences"]
    assert one["plans"] == [plan.name for plan in whole]
    assert "**losses differ in strict runs**" in page_of(tmp_path)
    # It is told as soon as it is known.
    before, _, after = capsys.readouterr().err.partition("warning: losses differ in strict runs")
    assert f"{whole[-1].name}: done" in before
    assert f"{CHECKS[-1].name}: done" in after
    assert "equal to the bit" not in after


def test_strict_runs_that_are_equal_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert reported(tmp_path, Runner(), CHECKS)["differences"] == []
    assert "2 groups of strict runs: equal to the bit" in capsys.readouterr().err


def test_strict_runs_of_a_stage_without_losses_must_have_equal_gradients(tmp_path: Path) -> None:
    stages = [plan for plan in CHECKS if plan.stage is not None]
    summary = reported(tmp_path, Runner(drifts={stages[-1].name: 1e-9}), CHECKS)
    assert summary["differences"] == [
        {"plans": [plan.name for plan in stages], "words": "gradients differ"}
    ]


def test_a_check_that_fails_is_told(tmp_path: Path) -> None:
    summary = reported(tmp_path, Runner(fails=CHECKS[1].name), CHECKS)
    assert summary["failed_checks"] == [{"plans": [CHECKS[1].name], "words": "out of memory"}]
    assert f"**out of memory**: {CHECKS[1].name}" in page_of(tmp_path)


def test_losses_of_timed_runs_may_differ_by_little_after_the_first(tmp_path: Path) -> None:
    row = FEW[0].row
    offloaded = ReportPlan(row=(*row[:6], (0, 0, 1, 0)))
    plans = (*FEW[:2], offloaded)

    def differences(drift: float) -> Any:
        folder = tmp_path / str(drift)
        return reported(folder, Runner(drifts={offloaded.name: drift}), plans)["differences"]

    assert differences(0.9 * LOSS_TOLERANCE) == []
    (one,) = differences(1.1 * LOSS_TOLERANCE)
    assert one["plans"] == [FEW[0].name, offloaded.name]
    assert one["words"].startswith("losses differ by 1.1e-04")
    assert differences(float("nan"))


def test_first_losses_must_be_equal(tmp_path: Path) -> None:
    row = FEW[0].row
    plans = (*FEW[:2], ReportPlan(row=(*row[:6], (0, 0, 1, 0))))
    assert report(tmp_path, Runner(), plans).work()
    path = tmp_path / "runs.jsonl"
    said = {name: dict(one) for name, one in RunRows(path=path).said.items()}
    said[plans[-1].name]["losses"] = [9.0 + 1e-6, 8.5]
    (one,) = figures_of(tmp_path, plans, said).checks.differences
    assert one.words == "the first losses differ"


def test_clocks_that_move_are_told(tmp_path: Path) -> None:
    assert report(tmp_path, Runner()).work()
    said = {k: dict(one) for k, one in RunRows(path=tmp_path / "runs.jsonl").said.items()}
    clocks = [{"sm_mhz": 1980.0, "memory_mhz": 2619.0}, {"sm_mhz": 1800.0, "memory_mhz": 2619.0}]
    said[FEW[2].name]["clocks"] = clocks
    said[FEW[3].name]["clocks"] = [clocks[0], clocks[0]]
    (one,) = figures_of(tmp_path, FEW, said).checks.moved_clocks
    assert one.plans == (FEW[2].name,)
    assert "**clocks moved by 9.1% meanwhile" in page_of(tmp_path)
