"""Plan files at the command line: what is said of good ones, and of every kind of bad one."""

import json
from pathlib import Path
from typing import Any

import pytest

from experiments import analyse
from experiments.cli.command import EXAMPLE
from experiments.cli.commandline import run

GOOD = EXAMPLE.resolve().read_text(encoding="utf-8")


def answers(capsys: pytest.CaptureFixture[str], *paths: Path) -> tuple[int, list[dict[str, Any]]]:
    status = run(analyse.main, ["--json", *map(str, paths)])
    captured = capsys.readouterr()
    assert captured.err == ""
    return status, [json.loads(line) for line in captured.out.splitlines()]


def test_the_example_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    status, (answer,) = answers(capsys)
    assert status == 0
    assert answer["tensors_fit"]
    assert [stage["feasible"] for stage in answer["stages"]] == [True, True]
    # Four ranks of one node, two of either stage.
    assert answer["host_bytes_of_fullest_node"] == 2 * sum(
        stage["host_bytes"] for stage in answer["stages"]
    )


def test_a_table_is_printed_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(analyse.main, []) == 0
    text = capsys.readouterr().out
    assert "stage 1" in text
    assert "tensors fit: 22.0 GiB a GPU" in text


def test_host_memory_is_counted_on_each_node_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(
        GOOD.replace("nodes: 1", "nodes: 2").replace("gpus_per_node: 4", "gpus_per_node: 2"),
        encoding="utf-8",
    )
    _, (answer,) = answers(capsys, plan)
    fullest = max(stage["host_bytes"] for stage in answer["stages"])
    assert answer["host_bytes_of_fullest_node"] == 2 * fullest


@pytest.mark.parametrize(
    "override", ["memory_gib: 12.0", "host_memory_gib: 13.0"], ids=["device", "host"]
)
def test_too_little_memory_does_not_fit(
    override: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    plan.write_text(GOOD.replace("  nodes: 1", f"  {override}\n  nodes: 1"), encoding="utf-8")
    status, (answer,) = answers(capsys, plan)
    assert status == 0
    assert not answer["tensors_fit"]


BAD = {
    "layers that do not sum": ("layers: 16", "layers: 15", "plan.stages: layers sum to 30, but"),
    "a batch that does not divide": ("micro_batches: 4", "micro_batches: 3", "global_batch is 8"),
    "a degree that does not divide": ("tensor_parallel: 1", "tensor_parallel: 3", "divide heads"),
    "more GPUs than there are": ("data_parallel: 2", "data_parallel: 4", "the cluster has 4"),
    "an unknown key": ("zero: 1", "zeros: 1", "did you mean 'zero'?"),
    "an unknown model": ("gpt3-2.7b", "gpt3-2.6b", "did you mean 'gpt3-2.7b'"),
    "unknown hardware": ("l4-24gb", "l4", "did you mean 'l4-24gb'"),
    "a negative ratio": ("optimizer: 0.5", "optimizer: -0.5", "-0.5 is not a ratio"),
    "a ratio above one": ("optimizer: 0.5", "optimizer: 1.5", "1.5 is not a ratio"),
    "not a number": ("optimizer: 0.5", "optimizer: .nan", "nan"),
    "text for a number": ("zero: 1", "zero: one", "'one' is not a whole number"),
    "broken YAML": ("cluster:", "cluster: [", "closing bracket: write it"),
}


@pytest.mark.parametrize(("old", "new", "message"), BAD.values(), ids=BAD.keys())
def test_a_bad_plan_file_gives_one_line_with_its_error(
    old: str, new: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.yaml", tmp_path / "bad.yaml"
    good.write_text(GOOD, encoding="utf-8")
    assert old in GOOD
    bad.write_text(GOOD.replace(old, new), encoding="utf-8")

    status, lines = answers(capsys, bad, good)

    assert status == 1
    assert lines[0]["plan"] == str(bad)
    assert lines[0]["error"].startswith(f"{bad}: ")
    assert message in lines[0]["error"]
    assert lines[1]["tensors_fit"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty: write at least one key"),
        (b"\x7fELF\x02\x01\x00\xff\xfe", "give a text file"),
        (b"- a\n- b\n", "not a mapping: write 'key: value' lines"),
        (None, "there is no such file: check the path"),
    ],
    ids=["empty", "binary", "list", "missing"],
)
def test_a_file_that_is_no_plan_is_named(
    content: bytes | None, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.yaml"
    if content is not None:
        plan.write_bytes(content)
    assert run(analyse.main, [str(plan)]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith(f"error: {plan}: ")
    assert message in captured.err


def test_an_unknown_option_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        run(analyse.main, ["--nonsense"])
    assert stop.value.code == 2
    assert "unrecognized arguments: --nonsense" in capsys.readouterr().err
