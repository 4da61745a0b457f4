"""Runs in processes of their own, and the file in which what they said is kept."""

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments.cli.command import TINY
from experiments.training import plan_runs
from experiments.training.plan_runs import PlanRun, RunRows, WorkerRunner, ended_within
from mistlab.core.values import InputError


def test_a_run_that_was_cut_off_is_dropped_and_a_strange_one_refused(tmp_path: Path) -> None:
    path = tmp_path / "runs.jsonl"
    whole = json.dumps({"plan": "a", "error": "b"})
    path.write_text(f'{whole}\n{{"plan": "c", "los', encoding="utf-8")
    rows = RunRows(path=path)
    assert rows.said == {"a": {"error": "b"}}
    rows.add("d", {"plan": "plans/d.yaml", "losses": [1.0]})
    assert RunRows(path=path).said == {"a": {"error": "b"}, "d": {"losses": [1.0]}}
    path.write_text("{}\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"line 1 is not a JSON object .*: remove the line"):
        RunRows(path=path)


@pytest.fixture
def runner(monkeypatch: pytest.MonkeyPatch, warm_python: str) -> Iterator[WorkerRunner]:
    monkeypatch.setattr(plan_runs, "WORKER", (warm_python, *plan_runs.WORKER[1:]))
    runner = WorkerRunner("cpu")
    yield runner
    runner.close()


def test_plans_run_in_one_process_until_they_become_strict_or_fail(
    tmp_path: Path, runner: WorkerRunner
) -> None:
    pytest.importorskip("torch")

    def run(plan: Path, **fields: Any) -> Mapping[str, Any]:
        said = runner(PlanRun(plan=plan, steps=2, **fields), 300.0)
        assert said is not None
        return said

    first, worker = run(TINY), runner._worker
    again = run(TINY)
    assert runner._worker is worker
    assert again["losses"] == first["losses"]
    strict = run(TINY, strict=True, with_norms=True)
    assert runner._worker is not worker
    assert strict["deterministic"] is True
    assert strict["losses"] == first["losses"]
    assert None not in strict["gradient_norms"]
    assert first["gradient_norms"] == [None, None]

    broken = tmp_path / "broken.yaml"
    broken.write_text("plan: 3\n", encoding="utf-8")
    with pytest.raises(InputError, match=r"broken.yaml: ") as refused:
        run(broken)
    assert "error" not in str(refused.value)
    assert str(refused.value).count("broken.yaml") == 1
    # After a failure there is a new process.
    assert run(TINY)["losses"] == first["losses"]


def test_a_run_that_takes_too_long_is_interrupted(tmp_path: Path, runner: WorkerRunner) -> None:
    pytest.importorskip("torch")
    assert runner(PlanRun(plan=TINY, steps=10**6), 1.0) is None


def test_a_run_that_fails_is_a_row_with_its_last_words(
    tmp_path: Path, runner: WorkerRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plan_runs, "WORKER", (sys.executable, "-c", DYING))
    said = runner(PlanRun(plan=tmp_path, steps=1), 60.0)
    assert said == {"error": "error: stage 0 is out of memory"}


# Reads its line and ends as run_plan does when memory runs out.
DYING = """import os, sys
input()
print("a warning", file=sys.stderr)
print("error: stage 0 is out of memory", file=sys.stderr, flush=True)
os._exit(1)
"""


def test_a_process_is_interrupted_when_its_time_is_over(tmp_path: Path) -> None:
    reached = tmp_path / "reached"
    sleep = f"import pathlib, time; time.sleep(60); pathlib.Path({str(reached)!r}).touch()"
    assert ended_within([sys.executable, "-c", sleep], 1.0) is None
    assert not reached.exists()
    done = ended_within([sys.executable, "-c", "print(1); raise SystemExit(3)"], 30.0)
    assert done is not None
    assert (done.returncode, done.stdout) == (3, "1\n")
