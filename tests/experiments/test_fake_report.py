"""The report on a GPU runs through on a device without memory, from its plans to its page."""

import argparse
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments import plan_runs, run_plan
from experiments.commandline import DONE, run
from experiments.gpu_report import Report
from experiments.plan_runs import ModelRunner
from experiments.report_plans import PLANS, ReportPlan
from mistlab import catalog
from mistlab.model import ModelSpec
from runtime.checks.fake.device import device_findings, fake_device
from runtime.checks.fake.sham import SHAM
from runtime.checks.fake.watch import Watch
from runtime.engine.training import Training
from tests.experiments.test_gpu_report import h200, profiler

LAYERS = 2
OFFLOADS = (0.5, 0.5, 0.5, 0.5)
FEW = (
    ReportPlan(row=("tiny", 16, 24, 1, 2, 1, OFFLOADS)),
    ReportPlan(row=("tiny", 16, 24, 1, 2, 1, OFFLOADS), is_serialised=True),
    ReportPlan(row=("tiny", 16, 24, 1, 2, 0, OFFLOADS), num_stages=2, stage=0),
)


class Worker:
    """Runs plans in this process, as the one of the report does in its own."""

    def ask(self, words: Sequence[str], _seconds: float) -> Mapping[str, Any]:
        said = io.StringIO()
        with redirect_stdout(said):
            status = run(run_plan.main, words)
        return {"status": status, "said": json.loads(said.getvalue()), "error": ""}

    def close(self) -> None:
        """Nothing has begun."""


@pytest.fixture
def watch(monkeypatch: pytest.MonkeyPatch) -> Iterator[Watch]:
    """A device that command lines may name."""
    parser_of_runs = run_plan._parser

    def parser() -> argparse.ArgumentParser:
        parser = parser_of_runs()
        (device,) = (action for action in parser._actions if action.dest == "device")
        device.choices = (SHAM,)
        return parser

    monkeypatch.setattr(run_plan, "_parser", parser)
    monkeypatch.setattr(plan_runs, "_Worker", Worker)
    tiny = ModelSpec.of(family="gpt", hidden=32, layers=LAYERS, heads=2, vocab=96)
    monkeypatch.setattr(catalog, "model", lambda _name: tiny)
    with fake_device() as watch:
        yield watch


def test_the_report_runs_through(watch: Watch, tmp_path: Path) -> None:
    report = Report(
        folder=tmp_path, plans=FEW, runner=ModelRunner(SHAM), profiler=profiler, seconds=1000.0
    )
    summary = report.work()
    assert watch.findings == ()
    assert summary is not None
    assert len(summary["rows"]) == len(summary["stages"]["rows"]) == 1
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
