"""What a training takes, on the command line: the published cases, prices, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import estimate
from experiments.cli.command import EXAMPLE
from experiments.cli.commandline import run
from mistlab import catalog

SMALL = (
    *("--model", "gpt3-1.3b", "--hardware", "l4-24gb", "--nodes", "1", "--gpus-per-node", "2"),
    *("--attention", "flash", "--global-batch", "32"),
)


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, Any]], Path]:
    """The rows of the command without options but --quick, and its folder."""
    out = tmp_path_factory.mktemp("estimate")
    assert run(estimate.main, ["--quick", "--out", str(out)]) == 0
    text = (out / "rows.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()], out


def test_gpt_3_s_days_are_near_the_published_ones(
    quick: tuple[list[dict[str, Any]], Path],
) -> None:
    rows = {(row["run"], row["way"]): row for row in quick[0]}
    formula, rule = rows["gpt3-175b", "formula"], rows["gpt3-175b", "rule"]
    assert formula["days"] == pytest.approx(35, rel=0.02)
    assert rule["days"] == pytest.approx(35, rel=0.15)
    assert rule["tokens"] == formula["tokens"] == 300e9
    assert rule["days_low"] < rule["days"] < rule["days_high"]
    # 300e9 tokens in steps of 1536 x 2048.
    assert rule["steps"] == pytest.approx(95_367, rel=1e-4)
    assert rule["days"] == pytest.approx(rule["steps"] * rule["iteration_s"] / 86_400)
    assert "8 tensor parallel" in rule["plan"][1]
    assert "all 12 blocks recomputed" in rule["plan"][1]


def test_published_runs_and_bills_stand_beside(
    quick: tuple[list[dict[str, Any]], Path],
) -> None:
    rows, out = quick
    found = {row["run"]: row for row in rows if row["way"].startswith("published")}
    assert found["GPT-3 175B, Megatron-LM"]["utilisation"] == pytest.approx(0.44, abs=0.01)
    assert found["LLaMA 65B"]["utilisation"] == pytest.approx(0.63, abs=0.005)
    bills = [row for row in found.values() if row["way"] == "published bill"]
    assert len(bills) == 3
    for row in bills:
        assert row["usd"] == pytest.approx(row["published_usd"], rel=0.01)
        assert row["carbon_kg"] == pytest.approx(row["published_carbon_kg"], rel=0.01)
    page = (out / "report.md").read_text(encoding="utf-8")
    assert "Why this differs".lower() in page.lower()


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(estimate.main, [*arguments, "--quick", "--json"]) == 0
    content: dict[str, Any] = json.loads(capsys.readouterr().out)
    return {row["way"]: row for row in content["rows"]}


def test_tokens_and_prices_are_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    common = (*SMALL, "--out", str(tmp_path))
    published = answer(capsys, *common)["rule"]
    assert published["tokens"] == 300e9
    optimal = answer(capsys, *common, "--tokens", "chinchilla")["rule"]
    assert optimal["tokens"] == 20 * optimal["parameters"]
    assert optimal["days"] / published["days"] == pytest.approx(optimal["tokens"] / 300e9)
    slower = answer(capsys, *common, "--goodput", "0.8")
    assert slower["rule"]["days"] == pytest.approx(published["days"] / 0.8)
    own = ("--tokens", "1e9", "--usd-per-gpu-hour", "3", "--kg-per-kwh", "0.1", "--overhead", "2")
    priced = answer(capsys, *common, *own)["rule"]
    assert priced["days"] == pytest.approx(published["days"] / 300)
    assert priced["gpu_hours"] == pytest.approx(priced["days"] * 24 * 2)
    assert priced["usd"] == pytest.approx(3 * priced["gpu_hours"])
    # An L4 board draws 72 W.
    assert priced["kwh"] == pytest.approx(priced["gpu_hours"] * 0.072 * 2)
    assert priced["carbon_kg"] == pytest.approx(priced["kwh"] * 0.1)


def test_gpu_hours_have_a_bill_of_their_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ("--gpu-hours", "7e6", "--hardware", "h100-80gb", "--out", str(tmp_path))
    row = answer(capsys, *given)["GPU hours"]
    assert row["usd"] == 14e6
    assert row["carbon_kg"] == pytest.approx(2_040_000, rel=0.01)


def test_a_plan_is_predicted_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = EXAMPLE
    rows = answer(capsys, "--plan", str(plan), "--tokens", "1e9", "--out", str(tmp_path))
    assert set(rows) == {"formula", "plan"}
    assert rows["plan"]["gpus"] == 4


@pytest.mark.parametrize(
    "words", [("--optimizer", "adamw-8bit"), ("--model=gpt3-1.3b",), ("--nodes", "1")]
)
def test_options_that_a_plan_determines_are_refused(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run(estimate.main, ["--plan", str(EXAMPLE), *words, "--out", str(out)]) == 2
    option = words[0].partition("=")[0]
    message = f"{EXAMPLE}: the plan file already determines {option}: leave these options out"
    assert message in capsys.readouterr().err
    assert not out.exists()


def test_the_rule_s_plan_has_the_optimizer_that_is_asked_for(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Published Megatron-LM keeps moments in 32 bits alone, today's also in 8 and 16."""
    line = ("--model", "llama3-8b", "--hardware", "a100-80gb", "--tokens", "1e9")
    for optimizer, engine in (("adamw", "megatron"), ("adamw-8bit", "megatron-core")):
        rows = answer(capsys, *line, "--optimizer", optimizer, "--out", str(tmp_path))
        assert rows["rule"]["plan"][0].startswith(f"engine {engine}, ")
        assert rows["rule"]["days"] > 0


def test_where_nothing_fits_the_formula_is_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--model", "gpt3-13b", "--quick", "--out", str(tmp_path)]
    assert run(estimate.main, options) == 1
    assert "nothing fits" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--tokens", "0", "--tokens: 0 is not a number of tokens: give one above 0"),
        ("--tokens", "1.5B", "--tokens: 1.5B has a letter as its unit: give 1.5e9"),
        ("--tokens", "inf", "--tokens: inf is not a number of tokens"),
        ("--tokens", "chinchila", "did you mean 'chinchilla'?"),
        ("--usd-per-gpu-hour", "-1", "--usd-per-gpu-hour: -1.0 is too small"),
        ("--kg-per-kwh", "-1", "--kg-per-kwh: -1.0 is too small"),
        ("--watts", "-1", "--watts: -1.0 is too small"),
        ("--overhead", "0.5", "--overhead: 0.5 is too small"),
        ("--utilisation", "0", "--utilisation: 0.0 is not a share"),
        ("--goodput", "1.2", "--goodput: 1.2 is not a share"),
        ("--gpu-hours", "0", "--gpu-hours: 0 is not above 0"),
        ("--model", "gpt3-17b", "did you mean 'gpt3-175b'"),
        ("--sequence-length", "0", "--sequence-length: 0 is too small"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    option: str, value: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "run"
    assert run(estimate.main, [*SMALL, option, value, "--out", str(out)]) == 2
    assert message in capsys.readouterr().err
    assert not out.exists()


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (["--samples", "0"], "--samples: 0 is too small: give at least 1"),
        (["--samples", "9", "--epochs", "0"], "--epochs: 0 is not a number of epochs"),
        (["--epochs", "3"], "--epochs 3: has an effect only with a number of samples"),
        (["--samples", "9", "--tokens", "1e6"], "--samples 9: the training has --tokens 1e6"),
        (["--samples", "1" + "0" * 400], "0 is too large: give at most 1e+15"),
        (
            ["--samples", "8", "--epochs", "1e308"],
            "--epochs: 1e+308 times 8 samples are too many: give at most 1.25e+14 epochs",
        ),
        (
            ["--gpu-hours", "1000", "--samples", "5"],
            "--samples 5: has no effect on the bill of --gpu-hours 1000: leave out --samples",
        ),
        (["--gpu-hours", "9", "--tokens", "1e9"], "--tokens 1e9: has no effect on the bill of"),
        (["--num-epochs", "3"], "--num-epochs 3: give --epochs ("),
    ],
)
def test_samples_and_epochs_are_refused_by_name(
    line: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = run(estimate.main, [*SMALL, *line, "--out", str(tmp_path / "run")])
    except SystemExit as stop:
        status = int(stop.code or 0)
    assert (status, (tmp_path / "run").exists()) == (2, False)
    assert message in capsys.readouterr().err


def test_samples_are_full_sequences_and_said_to_be(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    more = ["--quick", "--out", str(tmp_path), "--sequence-length", "2048", "--global-batch", "16"]
    tables = []
    for line in (["--samples", "1000", "--epochs", "2.5"], ["--tokens", str(2500 * 2048)]):
        assert run(estimate.main, [*SMALL, *more, *line]) == 0
        page = capsys.readouterr().out
        tables.append([row for row in page.splitlines() if row.startswith("|")])
        # 2,500 sequences are 156 whole batches of 16, and one that is not full.
        steps = "157 steps of 16 full sequences of 2,048 tokens"
        assert steps in page
        assert ("(1,000 samples, 2.5 times)" in page) == ("--samples" in line)
        assert ("shorter samples that are packed have fewer" in page) == ("--samples" in line)
    assert tables[0] == tables[1]


def test_the_length_is_told_in_whole_numbers_with_the_model_s_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, "--quick", "--out", str(tmp_path), "--sequence-length", "2048"]
    for samples, words in (
        ("1", "gpt3-1.3b trains on 2,048 tokens (1 sample, 1 time) in 1 step of 32 full sequences"),
        ("70", "gpt3-1.3b trains on 143,360 tokens (70 samples, 1 time) in 3 steps of 32 full "),
    ):
        assert run(estimate.main, [*line, "--samples", samples]) == 0
        assert words in capsys.readouterr().out


def test_a_precision_that_no_predicted_plan_has_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = [*SMALL, "--hardware", "h100-80gb", "--precision", "fp8", "--out", str(tmp_path / "run")]
    assert run(estimate.main, line) == 2
    assert capsys.readouterr().err == (
        "error: --precision fp8: engines megatron and mistlab, whose plans are predicted, do not "
        "train in it: give fp16, bf16 or fp32, or a plan of another engine (--plan PLAN.yaml)\n"
    )


def test_a_small_training_is_told_in_hours_and_dollars(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--tokens", "1e7", "--quick", "--out", str(tmp_path)]
    assert run(estimate.main, options) == 0
    text = capsys.readouterr().out
    head, _, formula, *_ = (line for line in text.splitlines() if line.startswith("|"))
    cells = dict(zip(_cells(head), _cells(formula), strict=True))
    # 8 x 1e7 tokens x 1.418e9 parameters at 0.44 of two L4's 121 TFLOP/s are 0.592 GPU hours.
    assert (cells["hours"], cells["GPU hours"], cells["$"]) == ("0.3", "0.6", "1.18")
    assert cells["kWh"] == "0.04"
    assert "days" not in cells


def test_frozen_weights_take_six_operations_a_parameter_and_token(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = (*SMALL, "--tokens", "1e9", "--out", str(tmp_path))
    full = answer(capsys, *common)
    lora = answer(capsys, *common, "--train", "lora", "--rank", "1")
    parameters = lora["formula"]["parameters"] / full["formula"]["parameters"]
    ratio = lora["formula"]["days"] / full["formula"]["days"]
    assert ratio == pytest.approx(6 / 8 * parameters)
    assert "6TP/(NFU)" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_only_the_published_question_has_the_published_nodes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--gpus-per-node", "1", "--hardware", "a100-80gb", "--global-batch", "8")
    model = ("--model", "gpt3-1.3b", "--tokens", "1e9", "--out", str(tmp_path))
    assert answer(capsys, *model, *asked)["formula"]["gpus"] == 1
    assert "--nodes 1 " in (tmp_path / "README.md").read_text(encoding="utf-8")
    assert "--attention flash" in (tmp_path / "README.md").read_text(encoding="utf-8")


def _cells(line: str) -> list[str]:
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_adapters_are_estimated_by_the_rule_of_their_programs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("--model", "llama3-8b", "--hardware", "h100-80gb", "--gpus-per-node", "2", "--quick")
    sized = (*asked, "--global-batch", "16", "--tokens", "1e8", "--out", str(tmp_path))
    plans = {}
    for train in ("all", "adapters"):
        assert run(estimate.main, [*sized, "--train", train]) == 0
        text = (tmp_path / "rows.jsonl").read_text(encoding="utf-8")
        rows = {row["way"]: row for row in map(json.loads, text.splitlines())}
        plans[train] = rows["rule"]["plan"]
        assert train == "all" or rows["rule"]["days"] > 0
    assert plans["all"][0].startswith("engine megatron,")
    engine, stage = plans["adapters"]
    assert engine.startswith("engine trainer, 1 stage,")
    assert "2 data x 1 tensor parallel" in stage
    assert "ZeRO-3, all 32 blocks recomputed" in stage


def test_a_name_of_hugging_face_stands_for_the_catalogue_s(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert run(estimate.main, ["--model", "Qwen/Qwen2.5-7B", "--tokens", "1e9"]) == 0
    assert "--model Qwen/Qwen2.5-7B: is taken as qwen2.5-7b of" in capsys.readouterr().err


def test_the_share_of_the_peak_counts_what_a_plan_computes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The second forward pass of blocks that are not recomputed is none of a plan's operations."""
    line = ("--hardware", "h100-80gb", "--gpus-per-node", "8", "--global-batch", "8")
    asked = ("--model", "llama3.2-1b", *line, "--sequence-length", "1024", "--train", "lora")
    out = ("--tokens", "1e6", "--space", "mist", "--out", str(tmp_path), "--json")
    assert run(estimate.main, [*asked, *out]) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    (mist,) = (row for row in rows if row["way"] == "mist")
    assert any("no blocks recomputed" in words for words in mist["plan"])
    assert mist["operations"] == 6
    recomputed_as_formula = 6 * 1e6 * mist["parameters"]
    at_peak_s = (
        recomputed_as_formula
        / mist["gpus"]
        / catalog.hardware("h100-80gb").gpu.peak_flop_per_s("fp16")
    )
    assert mist["utilisation"] == pytest.approx(at_peak_s / (mist["days"] * 86_400) * 4 / 6)
    assert "which no GPU has run" in (tmp_path / "report.md").read_text(encoding="utf-8")


def test_adapters_are_estimated_in_a_space_that_their_programs_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ["--model", "llama3.2-1b", "--hardware", "h100-80gb", "--gpus-per-node", "2"]
    asked += ["--out", str(tmp_path), "--sequence-length", "1024"]
    lora = [*asked, "--train", "lora"]
    assert run(estimate.main, lora) == 2
    assert "--tokens published: those of the model's pretraining" in capsys.readouterr().err
    for more, engine in (([], "trainer"), (["--space", "fsdp"], "fsdp")):
        assert run(estimate.main, [*lora, "--samples", "800", *more]) == 0
        page = capsys.readouterr().out
        assert "which no GPU has run" not in page
        assert f"found by mist: engine {engine}, 1 stage" in page
        # Not the batch of a pretraining, of 4 million tokens.
        assert "in 100 steps of 8 full sequences of 1,024 tokens" in page
    with pytest.raises(SystemExit):
        run(estimate.main, [*lora, "--engine", "trainer"])
    assert "--engine trainer: give --space, such as fsdp" in capsys.readouterr().err
