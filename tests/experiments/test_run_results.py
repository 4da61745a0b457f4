"""What is said of a run beside its measurement: a prediction, or that there can be none."""

import argparse
import json
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

pytest.importorskip("torch")

from experiments.training import run_results
from experiments.training.run_plan import write_trace
from experiments.training.run_results import History, result_of, shortage_words
from mistlab.core.values import InputError
from mistlab.job.job import Job, load_job
from mistlab.job.prediction import Environment
from runtime.comm.group import Shortage
from runtime.engine.executor import Report
from simulators.events import EventSimulator
from tests.experiments.tiny_plans import plan_file

REPORT = Report(loss=4.0, gradient_norm=None, loss_scale=1.0, skipped=False)
SHORTAGE = Shortage(stage=0, doing="its start", held_bytes={}, reason="no more")


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return load_job(plan_file(tmp_path))


def said(job: Job) -> dict[str, Any]:
    options = argparse.Namespace(
        plan="plan.yaml", stage=None, seed=0, deterministic=False, attention_kernel="flash"
    )
    history = History()
    history.add(1, REPORT, 1.0, 48)
    return result_of(job, options, history, [], Environment(device="CPU", num_devices=1))


def predicted_events(job: Job, folder: Path) -> list[Any]:
    write_trace(job, None, [], folder / "timeline.json")
    events = json.loads((folder / "timeline.json").read_text())["traceEvents"]
    return [event for event in events if event["ph"] == "X"]


def wrong(*_: object, **__: object) -> NoReturn:
    message = "plan.stages: is wrong: correct it"
    raise InputError(message)


def test_a_prediction_stands_beside_the_measurement(job: Job, tmp_path: Path) -> None:
    assert said(job)["predicted_iteration_s"] > 0
    assert predicted_events(job, tmp_path)


def test_rates_leave_padding_out(job: Job) -> None:
    assert said(job)["tokens_per_s"] == 48 < job.workload.tokens


@pytest.mark.parametrize("group", ["compute", "transfers", "allocator"])
def test_hardware_that_is_not_calibrated_has_no_prediction(
    job: Job, tmp_path: Path, group: str
) -> None:
    whole = job.cluster.hardware
    provenance = replace(whole.provenance, **{group: None})
    hardware = replace(whole, provenance=provenance, **{group: None})
    job = replace(job, cluster=replace(job.cluster, hardware=hardware))
    assert said(job)["predicted_iteration_s"] is None
    assert shortage_words(SHORTAGE, job, None).endswith("(no more)")
    if group != "allocator":
        assert not predicted_events(job, tmp_path)


def test_whatever_else_is_wrong_with_a_prediction_is_said(
    job: Job, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_results, "prediction_of", wrong)
    monkeypatch.setattr(EventSimulator, "simulate", wrong)
    with pytest.raises(InputError, match="is wrong"):
        said(job)
    with pytest.raises(InputError, match="is wrong"):
        predicted_events(job, tmp_path)
    # The shortage is what the run ended by.
    words = shortage_words(SHORTAGE, job, None)
    assert words.startswith("stage 0 is out of memory at its start (no more)")
    assert words.endswith("not predicted: plan.stages: is wrong: correct it")
