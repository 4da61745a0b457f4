"""Random plans exported to all targets: what is claimed of the exports holds."""

import ast
import json
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

from experiments import check_exports
from experiments.cli.commandline import run
from experiments.interchange import check_exports as export_check
from experiments.interchange.check_exports import MODELS, drawn_exports, rows_of
from experiments.pages.tables import Row
from mistlab.export.targets import TARGETS
from mistlab.job.job import Job
from tests.mistlab.megatron_parser import parsed

pytestmark = pytest.mark.usefixtures("predicted_once")

# Keys that DeepSpeed 0.19.8 and Accelerate 1.15.0 know, as far as exports write them.
DEEPSPEED = {
    *("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"),
    *("fp16", "bf16", "zero_optimization", "activation_checkpointing", "tensor_parallel"),
    "pipeline",
}
ACCELERATE = {
    *("compute_environment", "distributed_type", "mixed_precision", "num_machines"),
    *("num_processes", "machine_rank", "use_cpu", "fsdp_config", "parallelism_config"),
}


def problem_of(name: str, text: str, job: Job) -> str:
    """What facts of a framework say against a text; empty if nothing."""
    if name == "megatron":
        try:
            parsed(text)
        except ValueError as error:
            return str(error)
        return ""
    if name == "deepspeed":
        return " ".join(json.loads(text).keys() - DEEPSPEED)
    if name == "accelerate":
        content = yaml.safe_load(text)
        processes = content["num_processes"]
        strange = " ".join(content.keys() - ACCELERATE)
        return strange or ("" if processes == job.plan.num_gpus else f"{processes} processes")
    if name == "torchtitan-toml":
        return "" if "parallelism" in tomllib.loads(text) else "no parallelism"
    ast.parse(text)
    return ""


def accept(name: str, texts: Sequence[tuple[str, Job]]) -> Sequence[str]:
    return [problem_of(name, text, job) for text, job in texts]


@cache
def rows(name: str) -> tuple[Row, ...]:
    return tuple(rows_of(name, [*drawn_exports(16, seed=1)], accept))


def written(name: str) -> list[Row]:
    return [row for row in rows(name) if not row["refused"]]


@pytest.mark.parametrize("name", TARGETS)
def test_batches_and_processes_come_out_and_texts_are_taken(name: str) -> None:
    assert len(written(name)) >= len(rows(name)) / 4
    for row in written(name):
        assert row["batch"], row
        assert row["world"], row
        assert row["problem"] == "", row


@pytest.mark.parametrize("name", TARGETS)
def test_what_is_exact_is_so_and_what_fitted_fits_or_is_told(name: str) -> None:
    for row in written(name):
        assert row["same"] or not row["exact"], row
        assert row["told"] == (row["fitted"] is True and row["fits"] is False), row


def test_all_families_are_drawn_the_same_for_the_same_seed() -> None:
    first, again = ([*drawn_exports(8, seed=3)] for _ in range(2))
    assert first == again != [*drawn_exports(8, seed=4)]
    assert {family for family, _ in first} == set(MODELS)


def test_a_framework_that_is_not_there_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_check, "TARGETS", {"deepspeed": TARGETS["deepspeed"]})
    line = ["--quick", "--out", str(tmp_path / "out"), "--json"]
    assert run(check_exports.main, line) == 0
    rows = json.loads(capsys.readouterr().out)["rows"]
    problems = {row["problem"] for row in rows if not row["refused"]}
    is_named = all(it.startswith("not asked: ") and "deepspeed" in it for it in problems)
    assert problems
    assert is_named == (find_spec("deepspeed") is None)


def test_a_python_that_is_none_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(check_exports.main, ["--python", "megatron=/no/such"]) == 2
    assert "give TARGET=PATH, such as megatron" in capsys.readouterr().err
