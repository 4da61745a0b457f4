"""A report on a node of several GPUs: its plans, how long they take, and runs of processes."""

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from experiments import gpu_report
from experiments.cli.commandline import DONE, WRONG_USAGE, run
from experiments.commands.machine_commands import MINUTES
from experiments.gpu_reports.gpu_report import (
    PROFILE,
    PROFILE_S,
    ReportFolder,
    estimates,
    profile_s,
    reference_hardware,
    total_s,
)
from experiments.gpu_reports.node_plans import NODE_PLANS, NodePlan, plans_of
from experiments.gpu_reports.report_checks import ROUNDING, checks_of
from experiments.gpu_reports.report_page import figures_of
from experiments.gpu_reports.report_plans import PlanOfReport
from experiments.training import plan_runs
from experiments.training.plan_runs import NodeRunner, PlanRun, RunRows
from experiments.training.run_results import prediction_of
from mistlab.core.files import read_yaml, write_yaml
from mistlab.plan.plan import StagePlan
from tests.experiments.test_gpu_report import FITTED, profiler

pytestmark = pytest.mark.usefixtures("predicted_once")

ROOT = Path(__file__).parents[2]
TINY: Mapping[str, Any] = {
    "model": {"family": "llama", "hidden": 32, "layers": 8, "heads": 8, "vocab": 96},
    "sequence_length": 16,
    "global_batch": 8,
    "precision": "fp32",
}


def on_a_node(gpus: int) -> list[NodePlan]:
    return [plan for plan in plans_of(gpus) if isinstance(plan, NodePlan)]


def stages_of(plan: PlanOfReport) -> Sequence[StagePlan]:
    return plan.job(reference_hardware()).plan.stages


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_plans_take_all_gpus_and_fit_them(gpus: int) -> None:
    plans = plans_of(gpus)
    assert len({plan.name for plan in plans}) == len(plans)
    assert [plan for plan in plans if plan.gpus == 1] == [*FITTED]
    for plan in on_a_node(gpus):
        job = plan.job(reference_hardware())
        assert job.plan.num_gpus == plan.gpus == gpus
        assert prediction_of(job, None).fits, plan.name


def test_eight_gpus_are_divided_in_all_ways_and_in_combinations() -> None:
    timed = [stages_of(plan) for plan in on_a_node(8) if not plan.is_check]
    first = [stages[0] for stages in timed]
    assert {len(stages) for stages in timed} >= {1, 2, 4, 8}
    assert {one.tensor_parallel for one in first} >= {1, 2, 4, 8}
    assert {one.data_parallel for one in first} >= {1, 2, 4, 8}
    assert {one.zero for one in first if one.data_parallel == 8} == {0, 1, 2, 3}
    assert any(
        len(stages) > 1 and stages[0].tensor_parallel > 1 and stages[0].data_parallel > 1
        for stages in timed
    )


def test_what_is_riskiest_comes_first() -> None:
    plans = plans_of(8)
    checks = [plan for plan in plans if plan.is_check]
    assert [*plans[: len(checks)]] == checks
    # All layouts at once in the first run, and the plainest, against which others are held, last.
    first, *_, last = (stages_of(plan) for plan in checks)
    assert len(first) > 1
    assert first[0].splits_tokens
    assert first[0].zero
    assert (len(last), last[0].data_parallel, last[0].zero) == (1, 8, 0)
    assert len({plan.trains for plan in checks}) == 1
    assert len({plan.twins for plan in checks}) == len(checks)


@pytest.mark.parametrize("gpus", [2, 4, 8])
def test_a_node_fits_half_an_hour_by_estimate(gpus: int) -> None:
    steps = estimates(plans_of(gpus))
    assert total_s(steps, MINUTES) <= 30 * 60
    names = [step.name for step in steps]
    before = names[: names.index(PROFILE)]
    assert before == [plan.name for plan in plans_of(gpus) if plan.is_check]
    assert sum(step.seconds for step in steps[: len(before)]) < 5 * 60
    page = (ROOT / "docs/reference/gpu-report.md").read_text(encoding="utf-8")
    if gpus == 8:
        assert f"{total_s(steps, MINUTES) / 60:.0f} minutes for eight" in page


def test_more_sizes_of_groups_take_longer_to_profile() -> None:
    assert profile_s(1) == profile_s(2) == PROFILE_S
    assert profile_s(4) < profile_s(8)


def test_a_dry_run_lists_the_plans_of_a_node(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--out", "nowhere", "--dry-run", "--gpus-per-node"]
    assert run(gpu_report.main, [*words, "8", "--json"]) == DONE
    told = json.loads(capsys.readouterr().out)
    named = [step["name"] for step in told["steps"] if step["name"] != PROFILE]
    assert named == [plan.name for plan in plans_of(8)]
    assert run(gpu_report.main, [*words, "8"]) == DONE
    told_words = capsys.readouterr().out
    assert "by estimate for 8 H100" in told_words
    assert "pp stages, dp data_parallel, tp tensor_parallel, b micro_batch" in told_words
    assert run(gpu_report.main, [*words, "3"]) == WRONG_USAGE
    assert "no plans for 3 GPUs of a node: give 1, 2, 4 or 8" in capsys.readouterr().err


def outcomes_of(plans: Sequence[PlanOfReport], **drifts: float) -> dict[str, dict[str, Any]]:
    """Losses of plans by name; those of the named ones are off by a share."""
    return {
        plan.name: {"losses": [9.0, 8.5 * (1 + drifts.get(plan.name, 0.0))], "iteration_s": [1.0]}
        for plan in plans
    }


def test_losses_must_agree_whatever_the_layout() -> None:
    checks = [plan for plan in plans_of(8) if plan.is_check]
    found = checks_of(checks, outcomes_of(checks, **{checks[1].name: ROUNDING / 2}))
    assert found.layouts == len(checks)
    assert found.differences == ()
    found = checks_of(checks, outcomes_of(checks, **{checks[1].name: 2 * ROUNDING}))
    (one,) = found.differences
    assert one.plans == (checks[1].name,)
    assert "off those of other layouts" in one.words


def test_later_losses_of_timed_runs_are_not_held_against_other_layouts() -> None:
    timed = [plan for plan in on_a_node(8) if not plan.is_check][:3]
    assert checks_of(timed, outcomes_of(timed, **{timed[1].name: 0.1})).differences == ()


def tiny_plans(tmp_path: Path, gpus: int, checks: Sequence[int], timed: Sequence[int]) -> list[Any]:
    """Some of the plans of a node, of a model so small that a CPU trains it."""
    listed = read_yaml(NODE_PLANS)
    rows = listed["gpus"][gpus]

    def tiny(row: Mapping[str, Any]) -> dict[str, Any]:
        ranks = row.get("data_parallel", 1)
        left_out = {"checkpointed_layers": 0, "micro_batch": 1}
        return {**row, **left_out, "micro_batches": TINY["global_batch"] // ranks}

    chosen = {
        "checks": [tiny(rows["checks"][number]) for number in checks],
        "timed": [tiny(rows["timed"][number]) for number in timed],
    }
    workloads = dict.fromkeys(listed["workloads"], TINY)
    write_yaml({"workloads": workloads, "gpus": {gpus: chosen}}, tmp_path / "plans.yaml")
    return [plan for plan in plans_of(gpus, tmp_path / "plans.yaml") if plan.gpus > 1]


@pytest.fixture
def warm_ranks(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> None:
    """torchrun and its ranks are processes that have imported torch already."""
    monkeypatch.setattr(plan_runs, "TORCHRUN", (warm_python, *plan_runs.TORCHRUN[1:]))
    # The program by which torchrun starts its ranks.
    monkeypatch.setenv("PYTHON_EXEC", warm_python)


def reported(tmp_path: Path, plans: Sequence[PlanOfReport]) -> Mapping[str, Any]:
    """What a report says whose plans ran under torchrun on this machine's CPU."""
    pytest.importorskip("torch")
    runner = NodeRunner("cpu")
    out = tmp_path / "out"
    report = ReportFolder(folder=out, plans=plans, runner=runner, profiler=profiler, seconds=3000.0)
    assert report.work()
    runner.close()
    return figures_of(out, plans, RunRows(path=out / "runs.jsonl").said).summary


@pytest.mark.usefixtures("warm_ranks")
def test_a_report_on_two_processes_comes_from_real_runs(tmp_path: Path) -> None:
    (timed,) = tiny_plans(tmp_path, 2, checks=(), timed=(0,))
    summary = reported(tmp_path, [timed])
    assert (summary["plans"], summary["failed"]) == (1, 0)
    (row,) = summary["rows"]
    assert row["plan"] == timed.name
    assert row["measured_s"] > 0
    said = RunRows(path=tmp_path / "out" / "runs.jsonl").said
    assert len(said[timed.name]["peak_allocated_bytes"]) == 2
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert f"| {timed.name} |" in page


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_all_plans_of_two_processes_agree(tmp_path: Path) -> None:
    summary = reported(tmp_path, tiny_plans(tmp_path, 2, checks=range(5), timed=range(7)))
    assert summary["failed_checks"] == summary["differences"] == []
    assert summary["layouts"] == 5 + 7
    assert (summary["plans"], summary["failed"]) == (7, 0)
    page = (tmp_path / "out" / "README.md").read_text(encoding="utf-8")
    assert "12 plans in unlike layouts" in page


@pytest.mark.slow
@pytest.mark.usefixtures("warm_ranks")
def test_a_report_on_eight_processes_comes_from_real_runs(tmp_path: Path) -> None:
    plans = tiny_plans(tmp_path, 8, checks=range(6), timed=(0, 1, 7, 10))
    summary = reported(tmp_path, plans)
    assert summary["failed_checks"] == summary["differences"] == []
    assert summary["layouts"] == 6 + 4
    assert (summary["plans"], summary["failed"]) == (4, 0)


def test_a_run_on_several_gpus_has_them_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process of runs on one GPU ends before a torchrun, and a rank's complaint is told."""
    words = "import sys; print('error: no room', file=sys.stderr); sys.exit(2)"
    monkeypatch.setattr(plan_runs, "TORCHRUN", (sys.executable, "-c", words))
    runner, closed = NodeRunner("cpu"), []
    monkeypatch.setattr(runner, "close", lambda: closed.append(True))
    said = runner(PlanRun(plan=tmp_path / "plan.yaml", steps=1, gpus=2), 60.0)
    assert said == {"error": "no room"}
    assert closed == [True]


def test_gpus_that_cannot_run_the_plans_are_refused_before_any_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torch = pytest.importorskip("torch")
    words = ["--out", str(tmp_path / "out"), "--gpus-per-node", "8"]
    answers: dict[str, Any] = {"is_available": True, "device_count": 4}
    answers |= {"get_device_capability": (7, 0), "get_device_name": "Tesla V100"}
    monkeypatch.setattr(torch.distributed, "is_nccl_available", lambda: True)
    for name in answers:
        monkeypatch.setattr(torch.cuda, name, lambda *_, name=name, **_kwargs: answers[name])
    assert run(gpu_report.main, words) == WRONG_USAGE
    assert "--gpus-per-node: 8 is more than the 4 GPUs that torch sees" in capsys.readouterr().err
    answers["device_count"] = 8
    assert run(gpu_report.main, words) == WRONG_USAGE
    assert "bf16, but Tesla V100 has no bfloat16 arithmetic" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
