"""A machine that has torch, numpy, sympy and pyyaml trains, and says what it leaves out."""

import json
import zipfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

pytest.importorskip("torch")

from experiments.calibration.noted_machine import Machine
from experiments.cli import rundir
from experiments.cli.command import TINY
from mistlab.core.files import write_yaml
from mistlab.core.units import GIB_BYTES
from mistlab.core.values import to_mapping
from mistlab.job.prediction import Environment
from mistlab.machine.hardware import PeakTflops
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
        *(tmp_path, "-m", "experiments.run_plan", TINY, "--steps", 2, "--json", "--out", out)
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


def test_a_machine_is_measured_without_what_fits_need(tmp_path: Path, warm_python: str) -> None:
    code = "import experiments.calibration.profiling, experiments.profile_hardware"
    done = bare_process(tmp_path, "-c", code, program=warm_python)
    assert done.returncode == 0, done.stderr


# A report of one plan that somebody else ran, and its profile.
REPORT = """\
import json, sys
from pathlib import Path

from experiments.gpu_reports.gpu_report import ReportFolder
from experiments.training.plan_runs import RunRows
from experiments.gpu_reports.report_page import figures_of
from experiments.gpu_reports.gpu_report import pack
from experiments.gpu_reports.report_plans import PLANS

folder, machine = Path(sys.argv[1]), sys.argv[2]
said = {"losses": [1.0], "iteration_s": [1.0] * 7, "clocks": [], "allocator_retries": [0],
        "peak_allocated_bytes": [1], "peak_reserved_bytes": [1]}


def profiler(path, seconds):
    (folder / "tables").mkdir()
    (folder / "tables" / "machine.yaml").write_text(machine)
    return True


report = ReportFolder(folder=folder, plans=PLANS[-1:], runner=lambda run, seconds: said,
                profiler=profiler, seconds=100.0)
assert report.work()
figures = figures_of(folder, PLANS[-1:], RunRows(path=folder / "runs.jsonl").said)
pack(folder)
print(json.dumps(figures.summary))
"""


def test_a_report_is_measured_packed_and_its_predictions_left_out(tmp_path: Path) -> None:
    folder = tmp_path / "report"
    folder.mkdir()
    machine = yaml.safe_dump(to_mapping(replace(MACHINE, is_measured=True)))
    done = bare_process(tmp_path, "-c", REPORT, folder, machine)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["left_out"] == ["predictions: scipy is not installed"]
    assert found["rows"] == []
    page = (folder / "README.md").read_text(encoding="utf-8")
    assert "left out here: predictions: scipy is not installed" in page
    with zipfile.ZipFile(folder / "report.zip") as file:
        names = file.namelist()
    assert {"runs.jsonl", "tables/machine.yaml", "README.md"} <= set(names)


def test_a_plan_runs_in_the_process_of_a_report(tmp_path: Path, warm_python: str) -> None:
    script = (
        "import sys; from pathlib import Path; from experiments.training import plan_runs; "
        "plan_runs.WORKER = (sys.argv[2], *plan_runs.WORKER[1:]); "
        "from experiments.training.plan_runs import PlanRun, WorkerRunner; "
        "runner = WorkerRunner('cpu'); "
        "print(runner(PlanRun(plan=Path(sys.argv[1]), steps=1), 200.0)['losses']); runner.close()"
    )
    done = bare_process(tmp_path, "-c", script, TINY, warm_python, program=warm_python)
    assert done.returncode == 0, done.stderr
    assert len(json.loads(done.stdout)) == 1


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
