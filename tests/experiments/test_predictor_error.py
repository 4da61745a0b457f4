"""Published runs, read from tables or carried, beside what is predicted of them."""

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from experiments import predictor_error
from experiments.calibration.published import (
    END_TO_END,
    MEGATRON_COLUMNS,
    PublishedRun,
    carried,
    read_end_to_end,
    read_megatron,
)
from experiments.calibration.whole_runs import predicted_s
from experiments.cli.commandline import run
from experiments.measured import predictor_error as error_rows
from mistlab import catalog
from mistlab.engines.mistlab import MIST, MISTLAB
from simulators.symbolic import SymbolicPredictor

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
    "dropout": "0",
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
    "iter_s": "2.1",
    "peak_alloc_mb": "18000 14000",
    "peak_reserved_mb": "20000 16000",
}
SPLIT = {
    **ROW,
    "id": "split-operators",
    "hardware": "a100-sxm4-40gb",
    "system": "aceso (runtime)",
    "model": "gpt-13B",
    "nodes": "2",
    "gpus": "4",
    "num_stages": "3",
    "layers": "12.5 14.25 13.25",
    "ckpt_layers": "per-op, fraction of ops: 0.5 0.25 0.0",
    "mbs": "1",
    "dp": "1x29|1x30|1x32",
    "tp": "1x29|2x30|1x32",
    "zero_wgo": "000",
    "offload_wgoa": "0",
    "dropout": "0.1",
    "peak_alloc_mb": "30241",
    "peak_reserved_mb": "32974",
}


def written(folder: Path, *rows: dict[str, str]) -> Path:
    path = folder / "end_to_end.csv"
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, END_TO_END)
        writer.writeheader()
        writer.writerows(rows)
    return path


def test_a_row_becomes_a_run(tmp_path: Path) -> None:
    (found,) = read_end_to_end(written(tmp_path, ROW)).runs
    assert found.plan is not None
    first, second = found.plan.stages
    assert (first.layers, first.checkpointed_layers, first.zero) == (13, 2, 1)
    assert (first.offload.optimizer, first.offload.activations) == (0.5, 0.25)
    assert (second.layers, second.tensor_parallel, second.offload.optimizer) == (11, 1, 0.0)
    assert found.allocated_bytes == (18000 * MIB_BYTES, 14000 * MIB_BYTES)


def test_stages_of_the_published_runtime_wait_for_transfers_and_those_of_ours_do_not(
    tmp_path: Path,
) -> None:
    theirs, ours = read_end_to_end(written(tmp_path, ROW, {**ROW, "system": "mistlab"})).runs
    assert (theirs.engine, ours.engine) == ("mistlab", "mistlab")
    assert ours.plan is not None
    predictor = SymbolicPredictor(workload=ours.workload, cluster=ours.cluster)
    expected = predictor.predict(ours.plan).iteration_s
    assert predicted_s(ours, ours.cluster.hardware) == pytest.approx(expected, rel=1e-12)
    (theirs_s,) = predictor.iterations(
        theirs.stages,
        np.array([4]),
        engine=MIST,
    )
    assert predicted_s(theirs, theirs.cluster.hardware) == pytest.approx(theirs_s, rel=1e-12)
    step_moved = {name: MISTLAB.step_moved[name] for name in MIST.memory}
    (waiting_s,) = predictor.iterations(
        theirs.stages, np.array([4]), engine=replace(MIST, step_moved=step_moved)
    )
    assert waiting_s != expected
    # Their step is one kernel.
    assert theirs_s < waiting_s
    (adding_s,) = predictor.iterations(
        theirs.stages,
        np.array([4]),
        engine=replace(MIST, kernels=MISTLAB.kernels, overlapped=MISTLAB.overlapped),
    )
    # Their products do not add gradients up.
    assert adding_s < theirs_s


def test_split_operators_are_approximated_by_broken_numbers_of_blocks(tmp_path: Path) -> None:
    (found,) = read_end_to_end(written(tmp_path, SPLIT)).runs
    assert found.plan is None
    assert found.stages.layers.tolist() == [12.5, 14.25, 13.25]
    # Of half of the operators three of thirteen are those of scores, which are recomputed first.
    assert found.stages.checkpointed_layers == pytest.approx([4.375, 0.35625, 0.0])
    assert found.stages.value("core_recomputed_layers") == pytest.approx([8.125, 13.89375, 0.0])
    assert found.stages.tensor_parallel.tolist() == [1, 2, 1]
    assert found.stages.first_rank.tolist() == [0, 1, 3]
    assert found.workload.model.biases
    assert found.allocated_bytes == ()
    assert predicted_s(found, found.cluster.hardware) > 0


def test_a_megatron_row_becomes_a_plan(tmp_path: Path) -> None:
    path = tmp_path / "megatron.csv"
    values = (16, 64, 2, 1024, 16, 24, 1024, 2, 2, 4, 500.0)
    path.write_text(
        f"{','.join(MEGATRON_COLUMNS)}\n{','.join(map(str, values))}\n", encoding="utf-8"
    )
    (found,) = read_megatron(path, catalog.hardware("a100-80gb")).runs
    assert found.plan is not None
    assert found.plan.micro_batches == 64 // (2 * 2)
    assert [stage.layers for stage in found.plan.stages] == [6] * 4
    assert all(stage.checkpointed_layers == 6 for stage in found.plan.stages)
    assert (found.cluster.nodes, found.cluster.gpus_per_node) == (2, 8)
    assert (found.iteration_s, found.fold) == (0.5, "16x24")


def test_carried_figures_are_met(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(predictor_error.main, ["--out", str(tmp_path), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)
    base, weak_scaling = summary["times"]
    assert (base["runs"], weak_scaling["runs"]) == (1, 9)
    assert base["mean_error"] < 0.035
    assert weak_scaling["mean_error"] < 0.06
    assert summary["memory"] is None
    assert (tmp_path / "times.svg").stat().st_size > 10_000
    page = (tmp_path / "report.md").read_text(encoding="utf-8")
    line = next(line for line in page.splitlines() if line.startswith("| a100-80gb, megatron, w"))
    cells = [cell.strip() for cell in line.strip("|").split("|")]
    assert cells[1:4] == ["9", "0", f"{weak_scaling['mean_error']:.2%}"]
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert len(rows) == 10
    assert {row["micro_batch"] for row in rows if "weak" in row["set"]} <= {1, 2, 4, 8}


# Playing a run of many GPUs takes seconds, so only one of those that are carried is played here.
@pytest.mark.parametrize("weak_scaling", [1, pytest.param(9, marks=pytest.mark.slow)])
def test_tables_are_compared_set_by_set(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    weak_scaling: int,
) -> None:
    def some(*of: Any) -> tuple[list[PublishedRun], list[PublishedRun]]:
        base, runs = carried(*of)
        # Of the micro-batches with which a run is predicted, the first.
        first = {one.name: one for one in reversed(runs)}
        return base, [*reversed(first.values())][:weak_scaling]

    monkeypatch.setattr(error_rows, "carried", some)
    kept = {**ROW, "offload_wgoa": "0"}
    faster = {**kept, "id": "faster", "ckpt_layers": "0 0", "iter_s": "2.2"}
    written(tmp_path, kept, faster, SPLIT)
    out = tmp_path / "out"
    arguments = ["--tables", str(tmp_path), "--out", str(out), "--events", "--json"]
    assert run(predictor_error.main, arguments) == 0
    summary = json.loads(capsys.readouterr().out)
    runs = [row for row in summary["rows"] if "stage" not in row]
    played = {row["run"]: row["events_error"] for row in runs if "events_error" in row}
    assert len(played) == 2 + weak_scaling
    # Of two stages that wait for each transfer both simulators say the same.
    assert played["faster"] == pytest.approx(
        next(row["error"] for row in runs if row["run"] == "faster"), abs=1e-9
    )
    ours = next(one for one in summary["times"] if one["set"] == "l4-24gb, mist")
    errors = [row["error"] for row in runs if row["set"] == ours["set"]]
    assert ours["mean_error"] == pytest.approx(sum(map(abs, errors)) / 2)
    mean = sum(errors) / 2
    assert ours["mean_error_after_removing_the_mean"] == pytest.approx(
        sum(abs(error - mean) for error in errors) / 2
    )
    # Fewer blocks computed again, yet slower by the table: that pair is in the wrong order.
    assert ours["telling_pairs_in_wrong_order"] == 1
    assert summary["memory"]["stages"] == 4
    assert all(row["fits"] or row["approximated"] for row in runs)
    approximated = [row["run"] for row in runs if row["approximated"]]
    assert approximated == ["split-operators"]
    assert (out / "memory.svg").exists()
    page = (out / "report.md").read_text(encoding="utf-8")
    # Readers elsewhere have no such folder, and these few runs say nothing of the largest errors.
    assert f"--tables {tmp_path.name} " in page
    assert str(tmp_path) not in page
    assert "The largest errors" not in page


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layers": "13 x"}, "line 2: layers: '13 x' is unknown or malformed"),
        ({"iter_s": "0"}, "line 2: column iter_s: 0 is not positive"),
        ({"iter_s": "nan"}, "line 2: column iter_s: nan is negative or not finite"),
        ({"model": "gpt2-9b"}, "line 2: model: 'gpt3-9b' is unknown"),
        ({"system": "alpa"}, "line 2: system: 'alpa' is unknown or malformed"),
    ],
)
def test_a_bad_row_is_named(
    change: dict[str, str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written(tmp_path, {**ROW, **change})
    arguments = ["--tables", str(tmp_path), "--out", str(tmp_path / "out")]
    assert run(predictor_error.main, arguments) == 2
    assert message in capsys.readouterr().err


def test_a_missing_column_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "end_to_end.csv").write_text("id,hardware\na,b\n", encoding="utf-8")
    assert run(predictor_error.main, ["--tables", str(tmp_path), "--out", str(tmp_path)]) == 2
    assert "column nodes" in capsys.readouterr().err
