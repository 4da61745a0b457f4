"""CUDA devices, as ``torch.cuda`` drives them."""

import os
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager
from typing import Any, final

import torch
from torch import Tensor

from mistlab.schedule.lanes import LANES
from runtime.devices.driver import DevicePeaks, Event, Stream

CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"
# CUDA reads the first when it starts, torch the second when it makes a communicator; what the user
# has set stays. Streams that share one of CUDA's connections wait for one another, and messages
# have a stream of NCCL's, as urgent as their lanes (docs/decisions/0011-communicators.md).
SETTINGS = {CONNECTIONS: "32", "TORCH_NCCL_HIGH_PRIORITY": "1"}


def shared_connections() -> str | None:
    """What to say where the user has set fewer connections than lanes, if that is so."""
    given = os.environ.get(CONNECTIONS, "")
    if not given.isdigit() or int(given) >= len(LANES):
        return None
    return (
        f"{CONNECTIONS}={given}: fewer than the {len(LANES)} streams of a rank; those that share "
        "one wait for one another, in a pipeline perhaps for ever: unset it, or give 32"
    )


@final
class CudaDriver:
    """NVIDIA's GPUs."""

    backend = "nccl"

    @property
    def version(self) -> str:
        """The version of CUDA that torch was built with."""
        return torch.version.cuda or ""

    def count(self) -> int:
        """GPUs that are there; asked before anything else, so that CUDA starts as it should."""
        for name, value in SETTINGS.items():
            os.environ.setdefault(name, value)
        return torch.cuda.device_count() if torch.cuda.is_available() else 0

    def choose(self, device: torch.device) -> None:
        """Let a GPU be the calling thread's current one."""
        torch.cuda.set_device(device)

    def name(self, device: torch.device) -> str:
        """What NVIDIA calls it."""
        return torch.cuda.get_device_name(device)

    def has_bf16(self) -> bool:
        """Whether the current GPU computes in bfloat16 itself."""
        return torch.cuda.is_bf16_supported(including_emulation=False)

    def current_stream(self, device: torch.device) -> Stream:
        """The stream that torch puts work on when nobody says otherwise."""
        return torch.cuda.current_stream(device)

    def stream(self, device: torch.device, *, urgent: bool = False) -> Stream:
        """A new stream, of the highest priority if it is urgent."""
        return torch.cuda.Stream(device, priority=-1 if urgent else 0)

    def using(self, stream: Any) -> AbstractContextManager[object]:
        """Let a stream be the calling thread's current one, and its GPU the current GPU."""
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        """A new event, with timing."""
        return torch.cuda.Event(enable_timing=True)

    def synchronize(self, device: torch.device) -> None:
        """Let the calling thread of the host wait for all streams."""
        torch.cuda.synchronize(device)

    def generator(self, device: torch.device) -> torch.Generator:
        """A new generator on a GPU."""
        return torch.Generator(device)

    def idle(self, cycles: int) -> None:
        """Queue a pause on the current stream."""
        torch.cuda._sleep(cycles)

    def threads(self, name: str) -> Executor:
        """One thread of the host."""
        return ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    def host_zeros(self, size_bytes: int) -> Tensor:
        """Bytes of the host, not pinned yet: torch's own pinned allocator would round sizes up to
        powers of two."""
        return torch.zeros(size_bytes, dtype=torch.uint8)

    def pin(self, memory: Tensor) -> int:
        """Register memory that is already there."""
        return int(torch.cuda.cudart().cudaHostRegister(memory.data_ptr(), memory.numel(), 0))

    def unpin(self, memory: Tensor) -> None:
        """Undo ``pin``."""
        torch.cuda.cudart().cudaHostUnregister(memory.data_ptr())

    def free_and_total_bytes(self, device: torch.device) -> tuple[int, int]:
        """Memory that nobody has, and all of it."""
        return torch.cuda.mem_get_info(device)

    def reserved_bytes(self, device: torch.device) -> int:
        """Memory that torch's allocator holds now."""
        return torch.cuda.memory_reserved(device)

    def cap(self, device: torch.device, share: float) -> None:
        """Let torch's allocator hold no more than a share of all memory."""
        torch.cuda.set_per_process_memory_fraction(share, device)

    def count_anew(self, device: torch.device) -> None:
        """Give back what is cached, and begin to count peaks again."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        torch.cuda.reset_accumulated_memory_stats(device)

    def peaks(self, device: torch.device) -> DevicePeaks:
        """Peaks since ``count_anew``."""
        return DevicePeaks(
            allocated_bytes=torch.cuda.max_memory_allocated(device),
            reserved_bytes=torch.cuda.max_memory_reserved(device),
            retries=torch.cuda.memory_stats(device)["num_alloc_retries"],
        )
