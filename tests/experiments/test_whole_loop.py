"""The whole loop without a GPU: a machine is measured, a plan searched for it, run and compared."""

import json
import statistics
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import profile_hardware, run_plan, tune
from experiments.calibrating.profile_sizes import SIZES
from experiments.cli.commandline import DONE, run
from mistlab.values.job import load_job
from tests.experiments.test_profile_hardware import TINY

MODEL = "{family: gpt, hidden: 64, layers: 4, heads: 4, vocab: 128}\n"


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
    # Tiny models on simulated streams: an order of magnitude is all that the two may share.
    ratio = statistics.median(found["iteration_s"]) / found["predicted_iteration_s"]
    assert 1 / 50 < ratio < 50
    events = json.loads((out / "timeline.json").read_text(encoding="utf-8"))["traceEvents"]
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {"stage 0, predicted", "stage 0, measured"}
