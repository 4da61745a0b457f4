"""What is noted of a machine holds for later calls, and for no other machine."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from experiments.calibration.noted_machine import Machine, noted_machine
from experiments.calibration.profiling import SIZES, machine_of
from mistlab.core.files import read_yaml, write_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import InputError, to_mapping
from mistlab.job.prediction import Environment
from mistlab.machine.hardware import PeakTflops
from runtime.profiling import environment
from runtime.profiling.environment import Devices
from runtime.profiling.timing import HostClock

H100 = Environment(
    device="NVIDIA H100", num_devices=1, python="3.12", torch="2.11", cuda="13.0", driver="580"
)
GPU = Devices(kind="cpu", count=1, threads=1)


def noted(**fields: Any) -> Machine:
    known: dict[str, Any] = {
        "environment": H100,
        "date": "2026-01-01",
        "threads": 1,
        "clocks": None,
        "device_memory_bytes": 80 * GIB_BYTES,
        "outside_bytes": GIB_BYTES,
        "host_memory_bytes": 128 * GIB_BYTES,
        "memory_gbytes_per_s": 3000.0,
        "peak_tflops": PeakTflops(fp16=900.0, bf16=900.0, fp32=60.0),
    }
    return Machine(**{**known, **fields})


def machine(
    folder: Path, present: Environment, kernel: str = "flash", *, host_gib: int = 128
) -> Machine:
    """The machine of a folder, on the one that is present."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(environment, "environment_of", lambda *_: present)
        patch.setattr(environment, "host_memory_bytes", lambda: host_gib * GIB_BYTES)
        return machine_of(
            *(folder / "machine.yaml", GPU, SIZES["cpu", True], HostClock()),
            date="2026-02-02",
            revision="abc",
            kernel=kernel,
        )


def test_notes_of_the_same_machine_hold(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_yaml(to_mapping(noted()), tmp_path / "machine.yaml")
    assert machine(tmp_path, replace(H100, revision="later")) == noted()
    assert "going on with what was measured on 2026-01-01" in capsys.readouterr().err


def test_another_machine_of_the_same_kind_goes_on_and_is_noted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_yaml(to_mapping(noted()), tmp_path / "machine.yaml")
    other = replace(H100, driver="575", python="3.11")
    for _ in range(2):
        found = machine(tmp_path, other, host_gib=256)
        assert found == noted(others=("driver 575, 256 GiB of host memory",))
        assert "; here driver 575, 256 GiB" in capsys.readouterr().err
    assert noted_machine(tmp_path) == found
    assert "also one with driver 575, 256 GiB of host memory" in found.words
    # What is noted of the first machine stays.
    assert machine(tmp_path, H100) == found


@pytest.mark.parametrize(
    "fields", [{"device": "NVIDIA A100"}, {"num_devices": 2}, {"torch": "2.12"}, {"cuda": "12.8"}]
)
def test_another_machine_does_not_mix(tmp_path: Path, fields: Any) -> None:
    write_yaml(to_mapping(noted()), tmp_path / "machine.yaml")
    with pytest.raises(InputError, match="only one kind: give another folder as --tables"):
        machine(tmp_path, replace(H100, **fields))
    assert read_yaml(tmp_path / "machine.yaml") == to_mapping(noted())


def test_another_kernel_does_not_mix(tmp_path: Path) -> None:
    write_yaml(to_mapping(noted(attention_kernel="cudnn")), tmp_path / "machine.yaml")
    assert machine(tmp_path, H100, "cudnn").attention_kernel == "cudnn"
    with pytest.raises(InputError, match="attention by cudnn, not by flash, and a folder may"):
        machine(tmp_path, H100)
