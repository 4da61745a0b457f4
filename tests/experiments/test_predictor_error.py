"""Published runs read from a table, and what is predicted of them."""

import csv
import json
from pathlib import Path

import pytest

from experiments import predictor_error
from experiments.analyse import analysis_of
from experiments.commandline import run
from experiments.published import NEEDED, read_published

MIB_BYTES = 2**20
ROW = {
    "id": "a-run",
    "hardware": "l4-24gb",
    "nodes": "1",
    "gpus": "2",
    "system": "mist",
    "model": "gpt2-1.3b",
    "flash": "True",
    "seq": "2048",
    "vocab": "50304",
    "global_batch": "8",
    "grad_accum": "4",
    "num_stages": "2",
    "layers": "13 11",
    "ckpt_layers": "2 0",
    "mbs": "2 2",
    "dp": "1 1",
    "tp": "1",
    "zero_wgo": "001",
    "offload_wgoa": "0.0/0.0/0.5/0.25 0",
    "iter_s": "7.8",
    "peak_alloc_mb": "",
    "peak_reserved_mb": "",
}


def written(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "end_to_end.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, NEEDED)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_becomes_a_job(tmp_path: Path) -> None:
    rows = ({**ROW, "peak_alloc_mb": "100 200"}, ROW, {**ROW, "system": "megatron"})
    published = read_published(written(tmp_path, *rows))

    (found,) = published.runs
    assert published.without_memory == 2
    assert found.peak_allocated_bytes == (100 * MIB_BYTES, 200 * MIB_BYTES)
    first, second = found.job.plan.stages
    assert (first.layers, first.checkpointed_layers, first.zero) == (13, 2, 1)
    assert (first.offload.optimizer, first.offload.activations) == (0.5, 0.25)
    assert (second.layers, second.tensor_parallel, second.offload.optimizer) == (11, 1, 0.0)
    assert found.job.workload.model.hidden == 2048
    assert found.job.workload.attention == "flash"


def test_errors_are_predicted_over_measured_less_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (job,) = (
        entry.job
        for entry in read_published(written(tmp_path, {**ROW, "peak_alloc_mb": "1 1"})).runs
    )
    peaks = analysis_of(job, {}).figures.peak_bytes / MIB_BYTES
    written(tmp_path, {**ROW, "peak_alloc_mb": f"{peaks[0] / 1.02} {peaks[1] / 0.99}"})
    out = tmp_path / "out"

    arguments = ["--tables", str(tmp_path), "--out", str(out), "--json"]
    assert run(predictor_error.main, arguments) == 0

    summary = json.loads(capsys.readouterr().out)
    errors = [row["error"] for row in summary["stages"]]
    assert errors == pytest.approx([0.02, -0.01])
    assert summary["mean_error"] == pytest.approx(0.015)
    assert summary["worst_error"] == pytest.approx(0.02)
    assert (out / "memory.svg").exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": "13 12"}, "line 2: plan.stages: layers sum to 25, the model has 24"),
        ({"model": "gpt2-1.4b"}, "line 2: model: 'gpt3-1.4b' is unknown: did you mean"),
        ({"mbs": "two"}, "line 2: invalid literal for int"),
        ({"peak_alloc_mb": "1"}, "line 2: peak_alloc_mb: 1 peaks for 2 stages"),
        ({"system": "other"}, "no run of system mist with its memory: nothing to compare"),
    ],
)
def test_a_bad_row_is_named(
    changes: dict[str, str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    written(tmp_path, {**ROW, "peak_alloc_mb": "1 1", **changes})
    arguments = ["--tables", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(predictor_error.main, arguments) == 2
    assert message in capsys.readouterr().err


def test_a_folder_without_the_table_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(predictor_error.main, ["--tables", str(tmp_path)]) == 2
    assert "end_to_end.csv: cannot be read" in capsys.readouterr().err
