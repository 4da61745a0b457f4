"""The whole loop without a GPU: a machine is measured, calibrated, and a plan on it predicted."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import predict, profile_hardware
from experiments.calibration.profiling import SIZES, ProfileSizes, attention_of, blocks
from experiments.cli.commandline import run
from mistlab import catalog
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.units import MIB_BYTES
from mistlab.core.values import from_mapping
from mistlab.machine.hardware import Hardware
from runtime.profiling.side_by_side import Lengths

TINY = ProfileSizes(
    repetitions=2,
    products=(32,),
    copied_bytes=MIB_BYTES,
    blocks=blocks(((32, 2), (64, 2)), 16, (1,)),
    attention=attention_of(blocks(((32, 2),), 16, (1,))),
    transfer_bytes=tuple(MIB_BYTES // 16 << power for power in (0, 3, 5, 7)),
    lengths=Lengths(levels=(0, 1), unit_s=2e-4, product_size=32, chunk_bytes=MIB_BYTES // 16),
)
PLAN = """\
workload:
  model: {{family: gpt, hidden: 64, layers: 4, heads: 4, vocab: 128}}
  sequence_length: 32
  global_batch: 4
  attention: flash
  precision: fp32
cluster: {{hardware: {hardware}, nodes: 1, gpus_per_node: {gpus}}}
plan:
  micro_batches: 2
  stages:
  - {{layers: 4, data_parallel: {gpus}, tensor_parallel: 1, micro_batch: {micro_batch}, zero: 2,
     checkpointed_layers: 2, offload: {{optimizer: 0.5}}}}
"""
TABLES = ("operators", "attention", "launches", "copies", "collectives", "sends", "streams")


@pytest.fixture(autouse=True)
def _tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, ("cpu", True), TINY)


def profile(out: Path, *options: str) -> int:
    arguments = ["--device", "cpu", "--quick", "--out", str(out), "--json", *options]
    return run(profile_hardware.main, arguments)


def predicted(folder: Path, gpus: int, capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    path = folder / "plan.yaml"
    text = PLAN.format(hardware="machine.yaml", gpus=gpus, micro_batch=2 // gpus)
    path.write_text(text, encoding="utf-8")
    assert run(predict.main, [str(path), "--json"]) == 0
    answer: dict[str, object] = json.loads(capsys.readouterr().out)
    return answer


def lines(folder: Path) -> dict[str, list[str]]:
    paths = {name: folder / "machine-tables" / f"{name}.csv" for name in TABLES}
    return {name: path.read_text(encoding="utf-8").splitlines() for name, path in paths.items()}


# They fit what this machine does while they run: a busy one may be too noisy to fit.
@pytest.mark.slow
def test_from_a_bare_machine_to_a_prediction_and_on_from_where_it_was(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "machine.yaml"
    assert profile(out) == 0
    summary = json.loads(capsys.readouterr().out)
    assert {"transfers", "interference", "compute"} <= set(summary)
    hardware = from_mapping(Hardware, read_yaml(out))
    assert hardware.name == "machine"
    assert hardware.node.gpus == 2
    assert "2 processes of" in hardware.provenance.gpu.source
    assert "stand in for GPUs" in hardware.provenance.gpu.source
    assert hardware.transfers is not None
    assert hardware.transfers.in_node is not None
    (group,) = hardware.transfers.groups
    assert None not in (group.all_gather, group.reduce_scatter, group.all_reduce)
    assert None not in (group.host_to_device, group.device_to_host)
    assert hardware.interference is not None
    assert len(hardware.interference.groups[0].slowdowns) == 11
    assert hardware.compute is not None
    assert hardware.compute.launch_us > 0
    assert predicted(tmp_path, 2, capsys)["fits"] is True

    # Nothing is measured twice, and only what is missing is measured.
    measured, written = lines(tmp_path), out.read_text(encoding="utf-8")
    assert profile(out) == 0
    assert lines(tmp_path) == measured
    assert out.read_text(encoding="utf-8") == written
    streams = tmp_path / "machine-tables" / "streams.csv"
    streams.write_text("\n".join(measured["streams"][:-1]) + "\n", encoding="utf-8")
    capsys.readouterr()
    assert profile(out) == 0
    assert "links and streams: 1 of 1" in capsys.readouterr().err
    again = lines(tmp_path)
    assert again.pop("streams")[:-1] == measured.pop("streams")[:-1]
    assert again == measured

    # Measurements of another machine do not mix with them.
    machine = tmp_path / "machine-tables" / "machine.yaml"
    noted = read_yaml(machine)
    noted["environment"]["torch"] = "1.0"
    write_yaml(noted, machine)
    assert profile(out) == 2
    complaint = capsys.readouterr().err
    assert "machine.yaml: its folder has measurements of" in complaint
    assert "give another folder as --tables" in complaint


@pytest.mark.slow
def test_one_device_has_no_collectives_and_may_take_a_datasheets_peaks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "machine.yaml"
    assert profile(out, "--gpus-per-node", "1", "--datasheet", "h200-141gb") == 0
    assert "one device: no collectives" in capsys.readouterr().err
    hardware, sheet = from_mapping(Hardware, read_yaml(out)), catalog.hardware("h200-141gb")
    assert hardware.gpu.peak_tflops == sheet.gpu.peak_tflops
    assert hardware.gpu.memory_gib != sheet.gpu.memory_gib
    assert hardware.provenance.gpu.kind == "datasheet"
    assert hardware.node.inter_node_gbytes_per_s == sheet.node.inter_node_gbytes_per_s
    assert "between GPUs the host link's rate, not measured" in hardware.provenance.node.source
    assert hardware.transfers is not None
    assert hardware.transfers.in_node is None
    assert len(lines(tmp_path)["collectives"]) == 1
    assert hardware.interference is not None
    (group,) = hardware.interference.groups
    assert (group.gpus_in_node, len(group.slowdowns)) == (1, 4)
    assert predicted(tmp_path, 1, capsys)["fits"] is True


def test_a_folder_that_cannot_be_made_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    assert profile(tmp_path / "machine.yaml", "--tables", str(tmp_path / "file" / "x")) == 2
    assert "give another folder" in capsys.readouterr().err


def test_sizes_are_enough_to_fit_lines() -> None:
    for sizes in SIZES.values():
        assert len(sizes.transfer_bytes) >= 4
        assert len({block.hidden for block in sizes.blocks}) >= 2
