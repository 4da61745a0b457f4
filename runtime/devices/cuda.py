"""The driver for CUDA devices, which calls ``torch.cuda``, and the table of drivers by kind of
device.
"""

import os
import re
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from typing import Any, final

import torch
from torch import Tensor

from mistlab.schedule.stage_passes import LANES
from runtime.devices.driver import DevicePeaks, Driver, Event, Graph, Stream

# The driver for CUDA devices, which calls ``torch.cuda``.


CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# Environment variables that are set unless the user has set them. CUDA reads the first when it
# starts, torch the second when it creates a communicator. Streams that share one of CUDA's
# connections wait for one another. NCCL sends messages on a stream of its own, to which the second
# variable gives the priority of the runtime's streams for messages
# (docs/decisions/0011-communicators.md).
SETTINGS = {CONNECTIONS: "32", "TORCH_NCCL_HIGH_PRIORITY": "1"}

# For each major version of CUDA: the driver that it needs, and the build of ``TESTED_TORCH`` for it
# (docs.nvidia.com/deploy/cuda-compatibility).
NEEDED_DRIVERS = {"13": ("580", "cu130"), "12": ("525", "cu126")}
TESTED_TORCH = "2.13.0"
FIRST_WITH_BF16 = (8, 0)
NO_PEERS = "NCCL_P2P_DISABLE"
_LOST = (
    "messages go through the host's memory and not from GPU to GPU, several times slower than "
    "predicted for NVLink"
)


def shared_connections() -> str | None:
    """A warning if the user allows CUDA fewer connections than a rank has lanes (queues of work);
    otherwise None.
    """
    given = os.environ.get(CONNECTIONS, "")
    if not given.isdigit() or int(given) >= len(LANES):
        return None
    return (
        f"{CONNECTIONS}={given}: fewer than the {len(LANES)} streams of a rank; those that share "
        "one wait for one another, in a pipeline perhaps for ever: unset it, or give 32"
    )


def why_no_gpu() -> str:
    """Why CUDA has no GPU for this process, with the remedy; empty if it has one."""
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        message = str(error).strip().partition("\n")[0].partition(". ")[0]
    else:
        return ""
    if "too old" in message:
        return _old_driver(message)
    if "not compiled" in message:
        return f"torch {torch.__version__} is a build for CPUs: install one for CUDA"
    return message


def _old_driver(message: str) -> str:
    """What to say about a driver that is too old for the installed torch: both versions, and what
    to install.
    """
    built = str(torch.version.cuda)
    version = re.search(r"found version (\d+)", message)
    major, minor = divmod(int(version[1]), 1000) if version else (0, 0)
    has = f"knows CUDA {major}.{minor // 10} at most" if version else "is of an older CUDA"
    needed = NEEDED_DRIVERS.get(built.partition(".")[0], ("newer", ""))[0]
    problem = (
        f"the NVIDIA driver is too old: it {has}, torch {torch.__version__} was built for CUDA "
        f"{built}, which needs driver {needed} or newer: update the driver"
    )
    if str(major) not in NEEDED_DRIVERS:
        return problem
    _, build = NEEDED_DRIVERS[str(major)]
    index = f"https://download.pytorch.org/whl/{build}"
    return f"{problem}, or pip install torch=={TESTED_TORCH} --index-url {index}"


def peers_apart(ranks: int) -> str | None:
    """A warning if two GPUs of this node's ranks cannot access each other's memory (peer access),
    or if such access is disabled; otherwise None.
    """
    if ranks > 1 and os.environ.get(NO_PEERS) == "1":
        return f"{NO_PEERS}=1: {_LOST}: unset it, if the GPUs have peer access"
    gpus = range(min(DRIVERS["cuda"].count(), ranks))
    apart = [
        (gpu, other)
        for gpu in gpus
        for other in gpus
        if gpu < other and not torch.cuda.can_device_access_peer(gpu, other)
    ]
    if not apart:
        return None
    gpu, other = apart[0]
    more = f", as {len(apart) - 1} more pairs" if len(apart) > 1 else ""
    return (
        f"GPUs {gpu} and {other} of this node have no peer access{more}: {_LOST}: see "
        "'nvidia-smi topo -p2p r' (access control of PCIe, a virtual machine), or plan with less "
        f"tensor parallelism; if NCCL hangs at its first message, {NO_PEERS}=1 keeps it from trying"
    )


@final
class CudaDriver:
    """The driver for NVIDIA's GPUs."""

    backend = "nccl"

    @property
    def version(self) -> str:
        """The version of CUDA that torch was built with."""
        return torch.version.cuda or ""

    def count(self) -> int:
        """The number of GPUs. It must be called first, so that CUDA starts with the variables in
        ``SETTINGS``.
        """
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def choose(self, device: torch.device) -> None:
        """Make a GPU the calling thread's current GPU."""
        torch.cuda.set_device(device)

    def name(self, device: torch.device) -> str:
        """The name of a GPU, as NVIDIA's driver gives it."""
        return torch.cuda.get_device_name(device)

    def has_bf16(self, device: torch.device) -> bool:
        """Whether a GPU has native, not emulated, bfloat16 arithmetic."""
        return torch.cuda.get_device_capability(device) >= FIRST_WITH_BF16

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that torch uses by default."""
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device, *, urgent: bool = False) -> Stream:
        """A new stream. Work on an urgent stream has priority over the default stream, but not over
        NCCL's urgent streams.

        With CUDA's highest priority torch would take the stream from the pool that NCCL uses, and a
        lane and a group of NCCL could share it.
        """
        return torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Make a stream the calling thread's current stream, and its GPU the current GPU."""
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        """A new event that records times; a thread that waits for it sleeps instead of spinning."""
        return torch.cuda.Event(enable_timing=True, blocking=True)

    @contextmanager
    def capture(self, stream: Any) -> Iterator[Graph]:
        """Capture a CUDA graph; other threads of the process, such as NCCL's, may call CUDA
        meanwhile.
        """
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            yield graph

    def synchronize(self, device: torch.device) -> None:
        """Block the calling thread until all streams have ended their work."""
        torch.cuda.synchronize(device)

    def read(self, tensor: Tensor, usual: int) -> list[int]:
        """The values of a tensor that the current stream has computed."""
        del usual
        return [int(one) for one in tensor.tolist()]

    def generator(self, device: torch.device) -> torch.Generator:
        """A new random generator for tensors on a GPU."""
        return torch.Generator(device)

    def idle(self, cycles: int) -> None:
        """Queue a pause of this many clock cycles on the current stream."""
        torch.cuda._sleep(cycles)

    def threads(self, name: str) -> Executor:
        """An executor with one host thread."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Zeros in host memory, not yet pinned.

        Torch's own allocator of pinned memory would round sizes up to powers of two.
        """
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> int:
        """Register host memory with CUDA; returns CUDA's error number, 0 for none."""
        return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    def unpin(self, memory: Tensor) -> None:
        """Unregister memory that ``pin`` has registered."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """The free and the total bytes of a GPU's memory."""
        return torch.cuda.mem_get_info(device)

    def reserved_bytes(self, device: torch.device) -> int:
        """The bytes that torch's allocator currently reserves."""
        return torch.cuda.memory_reserved(device)

    def cap(self, device: torch.device, share: float) -> None:
        """Limit torch's allocator to ``share`` of the GPU's memory."""
        torch.cuda.set_per_process_memory_fraction(share, device)

    def count_anew(self, device: torch.device) -> None:
        """Free the allocator's cache, and reset its peak counters."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)

    def peaks(self, device: torch.device) -> DevicePeaks:
        """The peaks of the GPU's memory since the last ``count_anew``."""
        return DevicePeaks(
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            retries=torch.cuda.memory_stats(device)["num_alloc_retries"],
        )


# The table of drivers for devices other than the CPU, by torch's name for the kind of device.


# A stand-in for a GPU adds a row while it is in use.
DRIVERS: dict[str, Driver] = {"cuda": CudaDriver()}


def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device; None for a CPU, unless a stand-in treats the CPU as a GPU."""
    return DRIVERS.get(device.type)


def generator_of(device: torch.device) -> torch.Generator:
    """A new random generator for tensors on a device, or on the CPU."""
    driver = driver_of(device)
    return torch.Generator() if driver is None else driver.generator(device)
