"""The precision of a question that names an engine or a space and no precision."""

import json
from pathlib import Path

import pytest

from experiments import compare_searchers, estimate, tune, will_it_fit
from experiments.cli.commandline import run
from mistlab.engines.engine import ENGINES, SINGLE
from mistlab.job.job import load_job

SMALL = (
    *("--model", "llama3.2-1b", "--hardware", "h100-80gb", "--gpus-per-node", "2"),
    *("--sequence-length", "1024", "--global-batch", "4"),
)


@pytest.mark.parametrize(
    ("options", "precision"),
    [
        ((), "fp16"),
        (("--space", "fsdp"), "bf16"),
        (("--engine", "nanotron"), "bf16"),
        # GPUs without bf16, under a gradient scaler: nobody is given 32 bits who did not ask.
        (("--space", "fsdp", "--hardware", "v100-32gb"), "fp16"),
        (("--engine", "trainer", "--hardware", "v100-32gb"), "fp16"),
        (("--engine", "fsdp-compiled", "--hardware", "t4-16gb"), "fp16"),
        (("--space", "fsdp", "--precision", "fp8"), "fp8"),
        (("--space", "megatron", "--engine", "megatron,megatron-bridge"), "bf16"),
        (("--space", "megatron-core"), "fp16"),
    ],
)
def test_a_search_trains_in_a_precision_that_its_engines_have(
    options: tuple[str, ...], precision: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    assert run(tune.main, [*SMALL, *options, "--out", str(plan)]) == 0
    assert f"a step, {precision}" in capsys.readouterr().err
    assert load_job(plan).workload.precision == precision


def test_commands_that_name_no_precision_answer_in_that_of_their_engine(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [*SMALL, "--quick", "--out", str(tmp_path / "out")]
    assert run(will_it_fit.main, [*asked, "--engine", "fsdp", "--zero", "3"]) == 0
    assert "a step, bf16, engine fsdp." in capsys.readouterr().out
    line = [*SMALL, "--quick", "--searchers", "random", "--space", "fsdp"]
    assert run(compare_searchers.main, [*line, "--out", str(tmp_path / "compared")]) == 0
    prices = tmp_path / "prices.yaml"
    kinds = [
        {"hardware": name, "usd_per_gpu_hour": 1.0, "most_gpus": 1}
        for name in ("h100-80gb", "v100-32gb")
    ]
    prices.write_text(json.dumps({"date": "2026-11-28", "source": "a test", "gpus": kinds}))
    assert run(estimate.main, [*asked, "--tokens", "1e6", "--prices", str(prices)]) == 0
    told = capsys.readouterr().out
    assert "Cheapest of all: 1 x h100-80gb" in told


def test_no_engine_needs_32_bits_as_its_default() -> None:
    """All GPUs have fp16, and each engine that trains in 32 bits trains in fp16, too."""
    for engine in ENGINES.values():
        assert engine.memory.keys() & {"fp16", "bf16"}
        assert "fp16" in engine.memory or not engine.memory.keys() & {*SINGLE}


@pytest.mark.parametrize("command", [tune, will_it_fit])
def test_gpus_without_any_precision_of_the_engine_are_refused(
    command: object, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, "--hardware", "v100-32gb", "--engine", "nanotron"]
    line += ["--out", str(tmp_path / "out")]
    assert run(command.main, line) == 2  # type: ignore[attr-defined]
    assert capsys.readouterr().err == (
        "error: --hardware v100-32gb: its GPUs compute in fp16 or fp32 only, but engine "
        "nanotron trains in bf16: give another --hardware, or an --engine that trains in a "
        "precision of these GPUs\n"
    )


def test_precisions_are_offered_only_if_gpus_have_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = [*SMALL, "--hardware", "v100-32gb", "--precision", "fp16", "--engine", "nanotron"]
    assert run(tune.main, line) == 2
    assert capsys.readouterr().err.endswith("does not train in it: give --engine mistlab\n")


def test_fp16_of_fsdp_takes_a_scaled_step_and_the_memory_of_bf16() -> None:
    for name in ("fsdp", "fsdp-eager", "fsdp-compiled"):
        engine = ENGINES[name]
        assert engine.memory["fp16"] == engine.memory["bf16"]
        # The scaler reads and writes gradients of 32 bits once more, as Megatron-LM's does.
        assert engine.step_moved["fp16"] - engine.step_moved["bf16"] == 8
    megatron = ENGINES["megatron-core"].other_sums["fp16"].step_moved
    assert ENGINES["fsdp"].step_moved["fp16"] == megatron
