"""Measured speedups: every system tries as much, what was measured is kept, losses are told too."""

import json
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from experiments import measure_speedup
from experiments.cli.commandline import run
from experiments.speedup import contenders, trial
from experiments.speedup import measure_speedup as measuring
from experiments.speedup.contenders import STATES, TARGET
from experiments.speedup.nodes import Nodes
from experiments.speedup.same_training import held_against
from experiments.speedup.trial import _outcome_of, without_launcher
from mistlab import catalog
from mistlab.core.values import InputError
from mistlab.export.nearest import nearest
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from mistlab.job.search import Budget
from mistlab.machine.cluster import Cluster
from runtime.baselines import builds as installed
from runtime.baselines.builds import check_builds
from tests.workloads import workload_of

WORKLOAD = workload_of("gpt3-1.3b", 2048, 8, "bf16")
SECONDS = {"mistlab": 2.0, "megatron": 3.0, "deepspeed": 1.0, "deepcompile": 4.0, "fsdp": None}


def cluster(cap_gib: float) -> Cluster:
    return Cluster(
        hardware=catalog.hardware("a100-80gb"), nodes=1, gpus_per_node=1, memory_gib=cap_gib
    )


def test_every_missing_framework_is_named_with_the_systems_that_are_left(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def is_missing(package: str) -> None:
        message = f"{package} is not installed"
        raise InputError(message)

    monkeypatch.setattr(installed, "check_installed", is_missing)
    with pytest.raises(InputError, match=r"megatron-core.*; deepspeed.*: --systems fsdp,mistlab$"):
        measuring.chosen_systems("megatron,fsdp,deepspeed,deepcompile,mistlab")


@pytest.mark.parametrize("system", TARGET)
def test_a_system_tries_what_it_can_say_and_first_what_fits(system: str) -> None:
    found = contenders.contenders(system, WORKLOAD, cluster(40), 6, 0)
    assert len(found) == 6
    fits = [one.prediction is not None and one.prediction.fits for one in found]
    assert fits[0]
    assert fits == sorted(fits, reverse=True)
    times = [one.prediction.iteration_s for one in found if one.prediction and one.prediction.fits]
    assert times == sorted(times)
    if system != "fsdp":
        assert all(nearest(one.job, TARGETS[TARGET[system]]).is_exact for one in found)


def test_megatron_tries_tensor_sequence_and_pipeline_parallelism() -> None:
    gpus = replace(cluster(80), gpus_per_node=4)
    found = contenders.contenders("megatron", WORKLOAD, gpus, 999, 0)
    plans = [one.job.plan for one in found]
    degrees = {(plan.stages[0].tensor_parallel, plan.num_stages) for plan in plans}
    assert degrees == {(1, 1), (2, 1), (4, 1), (1, 2), (2, 2), (1, 4)}
    assert any(plan.stages[0].sequence_parallel for plan in plans)
    assert {stage.zero for plan in plans for stage in plan.stages} <= {0, 1}
    assert {plan.stages[0].checkpointed_layers for plan in plans if plan.num_stages == 1} == {
        *(0, 12, 24)
    }


def test_a_run_whose_losses_are_not_ours_is_no_measurement() -> None:
    ours = [5.0, 4.0]
    ran = {"outcome": "ran", "losses": [5.001, 4.001], "timing": {"median_s": 1.0}}
    assert held_against(ran, ours, "bf16") == ran
    assert held_against(ran, None, "fp32") == ran
    assert held_against({"outcome": "out of memory"}, ours, "fp32") == {"outcome": "out of memory"}
    off = held_against(ran, ours, "fp32")
    assert off["outcome"] == "trains something else: loss 5.001 in step 1, ours is 5"
    assert "timing" not in off
    drifts = {**ran, "losses": [5.0, float("nan")]}
    assert "loss nan in step 2" in held_against(drifts, ours, "bf16")["outcome"]


def test_what_is_not_megatron_as_its_users_run_it_is_not_called_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def run_trial(system: str, _: Job, **__: object) -> dict[str, Any]:
        name = "Megatron-core 0.16.1, local layers" if system == "megatron" else "mistlab 0.1.0"
        said = {"system": name, "attention": f"attention of {system}"}
        loss = 1.0 if len(losses) < 3 else 1.1
        losses.append(loss)
        told = {"outcome": "ran", "losses": [loss], "configuration": said}
        return {**told, "timing": {"seconds": [], "median_s": 1.0}}

    losses: list[float] = []
    monkeypatch.setattr(measuring, "run_trial", run_trial)
    monkeypatch.setattr(measuring, "_check_installed", lambda _: None)
    monkeypatch.setattr(measuring, "check_node", lambda *_: None)
    options = ["--models", "gpt3-1.3b", "--cap-gib", "40", "--batches", "8", "--json"]
    options += ["--hardware", "a100-80gb", "--trials", "2", "--repeats", "1"]
    options += ["--systems", "mistlab,megatron", "--out", str(tmp_path / "out")]
    assert run(measure_speedup.main, options) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [*answer["timing"]["speedups"]] == ["Megatron-core 0.16.1, local layers"]
    # The second trial of Megatron trained something else: it has no time.
    others = [row["outcome"] for row in answer["rows"] if "timing" not in row]
    assert others[0] == "trains something else: loss 1.1 in step 1, ours is 1"
    page = (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert re.search(r"\| attention +\| attention of mistlab +\| attention of megatron +\|", page)
    assert "Megatron-core 0.16.1, local layers" in page


def test_ratios_of_deepspeed_are_among_its_trials() -> None:
    ratios = {one.get("offload_optimizer", 0.0) for one in STATES["deepspeed"]}
    assert {0.0, 0.25, 0.5, 0.75, 1.0} == ratios


def test_deepspeed_tries_every_level_with_nothing_offloaded_and_sums_as_others_do() -> None:
    gpus = replace(cluster(80), gpus_per_node=4)
    found = contenders.contenders("deepspeed", WORKLOAD, gpus, 99, 0)
    stages = [one.job.plan.stages[0] for one in found]
    assert {one.zero for one in stages if not one.offload.optimizer} == {1, 2, 3}
    assert {one.job.workload.gradients for one in found} == {"32bit"}
    for one in found:
        config = json.loads(TARGETS["deepspeed"].write(one.job))
        assert config["data_types"] == {"grad_accum_dtype": "fp32"}
        assert config["communication_data_type"] == "fp32"


def test_deepspeed_tries_on_a_cpu_what_its_driver_can_step_there() -> None:
    gpus = cluster(40)
    hardware = replace(gpus.hardware, gpu=replace(gpus.hardware.gpu, cores=1))
    found = contenders.contenders("deepspeed", WORKLOAD, replace(gpus, hardware=hardware), 99, 0)
    ratios = {one.job.plan.stages[0].offload.optimizer for one in found}
    assert ratios == {0.0, 1.0}


def stand_in(calls: list[str]) -> Any:
    """Runs that take a second or three, or no memory."""

    def run_trial(system: str, job: Job, **_: object) -> dict[str, Any]:
        calls.append(system)
        assert job.workload.global_batch == 8
        seconds = SECONDS[system]
        if seconds is None:
            return {"outcome": "out of memory"}
        return {"outcome": "ran", "losses": [1.0], "timing": {"seconds": [], "median_s": seconds}}

    return run_trial


def test_the_best_of_each_run_in_turn_and_a_second_call_measures_nothing_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(contenders, "BUDGET", Budget(evaluations=2_000))
    monkeypatch.setattr(measuring, "run_trial", stand_in(calls))
    monkeypatch.setattr(measuring, "_check_installed", lambda _: None)
    monkeypatch.setattr(measuring, "check_node", lambda *_: None)
    options = ["--models", "gpt3-1.3b", "--cap-gib", "40", "--batches", "8", "--json"]
    options += ["--hardware", "a100-80gb", "--trials", "2", "--repeats", "2"]
    options += ["--out", str(tmp_path / "out")]
    assert run(measure_speedup.main, options) == 0
    answer = json.loads(capsys.readouterr().out)
    trials, repeats = calls[:10], calls[10:]
    assert trials == [*SECONDS, *SECONDS]
    # Interleaved; what ran out of memory has no best plan.
    assert repeats == ["mistlab", "megatron", "deepspeed", "deepcompile"] * 2
    speedups = answer["timing"]["speedups"]
    assert speedups == pytest.approx({"megatron": 1.5, "deepspeed": 0.5, "deepcompile": 2.0})
    # A system of which nothing ran stands in the table all the same.
    assert "| fsdp" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    assert "out of memory" in (tmp_path / "out" / "report.md").read_text(encoding="utf-8")
    outcomes = {row["system"]: row["outcome"] for row in answer["rows"]}
    assert outcomes["fsdp"] == "out of memory"
    calls.clear()
    assert run(measure_speedup.main, options) == 0
    assert calls == []
    again = json.loads(capsys.readouterr().out)
    assert again["rows"] == answer["rows"]


def test_a_call_that_is_over_says_how_to_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measuring, "run_trial", stand_in([]))
    monkeypatch.setattr(measuring, "_check_installed", lambda _: None)
    monkeypatch.setattr(measuring, "check_node", lambda *_: None)
    options = ["--cap-gib", "40", "--batches", "8", "--systems", "megatron", "--seconds", "0"]
    options += ["--hardware", "a100-80gb", "--out", str(tmp_path / "out")]
    assert run(measure_speedup.main, options) == 0
    assert "1 of 1 cases are left: give the same command again" in capsys.readouterr().err


def test_a_run_that_the_end_of_a_call_cuts_begins_again_in_the_next(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    allowed: list[float] = []

    def cut(*_: object, longest_s: float, **__: object) -> None:
        allowed.append(longest_s)

    monkeypatch.setattr(measuring, "run_trial", cut)
    monkeypatch.setattr(measuring, "_check_installed", lambda _: None)
    monkeypatch.setattr(measuring, "check_node", lambda *_: None)
    options = ["--cap-gib", "40", "--batches", "8", "--systems", "megatron", "--json"]
    options += ["--hardware", "a100-80gb", "--out", str(tmp_path / "out")]
    for _ in range(2):
        assert run(measure_speedup.main, [*options, "--seconds", "100"]) == 0
        said = capsys.readouterr()
        assert json.loads(said.out)["rows"] == []
        assert "1 of 1 cases are left" in said.err
    assert len(allowed) == 2
    assert all(0 < seconds <= 100 for seconds in allowed)


def test_under_torchrun_one_process_measures_with_launchers_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks: list[int] = []

    def trial(_: str, job: Job, **__: object) -> dict[str, Any]:
        ranks.append(job.plan.num_gpus)
        return {"outcome": "ran", "losses": [1.0], "timing": {"seconds": [], "median_s": 1.0}}

    monkeypatch.setattr(measuring, "run_trial", trial)
    monkeypatch.setattr(measuring, "check_node", lambda *_: None)
    said = {"LOCAL_WORLD_SIZE": "4", "GROUP_WORLD_SIZE": "1", "RANK": "0", "LOCAL_RANK": "0"}
    for name, value in said.items():
        monkeypatch.setenv(name, value)
    options = ["--cap-gib", "40", "--batches", "8", "--systems", "fsdp", "--trials", "1"]
    options += ["--hardware", "a100-80gb", "--out", str(tmp_path / "out")]
    monkeypatch.setenv("LOCAL_RANK", "1")
    assert run(measure_speedup.main, options) == 0
    assert ranks == []
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert run(measure_speedup.main, options) == 0
    assert set(ranks) == {4}
    assert without_launcher({**said, "TORCHELASTIC_RUN_ID": "1", "PATH": "/bin"}) == {
        "PATH": "/bin"
    }


MODEL = "{family: gpt, hidden: 64, layers: 2, heads: 4, vocab: 128}\n"


@pytest.mark.slow
def test_two_processes_of_a_cpu_measure_as_gpus_would(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("torch")
    model = tmp_path / "tiny.yaml"
    model.write_text(MODEL, encoding="utf-8")
    options = ["--models", str(model), "--cap-gib", "1", "--batches", "4", "--device", "cpu"]
    options += ["--gpus-per-node", "2", "--hardware", "l4-24gb", "--sequence-length", "32"]
    options += ["--precision", "fp32", "--systems", "mistlab,fsdp", "--quick", "--json"]
    assert run(measure_speedup.main, [*options, "--out", str(tmp_path / "out")]) == 0
    said = json.loads(capsys.readouterr().out)
    assert [row["outcome"] for row in said["rows"]] == ["ran"] * 4
    ((name, gain),) = said["timing"]["speedups"].items()
    assert name.startswith("FSDP2 of torch")
    assert gain > 0
    first = {row["system"]: row["losses"][0] for row in said["rows"]}
    assert first["mistlab"] == pytest.approx(first["fsdp"], rel=1e-5)


class Store:
    """What leaders of nodes tell one another, in one process."""

    def __init__(self) -> None:
        self.said: dict[str, str] = {}

    def set(self, key: str, value: str) -> None:
        self.said[key] = value

    def get(self, key: str) -> bytes:
        return self.said[key].encode()

    def check(self, keys: list[str]) -> bool:
        return all(key in self.said for key in keys)


def test_a_run_that_is_out_of_memory_on_another_node_is_out_of_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = Store()
    first, second = (Nodes(count=2, own=node, address="a", store=store) for node in (0, 1))
    (contender,) = contenders.contenders("fsdp", WORKLOAD, cluster(40), 1, 0)
    started: list[list[str]] = []

    def part(told: dict[str, Any], job: Job, nodes: Nodes) -> dict[str, Any]:
        started.append(nodes.launcher(4, told["port"]))
        if nodes.own == 0:
            # What the other node does meanwhile; it is told of no run after this one.
            store.set("run 2", json.dumps("ended"))
            trial.take_part(second)
            return {"outcome": "connection closed"}
        assert job == contender.job
        return {"outcome": "out of memory"}

    monkeypatch.setattr(trial, "_own_part", part)
    settings: dict[str, Any] = {"steps": 1, "device": "cpu", "seed": 0}
    told = trial.run_trial("fsdp", contender.job, **settings, nodes=first)
    assert told == {"outcome": "out of memory"}
    ports = {words[words.index("--master-port") + 1] for words in started}
    assert len(ports) == 1
    assert [words[words.index("--node-rank") + 1] for words in started] == ["0", "1"]
    assert started[0][-2:] == ["--nproc-per-node", "2"]


def test_a_node_whose_neighbour_has_ended_long_ago_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    store, now = Store(), [0.0]
    monkeypatch.setattr("experiments.speedup.nodes.time.monotonic", lambda: now[0])
    first, second = (Nodes(count=2, own=node, address="a", store=store) for node in (0, 1))
    first.announce({})
    next(second.announced())
    assert not first.others_are_over()
    second.over("ran")
    assert not first.others_are_over()
    now[0] += 11
    assert first.others_are_over()
    first.announce({})
    assert not first.others_are_over()


@pytest.mark.slow
def test_two_nodes_measure_together_and_the_first_one_tells(tmp_path: Path) -> None:
    """Two torchruns of one process each, as on two machines."""
    pytest.importorskip("torch")
    model = tmp_path / "tiny.yaml"
    model.write_text(MODEL, encoding="utf-8")
    with socket.socket() as free:
        free.bind(("", 0))
        port = str(free.getsockname()[1])
    options = ["--models", str(model), "--cap-gib", "1", "--batches", "4", "--device", "cpu"]
    options += ["--hardware", "l4-24gb", "--sequence-length", "32", "--precision", "fp32"]
    options += ["--systems", "mistlab,fsdp", "--quick", "--json", "--out", str(tmp_path / "out")]

    def torchrun(node: int) -> subprocess.Popen[str]:
        words = ["-m", "torch.distributed.run", "--nnodes", "2", "--node-rank", str(node)]
        words += ["--master-addr", "127.0.0.1", "--master-port", port, "--nproc-per-node", "1"]
        command = [sys.executable, *words, "-m", "experiments.measure_speedup", *options]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True)

    nodes = [torchrun(0), torchrun(1)]
    said = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], said
    rows = json.loads(said[0][0].strip().splitlines()[-1])["rows"]
    assert [row["outcome"] for row in rows] == ["ran"] * 4
    assert {sum(stage["data_parallel"] for stage in row["plan"]["stages"]) for row in rows} <= {2}
    first = {row["system"]: row["losses"][0] for row in rows}
    assert first["mistlab"] == pytest.approx(first["fsdp"], rel=1e-5)


def test_an_interrupted_compilation_is_told_before_deepspeed_waits_for_it(tmp_path: Path) -> None:
    environment = {"TORCH_EXTENSIONS_DIR": str(tmp_path)}
    check_builds(environment)
    (tmp_path / "cpu_adam").mkdir()
    lock = tmp_path / "cpu_adam" / "lock"
    lock.touch()
    with pytest.raises(InputError) as refused:
        check_builds(environment)
    assert str(refused.value).startswith(f"{lock}: a compilation was interrupted")
    assert f"delete {lock.parent}" in str(refused.value)


def test_deepcompile_offloads_in_place_of_zero_offload() -> None:
    pytest.importorskip("torch")
    from runtime.baselines.deepspeed_run import compile_steps  # noqa: PLC0415 (needs torch)

    (one,) = [
        one
        for one in contenders.contenders("deepcompile", WORKLOAD, cluster(40), 99, 0)
        if one.job.plan.stages[0].offload.optimizer
        and one.job.plan.stages[0].micro_batch == 8
        and not one.job.plan.stages[0].checkpointed_layers
    ]
    config = json.loads(TARGETS["deepspeed"].write(one.job))
    assert config["zero_optimization"]["offload_optimizer"]
    compile_steps(config)
    assert "offload_optimizer" not in config["zero_optimization"]
    assert config["compile"] == {"deepcompile": True, "offload_opt_states": True}


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--systems", "megatorn"], "--systems: 'megatorn' is unknown: did you mean 'megatron'?"),
        (["--cap-gib", "x"], "--cap-gib: 'x' is not a list of numbers"),
        (["--batches", "0"], "--batches: 0 is too small"),
        (["--models", "gpt4"], "'gpt4' is unknown"),
    ],
)
def test_bad_options_are_refused(
    options: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(measuring, "_check_installed", lambda _: None)
    monkeypatch.setattr(measuring, "check_node", lambda *_: None)
    out = ["--hardware", "a100-80gb", "--out", str(tmp_path / "out")]
    assert run(measure_speedup.main, [*out, *options]) == 2
    assert words in capsys.readouterr().err


def test_a_run_without_an_answer_is_told_by_its_last_line() -> None:
    assert _outcome_of(None, "x\nCUDA out of memory. Tried\n")["outcome"] == "out of memory"
    assert _outcome_of(None, "Traceback\nTypeError: no\n\n")["outcome"] == "TypeError: no"
    # The launcher of several ranks has words of its own below theirs.
    told = _outcome_of(None, "[rank1]:   at\n[rank1]: a.BadError: no\nFailures:\n=====\n")
    assert told["outcome"] == "a.BadError: no"
    ran = {"seconds": [9.0, 8.0, 1.0, 3.0, 2.0], "losses": [1.0], "configuration": {}}
    told = _outcome_of(ran, "")
    assert told["timing"]["median_s"] == 2.0
