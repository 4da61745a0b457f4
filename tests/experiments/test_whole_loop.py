"""The whole loop without a GPU: a machine is measured, a plan searched for it, run and compared."""

import json
import statistics
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments import profile_hardware, run_plan, tune, whole_loop
from experiments.calibration.profiling import SIZES
from experiments.cli.commandline import DONE, run
from experiments.pages.tables import Row
from experiments.speedup import whole_loop as loop
from experiments.speedup.whole_loop import report
from mistlab import catalog
from mistlab.job.job import Job, load_job
from simulators.symbolic import SymbolicPredictor
from tests.experiments.test_profile_hardware import TINY

MODEL = "{family: gpt, hidden: 64, layers: 4, heads: 4, vocab: 128}\n"


def test_plans_run_in_turn_and_stand_beside_their_predictions(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran = []

    def trial(system: str, job: Job, **_: object) -> dict[str, Any]:
        ran.append(job.plan)
        predicted_s = SymbolicPredictor(workload=job.workload, cluster=job.cluster).predict(
            job.plan
        )
        seconds = 1.1 * predicted_s.iteration_s
        return {"outcome": "ran", "timing": {"seconds": [seconds], "median_s": seconds}}

    monkeypatch.setattr(loop, "run_trial", trial)
    where = ("--hardware", "l4-24gb", "--systems", "mistlab", "--out", str(tmp_path / "loop"))
    arguments = [*where, "--plans", "5", "--repeats", "2", "--json"]
    assert run(whole_loop.main, arguments) == DONE
    said = json.loads(capsys.readouterr().out)
    # Plans take turns, and no plan comes twice in a turn.
    assert ran[:5] == ran[5:]
    assert len(set(ran)) == 5
    assert {row["ranks"] for row in said["rows"]} == {1, 8}
    # The search is on all devices.
    assert said["rows"][0]["ranks"] == 8
    assert said["timing"]["median_error"] == pytest.approx(1 - 1 / 1.1)
    assert said["timing"]["pairs_apart"] == said["timing"]["pairs_right"] > 0
    # What ran is not run again.
    assert run(whole_loop.main, arguments) == DONE
    assert len(ran) == 10


PLAN = {"stages": [{"layers": 2, "data_parallel": 1, "tensor_parallel": 1, "micro_batch": 1}]}


def rows(name: str, predicted_s: float, *runs_s: float, is_trial: bool = True) -> list[Row]:
    """Runs of a plan; the first word of its name is the system, unless it is one of ours."""
    return [
        {
            "name": name,
            "system": name.split(maxsplit=1)[0] if " " in name else "mistlab",
            "is_trial": is_trial,
            "ranks": 1,
            "plan": PLAN,
            "predicted_s": predicted_s,
            "timing": {"median_s": seconds},
        }
        for seconds in runs_s
    ]


def test_the_best_of_as_many_trials_count_and_wins_and_losses_are_told() -> None:
    runs = [
        *rows("01", 1.0, 1.9, 2.1),
        *rows("02", 1.1, 1.0, 1.1),
        # Fast, but nobody has tried it to be fast.
        *rows("03", 0.9, 0.5, 0.5, is_trial=False),
        *rows("megatron 1", 1.0, 1.5),
        *rows("megatron 2", 1.0, 1.2),
        *rows("deepspeed 1", 1.0, 1.02),
        *rows("fsdp 1", 1.0, 0.7),
    ]
    told = report(runs, catalog.hardware("l4-24gb"), has_priority=False)
    text = "\n".join(told.words)
    assert (
        "The fastest of 2 searched plans is 1.14 times as fast as the fastest of 2 of megatron "
        "(1.09 to 1.20 from run to run): a win."
    ) in text
    assert (
        "the fastest of 1 of deepspeed (0.93 to 1.02 from run to run): within the spread." in text
    )
    assert "(0.64 to 0.70 from run to run): a loss." in text
    assert "Of 3 pairs of plans whose times differ by more than 25%, 2 are" in text
    assert "Not so: 02 before 01." in text
    assert "real-time" not in text
    assert "real-time" in "\n".join(
        report(runs, catalog.hardware("l4-24gb"), has_priority=True).words
    )


@pytest.mark.slow
def test_a_plan_found_for_a_measured_machine_runs_beside_its_prediction(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(SIZES, ("cpu", True), TINY)
    machine, model, plan = (tmp_path / name for name in ("box.yaml", "gpt.yaml", "plan.yaml"))
    model.write_text(MODEL, encoding="utf-8")
    measured = ("--device", "cpu", "--gpus-per-node", "1", "--quick", "--out", str(machine))
    assert run(profile_hardware.main, measured) == DONE

    problem = ("--model", str(model), "--sequence-length", "32", "--global-batch", "4")
    where = ("--hardware", str(machine), "--gpus-per-node", "1", "--precision", "fp32")
    assert run(tune.main, [*problem, *where, "--quick", "--out", str(plan)]) == DONE
    assert load_job(plan).cluster.hardware.name == "box"

    capsys.readouterr()
    out = tmp_path / "run"
    assert run(run_plan.main, [str(plan), "--steps", "5", "--out", str(out), "--json"]) == DONE
    found = json.loads(capsys.readouterr().out)
    assert len(found["losses"]) == 5
    # Of so tiny a model an order of magnitude is all that the two may share.
    ratio = statistics.median(found["iteration_s"]) / found["predicted_iteration_s"]
    assert 1 / 50 < ratio < 50
    events = json.loads((out / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"stage 0, predicted", "stage 0, measured"}
