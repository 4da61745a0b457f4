"""Memory outside torch's allocator: measured once groups have connected, and left free."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from experiments import run_plan  # noqa: E402
from experiments.calibration.profiling import (  # noqa: E402
    SIZES,
    device_outside_bytes,
)
from experiments.cli.commandline import DONE, run  # noqa: E402
from experiments.training.run_results import shortage_words  # noqa: E402
from mistlab import catalog  # noqa: E402
from mistlab.core.files import read_yaml, write_yaml  # noqa: E402
from mistlab.core.units import GIB_BYTES  # noqa: E402
from mistlab.core.values import InputError  # noqa: E402
from mistlab.job.job import load_job  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from runtime import session  # noqa: E402
from runtime.comm.group import Shortage  # noqa: E402
from runtime.devices import outside  # noqa: E402
from runtime.devices.cuda import DRIVERS  # noqa: E402
from runtime.devices.outside import Cap, outside_bytes  # noqa: E402
from runtime.profiling.environment import (  # noqa: E402
    Devices,
    device_memory_bytes,
)
from runtime.profiling.world import ProfiledWorld  # noqa: E402
from tests.experiments.tiny_plans import plan_file  # noqa: E402
from tests.runtime.test_profiling import LENGTHS  # noqa: E402

WHOLE = 80 * GIB_BYTES
DEVICE = torch.device("cuda", 1)


class Gpu:
    """A GPU of 80 GiB, of which torch's allocator holds 10, and others what they are told to."""

    def __init__(self) -> None:
        self.taken_gib = 0.5
        self.shares: list[float] = []

    def free_and_total_bytes(self, _: torch.device) -> tuple[int, int]:
        return WHOLE - round((10 + self.taken_gib) * GIB_BYTES), WHOLE

    def reserved_bytes(self, _: torch.device) -> int:
        return 10 * GIB_BYTES

    def count_anew(self, _: torch.device) -> None:
        """Nothing is counted."""

    def cap(self, _: torch.device, share: float) -> None:
        self.shares.append(share)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Stands in for CUDA."""
    made = Gpu()
    monkeypatch.setitem(DRIVERS, "cuda", made)
    return made


def cluster(memory_gib: float | None) -> Cluster:
    hardware = catalog.hardware("h100-80gb")
    return Cluster(hardware=hardware, nodes=1, gpus_per_node=8, memory_gib=memory_gib)


def test_what_torch_does_not_hold_is_outside(gpu: Gpu) -> None:
    assert outside_bytes(DEVICE) == GIB_BYTES / 2
    assert outside_bytes(torch.device("cpu")) == 0


def test_torch_may_hold_what_the_plan_gives_less_what_is_outside(gpu: Gpu) -> None:
    gpu.taken_gib = 4.0
    cap = Cap(cluster(40.0), DEVICE)
    assert gpu.shares == [pytest.approx(36 / 80)]
    gpu.taken_gib = 6.0
    cap.measure()
    assert gpu.shares[1:] == [pytest.approx(34 / 80)]
    assert cap.outside_bytes == 6 * GIB_BYTES


def test_torch_may_hold_what_a_plan_keeps_free(gpu: Gpu) -> None:
    """The memory is kept for what predictions do not know, which the run may need."""
    Cap(replace(cluster(40.0), keep_free_gib=8.0), DEVICE)
    assert gpu.shares == [pytest.approx(39.5 / 80)]


def test_without_a_size_in_the_plan_torch_may_hold_all(gpu: Gpu) -> None:
    assert Cap(cluster(None), DEVICE).outside_bytes == GIB_BYTES / 2
    assert gpu.shares == [1.0]


def test_a_plan_for_less_memory_than_is_taken_already_is_refused(gpu: Gpu) -> None:
    gpu.taken_gib = 4.0
    with pytest.raises(InputError, match=r"memory_gib: 3 is no more than the 4\.00 GiB of cuda:1"):
        Cap(cluster(3.0), DEVICE)


def test_a_run_measures_when_it_has_connected_and_after_its_first_step(
    gpu: Gpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(outside, "driver_of", lambda _: gpu)
    connected, iterate = session.connected_replicas, session.Executor.iterate
    held: list[float] = []

    def connecting(*arguments: Any, **options: Any) -> object:
        gpu.taken_gib = 5.0
        return connected(*arguments, **options)

    def iterating(executor: Any, batches: Any) -> None:
        held.append(gpu.taken_gib)
        gpu.taken_gib += 1.0
        iterate(executor, batches)

    monkeypatch.setattr(session, "connected_replicas", connecting)
    monkeypatch.setattr(session.Executor, "iterate", iterating)
    plan = plan_file(tmp_path)
    content = read_yaml(plan)
    content["cluster"]["memory_gib"] = 20.0
    write_yaml(content, plan)
    assert run(run_plan.main, [str(plan), "--steps", "2", "--json"]) == DONE
    assert held == [5.0, 6.0]
    assert gpu.shares == [pytest.approx(15 / 80), pytest.approx(14 / 80)]
    assert json.loads(capsys.readouterr().out)["outside_bytes"] == [6 * GIB_BYTES]


def test_a_shortage_names_what_is_outside(gpu: Gpu, tmp_path: Path) -> None:
    shortage = Shortage(
        stage=0,
        doing="0B.4m0 (backward)",
        held_bytes={"weights": GIB_BYTES},
        outside_bytes=outside_bytes(DEVICE),
        reason="no more",
    )
    words = shortage_words(shortage, load_job(plan_file(tmp_path)), None)
    assert (
        "GiB allocated: weights 1.00; 0.50 GiB of the device taken outside torch's allocator"
        in words
    )


def test_a_profile_asks_processes_that_have_connected() -> None:
    """On CPUs a process's own memory: with torch loaded some 100 MB, and messages of 1 MB."""
    world = ProfiledWorld(
        devices=Devices(kind="cpu", count=2, threads=1), repetitions=1, lengths=LENGTHS
    )
    assert 2**26 < world.outside_bytes(2**20) < 2**32


def test_what_connected_processes_take_besides_is_that_of_their_communicators(
    gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of four GPUs one for all, and one for a group of each size: 2 and 4."""
    monkeypatch.setattr(ProfiledWorld, "outside_bytes", lambda *_: 2 * GIB_BYTES)
    devices = Devices(kind="cuda", count=4, threads=1)
    alone, of_group = device_outside_bytes(devices, SIZES["cuda", True])
    assert (alone, of_group) == (GIB_BYTES / 2, GIB_BYTES / 2)


def test_one_device_is_asked_as_it_is(gpu: Gpu) -> None:
    devices = Devices(kind="cuda", count=1, threads=1)
    assert device_outside_bytes(devices, SIZES["cuda", True]) == (GIB_BYTES / 2, None)
    assert device_memory_bytes(devices) == WHOLE
