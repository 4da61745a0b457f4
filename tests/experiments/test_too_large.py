"""Plans and questions that are consistent, and far too large: refused with what to give."""

import re
from pathlib import Path

import pytest

from experiments import cross_check, estimate, predict
from experiments.cli.commandline import run, shortened
from experiments.pages.charts import Lines
from experiments.studies import space_size as space_sizes

PLAN = """
workload:
  model: {{family: llama, hidden: {hidden}, layers: 4, heads: 4, vocab: 1024}}
  sequence_length: {sequence}
  global_batch: {batch}
  attention: flash
  precision: bf16
cluster: {{hardware: a100-80gb, nodes: 1, gpus_per_node: 2}}
plan:
  order: {order}
  micro_batches: {micro_batches}
  stages:
  - {{layers: 2, data_parallel: 1, tensor_parallel: 1, micro_batch: {micro_batch}}}
  - {{layers: 2, data_parallel: 1, tensor_parallel: 1, micro_batch: {micro_batch}}}
"""
SIZES = {
    "hidden": 256,
    "sequence": 256,
    "order": "1f1b",
    "micro_batches": 8,
    "micro_batch": 1,
}
MANY = {"micro_batches": 10**8}


@pytest.mark.parametrize(
    ("sizes", "options", "message"),
    [
        (
            {**MANY, "order": "gpipe"},
            [],
            "plan.micro_batches: 100000000 on each of 2 stages are more than the 1,000,000 that",
        ),
        (MANY, ["--simulator", "events"], "plan.micro_batches: 100000000 "),
        (
            {"micro_batches": 2_000_000},
            ["--simulator", "events"],
            "plan.micro_batches: 2000000 ",
        ),
        (
            {"hidden": 2**20, "sequence": 10**9, "micro_batches": 1, "micro_batch": 10**8},
            [],
            "workload: needs more than 8 EiB of a GPU: give a smaller model",
        ),
    ],
    ids=["order", "played", "written out", "bytes"],
)
def test_a_plan_without_end_is_refused(
    sizes: dict[str, object],
    options: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    given = {**SIZES, **sizes}
    given["batch"] = int(str(given["micro_batches"])) * int(str(given["micro_batch"]))
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.format(**given), encoding="utf-8")
    assert run(predict.main, [str(path), *options]) == 1
    assert f"error: {path}: {message}" in capsys.readouterr().err


def test_the_closed_form_folds_as_many_micro_batches(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text(PLAN.format(**{**SIZES, **MANY, "batch": 10**8}), encoding="utf-8")
    assert run(predict.main, [str(path)]) == 0
    assert "steady s" in capsys.readouterr().out


def test_a_space_without_plans_is_counted_as_none() -> None:
    """As with more nodes than a model of so few blocks and such a batch can use."""
    rows = [
        {"chapter": "features", "space": space, "layers": layers, "power_of_ten": power}
        for space in space_sizes.FEATURES
        for layers, power in ((16, None), (32, 2.5))
    ]
    named = {"chapter": "named", "space": "mist", "layers": 16, "power_of_ten": None}
    report = space_sizes._report([*rows, named], "a question")
    assert "none" in "\n".join(report.words)
    assert report.summary["monotone"]
    (picture,) = report.pictures
    assert isinstance(picture, Lines)
    assert picture.curves["DP+TP"] == [(32, 2.5)]


def test_dashes_are_no_value_of_an_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        run(cross_check.main, ["--plans=--"])
    assert ended.value.code == 2
    assert "--plans: -- is not a value: give one" in capsys.readouterr().err


def test_a_word_of_thousands_of_letters_is_cut_short(capsys: pytest.CaptureFixture[str]) -> None:
    assert shortened(f"--model: {'x' * 60_000} is unknown") == (
        f"--model: {'x' * 100}...{'x' * 50} is unknown"
    )
    with pytest.raises(SystemExit):
        run(cross_check.main, [f"--plans={'9x' * 30_000}"])
    assert len(capsys.readouterr().err) < 400


@pytest.mark.parametrize("option", ["--tokens", "--gpu-hours"])
def test_a_result_that_overflows_is_refused(
    option: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    problem = ["--model", "gpt3-125m", "--nodes", "1", "--quick", "--out", str(tmp_path / "out")]
    assert run(estimate.main, [*problem, f"{option}=1e308", "--json"]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert re.search(r"error: the answer's [\w.]+ is too large for a number: ", captured.err)
