"""A report on a GPU that is not there: profile and runs come from a hardware with known numbers."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import gpu_report
from experiments.cli.commandline import DONE, run
from experiments.commands.machine_commands import MINUTES
from experiments.gpu_reports.gpu_report import (
    PROFILE,
    PROFILE_S,
    ReportFolder,
    estimates,
    total_s,
)
from experiments.gpu_reports.report_page import figures_of
from experiments.gpu_reports.report_plans import CAPS_GIB, PLANS, ReportPlan
from experiments.gpu_reports.report_rows import CHECKED, TIMED, WARM_UPS
from experiments.training.plan_runs import PlanRun, RunRows, WorkerRunner
from experiments.training.run_results import prediction_of
from mistlab import catalog
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.values import InputError, from_mapping, to_mapping
from mistlab.job.job import Job, load_job
from mistlab.machine.hardware import Hardware
from mistlab.plan.workload import ModelSpec

pytestmark = pytest.mark.usefixtures("predicted_once")

ROOT = Path(__file__).parents[2]
SUSTAINED = 0.85
SERIALISED = 1.5
CHECKS = tuple(plan for plan in PLANS if plan.is_check)
FITTED = tuple(plan for plan in PLANS if plan.is_fitted)
COMPARED = tuple(plan for plan in PLANS if plan.is_compared and plan.stage is None)
# Two that are fitted to, and three of which nothing is offloaded but states.
FEW = (*FITTED[:2], *[plan for plan in COMPARED if not plan.comes_first][6:9])
H100 = {"device": "NVIDIA H100", "torch": "2.11", "cuda": "13.0"}


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

    def __init__(self, *, fails: str = "", drifts: Mapping[str, float] = {}) -> None:
        self.ran: list[str] = []
        self.fails, self.drifts = fails, drifts
        self.environment = H100

    def __call__(self, run: PlanRun, seconds: float) -> Mapping[str, Any] | None:
        plan, stage = run.plan, run.stage
        assert run.strict == ("check" in plan.stem)
        assert run.steps == (CHECKED if run.strict else WARM_UPS + TIMED)
        assert run.with_norms == (run.strict and stage is not None)
        assert seconds > 0
        self.ran.append(plan.stem)
        if plan.stem == self.fails:
            return {"error": "out of memory"}
        job = load_job(plan)
        cluster = replace(job.cluster, hardware=h200(SUSTAINED))
        found = prediction_of(replace(job, cluster=cluster), stage)
        (one,) = found.stages
        seconds = found.iteration_s * (SERIALISED if run.serialises else 1)
        drift = 1 + self.drifts.get(plan.stem, 0.0)
        return {
            "plan": str(plan),
            "losses": [None] * 2 if stage == 0 else [9.0, 8.5 * drift],
            "gradient_norms": [3.0 * drift] * 2 if run.with_norms else [None] * 2,
            # The first iterations are slower, and one of the others.
            "iteration_s": [9 * seconds] * WARM_UPS + [seconds] * (TIMED - 1) + [2 * seconds],
            "allocator_retries": [0],
            "peak_allocated_bytes": [one.peak_allocated_bytes],
            "peak_reserved_bytes": [one.peak_reserved_bytes],
            "outside_bytes": [5 << 28],
            "clocks": [],
            "environment": self.environment,
        }


def report(folder: Path, runner: Runner, plans: tuple[ReportPlan, ...] = FEW) -> ReportFolder:
    return ReportFolder(
        folder=folder, plans=plans, runner=runner, profiler=profiler, seconds=1000.0
    )


def reported(
    folder: Path, runner: Runner, plans: tuple[ReportPlan, ...] = FEW
) -> Mapping[str, Any]:
    """The summary of a report that is done in one call."""
    assert report(folder, runner, plans).work()
    return figures_of(folder, plans, RunRows(path=folder / "runs.jsonl").said).summary


def page_of(folder: Path) -> str:
    return (folder / "README.md").read_text(encoding="utf-8")


def test_the_plans_are_many_and_fit_what_they_imitate() -> None:
    assert len(COMPARED) >= 30
    assert len({plan.name for plan in PLANS}) == len(PLANS)
    assert {plan.row[2] for plan in COMPARED} == set(CAPS_GIB)
    assert {plan.model for plan in COMPARED} >= {"gpt3-1.3b", "gpt3-2.7b", "gpt3-7b", "llama-7b"}
    hardware = h200(1.0)
    node = replace(hardware.node, host_memory_gib=128)
    for plan in PLANS:
        job = plan.job(replace(hardware, node=node))
        assert prediction_of(job, plan.stage).fits, plan.name


def test_single_stages_are_of_each_kind_and_each_cap() -> None:
    single = [plan for plan in PLANS if plan.is_compared and plan.stage is not None]
    assert {plan.row[2] for plan in single} == set(CAPS_GIB)
    assert {plan.model for plan in single} == {"gpt3-7b", "gpt3-22b"}
    ends = {(plan.stage == 0, plan.stage == plan.num_stages - 1) for plan in single}
    assert ends == {(True, False), (False, False), (False, True)}
    for plan in single:
        # As many micro-batches as a first stage of 1F1B holds, or more.
        assert plan.job(h200(1.0)).plan.micro_batches > plan.num_stages


def test_the_riskiest_come_first(tmp_path: Path) -> None:
    runner = Runner()
    waits = replace(report(tmp_path, runner, PLANS), profiler=lambda _out, _seconds: False)
    assert not waits.work()
    first = [plan for plan in PLANS if plan.name in runner.ran]
    assert runner.ran == [plan.name for plan in PLANS[: len(first)]]
    # Strict runs, then all that offload activations, with their serialised twins.
    assert [plan.is_check for plan in first] == [True] * len(CHECKS) + [False] * (
        len(first) - len(CHECKS)
    )
    offloading = {plan.name for plan in PLANS if plan.row[-1][-1] > 0}
    assert offloading <= set(runner.ran)
    assert all(plan.name in offloading for plan in first[len(CHECKS) :])
    assert any(plan.is_serialised for plan in first[len(CHECKS) :])
    # Without a profile the page tells of losses alone.
    assert (
        "predictions: the machine is not profiled yet"
        in figures_of(tmp_path, PLANS, RunRows(path=tmp_path / "runs.jsonl").said).left_out
    )
    assert f"- {len({plan.twins for plan in CHECKS})} groups ran strictly" in page_of(tmp_path)


def test_checks_have_twins_that_keep_everything_and_serialised_ones() -> None:
    groups = {plan.twins for plan in CHECKS}
    for group in groups:
        twins = [plan for plan in CHECKS if plan.twins == group]
        assert len(twins) > 1
        assert any(not any(plan.row[-1]) for plan in twins)
        assert any(plan.row[-1][-1] > 0 for plan in twins)
    whole = [plan for plan in CHECKS if plan.stage is None]
    assert {plan.row for plan in whole if plan.is_serialised} < {plan.row for plan in whole}
    assert any(plan.is_serialised for plan in whole)


def test_it_fits_half_an_hour_by_estimate() -> None:
    steps = estimates(PLANS)
    assert [step.name for step in steps if step.name != PROFILE] == [plan.name for plan in PLANS]
    assert total_s(steps, MINUTES) <= 30 * 60
    page = (ROOT / "docs" / "reference" / "gpu-report.md").read_text(encoding="utf-8")
    assert f"{total_s(steps, MINUTES) / 60:.0f} minutes for one H100" in page
    # Whether activations leave and come back rightly is known within minutes.
    checks = [step.seconds for step in steps[: len(CHECKS)]]
    assert sum(checks) < 3 * 60
    first = [step.name for step in steps].index(PROFILE)
    assert sum(step.seconds for step in steps[:first]) < 60 * MINUTES


def test_memory_is_pinned_once_by_estimate_and_strict_runs_have_a_process_of_their_own() -> None:
    offloaded = next(plan for plan in COMPARED if plan.row[-1] == (0, 0, 1, 0))
    once, again = estimates([offloaded, replace(offloaded, num_stages=1)], profiles=False)
    alone = estimates([FITTED[0], offloaded], profiles=False)[1]
    assert again.seconds < alone.seconds < once.seconds
    check = CHECKS[0]
    twice = estimates([check, check], profiles=False)
    apart = estimates([check, FITTED[0]], profiles=False)
    assert twice[1].seconds < twice[0].seconds
    assert apart[1].seconds == estimates([FITTED[0]], profiles=False)[0].seconds
    assert estimates([check])[-1].seconds == PROFILE_S


def test_a_dry_run_tells_what_is_left_and_runs_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"

    def told() -> tuple[list[str], float]:
        assert run(gpu_report.main, ["--out", str(out), "--dry-run", "--json"]) == DONE
        found = json.loads(capsys.readouterr().out)
        return [step["name"] for step in found["steps"]], found["total_s"]

    names, total = told()
    assert not out.exists()
    assert len(names) == len(PLANS) + 1
    assert total == total_s(estimates(PLANS), MINUTES)
    assert report(out, Runner(), CHECKS).work()
    left, rest = told()
    assert left == [plan.name for plan in PLANS if not plan.is_check]
    assert rest < total - PROFILE_S
    assert run(gpu_report.main, ["--out", str(out), "--dry-run"]) == DONE
    assert (
        " s for the page of each, by estimate for one H100; nothing was run"
        in capsys.readouterr().out
    )


def test_single_stages_are_told_apart_from_whole_plans(tmp_path: Path) -> None:
    single = tuple(plan for plan in PLANS if plan.is_compared and plan.stage is not None)[-3:]
    before = reported(tmp_path / "without", Runner())
    summary = reported(tmp_path / "with", Runner(fails=single[1].name), (*FEW, *single))
    for name in before.keys() - {"stages"}:
        assert summary[name] == before[name]
    stages = summary["stages"]
    assert (stages["plans"], stages["failed"]) == (3, 1)
    assert stages["mean_allocated_error"] == 0
    assert stages["mean_time_error"] < 2e-3
    of_plans, _, of_stages = page_of(tmp_path / "with").partition("## Single stages of pipelines")
    assert "3 stages (1 failed)" in of_stages
    for plan in single:
        assert f"| {plan.name} |" in of_stages
        assert plan.name not in of_plans


def test_what_is_fitted_carries_over_to_plans_that_are_not(tmp_path: Path) -> None:
    summary = reported(tmp_path, Runner())
    assert summary["plans"] == 3
    assert summary["failed"] == 0
    assert summary["mean_time_error"] < 2e-3
    assert summary["mean_allocated_error"] == 0
    assert summary["differences"] == summary["left_out"] == []
    hardware = from_mapping(Hardware, read_yaml(tmp_path / "hardware.yaml"))
    assert hardware.compute is not None
    assert hardware.compute.sustained == pytest.approx(SUSTAINED, abs=2e-3)
    page = page_of(tmp_path)
    for plan in FEW:
        assert (f"| {plan.name} |" in page) == (not plan.is_fitted)
    assert "run on NVIDIA H100, torch 2.11, CUDA 13.0" in page
    assert "outside torch's allocator: 1.25 to 1.25 GiB, predicted 0.29 to 0.29" in page
    assert (tmp_path / "times.svg").exists()
    assert (tmp_path / "memory.svg").exists()


def test_a_call_goes_on_where_the_last_one_ended(tmp_path: Path) -> None:
    runner = Runner()
    ticks = iter(range(0, 10000, 100))
    # The clock is looked at a few times a plan: the call ends before all of them ran.
    first = replace(report(tmp_path, runner), clock=lambda: float(next(ticks)))
    assert not first.work()
    before = list(runner.ran)
    assert 2 <= len(before) < len(FEW)
    assert report(tmp_path, runner).work()
    assert sorted(runner.ran) == sorted(plan.name for plan in FEW)
    assert report(tmp_path, runner).work()
    assert len(runner.ran) == len(FEW)


def test_a_plan_that_would_not_end_in_time_is_left_for_the_next_call(tmp_path: Path) -> None:
    runner = Runner()
    expected = {FEW[0].name: 2000.0, FEW[1].name: 2000.0}
    first = replace(report(tmp_path, runner, FEW[:2]), expected_s=expected)
    # The profile was made in this call; in the next one the first plan is tried at least.
    assert not first.work()
    assert runner.ran == []
    assert not first.work()
    assert runner.ran == [FEW[0].name]


def test_runs_that_fail_are_told_and_counted(tmp_path: Path) -> None:
    summary = reported(tmp_path, Runner(fails=FEW[2].name))
    assert (summary["plans"], summary["failed"]) == (3, 1)
    assert f"| {FEW[2].name} | out of memory |" in page_of(tmp_path)


def test_without_runs_to_fit_predictions_are_the_profiles(tmp_path: Path) -> None:
    summary = reported(tmp_path, Runner(fails=FEW[1].name))
    assert summary["mean_time_error"] > 0.01
    assert not (tmp_path / "hardware.yaml").exists()


def test_plans_run_again_with_one_task_after_another(tmp_path: Path) -> None:
    serialised = ReportPlan(row=FEW[2].row, is_serialised=True)
    summary = reported(tmp_path, Runner(), (*FEW, serialised))
    assert summary["plans"] == 3
    (one,) = summary["overlaps"]
    assert one["plan"] == FEW[2].name
    assert one["serialised_s"] == pytest.approx(SERIALISED * one["overlapped_s"])
    assert "(1.50 times as long)" in page_of(tmp_path)


def test_machines_of_two_kinds_do_not_mix(tmp_path: Path) -> None:
    runner = Runner()
    assert report(tmp_path, runner, FEW[:2]).work()
    runner.environment = {**H100, "torch": "2.12"}
    with pytest.raises(InputError, match=r"on NVIDIA H100, torch 2.11, .*of one machine only"):
        report(tmp_path, runner).work()
    runner.environment = {**H100, "python": "3.13"}
    assert report(tmp_path, runner).work()


class TinyPlan(ReportPlan):
    """A row whose model is so small that a CPU trains it."""

    def job(self, hardware: Hardware) -> Job:
        job = super().job(hardware)
        model = ModelSpec.of(family="gpt", hidden=64, layers=24, heads=4, vocab=96)
        workload = replace(
            job.workload, model=model, sequence_length=32, precision="fp32", gradients="usual"
        )
        return replace(job, workload=workload)


@pytest.mark.slow
def test_a_report_comes_from_real_runs(tmp_path: Path) -> None:
    pytest.importorskip("torch")
    plain: tuple[Any, ...] = ("gpt3-1.3b", 2048, 24, 1, 2, 12, (0, 0, 0, 0))
    rows = (plain, (*plain[:6], (0.5, 0.5, 0.5, 0.5)))
    of_stages = [(*row[:5], 3, row[6]) for row in rows]
    plans = (
        *(TinyPlan(row=row, is_check=True) for row in rows),
        TinyPlan(row=rows[1], is_check=True, is_serialised=True),
        *(TinyPlan(row=row, is_check=True, num_stages=4, stage=1) for row in of_stages),
        *(TinyPlan(row=row) for row in rows),
        *(TinyPlan(row=row, num_stages=4, stage=3) for row in of_stages),
        TinyPlan(row=(*plain[:5], 3, plain[6]), num_stages=4, stage=1),
    )
    runner = WorkerRunner("cpu")
    whole = ReportFolder(
        folder=tmp_path,
        plans=plans,
        runner=runner,
        profiler=profiler,
        seconds=1500.0,
    )
    assert whole.work()
    runner.close()
    summary = figures_of(tmp_path, plans, RunRows(path=tmp_path / "runs.jsonl").said).summary
    assert (summary["plans"], summary["failed"], summary["allocator_retries"]) == (2, 0, 0)
    assert (summary["stages"]["plans"], summary["stages"]["failed"]) == (3, 0)
    assert summary["strict"] == 2
    assert summary["differences"] == []
