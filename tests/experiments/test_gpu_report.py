"""A report on a GPU that is not there: profile and runs come from a hardware with known numbers."""

import json
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import plan_runs
from experiments.gpu_report import Report
from experiments.plan_runs import ModelRunner, PlanRun, RunRows, ended_within
from experiments.report_plans import CAPS_GIB, PLANS, ReportPlan
from experiments.report_rows import TIMED, WARM_UPS
from experiments.run_plan import EXAMPLE
from experiments.run_results import prediction_of
from mistlab import catalog
from mistlab.datafile import read_yaml, write_yaml
from mistlab.errors import InputError
from mistlab.hardware import Hardware
from mistlab.job import Job, load_job
from mistlab.model import ModelSpec
from mistlab.value import from_mapping, to_mapping

SUSTAINED = 0.85
SERIALISED = 1.5
FEW = (*PLANS[:2], *PLANS[10:13])


def h200(sustained: float) -> Hardware:
    hardware = catalog.hardware("h200-141gb")
    assert hardware.compute is not None
    compute = replace(hardware.compute, sustained=sustained)
    return replace(hardware, name="profile", compute=compute)


def profiler(out: Path, _seconds: float) -> bool:
    out.parent.mkdir(exist_ok=True)
    write_yaml(to_mapping(h200(1.0), omit_defaults=True), out)
    return True


class Runner:
    """Runs take what predictions say of a machine that sustains less than its profile tells."""

    def __init__(self, *, fails: str = "", drifts: str = "") -> None:
        self.ran: list[str] = []
        self.fails, self.drifts = fails, drifts

    def __call__(self, run: PlanRun, seconds: float) -> Mapping[str, Any] | None:
        plan, stage = run.plan, run.stage
        assert plan.stem.startswith(run.model)
        assert run.steps == WARM_UPS + TIMED
        assert seconds > 0
        self.ran.append(plan.stem)
        if plan.stem == self.fails:
            return {"error": "out of memory"}
        job = load_job(plan)
        cluster = replace(job.cluster, hardware=h200(SUSTAINED))
        found = prediction_of(replace(job, cluster=cluster), stage)
        (one,) = found.stages
        seconds = found.iteration_s * (SERIALISED if run.serialises else 1)
        return {
            "losses": [None] * 2 if stage == 0 else [9.0, 8.5 + (plan.stem == self.drifts)],
            # The first iterations are slower, and one of the others.
            "iteration_s": [9 * seconds] * WARM_UPS + [seconds] * (TIMED - 1) + [2 * seconds],
            "allocator_retries": [0],
            "peak_allocated_bytes": [one.peak_allocated_bytes],
            "peak_reserved_bytes": [one.peak_reserved_bytes],
        }


def report(folder: Path, runner: Runner, plans: tuple[ReportPlan, ...] = FEW) -> Report:
    return Report(folder=folder, plans=plans, runner=runner, profiler=profiler, seconds=1000.0)


def test_the_plans_are_many_and_fit_what_they_imitate() -> None:
    whole = [plan for plan in PLANS if plan.stage is None]
    unseen = [plan for plan in whole if not plan.is_fitted and not plan.is_serialised]
    assert len(unseen) >= 30
    assert len({plan.name for plan in PLANS}) == len(PLANS)
    assert {plan.row[2] for plan in unseen} == set(CAPS_GIB)
    assert {plan.model for plan in unseen} >= {"gpt3-1.3b", "gpt3-2.7b", "gpt3-7b", "llama-7b"}
    hardware = h200(1.0)
    node = replace(hardware.node, host_memory_gib=128)
    for plan in PLANS:
        job = plan.job(replace(hardware, node=node))
        assert prediction_of(job, plan.stage).fits, plan.name


def test_single_stages_are_of_each_kind_and_each_cap() -> None:
    single = [plan for plan in PLANS if plan.stage is not None]
    assert not any(plan.is_fitted or plan.is_serialised for plan in single)
    assert {plan.row[2] for plan in single} == set(CAPS_GIB)
    assert {plan.model for plan in single} == {"gpt3-7b", "gpt3-22b"}
    ends = {(plan.stage == 0, plan.stage == plan.num_stages - 1) for plan in single}
    assert ends == {(True, False), (False, False), (False, True)}
    for plan in single:
        # As many micro-batches as a first stage of 1F1B holds, or more.
        assert plan.job(h200(1.0)).plan.micro_batches > plan.num_stages


def test_single_stages_are_told_apart_from_whole_plans(tmp_path: Path) -> None:
    single = PLANS[-3:]
    before = report(tmp_path / "without", Runner()).work()
    summary = report(tmp_path / "with", Runner(fails=single[1].name), (*FEW, *single)).work()
    assert before is not None
    assert summary is not None
    for name in before.keys() - {"stages"}:
        assert summary[name] == before[name]
    stages = summary["stages"]
    assert (stages["plans"], stages["failed"]) == (3, 1)
    assert stages["mean_allocated_error"] == 0
    assert stages["mean_time_error"] < 2e-3
    page = (tmp_path / "with" / "README.md").read_text(encoding="utf-8")
    of_plans, _, of_stages = page.partition("## Single stages of pipelines")
    assert "3 stages (1 failed)" in of_stages
    for plan in single:
        assert f"| {plan.name} |" in of_stages
        assert plan.name not in of_plans


def test_what_is_fitted_carries_over_to_plans_that_are_not(tmp_path: Path) -> None:
    summary = report(tmp_path, Runner()).work()
    assert summary is not None
    assert summary["plans"] == 3
    assert summary["failed"] == 0
    assert summary["mean_time_error"] < 2e-3
    assert summary["mean_allocated_error"] == 0
    assert summary["unequal_losses"] == []
    hardware = from_mapping(Hardware, read_yaml(tmp_path / "hardware.yaml"))
    assert hardware.compute is not None
    assert hardware.compute.sustained == pytest.approx(SUSTAINED, abs=2e-3)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    for plan in FEW:
        assert (f"| {plan.name} |" in page) == (not plan.is_fitted)
    assert (tmp_path / "times.svg").exists()
    assert (tmp_path / "memory.svg").exists()


def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    runner = Runner()
    ticks = iter(range(0, 10000, 100))
    # The clock is looked at twice a plan: the call ends among the plans that are not fitted.
    first = replace(report(tmp_path, runner), clock=lambda: float(next(ticks)))
    assert first.work() is None
    before = list(runner.ran)
    assert 2 < len(before) < len(FEW)
    assert report(tmp_path, runner).work() is not None
    assert sorted(runner.ran) == sorted(plan.name for plan in FEW)
    assert report(tmp_path, runner).work() is not None
    assert len(runner.ran) == len(FEW)


def test_runs_that_fail_are_told_and_counted(tmp_path: Path) -> None:
    summary = report(tmp_path, Runner(fails=FEW[2].name)).work()
    assert summary is not None
    assert (summary["plans"], summary["failed"]) == (3, 1)
    page = (tmp_path / "README.md").read_text(encoding="utf-8")
    assert f"| {FEW[2].name} | out of memory |" in page


def test_without_runs_to_fit_predictions_are_the_profiles(tmp_path: Path) -> None:
    summary = report(tmp_path, Runner(fails=FEW[1].name)).work()
    assert summary is not None
    assert summary["mean_time_error"] > 0.01
    assert not (tmp_path / "hardware.yaml").exists()


def test_losses_that_offloading_changes_are_told(tmp_path: Path) -> None:
    row = FEW[0].row
    offloaded = ReportPlan(row=(*row[:6], (0, 0, 1, 0)), is_fitted=False)
    plans = (*FEW[:2], offloaded)
    summary = report(tmp_path, Runner(drifts=offloaded.name), plans).work()
    assert summary is not None
    assert summary["unequal_losses"] == [[FEW[0].name, offloaded.name]]


def test_plans_run_again_with_one_task_after_another(tmp_path: Path) -> None:
    serialised = ReportPlan(row=FEW[2].row, is_serialised=True)
    summary = report(tmp_path, Runner(), (*FEW, serialised)).work()
    assert summary is not None
    assert summary["plans"] == 3
    (one,) = summary["overlaps"]
    assert one["plan"] == FEW[2].name
    assert one["serialised_s"] == pytest.approx(SERIALISED * one["overlapped_s"])
    assert "(1.50 times as long)" in (tmp_path / "README.md").read_text(encoding="utf-8")


class TinyPlan(ReportPlan):
    """A row whose model is so small that a CPU trains it."""

    def job(self, hardware: Hardware) -> Job:
        job = super().job(hardware)
        model = ModelSpec.of(family="gpt", hidden=64, layers=24, heads=4, vocab=96)
        workload = replace(job.workload, model=model, sequence_length=32, precision="fp32")
        return replace(job, workload=workload)


@pytest.mark.slow
def test_a_report_comes_from_real_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plain: tuple[Any, ...] = ("gpt3-1.3b", 2048, 24, 1, 2, 12, (0, 0, 0, 0))
    rows = (plain, (*plain[:6], (0.5, 0.5, 0.5, 0.5)))
    plans = (
        *(TinyPlan(row=row) for row in rows),
        *(TinyPlan(row=(*row[:5], 3, row[6]), num_stages=4, stage=3) for row in rows),
        TinyPlan(row=(*plain[:5], 3, plain[6]), num_stages=4, stage=1),
    )
    runner = ModelRunner("cpu")
    whole = Report(
        folder=tmp_path,
        plans=plans,
        runner=runner,
        profiler=profiler,
        seconds=300.0,
    )
    summary = whole.work()
    runner.close()
    assert summary is not None
    assert (summary["plans"], summary["failed"], summary["allocator_retries"]) == (2, 0, 0)
    assert (summary["stages"]["plans"], summary["stages"]["failed"]) == (3, 0)
    assert summary["unequal_losses"] == []


def test_a_run_that_was_cut_off_is_dropped_and_a_strange_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    whole = json.dumps({"plan": "a", "error": "b"})
    path.write_text(f'{whole}\n{{"plan": "c", "los', encoding="utf-8")
    rows = RunRows(path=path)
    assert rows.said == {"a": {"error": "b"}}
    rows.add("d", {"losses": [1.0]})
    assert RunRows(path=path).said == rows.said
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"runs.jsonl: line 1 is not a run: remove it"):
        RunRows(path=path)


@pytest.fixture
def runner() -> Iterator[ModelRunner]:
    runner = ModelRunner("cpu")
    yield runner
    runner.close()


def test_plans_of_a_model_run_in_one_process(tmp_path: Path, runner: ModelRunner) -> None:
    pytest.importorskip("torch")

    def run(plan: Path, model: str) -> Mapping[str, Any]:
        said = runner(PlanRun(plan=plan, model=model, steps=2), 300.0)
        assert said is not None
        return said

    first, worker = run(EXAMPLE, "tiny"), runner._worker
    again = run(EXAMPLE, "tiny")
    assert runner._worker is worker
    assert run(EXAMPLE, "other")["losses"] == first["losses"] == again["losses"]
    assert runner._worker is not worker

    broken = tmp_path / "broken.yaml"
    broken.write_text("plan: 3\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"broken.yaml: error: .*broken.yaml"):
        run(broken, "other")
    # After a failure there is a new process.
    assert run(EXAMPLE, "other")["losses"] == first["losses"]


def test_a_run_that_takes_too_long_is_interrupted(tmp_path: Path, runner: ModelRunner) -> None:
    pytest.importorskip("torch")
    start = time.perf_counter()
    assert runner(PlanRun(plan=EXAMPLE, model="tiny", steps=10**6), 10.0) is None
    assert time.perf_counter() - start < 60


def test_a_run_that_fails_is_a_row_with_its_last_words(
    tmp_path: Path, runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_runs, "WORKER", (sys.executable, "-c", DYING))
    said = runner(PlanRun(plan=tmp_path, model="a", steps=1), 60.0)
    assert said == {"error": "error: stage 0 is out of memory"}


# Reads its line and ends as run_plan does when memory runs out.
DYING = """import os, sys
input()
print("a warning", file=sys.stderr)
print("error: stage 0 is out of memory", file=sys.stderr, flush=True)
os._exit(1)
"""


def test_a_process_is_interrupted_when_its_time_is_over() -> None:
    start = time.perf_counter()
    command = [sys.executable, "-c", "import time; time.sleep(60)"]
    assert ended_within(command, 1.0) is None
    assert time.perf_counter() - start < 30
    done = ended_within([sys.executable, "-c", "print(1); raise SystemExit(3)"], 30.0)
    assert done is not None
    assert (done.returncode, done.stdout) == (3, "1\n")
