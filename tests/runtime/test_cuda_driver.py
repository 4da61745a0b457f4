"""What the driver asks of ``torch.cuda``, on a stand-in that notes it; and its use by ranks."""

import tomllib
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from mistlab.core.values import InputError  # noqa: E402
from mistlab.machine.slowdowns import STREAMS  # noqa: E402
from mistlab.schedule.stage_passes import LANES  # noqa: E402
from runtime.comm import processes  # noqa: E402
from runtime.comm.processes import World, abandon, device_of, join  # noqa: E402
from runtime.devices.cuda import TESTED_TORCH, CudaDriver, peers_apart  # noqa: E402
from runtime.devices.driver import lend  # noqa: E402
from runtime.engine.streams.device_streams import CudaStreams  # noqa: E402
from runtime.profiling.side_by_side import StreamLanes  # noqa: E402

ROOT = Path(__file__).parents[2]
APART = ("can_device_access_peer",)
GPU = torch.device("cuda", 2)
Call = tuple[str, tuple[Any, ...], dict[str, Any]]


class StubCuda:
    """``torch.cuda`` with four GPUs, which notes its calls."""

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self.apart: set[tuple[int, int]] = set()
        self.answers: dict[str, Any] = {
            "is_available": True,
            "device_count": 4,
            "mem_get_info": (3, 8),
            "memory_reserved": 2,
            "max_memory_allocated": 5,
            "max_memory_reserved": 6,
            "memory_stats": {"num_alloc_retries": 7},
            "cudaHostRegister": 0,
            "get_device_capability": (8, 0),
            "get_arch_list": ["sm_75", "sm_80", "sm_90", "compute_90"],
        }
        # Answers of single GPUs, by their numbers.
        self.of_gpus: dict[tuple[str, int], Any] = {}

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            self.calls.append((name, args, kwargs))
            answer = self.answers.get(name, name)
            if args and isinstance(args[0], torch.device):
                answer = self.of_gpus.get((name, args[0].index), answer)
            if isinstance(answer, Exception):
                raise answer
            if name in APART:
                return args not in self.apart
            return self if name == "cudart" else answer

        return call


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[StubCuda]:
    stub = StubCuda()
    monkeypatch.setattr(torch, "cuda", stub)
    return stub


ASKED: dict[str, tuple[Callable[[CudaDriver], Any], list[Call]]] = {
    "a GPU is chosen": (lambda one: one.choose(GPU), [("set_device", (GPU,), {})]),
    "its name is asked": (lambda one: one.name(GPU), [("get_device_name", (GPU,), {})]),
    "emulated bfloat16 does not count": (
        lambda one: one.has_bf16(GPU),
        [("get_device_capability", (GPU,), {})],
    ),
    "compute has the current stream": (
        lambda one: one.current_stream(GPU),
        [("current_stream", (GPU,), {})],
    ),
    "an urgent stream goes before the default": (
        lambda one: one.stream(GPU, urgent=True),
        [("Stream", (GPU,), {"priority": -1})],
    ),
    "any other stream does not": (
        lambda one: one.stream(GPU),
        [("Stream", (GPU,), {"priority": 0})],
    ),
    "a stream is the current one": (lambda one: one.using("lane"), [("stream", ("lane",), {})]),
    "events have timing, and waiting for them no core": (
        lambda one: one.event(),
        [("Event", (), {"enable_timing": True, "blocking": True})],
    ),
    "all streams are waited for": (
        lambda one: one.synchronize(GPU),
        [("synchronize", (GPU,), {})],
    ),
    "the allocator is capped": (
        lambda one: one.cap(GPU, 0.5),
        [("set_per_process_memory_fraction", (0.5, GPU), {})],
    ),
    "peaks are counted anew": (
        lambda one: one.count_anew(GPU),
        [
            ("empty_cache", (), {}),
            ("reset_peak_memory_stats", (GPU,), {}),
            ("reset_accumulated_memory_stats", (GPU,), {}),
        ],
    ),
    "the device pauses": (lambda one: one.idle(9), [("_sleep", (9,), {})]),
}


@pytest.mark.parametrize("name", ASKED)
def test_the_driver_asks_cuda_for_what_it_is_asked(name: str, cuda: StubCuda) -> None:
    asks, expected = ASKED[name]
    asks(CudaDriver())
    assert cuda.calls == expected


def test_peaks_are_those_of_the_allocator(cuda: StubCuda) -> None:
    driver = CudaDriver()
    peaks = driver.peaks(GPU)
    assert (peaks.allocated_bytes, peaks.reserved_bytes, peaks.retries) == (5, 6, 7)
    assert driver.free_and_total_bytes(GPU) == (3, 8)
    assert driver.reserved_bytes(GPU) == 2
    assert {args for _, args, _ in cuda.calls} == {(GPU,)}


def test_host_memory_is_registered_whole_and_unregistered_once(cuda: StubCuda) -> None:
    lent = lend(10_000, CudaDriver())
    place = lent.memory.data_ptr()
    assert lent.memory.count_nonzero() == 0
    lent.give_back()
    assert [call for call in cuda.calls if call[0] != "cudart"] == [
        ("cudaHostRegister", (place, 10_000, 0), {}),
        ("cudaHostUnregister", (place,), {}),
    ]


@pytest.mark.parametrize(("rank", "local_rank"), [(0, 0), (5, 1), (7, 3)])
def test_a_rank_chooses_the_gpu_of_its_place_on_the_node(
    rank: int, local_rank: int, cuda: StubCuda
) -> None:
    device = device_of("cuda", World(rank=rank, size=8, local_rank=local_rank))
    assert device == torch.device("cuda", local_rank)
    assert ("set_device", (device,), {}) in cuda.calls


def test_a_rank_without_a_gpu_of_its_own_is_refused(cuda: StubCuda) -> None:
    with pytest.raises(InputError, match=r"torch sees 4 CUDA devices, fewer .*rank 2 has none"):
        device_of("cuda", World(rank=2, size=8, local_rank=4))


def test_each_lane_but_compute_has_an_urgent_stream(cuda: StubCuda) -> None:
    cuda.answers["Event"] = StubEvent()
    CudaStreams(GPU, CudaDriver()).close()
    streams = [call for call in cuda.calls if call[0] == "Stream"]
    assert streams == [("Stream", (GPU,), {"priority": -1})] * (len(LANES) - 1)


def test_a_capture_lets_other_threads_call_cuda(cuda: StubCuda) -> None:
    """NCCL's watchdog asks CUDA for events meanwhile: in another mode that ends the capture."""
    cuda.answers["graph"] = nullcontext()
    with CudaDriver().capture("lane") as graph:
        assert graph == "CUDAGraph"
    given = {"stream": "lane", "capture_error_mode": "thread_local"}
    assert ("graph", ("CUDAGraph",), given) in cuda.calls


@pytest.mark.parametrize(("name", "backend"), [("cuda", "nccl"), ("cpu", "gloo")])
def test_the_processes_of_gpus_are_bound_to_them(
    name: str, backend: str, cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else NCCL makes communicators at the first call, and a second one of all processes."""
    given: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
    monkeypatch.setattr(
        processes.distributed,
        "init_process_group",
        lambda *args, **kwargs: given.append((args, kwargs)),
    )
    device = torch.device("cuda", 1) if name == "cuda" else torch.device("cpu")
    join(World(rank=5, size=8, local_rank=1), device, 7.0)
    ((args, kwargs),) = given
    assert args == (backend,)
    assert kwargs["device_id"] == (device if name == "cuda" else None)
    assert kwargs["timeout"] == timedelta(seconds=7)


class StubEvent:
    """An event that has come."""

    def record(self, _stream: Any) -> None: ...
    def synchronize(self) -> None: ...


@pytest.mark.parametrize(("backend", "aborted"), [("nccl", 1), ("gloo", 0)])
def test_only_nccls_communicators_are_aborted(
    backend: str, aborted: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    monkeypatch.setattr(processes.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(processes.distributed, "get_backend", lambda: backend)
    monkeypatch.setattr(processes, "_abort_process_group", lambda: calls.append("aborted"))
    abandon()
    assert len(calls) == aborted


def test_a_profile_has_streams_as_urgent_as_a_run(cuda: StubCuda) -> None:
    StreamLanes(GPU, CudaDriver())
    priorities = [kwargs["priority"] for name, _, kwargs in cuda.calls if name == "Stream"]
    assert priorities == [0 if name == "compute" else -1 for name in STREAMS]


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "The NVIDIA driver on your system is too old (found version 11040). Please update",
            r"knows CUDA 11.4 at most, torch .* needs driver 580 or newer: update the driver\)",
        ),
        (
            "The NVIDIA driver on your system is too old (found version 12020). Please update",
            r"12.2 at most, .* was built for CUDA 13.0, .* pip install torch==2.13.0 \S+ \S+cu126",
        ),
        ("Torch not compiled with CUDA enabled", "is a build for CPUs: install one for CUDA"),
        ("Found no NVIDIA driver on your system. Please check", "no NVIDIA driver on your system"),
    ],
)
def test_why_there_is_no_gpu_is_told(
    said: str, told: str, cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    cuda.answers |= {"is_available": False, "init": RuntimeError(said)}
    with pytest.raises(InputError, match=told):
        device_of("cuda", World(rank=0, size=1, local_rank=0))


def test_gpus_that_cannot_reach_each_other_are_told(cuda: StubCuda) -> None:
    assert peers_apart(4) is None
    cuda.apart = {(1, 2), (2, 1), (0, 3)}
    assert peers_apart(2) is None
    words = peers_apart(4)
    assert words is not None
    assert words.startswith("GPUs 0 and 3 of this node have no peer access, as 1 more pairs")
    assert "nvidia-smi topo" in words
    assert "through the host's memory" in words
    assert "NCCL_P2P_DISABLE=1 keeps it from trying" in words


def test_messages_that_the_user_keeps_off_peer_access_are_told(
    cuda: StubCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    words = peers_apart(4)
    assert words is not None
    assert words.startswith("NCCL_P2P_DISABLE=1: messages go through the host's memory")
    assert cuda.calls == []
    assert peers_apart(1) is None


def test_the_torch_that_is_advised_is_the_one_that_tests_run_with() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert f"torch=={TESTED_TORCH}" in project["project"]["optional-dependencies"]["dev"]
