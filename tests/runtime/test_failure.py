"""What is left of a run that fails: nothing pinned, no thread, and nobody waits for a device."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from threading import Event
from threading import enumerate as threads
from typing import Any, NoReturn

import pytest

torch = pytest.importorskip("torch")

from mistlab import catalog  # noqa: E402
from mistlab.machine.cluster import Cluster  # noqa: E402
from mistlab.values.job import Job  # noqa: E402
from mistlab.values.plan import Plan  # noqa: E402
from runtime import failure  # noqa: E402
from runtime.comm import processes  # noqa: E402
from runtime.comm.group import ShortageError  # noqa: E402
from runtime.devices.cuda import CudaDriver  # noqa: E402
from runtime.engine.executor import Executor  # noqa: E402
from runtime.engine.storage import arena  # noqa: E402
from runtime.engine.streams.device_streams import (  # noqa: E402
    HostLane,
    SimulatedStreams,
)
from runtime.failure import let_go  # noqa: E402
from runtime.session import Session, Settings  # noqa: E402
from tests.runtime.worlds import CPU, MIXED, TRAINING, stage, workload  # noqa: E402

SETTINGS = Settings(device="cpu", data=None, seed=0, timeout_s=60, training=TRAINING)
GPU = torch.device("cuda", 0)


class Pinning(CudaDriver):
    """A driver that notes what is pinned."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()
        self.most = 0

    def pin(self, memory: torch.Tensor) -> int:
        self.pinned.add(memory.data_ptr())
        self.most = max(self.most, len(self.pinned))
        return 0

    def unpin(self, memory: torch.Tensor) -> None:
        self.pinned.remove(memory.data_ptr())


@pytest.fixture
def pinning(monkeypatch: pytest.MonkeyPatch) -> Pinning:
    """Pins what is offloaded on a CPU too."""
    driver, begin = Pinning(), arena.Arena.__init__

    def pinned(self: arena.Arena, size: int, device: torch.device, *, pins_for: Any) -> None:
        begin(self, size, device, pins_for=driver)

    def begun(self: arena.Arena, size: int, device: torch.device, **given: Any) -> None:
        (pinned if "pins_for" in given else begin)(self, size, device, **given)

    monkeypatch.setattr(arena.Arena, "__init__", begun)
    return driver


def job() -> Job:
    """Of which the first step pins activations too."""
    return Job(
        workload=workload("gpt"),
        cluster=Cluster(hardware=catalog.hardware("l4-24gb"), nodes=1, gpus_per_node=1),
        plan=Plan(micro_batches=2, stages=(stage(micro_batch=4, offload=MIXED),)),
    )


def failing(error: BaseException) -> Callable[..., NoReturn]:
    def fail(*_: object, **__: object) -> NoReturn:
        raise error

    return fail


def test_a_run_that_ends_well_leaves_nothing_pinned(pinning: Pinning) -> None:
    with Session.started(job(), SETTINGS) as session:
        session.step()
        assert len(pinning.pinned) > 1
    assert not pinning.pinned


@pytest.mark.parametrize("place", ["_draw_on_host", "iterate", "report", "release"])
@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (torch.OutOfMemoryError("CUDA out of memory."), (ShortageError, torch.OutOfMemoryError)),
        (torch.AcceleratorError("CUDA error: unspecified launch failure"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
    ],
    ids=["out of memory", "a device in error", "interrupted"],
)
def test_a_run_that_fails_leaves_nothing_pinned(
    pinning: Pinning,
    monkeypatch: pytest.MonkeyPatch,
    place: str,
    error: BaseException,
    raised: Any,
) -> None:
    """Neither from its start on, nor in its second step, with a step's tasks queued."""

    def run() -> None:
        with Session.started(job(), SETTINGS) as session:
            session.step()
            assert len(pinning.pinned) > 1
            monkeypatch.setattr(Executor, place, failing(error))
            session.step()

    if place == "_draw_on_host":
        monkeypatch.setattr(Executor, place, failing(error))
    with pytest.raises(raised):
        run()
    assert pinning.most > 0
    assert not pinning.pinned


class Hanging(Pinning):
    """A device that is never done."""

    def __init__(self) -> None:
        super().__init__()
        self.goes_on, self.is_done = Event(), False

    def choose(self, device: torch.device) -> None:
        pass

    def synchronize(self, device: torch.device) -> None:
        self.goes_on.wait(60)
        self.is_done = True


class Failing(Pinning):
    """A device in error."""

    choose = failing(torch.AcceleratorError("CUDA error: device-side assert triggered"))
    synchronize = failing(torch.AcceleratorError("CUDA error: device-side assert triggered"))


def test_a_device_in_error_keeps_nothing_pinned(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = Failing()
    monkeypatch.setattr(failure, "driver_of", lambda _: driver)
    held = arena.Arena(1000, CPU, pins_for=driver)
    let_go(GPU, None)
    assert held.size_bytes
    assert not driver.pinned


def test_nobody_waits_for_a_device_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory stays pinned, since it may still copy."""
    driver = Hanging()
    monkeypatch.setattr(failure, "driver_of", lambda _: driver)
    monkeypatch.setattr(failure, "PARTING_S", 0.01)
    held = arena.Arena(1000, CPU, pins_for=driver)
    let_go(GPU, None)
    assert not driver.is_done
    assert len(driver.pinned) == 1
    driver.goes_on.set()
    held.release()


def test_streams_that_are_closed_do_nothing_more_and_have_no_thread() -> None:
    began, goes_on, done = Event(), Event(), []
    pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="a host lane")
    lane = HostLane(pool)

    def first() -> None:
        began.set()
        goes_on.wait(60)
        done.append(1)

    lane.submit(first, [])
    last = lane.submit(lambda: done.append(2), [])
    began.wait(60)
    lane.close()
    goes_on.set()
    for thread in threads():
        if thread.name.startswith("a host lane"):
            thread.join(60)
            assert not thread.is_alive()
    assert last.cancelled()
    assert done == [1]


def test_simulated_streams_that_are_closed_do_nothing_more() -> None:
    streams, done = SimulatedStreams(progress="lazy"), []
    streams.submit("host_to_device", lambda: done.append(1), [])
    streams.close()
    streams.synchronize()
    assert done == []
    assert streams.spans() == []


@pytest.mark.parametrize(("backend", "calls"), [("nccl", 1), ("gloo", 0)])
def test_communicators_of_a_gpu_are_aborted(
    monkeypatch: pytest.MonkeyPatch, backend: str, calls: int
) -> None:
    """Gloo would wait for what is under way."""
    aborted: list[str] = []
    monkeypatch.setattr(processes.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(processes, "_abort_process_group", lambda: aborted.append(backend))
    let_go(CPU, None)
    assert len(aborted) == calls
