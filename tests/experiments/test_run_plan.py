"""run_plan: what it prints and writes, alone and under torchrun, and what it says when it fails."""

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

torch = pytest.importorskip("torch")

from experiments import run_plan  # noqa: E402
from experiments.cli.command import TINY  # noqa: E402
from experiments.cli.commandline import DONE, NO_ANSWER, WRONG_USAGE, run  # noqa: E402
from experiments.training import run_plan as training  # noqa: E402
from mistlab.core.files import read_yaml  # noqa: E402
from mistlab.core.values import from_mapping  # noqa: E402
from mistlab.job.prediction import Measurement  # noqa: E402
from runtime.checks.races.recorded_rank import standing_in  # noqa: E402
from tests.experiments.tiny_plans import MODEL, PIPELINE, UNLIKE, plan_file, refusal  # noqa: E402
from tests.runtime.inline_driver import InlineDriver  # noqa: E402

ROOT = Path(__file__).parents[2]
Run = Callable[..., Mapping[str, Any]]


@pytest.fixture
def result(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a plan and gives its JSON."""

    def of(*arguments: object) -> Mapping[str, Any]:
        assert run(run_plan.main, [*map(str, arguments), "--json"]) == DONE
        found: Mapping[str, Any] = json.loads(capsys.readouterr().out)
        return found

    return of


def test_losses_are_those_of_the_workload_whatever_the_plan(tmp_path: Path, result: Run) -> None:
    offload = dict.fromkeys(("weights", "gradients", "optimizer", "activations"), 0.37)
    plain = result(plan_file(tmp_path), "--steps", 3)
    other = plan_file(tmp_path, {"checkpointed_layers": 2, "offload": offload})
    found = result(other, "--steps", 3)
    assert found["losses"] == pytest.approx(plain["losses"], rel=1e-6)
    assert len(found["iteration_s"]) == 3
    for name in ("peak_allocated_bytes", "peak_reserved_bytes"):
        assert len(found[name]) == 1
    assert found["peak_allocated_bytes"][0] < plain["peak_allocated_bytes"][0]
    assert result(other, "--steps", 1, "--seed", 1)["losses"] != found["losses"][:1]


def test_a_folder_gets_measurement_timeline_and_rows(tmp_path: Path, result: Run) -> None:
    offload = {"optimizer": 0.5, "activations": 0.5}
    plan, out = plan_file(tmp_path, {"offload": offload}), tmp_path / "out"
    found = result(plan, "--steps", 4, "--out", out)

    measured = from_mapping(Measurement, read_yaml(out / "measurement.yaml"))
    assert list(measured.samples_s) == sorted(found["iteration_s"][2:])
    rows = [json.loads(line) for line in (out / "rows.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == found["losses"]
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    names = {
        process: {event["name"] for event in events if event["ph"] == "X" and event["pid"] == pid}
        for pid, process in enumerate(("predicted", "measured"))
    }
    assert names["predicted"]
    others = {"report", "open", "close", "let go"}
    assert names["measured"] == names["predicted"] | others
    readme = (out / "README.md").read_text()
    assert f"run_plan {plan} --" in readme
    assert f"--out {out}" in readme


def test_a_step_on_the_cpu_shows_on_a_track_of_the_host(tmp_path: Path, result: Run) -> None:
    plan, out = plan_file(tmp_path, {"offload": {"optimizer": 0.5}}), tmp_path / "out"
    fetched = result(plan, "--steps", 3)
    found = result(plan, "--steps", 3, "--step-on-cpu", "--out", out)
    assert found["losses"] == pytest.approx(fetched["losses"], rel=1e-6)
    # Optimizer state is not staged on the device.
    assert found["peak_allocated_bytes"][0] < fetched["peak_allocated_bytes"][0]
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    (host,) = [event for event in events if event.get("args", {}).get("name") == "host"]
    place = host["pid"], host["tid"]
    steps = {e["name"] for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == place}
    assert steps == {f"0S.{layer}m0" for layer in (1, 2, 3)}


def test_a_strict_run_says_so_and_has_the_same_losses(tmp_path: Path, result: Run) -> None:
    plan = plan_file(tmp_path)
    plain, strict = result(plan, "--steps", 2), result(plan, "--steps", 2, "--deterministic")
    assert (plain["deterministic"], strict["deterministic"]) == (False, True)
    assert strict["losses"] == plain["losses"]
    assert strict["attention_kernel"] == "flash"
    assert strict["environment"]["torch"] == torch.__version__
    assert strict["start_s"] > 0
    products = result(plan_file(tmp_path, attention="math"), "--steps", 1)
    assert products["attention_kernel"] is None


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_weights_that_a_device_draws_depend_on_the_seed_alone(
    tmp_path: Path, result: Run, family: str
) -> None:
    model = {**MODEL, "family": family, "tied_embeddings": family == "gpt"}
    offload = {"offload": {"optimizer": 0.5, "weights": 0.5}}
    plans = plan_file(tmp_path, model=model), plan_file(tmp_path, offload, model=model)
    on_host = result(plans[0], "--steps", 2)
    # The generator of a CPU that stands for a GPU draws what the host draws.
    with standing_in(InlineDriver()):
        drawn = [result(plan, "--steps", 2, "--draw-on-device") for plan in plans]
        other = result(plans[1], "--steps", 2, "--draw-on-device", "--seed", 1)
    for one in drawn:
        assert one["losses"] == pytest.approx(on_host["losses"], rel=1e-6)
    assert other["losses"] != drawn[1]["losses"]


def test_a_stage_of_a_pipeline_runs_by_itself(tmp_path: Path, result: Run) -> None:
    plan = plan_file(tmp_path, *PIPELINE, model={**MODEL, "layers": 4})
    first = result(plan, "--stage", 0, "--steps", 2, "--out", tmp_path / "out")
    last = result(plan, "--stage", 2, "--steps", 2)
    assert (first["stage"], last["stage"]) == (0, 2)
    assert first["losses"] == [None, None]
    assert all(loss > 0 for loss in last["losses"])
    for found in (first, last):
        assert len(found["peak_allocated_bytes"]) == 1
        assert len(found["predicted_peak_allocated_bytes"]) == 1
    assert first["predicted_iteration_s"] != last["predicted_iteration_s"]

    measured = from_mapping(Measurement, read_yaml(tmp_path / "out" / "measurement.yaml"))
    (one,) = measured.stages
    assert one.peak_allocated_bytes == first["peak_allocated_bytes"][0]
    assert one.stable_s is not None
    assert one.delta_forward_s is not None
    assert one.delta_backward_s is not None
    passes_s = 2 * one.stable_s + one.delta_forward_s + one.delta_backward_s
    assert 0 < passes_s <= max(first["iteration_s"])
    events = json.loads((tmp_path / "out" / "timeline.json").read_text())["traceEvents"]
    tasks = {
        pid: {e["name"] for e in events if e["ph"] == "X" and e["pid"] == pid} for pid in (0, 3)
    }
    assert {event["pid"] for event in events} == {0, 3}
    sends = {f"0{kind}.1m{micro_batch}" for kind in "XY" for micro_batch in range(2)}
    assert tasks[3] == tasks[0] | sends | {"report"}


def test_nothing_is_lost_when_a_run_ends_early(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, out = plan_file(tmp_path), tmp_path / "out"

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(training, "write_trace", full)
        assert run(run_plan.main, [str(plan), "--out", str(out), "--steps", "3"]) == NO_ANSWER
    captured = capsys.readouterr()
    assert captured.out.startswith("losses")
    assert "error: No space left on device: free space on this disk" in captured.err

    assert len((out / "rows.jsonl").read_text().splitlines()) == 3


def test_a_run_goes_on_from_its_checkpoint(tmp_path: Path, result: Run) -> None:
    plan, out = plan_file(tmp_path), tmp_path / "out"
    whole = result(plan, "--steps", 4)
    begun = result(plan, "--steps", 2, "--out", out, "--save-every", 2)
    ended = result(
        plan_file(tmp_path, {"offload": {"optimizer": 0.5}}),
        *("--steps", 2, "--resume", out / "checkpoints"),
    )
    assert begun["losses"] + ended["losses"] == pytest.approx(whole["losses"], rel=1e-6)


def test_a_file_of_tokens_is_trained_on(tmp_path: Path, result: Run) -> None:
    tokens = np.tile(np.arange(97, dtype="<u2"), 30)
    tokens.tofile(tmp_path / "tokens.bin")
    found = result(
        plan_file(tmp_path),
        *("--data", tmp_path / "tokens.bin", "--steps", 12, "--learning-rate", 1e-2),
    )
    assert found["losses"][-1] < 0.9 * found["losses"][0]


def test_a_router_that_sends_all_tokens_to_one_expert_works_and_is_named_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    tokens = tmp_path / "tokens.bin"
    np.full(40 * 17, 5, np.uint16).tofile(tokens)
    experts = {"count": 4, "active": 1, "ffn": 16, "router": {"z_loss": 0.1}}
    model = {**MODEL, "family": "llama", "experts": experts}
    plan = plan_file(tmp_path, model=model, precision="bf16")
    assert run(run_plan.main, [str(plan), "--steps", "2", "--data", str(tokens)]) == DONE
    said = capsys.readouterr().err
    for block in range(3):
        words = f"warning: block {block}: 100% of the tokens go to expert "
        assert said.count(words) == 1
    assert "give workload.model.experts.router a balance_loss" in said
    assert said.count("routers' loss 0.") == 2


def test_wrong_usage_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = plan_file(tmp_path)
    two = plan_file(tmp_path, {"data_parallel": 2, "micro_batch": 1})
    pipeline = plan_file(tmp_path, *PIPELINE, model={**MODEL, "layers": 4})
    (tmp_path / "odd.bin").write_bytes(b"abc")
    cases = {
        (two,): "takes 2 ranks, 1 was started: start torchrun --nproc-per-node 2",
        (plan, "--device", "cuda"): "there is no CUDA device",
        (plan, "--data", tmp_path / "none"): "No such file",
        (plan, "--data", tmp_path / "odd.bin"): "truncated",
        (pipeline, "--stage", 3): "--stage 3: the plan has stages 0 to 2: give one",
        (pipeline, "--stage", -1): "--stage -1: the plan has stages 0 to 2: give one",
        (pipeline, "--stage", 1): "--stage 1: the stage takes 2 GPUs",
        (pipeline, "--stage", 0, "--resume", tmp_path): "--resume needs the whole model",
        (pipeline, "--stage", 0, "--export", tmp_path / "a"): "--export needs the whole model",
        (pipeline, "--stage", 0, "--save-every", 1, "--out", tmp_path / "b"): "--save-every needs",
        (plan, "--data", tmp_path): "Is a directory",
        (plan, "--steps", 0): "--steps 0: is too small: give a number",
        (plan, "--save-every", -1): "give a number of at least 0",
        (plan, "--timeout", "nan"): "give a number from 1 to 1000000",
        (plan, "--loss-scale", 0): "--loss-scale: 0.0 is too small",
        (plan, "--out", plan): "File exists: give another folder",
        (plan, "--export", tmp_path): "--export",
        (plan, "--resume", tmp_path): "there is no checkpoint",
        (plan, "--save-every", 1): "give --out DIR",
        (plan, "--attention-kernel", "flash-attn"): "flash-attn: this kernel runs only on GPUs",
        (
            plan_file(tmp_path, attention="math"),
            "--attention-kernel",
            "cudnn",
        ): "with workload.attention: math no fused kernel",
        (plan, "--seed", 10**30): f"--seed {10**30}: is out of range: give a number from 0",
        (plan, "--resume", tmp_path / "nowhere"): "there is no checkpoint",
        (
            plan_file(tmp_path, model={**MODEL, "dropout": 0.1}),
        ): "give 0, or workload.attention: math",
    }
    for arguments, words in cases.items():
        assert words in refusal(capsys, WRONG_USAGE, *arguments)


def torchrun(ranks: int, *arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", str(ranks), "-m", "experiments.run_plan"]
    return subprocess.Popen(
        [*command, *map(str, arguments)],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def assert_tracks_are_read_in_order(timeline: Path) -> None:
    """Tasks of a track that overlap would be drawn inside one another."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for event in json.loads(timeline.read_text())["traceEvents"]:
        if event["ph"] == "X":
            span = event["ts"], event["ts"] + event["dur"]
            tracks.setdefault((event["pid"], event["tid"]), []).append(span)
    for spans in map(sorted, tracks.values()):
        assert all(end <= start + 1e-3 for (_, end), (start, _) in pairwise(spans))


@pytest.mark.slow
def test_torchrun_gives_the_losses_of_one_process(tmp_path: Path, result: Run) -> None:
    out = tmp_path / "out"
    alone = result(plan_file(tmp_path), "--steps", 4)
    plan = plan_file(tmp_path, *UNLIKE)
    with torchrun(3, plan, "--steps", 2, "--json", "--out", out, "--save-every", 2) as process:
        printed, complaint = process.communicate(timeout=200)
    assert process.returncode == DONE, complaint
    found = json.loads(printed)
    assert found["losses"] == pytest.approx(alone["losses"][:2], rel=1e-6)
    assert len(found["peak_allocated_bytes"]) == 3
    assert_tracks_are_read_in_order(out / "timeline.json")
    ended = result(plan_file(tmp_path), "--steps", 2, "--resume", out / "checkpoints")
    assert ended["losses"] == pytest.approx(alone["losses"][2:], rel=1e-6)


def test_the_example_is_a_plan_of_one_rank() -> None:
    content = yaml.safe_load(TINY.read_text(encoding="utf-8"))
    assert content["cluster"]["gpus_per_node"] == 1
