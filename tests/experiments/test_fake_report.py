"""The report on a GPU runs through on a device without memory, from its plans to its page."""

import io
import json
from collections.abc import Iterator, Mapping
from contextlib import redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments import run_plan
from experiments.cli.command import main_of, option
from experiments.cli.commandline import DONE, run
from experiments.commands import COMMANDS
from experiments.gpu_reports import report_rows
from experiments.gpu_reports.gpu_report import ReportFolder
from experiments.gpu_reports.report_page import figures_of
from experiments.gpu_reports.report_plans import PLANS, ReportPlan
from experiments.training.plan_runs import PlanRun, RunRows
from mistlab import catalog
from mistlab.plan.workload import ModelSpec
from runtime.checks.fake.fake_device import SHAM, device_findings, fake_device
from runtime.checks.fake.watch import Watch
from runtime.determinism import FIXED_WORKSPACE, WORKSPACE
from runtime.engine.training import Training
from tests.experiments.test_gpu_report import h200, profiler

ROW = ("tiny", 16, 24, 1, 2, 1, (0.5, 0.5, 0.5, 0.5))
FEW = (
    ReportPlan(row=ROW, is_check=True),
    ReportPlan(row=ROW),
    ReportPlan(row=ROW, is_serialised=True),
    ReportPlan(row=(*ROW[:5], 0, ROW[6]), num_stages=2, stage=0),
)


def runs_here(of: PlanRun, _seconds: float) -> Mapping[str, Any]:
    """What the report lets another process run; losses of zero have no relative difference."""
    said = io.StringIO()
    with redirect_stdout(said):
        status = run(run_plan.main, [*of.words, "--device", SHAM])
    assert status == DONE
    found = json.loads(said.getvalue())
    return {**found, "losses": [loss if loss is None else 1.0 for loss in found["losses"]]}


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A device that command lines may name."""
    row = COMMANDS["run_plan"]
    options = [option for option in row.options if option[0] != "--device"]
    tiny = ModelSpec.of(family="gpt", hidden=32, layers=2, heads=2, vocab=96)
    on_sham = replace(row, options=[*options, option("--device", "", SHAM)])
    monkeypatch.setattr(run_plan, "main", main_of("run_plan", on_sham))
    monkeypatch.setattr(catalog, "model", lambda _name: tiny)
    for steps in ("WARM_UPS", "TIMED", "CHECKED"):
        monkeypatch.setattr(report_rows, steps, 1)
    monkeypatch.setenv(WORKSPACE, FIXED_WORKSPACE)
    with fake_device() as watch:
        yield watch


def test_the_report_runs_through(watch: Watch, tmp_path: Path) -> None:
    report = ReportFolder(
        folder=tmp_path, plans=FEW, runner=runs_here, profiler=profiler, seconds=1000.0
    )
    assert report.work()
    assert watch.findings == ()
    said = RunRows(path=tmp_path / "runs.jsonl").said
    assert said.keys() == {plan.name for plan in FEW}
    figures_of(tmp_path, FEW, said)
    assert (tmp_path / "README.md").exists()


def test_a_run_writes_what_it_measured(watch: Watch, tmp_path: Path) -> None:
    out = tmp_path / "out"
    words = ["--device", SHAM, "--steps", "2", "--clip-norm", "1", "--out", str(out)]
    assert run(run_plan.main, words) == DONE
    assert watch.findings == ()
    assert {path.name for path in out.iterdir()} >= {"measurement.yaml", "timeline.json"}


@pytest.mark.slow
@pytest.mark.parametrize("plan", PLANS, ids=lambda plan: plan.name)
def test_nothing_keeps_the_host_waiting_in_the_report(plan: ReportPlan) -> None:
    job = plan.job(h200(1.0))
    found = device_findings(
        job.workload, job.plan, plan.stage or 0, Training(), serialises=plan.is_serialised
    )
    assert found == ()
