"""Random plans, and the two predictors held against one another over them."""

import json
from pathlib import Path

import pytest

from experiments import cross_check, predict
from experiments.commandline import run
from experiments.random_plans import random_plans
from mistlab.job import load_job


def test_random_plans_fit_and_are_the_same_for_the_same_seed() -> None:
    plans, again = (list(random_plans(20, 7)) for _ in range(2))
    assert plans == again
    assert plans != list(random_plans(20, 8))
    assert len({plan.job.workload for plan in plans}) > 3
    for plan in plans:
        assert plan.prediction.fits
        assert plan.job.plan.layers == plan.job.workload.model.layers
    strata = [name for plan in plans for name in plan.strata]
    assert set(strata) == set(cross_check.STRATA)


def test_the_two_agree_over_random_plans(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--plans", "30", "--seed", "3", "--out", str(tmp_path)]
    assert run(cross_check.main, [*arguments, "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert summary["plans"] == summary["all"]["plans"] == len(rows) <= 30
    assert summary["all"]["median"] < 0.02
    assert summary["all"]["p95"] < 0.06
    assert summary["memory"]["within_1_percent"] == 1
    for name, wanted in cross_check.STRATA.items():
        found = summary["strata"][name]
        assert found["share"] == found["plans"] / summary["plans"] >= wanted
    assert len(summary["worst"]) == 5
    largest = max(rows, key=lambda row: abs(row["difference"]))
    assert summary["worst"][0] == largest
    assert load_job(tmp_path / f"{largest['plan']:04}.yaml").plan.num_stages == largest["stages"]
    assert (tmp_path / "differences.svg").exists()


def test_no_plans_are_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(cross_check.main, ["--plans", "0"]) == 2
    assert "--plans 0: nothing to compare" in capsys.readouterr().err


def test_a_plan_can_be_played_and_drawn(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--simulator", "events", "--timeline", str(tmp_path), "--json"]
    assert run(predict.main, arguments) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["predictor"] == "events"
    trace = json.loads((tmp_path / "gpt3-2.7b-4xl4.trace.json").read_text())
    phases = {event["ph"] for event in trace["traceEvents"]}
    assert phases == {"M", "X", "s", "f", "C"}
    last = max(e["ts"] + e["dur"] for e in trace["traceEvents"] if e["ph"] == "X")
    assert last == pytest.approx(answer["iteration_s"] * 1e6)
    assert (tmp_path / "gpt3-2.7b-4xl4.svg").stat().st_size > 20_000


def test_a_timeline_needs_the_events(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(predict.main, ["--timeline", str(tmp_path)]) == 2
    assert "--timeline needs what --simulator events plays" in capsys.readouterr().err
