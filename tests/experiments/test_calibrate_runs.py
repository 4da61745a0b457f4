"""Hardware files calibrated with whole runs, and with what another machine lends."""

import csv
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from experiments import calibrate
from experiments.calibration.published import MEGATRON_COLUMNS, read_end_to_end, read_megatron
from experiments.calibration.whole_runs import figures_of, predicted_s
from experiments.cli.commandline import run
from mistlab import catalog
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.units import MIB_BYTES
from mistlab.core.values import from_mapping, to_mapping
from mistlab.machine.hardware import CALIBRATED, Hardware


def test_whole_runs_say_what_is_sustained_and_how_sure(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    true = catalog.hardware("l4-24gb")
    assert true.compute is not None
    true = replace(true, compute=replace(true.compute, sustained=0.88))
    rows = []
    for micro_batch, layers in ((1, "13 11"), (2, "13 11"), (1, "12 12"), (2, "14 10")):
        micro_batches = 16 // micro_batch
        row = {
            "id": f"run-{micro_batch}-{layers}",
            "hardware": "l4-24gb",
            "nodes": "1",
            "gpus": "2",
            "system": "mist",
            "model": "gpt2-1.3b",
            "flash": "True",
            "seq": "2048",
            "vocab": "50304",
            "dropout": "0",
            "global_batch": "16",
            "grad_accum": str(micro_batches),
            "num_stages": "2",
            "layers": layers,
            "ckpt_layers": "0 0",
            "mbs": str(micro_batch),
            "dp": "1",
            "tp": "1",
            "zero_wgo": "001",
            "offload_wgoa": "0",
            "iter_s": "1",
            "peak_alloc_mb": "18000 14000",
            "peak_reserved_mb": "20000 16700",
        }
        rows.append(row)

    def written(rows: list[dict[str, str]]) -> Path:
        path = tmp_path / "runs.csv"
        with path.open("w", encoding="utf-8", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
        return path

    runs = read_end_to_end(written(rows)).runs
    for row, one in zip(rows, runs, strict=True):
        row["iter_s"] = str(predicted_s(one, true))
        figures = figures_of(one)
        # 20 bytes a parameter of the largest layer, and 700 MiB on the stage with the head.
        beyond = 20 * figures.largest_parameters + np.array([0, 700 * MIB_BYTES])
        mib = (figures.peak_bytes + beyond) / MIB_BYTES
        row["peak_reserved_mb"] = " ".join(f"{value:.2f}" for value in mib)
    out = tmp_path / "machine.yaml"
    assert run(calibrate.main, ["--runs", str(written(rows)), "--out", str(out), "--json"]) == 0
    summary = json.loads(capsys.readouterr().out)["engines"]
    assert summary["fits"][0]["held_out_error"] < 1e-3
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.compute is not None
    assert hardware.compute.sustained == pytest.approx(0.88, abs=1e-3)
    (ours,) = (one for one in hardware.engines or () if one.engine == "mistlab")
    assert ours.runs == 4
    assert ours.half_width < 2e-3
    assert {place.gpus for place in ours.at} == {2}
    assert hardware.allocator is not None
    assert hardware.allocator.step_bytes_a_parameter == pytest.approx(20, abs=0.01)
    assert hardware.allocator.head_mib == pytest.approx(700, abs=1)


def test_megatron_runs_are_fitted_on_whole_folds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    true = catalog.hardware("a100-80gb")
    assert true.compute is not None
    true = replace(true, compute=replace(true.compute, sustained=0.9, launch_us=50.0))
    path = tmp_path / "megatron.csv"
    rows = [
        (gpus, 4 * gpus, micro_batch, hidden, 16, layers, 1024, 1, gpus, 1, 1.0)
        for gpus, hidden, layers in ((2, 1024, 4), (4, 4096, 4), (8, 1024, 6))
        for micro_batch in (1, 2, 4)
    ]

    def written(times_ms: Sequence[float]) -> Path:
        lines = [",".join(MEGATRON_COLUMNS)]
        lines += [",".join(map(str, (*row[:-1], t))) for row, t in zip(rows, times_ms, strict=True)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
        return path

    runs = read_megatron(written([1.0] * len(rows)), true).runs
    written([predicted_s(one, true) * 1e3 for one in runs])
    out = tmp_path / "machine.yaml"
    arguments = ["--hardware", "a100-80gb", "--megatron-runs", str(path), "--out", str(out)]
    assert run(calibrate.main, [*arguments, "--folds", "2x4,4x4", "--json"]) == 0
    fit, *widths = json.loads(capsys.readouterr().out)["engines"]["fits"]
    assert fit["rows"] == 3
    assert [(one["what"].split(" left out")[0], one["rows"]) for one in widths] == [
        ("megatron, width 1024", 6),
        ("megatron, width 4096", 3),
    ]
    assert fit["held_out_error"] < 0.01
    compute = from_mapping(Hardware, read_yaml(out)).compute
    assert compute is not None
    assert compute.launch_us == pytest.approx(50, rel=0.03)
    assert compute.sustained == pytest.approx(0.9, rel=0.03)
    assert run(calibrate.main, [*arguments, "--folds", "3x4"]) == 2
    assert (
        "--folds: the tables have no runs of 3x4 (nodes x GPUs): give some of 2x4, 4x4, 8x6"
        in capsys.readouterr().err
    )


def test_what_no_table_has_can_be_borrowed(tmp_path: Path) -> None:
    bare = catalog.hardware("h100-80gb")
    bare = replace(
        bare,
        **dict.fromkeys(CALIBRATED),
        provenance=replace(bare.provenance, **dict.fromkeys(CALIBRATED)),
    )
    path, out = tmp_path / "bare.yaml", tmp_path / "borrowed.yaml"
    write_yaml(to_mapping(bare, omit_defaults=True), path)
    arguments = ["--hardware", str(path), "--borrow", "a100-40gb", "--out", str(out)]
    assert run(calibrate.main, arguments) == 0
    found, lender = from_mapping(Hardware, read_yaml(out)), catalog.hardware("a100-40gb")
    assert found.compute is not None
    assert lender.compute is not None
    ratio = found.gpu.peak_tflops.fp16 / lender.gpu.peak_tflops.fp16
    for rate in ("matmul", "attention_forward"):
        theirs = lender.compute.rate(rate).tflops
        assert found.compute.rate(rate).tflops == pytest.approx(theirs * ratio, rel=1e-3)
    assert found.provenance.compute is not None
    assert found.provenance.compute.kind == "borrowed"
    assert found.transfers is not None
    assert {group.nodes for group in found.transfers.groups} == {1}
    assert found.transfers.across_nodes is None
    assert found.engines is None
