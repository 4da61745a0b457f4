"""A machine that has torch, numpy, sympy and pyyaml trains, and says what it leaves out."""

import json
from pathlib import Path

import pytest

pytest.importorskip("torch")

from experiments import rundir
from experiments.noted_machine import Machine
from experiments.run_plan import EXAMPLE
from mistlab.datafile import write_yaml
from mistlab.hardware import PeakTflops
from mistlab.measurement import Environment
from mistlab.units import GIB_BYTES
from mistlab.value import to_mapping
from tests.experiments.bare import bare_process, left_out

MACHINE = Machine(
    environment=Environment(device="NVIDIA H100", num_devices=1, torch="2.11", cuda="13.0"),
    date="2026-01-01",
    threads=1,
    clocks=None,
    device_memory_bytes=80 * GIB_BYTES,
    outside_bytes=GIB_BYTES,
    host_memory_bytes=128 * GIB_BYTES,
    memory_gbytes_per_s=3000.0,
    peak_tflops=PeakTflops(fp16=900.0, bf16=900.0, fp32=60.0),
)
MAY_LACK = {"highspy", "matplotlib", "optuna", "pulp", "scipy", "simpy", "sqlalchemy"}


def test_a_bare_machine_lacks_what_only_others_need() -> None:
    assert set(left_out()) >= MAY_LACK
    assert not {"torch", "numpy", "sympy", "yaml", "mpmath", "mistlab"} & set(left_out())


def test_a_plan_runs_and_its_timeline_is_the_measured_one(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = bare_process(
        *(tmp_path, "-m", "experiments.run_plan", EXAMPLE, "--steps", 2, "--json", "--out", out)
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert len(found["losses"]) == 2
    # What is predicted in closed form needs no more.
    assert found["predicted_iteration_s"] > 0
    assert "simpy is not installed: timeline.json has the measured iteration alone" in done.stderr
    events = json.loads((out / "timeline.json").read_text())["traceEvents"]
    processes = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert processes == ["stage 0, measured"]


def test_a_machine_is_measured_without_what_fits_need(tmp_path: Path) -> None:
    done = bare_process(
        tmp_path, "-c", "import experiments.profiling, experiments.profile_hardware"
    )
    assert done.returncode == 0, done.stderr


def test_what_is_missing_is_told_in_a_line(tmp_path: Path) -> None:
    tables = tmp_path / "tables"
    tables.mkdir()
    write_yaml(to_mapping(MACHINE), tables / "machine.yaml")
    done = bare_process(
        *(tmp_path, "-m", "experiments.profile_hardware", "--only", "fit"),
        *("--out", tmp_path / "a.yaml", "--tables", tables),
    )
    assert done.returncode == 2
    assert done.stderr == (
        "error: scipy is not installed, and this command needs it: pip install scipy\n"
    )


def test_a_folder_of_results_names_the_versions_of_what_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rundir, "PACKAGES", ("numpy", "no-such-package"))
    rundir.RunDirectory.make(tmp_path, "run_plan", {})
    versions = json.loads((tmp_path / "config.json").read_text())["versions"]
    assert versions["numpy"]
    assert versions["no-such-package"] is None
