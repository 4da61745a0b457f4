"""Clocks as a driver's tool tells them, and what is said when they move."""

import json
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments import run_plan  # noqa: E402
from experiments.calibrating.measure_machine import measured_machine  # noqa: E402
from experiments.calibrating.noted_machine import noted_machine  # noqa: E402
from experiments.calibrating.profile_sizes import SIZES  # noqa: E402
from experiments.cli.commandline import DONE, run  # noqa: E402
from mistlab.values.datafile import read_yaml, write_yaml  # noqa: E402
from mistlab.values.measurement import Clocks, Measurement  # noqa: E402
from mistlab.values.value import from_mapping, to_mapping  # noqa: E402
from runtime import session  # noqa: E402
from runtime.profiling.environment import clocks_of  # noqa: E402
from runtime.profiling.timing import HostClock  # noqa: E402
from tests.experiments.test_machine import noted  # noqa: E402
from tests.experiments.tiny_plans import plan_file  # noqa: E402

CUDA = torch.device("cuda", 1)
FAST = Clocks(sm_mhz=1980, memory_mhz=2619, most_sm_mhz=1980, power_limit_w=700)
SLOW = Clocks(sm_mhz=1755, memory_mhz=2619, most_sm_mhz=1980, power_limit_w=700)
NEAR = Clocks(sm_mhz=1935, memory_mhz=2619, most_sm_mhz=1980, power_limit_w=700)


@pytest.fixture
def tool(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What nvidia-smi answers, and what it was asked."""
    tool: dict[str, Any] = {"says": "1980, 1980, 2619, 700.00\n", "status": 0}

    def answer(command: list[str], **_: Any) -> Any:
        tool["asked"] = command
        if tool["says"] is None:
            raise FileNotFoundError
        return SimpleNamespace(stdout=tool["says"], returncode=tool["status"])

    monkeypatch.setattr(subprocess, "run", answer)
    properties = SimpleNamespace(uuid="ab-cd")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    return tool


def test_clocks_are_those_of_the_gpu_that_torch_means(tool: dict[str, Any]) -> None:
    assert clocks_of(CUDA) == FAST
    # A number would be that of the machine, whatever CUDA_VISIBLE_DEVICES says.
    assert "--id=GPU-ab-cd" in tool["asked"]


@pytest.mark.parametrize("says", [None, "", "No devices were found\n", "[N/A], 1980, 2619, 700\n"])
def test_who_does_not_tell_is_not_believed(tool: dict[str, Any], says: str | None) -> None:
    tool["says"] = says
    assert clocks_of(CUDA) is None
    tool.update(says="1980, 1980, 2619, 700.00\n", status=9)
    assert clocks_of(CUDA) is None
    assert clocks_of(torch.device("cpu")) is None


def test_what_a_gpu_does_not_know_is_left_out(tool: dict[str, Any]) -> None:
    tool["says"] = "1410, [N/A], 1215, [Not Supported]\n"
    assert clocks_of(CUDA) == Clocks(sm_mhz=1410, memory_mhz=1215)


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Clocks]]:
    """What a session reads one after another."""
    left: list[Clocks] = []
    monkeypatch.setattr(session, "clocks_of", lambda _: left.pop(0))
    yield left
    assert not left


def test_a_run_notes_its_clocks_and_warns_when_they_move(
    tmp_path: Path, readings: list[Clocks], capsys: pytest.CaptureFixture[str]
) -> None:
    plan, out = plan_file(tmp_path), tmp_path / "out"

    def warned(after: Clocks) -> str:
        readings[:] = [FAST, after]
        arguments = [str(plan), "--steps", "4", "--json", "--out", str(out)]
        assert run(run_plan.main, arguments) == DONE
        captured = capsys.readouterr()
        found = json.loads(captured.out)["clocks"]
        assert found == [to_mapping(FAST), to_mapping(after)]
        measured = from_mapping(Measurement, read_yaml(out / "measurement.yaml"))
        assert measured.clocks == (FAST, after)
        return captured.err

    assert "warning: clocks moved by 11.4% meanwhile, from SM 1980 and memory" in warned(SLOW)
    assert "warning" not in warned(NEAR)


def test_memory_that_slows_down_is_told_too() -> None:
    slow_memory = Clocks(sm_mhz=1980, memory_mhz=2500)
    assert slow_memory.moved_from(FAST) == pytest.approx(119 / 2619)
    assert FAST.moved_from(FAST) == 0


def test_a_profile_notes_its_clocks_at_the_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path, sizes = tmp_path / "machine.yaml", SIZES["cpu", True]
    write_yaml(to_mapping(noted(clocks=FAST)), path)
    monkeypatch.setattr("experiments.calibrating.measure_machine.clocks_of", lambda _: SLOW)
    after = measured_machine(path, noted(clocks=FAST), sizes, HostClock())
    assert noted_machine(tmp_path) == after
    assert after.clocks_after == SLOW
    assert after.is_measured
    assert "clocks moved by 11.4%" in after.words
    assert "warning: clocks moved by 11.4%" in capsys.readouterr().err
    assert "moved" not in noted(clocks=FAST, clocks_after=NEAR).words
