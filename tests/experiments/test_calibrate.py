"""From a table of measurements to a hardware file that a plan may name."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import calibrate
from experiments.commandline import run
from mistlab import catalog
from mistlab.cost.interference import factors_of, overlapped
from mistlab.datafile import read_yaml
from mistlab.hardware import Hardware
from mistlab.interference import SHARED_SETS, GroupSlowdowns, Slowdown
from mistlab.value import from_mapping

HEADER = (
    "generation,intra_group,inter_group,latency_ms,iso_compute_ms,iso_g2g_ms,iso_c2g_ms,iso_g2c_ms"
)


def slowdowns(gpus_in_node: int, factor: float) -> GroupSlowdowns:
    return GroupSlowdowns(
        gpus_in_node=gpus_in_node,
        nodes=1,
        slowdowns=tuple(Slowdown(streams=s, factors=(factor,) * len(s)) for s in SHARED_SETS),
    )


def written_table(path: Path, groups: list[GroupSlowdowns]) -> Path:
    draw = np.random.default_rng(0)
    lines = [HEADER]
    for group in groups:
        alone = draw.choice([0.0, 1.0, 2.0, 4.0], (400, 4))
        alone = alone[(alone > 0).sum(axis=1) > 1]
        together = overlapped(alone, factors_of(group)) * draw.uniform(0.99, 1.01, len(alone))
        for row, time in zip(alone, together, strict=True):
            parts = ",".join(f"{part:g}" for part in row)
            lines.append(f"a,{group.gpus_in_node},1,{time:.6f},{parts}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_a_table_becomes_a_hardware_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_table(tmp_path / "table.csv", [slowdowns(2, 1.2), slowdowns(4, 1.8)])
    out = tmp_path / "machine.yaml"

    arguments = ["--interference", str(table), "--out", str(out), "--json"]
    assert run(calibrate.main, arguments) == 0

    summary = json.loads(capsys.readouterr().out)
    assert summary["interference"]["held_out_error"] < 0.006  # noise of one percent, half in mean
    for group in summary["interference"]["fits"]:
        assert group["held_out_error"] < group["shape_left_out_error"]
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.interference is not None
    assert hardware.provenance.interference is not None
    assert summary["interference"]["sha256"][:16] in hardware.provenance.interference.source
    for gpus, factor in ((2, 1.2), (4, 1.8)):
        found = hardware.interference.of_group(gpus_in_node=gpus, nodes=1)
        alone = np.array([[1.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
        true = overlapped(alone, factors_of(slowdowns(gpus, factor)))
        assert overlapped(alone, factors_of(found)) == pytest.approx(true, rel=0.02)


def written_bandwidth(path: Path, latency_ms: float, sizes: int = 8) -> Path:
    lines = ["generation,intra_group,inter_group,kind,bytes,latency_ms"]
    for kind, gbytes_per_s in (("all_gather", 20.0), ("pinned_h2d", 5.0), ("pinned_d2h", 6.0)):
        for power in range(sizes):
            size = 2 ** (20 + power)
            time_ms = latency_ms + size / gbytes_per_s / 1e6
            lines.append(f"a,4,1,{kind},{size},{time_ms:.9f}")
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_transfers_become_lines_beside_what_the_hardware_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_bandwidth(tmp_path / "table.csv", latency_ms=0.25)
    out = tmp_path / "machine.yaml"

    arguments = ["--bandwidth", str(table), "--out", str(out), "--hardware", "a100-40gb", "--json"]
    assert run(calibrate.main, arguments) == 0

    summary = json.loads(capsys.readouterr().out)
    assert summary["transfers"]["held_out_error"] < 1e-4
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.interference == catalog.hardware("a100-40gb").interference
    assert hardware.transfers is not None
    (group,) = hardware.transfers.groups
    for line, gbytes_per_s in (
        (group.all_gather, 20.0),
        (group.host_to_device, 5.0),
        (group.device_to_host, 6.0),
    ):
        assert line is not None
        assert line.gbytes_per_s == pytest.approx(gbytes_per_s, rel=1e-4)
        assert line.latency_us == pytest.approx(250.0, rel=1e-3)
        assert (line.smallest_mib, line.largest_mib) == (1, 128)


def test_too_few_sizes_make_no_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = written_bandwidth(tmp_path / "table.csv", latency_ms=0.25, sizes=3)
    out = str(tmp_path / "m.yaml")
    assert run(calibrate.main, ["--bandwidth", str(table), "--out", out]) == 2
    assert "3 rows of all_gather for 4 GPUs in each of 1 nodes: measure at least 4 sizes" in (
        capsys.readouterr().err
    )


def test_no_table_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(calibrate.main, ["--out", str(tmp_path / "m.yaml")]) == 2
    assert "nothing to fit: give --interference" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--campaign", "b"], "--campaign 'b' is unknown: give one of a"),
        (["--hardware", "l5"], "'l5' is unknown"),
        (["--interference", "missing.csv"], "missing.csv: cannot be read"),
    ],
)
def test_wrong_usage_says_what_to_do(
    options: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = written_table(tmp_path / "table.csv", [slowdowns(2, 1.2)])
    arguments = ["--interference", str(table), "--out", str(tmp_path / "m.yaml"), *options]
    assert run(calibrate.main, arguments) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "m.yaml").exists()


def test_a_table_of_single_streams_cannot_be_fitted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(f"{HEADER}\na,2,1,1,1,0,0,0\n", encoding="utf-8")
    out = str(tmp_path / "m.yaml")
    assert run(calibrate.main, ["--interference", str(table), "--out", out]) == 2
    assert "no row has more than one stream busy" in capsys.readouterr().err
