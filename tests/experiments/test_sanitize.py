"""The command that checks plans for GPUs without one: what it says, and how it ends."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

pytest.importorskip("torch")

import torch

from experiments import sanitize
from experiments.cli.commandline import DONE, NO_ANSWER, WRONG_USAGE, run
from mistlab.stages import buffers
from runtime.checks.sanitizer import Sanitizer
from runtime.engine.executor import Executor

STAGE = {
    "layers": 2,
    "data_parallel": 1,
    "tensor_parallel": 1,
    "micro_batch": 1,
    "offload": {"activations": 1.0},
}


def plan_file(folder: Path, stages: list[dict[str, Any]], **workload: Any) -> Path:
    batch = stages[0]["data_parallel"] * stages[0]["micro_batch"] * 2
    content = {
        "workload": {
            "model": {"family": "gpt", "hidden": 32, "layers": 0, "heads": 4, "vocab": 96},
            "sequence_length": 16,
            "global_batch": batch,
            "attention": "flash",
            "precision": "fp32",
            **workload,
        },
        "cluster": {"hardware": "a100-80gb", "nodes": 128, "gpus_per_node": 8},
        "plan": {"micro_batches": 2, "stages": stages},
    }
    content["workload"]["model"]["layers"] = sum(stage["layers"] for stage in stages)
    path = folder / "plan.yaml"
    path.write_text(yaml.safe_dump(content))
    return path


def test_a_clean_plan_ends_with_0(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = {**STAGE, "layers": 1}
    path = plan_file(tmp_path, [one, {**one, "zero": 1}])
    assert run(sanitize.main, [str(path), "--clip-norm", "1"]) == DONE
    said = capsys.readouterr()
    assert said.out == f"{path}: clean (2 of 2 ranks, which do all that any does)\n"
    assert f"{path}: 2 GPUs, 2 that differ in what they do; about" in said.err


def forgetful_forward(touched: buffers.Touched) -> tuple[buffers.Buffers, buffers.Buffers]:
    """Layers that send nothing away do not wait before they let go of what others sent."""
    leaves = touched.shape.offload_of(touched.layer).activations > 0
    return (touched.weights,), ((("leaving", touched.entry),) if leaves else ())


def test_a_fault_is_told_with_its_tasks_and_the_wait_that_is_missing(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    forget_programs: Callable[[], None],
) -> None:
    monkeypatch.setitem(buffers.TOUCHES, "F", forgetful_forward)  # type: ignore[index]
    forget_programs()
    path = plan_file(tmp_path, [STAGE])
    assert run(sanitize.main, [str(path)]) == NO_ANSWER
    text = capsys.readouterr().out
    assert "rank 0 (stage 0, data 0, tensor 0): freed while used:" in text
    assert "0A>.1m0 (first forward) on device_to_host reads bytes" in text
    assert "missing: a wait of compute, at 0F." in text
    assert run(sanitize.main, [str(path), "--json"]) == NO_ANSWER
    found = json.loads(capsys.readouterr().out)
    assert found["findings"] == len(found["ranks"][0]["races"]) > 0
    race = found["ranks"][0]["races"][0]
    assert found["collectives"] == found["ranks"][0]["waits"] == []
    assert set(race) == {"kind", "memory", "first", "second", "missing"}
    assert race["first"]["actor"] == "device_to_host"


def test_a_wait_of_the_host_is_told_with_its_place(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def reading(executor: Executor, _weight: float = 1.0) -> torch.Tensor:
        return torch.tensor(executor.scaling.scale.item(), device=executor.device)

    monkeypatch.setattr(Executor, "_share", reading)
    path = plan_file(tmp_path, [STAGE])
    assert run(sanitize.main, [str(path), "--json"]) == NO_ANSWER
    found = json.loads(capsys.readouterr().out)["ranks"][0]["waits"]
    assert "value read" in {one["kind"] for one in found}


def test_a_plan_for_many_gpus_says_how_long_it_takes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage = {**STAGE, "data_parallel": 16, "tensor_parallel": 8, "layers": 12}
    model = {"family": "gpt", "hidden": 1024, "heads": 16, "vocab": 96, "layers": 96}
    path = plan_file(tmp_path, [stage] * 8, model=model)
    for check in ("races", "waits"):
        monkeypatch.setattr(Sanitizer, check, lambda _self, _rank: ())
    assert run(sanitize.main, [str(path)]) == DONE
    said = capsys.readouterr()
    assert "1024 GPUs, 32 that differ in what they do; 6 blocks stand for 12 of a stage" in said.err
    assert "32 of 32: rank 905 (stage 7, data 1, tensor 1): 0 findings" in said.err


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"plan": {"engine": "megatron"}}, "plan.engine: megatron trains in its own framework"),
        ({"plan": {"engine": "mist"}}, "plan.engine: mist trains in its own framework"),
        ({"model": {"dropout": 1}}, "workload.model: this model can be predicted but not"),
        (
            {"model": {"dropout": 0.1}},
            "workload.model.attention_dropout: 0.1 with workload.attention: flash",
        ),
    ],
)
def test_what_cannot_run_is_said_before_anything_runs(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    problem: str,
) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError

    for check in ("collectives", "races", "waits"):
        monkeypatch.setattr(Sanitizer, check, refuse)
    path = plan_file(tmp_path, [{**STAGE, "offload": {}}])
    content = yaml.safe_load(path.read_text())
    content["plan"].update(change.get("plan", {}))
    content["workload"]["model"].update(change.get("model", {}))
    path.write_text(yaml.safe_dump(content))
    assert run(sanitize.main, [str(tmp_path / "plan.yaml")]) == WRONG_USAGE
    assert f"error: {path}: {problem}" in capsys.readouterr().err
