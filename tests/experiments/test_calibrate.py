"""From a table of measurements to a hardware file that a plan may name."""

import json
from pathlib import Path

import numpy as np
import pytest

from experiments import calibrate
from experiments.commandline import run
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
    assert summary["held_out_error"] < 0.006  # the noise is up to one percent, half of it mean
    for group in summary["groups"]:
        assert group["held_out_error"] < group["shape_left_out_error"]
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.interference is not None
    assert hardware.provenance.interference is not None
    assert summary["sha256"][:16] in hardware.provenance.interference.source
    for gpus, factor in ((2, 1.2), (4, 1.8)):
        found = hardware.interference.of_group(gpus_in_node=gpus, nodes=1)
        alone = np.array([[1.0, 1.0, 0.0, 0.0], [4.0, 1.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]])
        true = overlapped(alone, factors_of(slowdowns(gpus, factor)))
        assert overlapped(alone, factors_of(found)) == pytest.approx(true, rel=0.02)


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
