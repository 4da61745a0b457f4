"""Ways to train with less memory: those that commands name fit, and what adapters take is told."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import tune, will_it_fit
from experiments.bench.adapter_words import adapters_called, bytes_of_adapters
from experiments.cli.commandline import run
from experiments.tuning.leaner import leaner, leaner_adapters
from mistlab import catalog
from mistlab.core.units import GIB_BYTES
from mistlab.job.job import load_job
from mistlab.machine.cluster import Cluster
from mistlab.plan.plan import Plan, StagePlan
from mistlab.plan.workload import Workload
from simulators.symbolic import SymbolicPredictor

WORK = Workload(
    model=catalog.model("llama3-8b"),
    sequence_length=1024,
    global_batch=4,
    attention="flash",
    precision="bf16",
    train="adapters",
    base="4bit",
)
PLAN = Plan(
    engine="fsdp",
    micro_batches=4,
    stages=(StagePlan(layers=32, data_parallel=1, tensor_parallel=1, micro_batch=1),),
)
EXPERTS = (
    *("--model", "qwen3-30b-a3b", "--hardware", "rtx-4090-24gb", "--gpus-per-node", "1"),
    *("--sequence-length", "2048", "--train", "lora", "--base", "4bit"),
)


@pytest.mark.parametrize("optimizer", ["adamw", "adamw-8bit"])
def test_what_adapters_take_is_what_half_their_rank_saves_twice(optimizer: str) -> None:
    cluster = Cluster(hardware=catalog.hardware("h100-80gb"), nodes=1, gpus_per_node=1)

    def held(work: Workload) -> int:
        memory = SymbolicPredictor(workload=work, cluster=cluster).predict(PLAN).stages[0].memory
        return memory.weights + memory.gradients + memory.optimizer

    work = replace(WORK, adapter_rank=64, optimizer=optimizer)  # type: ignore[arg-type]
    saved = held(work) - held(replace(work, adapter_rank=32))
    assert bytes_of_adapters(work, PLAN, 0) == pytest.approx(2 * saved, rel=1e-6)
    assert bytes_of_adapters(work.training_all, PLAN, 0) == 0


def test_adapters_are_told_where_they_take_much() -> None:
    assert adapters_called(WORK, 0.9 * GIB_BYTES) == ""
    on_experts = replace(WORK, model=catalog.model("qwen3-30b-a3b"))
    told = adapters_called(on_experts, 2 * GIB_BYTES)
    assert told.startswith("2.0 GiB are weights, gradients and states of adapters of rank 16 on")
    assert told.endswith("every product, those of 128 experts too")
    on_attention = replace(on_experts, adapter_targets="attention")
    assert adapters_called(on_attention, 2 * GIB_BYTES).endswith("on attention's products")


def test_ways_change_something_and_adapters_have_ways_of_their_own() -> None:
    for work in (WORK, WORK.training_all, replace(WORK, adapter_rank=1, optimizer="adamw-8bit")):
        ways = [*leaner(work), *leaner_adapters(work)]
        assert all(replace(work, **values) != work for values, _ in ways)
        assert len({str(values) for values, _ in ways}) == len(ways)
    alone = [values for values, _ in leaner_adapters(WORK) if len(values) == 1]
    assert [way.get("adapter_rank") for way in alone] == [None, 8, 4, None]
    assert leaner_adapters(WORK.training_all) == ()


def test_a_refusal_says_what_adapters_take_and_each_named_way_fits(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*EXPERTS, "--engine", "trainer", "--out", str(tmp_path / "plan.yaml")]
    assert run(tune.main, line) == 1
    told = capsys.readouterr().err
    assert re.search(r"12\.6 GiB are weights, gradients and states of adapters of rank 16", told)
    assert re.search(r"; [\d.]+ GiB of logits and temporaries are the logits of all tokens", told)
    named = re.findall(r"or adapters [^;]*?(?=; or|\.\n)", told)
    assert [re.findall(r"--[a-z-]+ [\w-]+", way) for way in named] == [
        ["--adapter-targets attention"],
        ["--rank 4", "--optimizer adamw-8bit"],
    ]
    for way in named:
        flags = " ".join(re.findall(r"--[a-z-]+ [\w-]+", way)).split()
        assert run(tune.main, [*line, *flags]) == 0


def test_a_margin_that_no_plan_leaves_is_told_with_a_training_that_leaves_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["--model", "gpt-oss-20b", "--hardware", "h100-80gb", "--gpus-per-node", "1"]
    line += ["--train", "lora", "--engine", "trainer", "--out", str(tmp_path / "plan.yaml")]
    assert run(tune.main, line) == 0
    margin = re.search(
        r"(--keep-free-gib \d+) asks for 90%, and gives no plan; a loss in chunks "
        r"\(--loss chunked\) would give one\.\n",
        capsys.readouterr().out,
    )
    assert margin
    assert run(tune.main, [*line, *margin[1].split(), "--loss", "chunked"]) == 0


def test_a_checkpoint_of_four_bits_is_taken_where_adapters_are_trained_on_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name, out = "unsloth/Llama-3.2-1B-Instruct-unsloth-bnb-4bit", tmp_path / "plan.yaml"
    line = ["--model", name, "--hardware", "t4-16gb", "--gpus-per-node", "1", "--train", "lora"]
    line += ["--engine", "trainer-fused", "--out", str(out)]
    assert run(tune.main, [*line, "--base", "8bit"]) == 2
    assert "has quantised weights: give --model unsloth/Llama-3.2-1B" in capsys.readouterr().err
    assert run(tune.main, [*line, "--base", "4bit"]) == 0
    model = load_job(out).workload.model
    assert (model.name, model.checkpoint) == ("llama3.2-1b", name)


def test_what_the_user_s_gpus_can_train_comes_before_other_gpus(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*EXPERTS, "--engine", "trainer", "--quick", "--out", str(tmp_path)]
    assert run(will_it_fit.main, line) == 0
    page = capsys.readouterr().out
    assert "GiB are weights, gradients and states of adapters of rank 16 on every product" in page
    here, elsewhere = "Another training fits here: ", "No change of the plan makes it fit on these"
    assert 0 < page.index(here) < page.index(elsewhere)


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["--optimizer", "adamw_8bit"], "adamw_8bit is --optimizer adamw-8bit here"),
        (["--optim", "adamw_8bit"], "--optim: give --optimizer"),
        (["--lora-target-modules", "q_proj"], "--lora-target-modules: give --adapter-targets"),
        (["--adapter-targets", "attention"], "--adapter-targets: attention, but train is all"),
    ],
)
def test_options_of_adapters_and_optimizers_are_named(
    line: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run(will_it_fit.main, ["--model", "llama3.2-1b", *line])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert status == 2
    assert told in capsys.readouterr().err
