"""Folders of plans that are run: what is kept, what is compared, and what a broken plan does."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from experiments import run_plans
from experiments.cli.commandline import PLANS, run
from experiments.training import run_plans as plan_folders
from experiments.training.plan_runs import last_words, silent
from experiments.training.run_plans import Launcher

TINY = PLANS.resolve() / "tiny"
SECONDS = {"plain": 0.2, "recomputed": 0.25, "two-stages": 0.1}


class Played(Launcher):
    """Says what a run would, without running."""

    ran: list[str]

    def run(self, plan: Path, gpus: int) -> Mapping[str, Any]:
        Played.ran.append(plan.stem)
        if plan.stem == "fails":
            return {"error": "out of memory"}
        seconds = SECONDS[plan.stem] / (2 if plan.parent.name == "faster" else 1)
        return {
            "losses": [6.2, 6.1],
            "predicted_iteration_s": 0.1,
            "peak_allocated_bytes": [100] * gpus,
            "peak_reserved_bytes": [200] * gpus,
            "iteration_s": [9.0, 8.0, seconds],
        }


@pytest.fixture
def ran(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The plans that were run, none of them really."""
    Played.ran = []
    monkeypatch.setattr(plan_folders, "Launcher", Played)
    return Played.ran


def answer(capsys: pytest.CaptureFixture[str], *arguments: object, status: int = 0) -> Any:
    capsys.readouterr()
    assert run(run_plans.main, [*map(str, arguments), "--json"]) == status
    return json.loads(capsys.readouterr().out)


def test_every_plan_of_a_folder_runs_and_is_compared(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = answer(capsys, TINY, "--out", tmp_path)
    assert ran == ["plain", "recomputed", "two-stages"]
    assert (found["ran"], found["failed"]) == (3, 0)
    # Of one workload: over its first plan.
    speedups = {row["plan"]: row for row in found["timing"]["speedups"]}
    assert speedups["plain"]["over"] is None
    assert speedups["recomputed"]["over"] == "tiny/plain"
    assert speedups["recomputed"]["speedup"] == pytest.approx(0.8)
    assert speedups["two-stages"]["speedup"] == pytest.approx(2.0)
    assert json.loads((tmp_path / "summary.json").read_text())["rows"] == found["rows"]
    head = (tmp_path / "rows.csv").read_text(encoding="utf-8").splitlines()[0].split(",")
    assert "predicted_iteration_s" in head
    assert not {"iteration_s", "timing.iteration_s"} & {*head}


def test_a_broken_plan_does_not_stop_the_others(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans = tmp_path / "plans"
    shutil.copytree(TINY, plans)
    (plans / "broken.yaml").write_text("plan: [", encoding="utf-8")
    shutil.copy(TINY / "plain.yaml", plans / "fails.yaml")
    found = answer(capsys, plans, "--out", tmp_path / "out", status=1)
    assert ran == ["fails", "plain", "recomputed", "two-stages"]
    assert (found["ran"], found["failed"]) == (3, 2)
    errors = {row["plan"]: row["error"] for row in found["rows"] if "error" in row}
    assert errors["fails"] == "out of memory"
    assert "broken.yaml: line 2" in errors["broken"]


def test_the_same_command_runs_what_is_left(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plans, out = tmp_path / "plans", tmp_path / "out"
    shutil.copytree(TINY, plans)
    shutil.copy(TINY / "plain.yaml", plans / "fails.yaml")
    first = answer(capsys, plans, "--out", out, status=1)
    ran.clear()
    text = (plans / "recomputed.yaml").read_text(encoding="utf-8")
    changed = text.replace("checkpointed_layers: 4", "checkpointed_layers: 3")
    (plans / "recomputed.yaml").write_text(changed, encoding="utf-8")
    (plans / "fails.yaml").unlink()
    again = answer(capsys, plans, "--out", out)
    assert ran == ["recomputed"]
    assert first["rows"][1] == again["rows"][0]
    # Other steps are another run.
    ran.clear()
    answer(capsys, plans, "--out", out, "--steps", "7")
    assert ran == ["plain", "recomputed", "two-stages"]


def test_a_stop_while_going_on_loses_nothing(
    ran: list[str],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plans, out = tmp_path / "plans", tmp_path / "out"
    shutil.copytree(TINY, plans)
    first = answer(capsys, plans, "--out", out)
    with (plans / "plain.yaml").open("a", encoding="utf-8") as file:
        file.write("# changed\n")

    def stopped(self: Launcher, plan: Path, gpus: int) -> Mapping[str, Any]:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Played, "run", stopped)
        assert run(run_plans.main, [str(plans), "--out", str(out)]) == 130
    ran.clear()
    again = answer(capsys, plans, "--out", out)
    assert ran == ["plain"]
    assert again["rows"][1:] == first["rows"][1:]
    assert len((out / "rows.jsonl").read_text(encoding="utf-8").splitlines()) == 3


def test_speedups_are_collected_from_folders_of_plans_and_of_results(
    ran: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    faster = tmp_path / "faster"
    shutil.copytree(TINY, faster)
    answer(capsys, TINY, "--out", tmp_path / "one")
    answer(capsys, faster, "--out", tmp_path / "two")
    ran.clear()
    found = answer(capsys, tmp_path / "one", tmp_path / "two", "--out", tmp_path / "both")
    assert ran == []
    rows = [row for row in found["timing"]["speedups"] if row["folder"] == "faster"]
    assert [row["over"] for row in rows] == ["tiny/plain", "tiny/recomputed", "tiny/two-stages"]
    assert [row["speedup"] for row in rows] == pytest.approx([2.0] * 3)
    assert (tmp_path / "both" / "run_plans.svg").exists()


def test_in_haste_the_first_plans_of_a_folder_run_and_the_others_are_named(
    tmp_path: Path, ran: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(run_plans.main, [str(TINY), "--quick", "--out", str(tmp_path)]) == 0
    assert ran == ["plain", "recomputed"]
    assert "--quick leaves out two-stages.yaml" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([str(TINY.with_name("tinny"))], "tinny: does not exist: did you mean 'tiny'?: give a"),
        (["nowhere"], "nowhere: does not exist: give a folder of plan files"),
        ([str(TINY / "plain.yaml")], "plain.yaml: is a file: give a folder"),
        ([str(TINY.parents[1] / "cli")], "cli: has no plan files"),
        ([str(TINY), "--steps", "0"], "--steps: 0 is not above 0"),
        ([str(TINY), "--seconds", "-1"], "--seconds: -1 is not above 0"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(run_plans.main, [*arguments, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_a_failure_is_told_in_the_words_of_the_rank_that_failed() -> None:
    text = "W torch: starting\nerror: the loss is nan\nTraceback\n  torch ... ChildFailedError\n"
    assert last_words(text, silent(1)) == "the loss is nan"
    assert last_words("killed\n", silent(1)) == "killed"
    assert last_words("", silent(9)) == "it ended with status 9, without a word"


def test_a_plan_of_several_gpus_says_how_to_install_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan_folders, "find_spec", lambda _: None)
    launcher = Launcher(steps=1, device="cuda", seed=0, seconds=1.0)
    with launcher:
        said = launcher.run(TINY / "two-stages.yaml", 2)
    assert "pip install '.[runtime]'" in said["error"]


@pytest.mark.slow
def test_plans_really_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("torch")
    found = answer(capsys, TINY, "--steps", "3", "--out", tmp_path)
    losses = [row["losses"] for row in found["rows"]]
    assert [row["gpus"] for row in found["rows"]] == [1, 1, 2]
    assert losses[1] == losses[0]
    assert losses[2] == pytest.approx(losses[0], rel=1e-6)
