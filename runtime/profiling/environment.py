"""Describes the machine that is profiled: its devices, software, clock rates, and what nvidia-smi
reports.
"""

import os
import platform
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import torch

from mistlab.core.values import reject
from mistlab.engines.engine import Precision
from mistlab.job.prediction import Clocks, Environment
from runtime.devices import outside
from runtime.devices.cuda import DRIVERS, driver_of, why_no_gpu
from runtime.threads import allowed_cores, cores_of_device, on_cores

# Asks nvidia-smi, a command of NVIDIA's driver, about a GPU.


_PATIENCE_S = 20.0


def answers_of(queries: Sequence[str], gpu: str) -> list[str]:
    """nvidia-smi's answer to each query about a GPU; empty texts if the command fails."""
    command = ["nvidia-smi", f"--query-gpu={','.join(queries)}", f"--id={gpu}"]
    command.append("--format=csv,noheader,nounits")
    nothing = [""] * len(queries)
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=_PATIENCE_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return nothing
    answers = [word.strip() for word in done.stdout.split(",")]
    return answers if done.returncode == 0 and len(answers) == len(queries) else nothing


# The devices that a profile measures: GPUs, or groups of CPU cores in place of GPUs.


# A kind of device: ``cpu``, or a kind for which there is a driver.
DeviceKind = str

# A CPU stands for this many devices, since communication needs at least two processes.
CPU_DEVICES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """The devices of a node that are measured, each by one process with ``threads`` threads. On a
    CPU each thread has a core of its own, of the ``node_cores``.
    """

    kind: DeviceKind
    count: int
    threads: int
    node_cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(allowed_cores())))

    @property
    def precision(self) -> Precision:
        """The precision in which operators are measured: the fastest one for training."""
        if self.kind == "cpu":
            return "fp32"
        has_bf16 = DRIVERS[self.kind].has_bf16
        gpus = [torch.device(self.kind, number) for number in range(self.count)]
        return "bf16" if all(has_bf16(gpu) for gpu in gpus) else "fp16"

    @property
    def first(self) -> torch.device:
        """The device of the first measuring process."""
        return torch.device(self.kind, 0)

    @contextmanager
    def driven(self, rank: int) -> Iterator[torch.device]:
        """Make a process's device its current device in the ``with`` block."""
        if self.kind == "cpu":
            with on_cores(cores_of_device(rank, self.threads, self.node_cores)):
                yield torch.device("cpu")
            return
        device = torch.device(self.kind, rank)
        DRIVERS[self.kind].choose(device)
        yield device


def usual_kind() -> DeviceKind:
    """The kind of device that is measured by default: GPUs if there are any, otherwise the CPU.

    Raises an error for GPUs whose driver is too old, so that a CPU is not measured instead.
    """
    if DRIVERS["cuda"].count():
        return "cuda"
    if "too old" in (why := why_no_gpu()):
        reject(f"--device: {why}; or give --device cpu")
    return "cpu"


def devices_of(kind: DeviceKind | None, count: int | None) -> Devices:
    """The devices that a profile measures: all GPUs by default, if there are any."""
    kind = kind or usual_kind()
    present = DRIVERS[kind if kind in DRIVERS else "cuda"].count()
    if count is not None and count < 1:
        reject(f"--gpus-per-node: {count} is below 1: give at least 1")
    if kind == "cpu":
        cores, count = len(allowed_cores()), count or CPU_DEVICES
        if count > max(cores, CPU_DEVICES):
            reject(
                f"--gpus-per-node: {count} processes are more than the {cores} CPU cores that "
                f"--device cpu may use: give at most {max(cores, CPU_DEVICES)}"
            )
        return Devices(kind=kind, count=count, threads=max(1, cores // count))
    if not present:
        why = why_no_gpu() if kind == "cuda" else ""
        reject(
            f"--device {kind}: torch finds no GPU ({why or 'none is visible: see nvidia-smi'}); "
            "or give --device cpu"
        )
    if (count or present) > present:
        reject(
            f"--gpus-per-node: {count} is more than the {present} GPUs that torch sees: give at "
            f"most {present}"
        )
    return Devices(kind=kind, count=count or present, threads=1)


# Reads the clock rates of a GPU from nvidia-smi.


# Queries to nvidia-smi: the SM clock, its maximum, the memory clock, and the power limit in watts.
_QUERIES = ("clocks.sm", "clocks.max.sm", "clocks.mem", "power.limit")


def clocks_of(device: torch.device) -> Clocks | None:
    """The clock rates of a GPU; None for a CPU, or if nvidia-smi fails.

    An idle GPU lowers its clocks, so this must be called right after work.
    """
    if device.type != "cuda":
        return None
    sm, most_sm, memory, power = map(_number, answers_of(_QUERIES, identity(device)))
    if sm is None or memory is None:
        return None
    return Clocks(sm_mhz=sm, memory_mhz=memory, most_sm_mhz=most_sm, power_limit_w=power)


def identity(device: torch.device) -> str:
    """The identifier of a GPU for nvidia-smi, whose numbering differs from torch's."""
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None)
    return str(device.index or 0) if uuid is None else f"GPU-{uuid}"


def _number(word: str) -> float | None:
    """A text as a positive number; None if it is empty or, in brackets, says that the value is
    unknown.
    """
    try:
        number = float(word)
    except ValueError:
        return None
    return number if number > 0 else None


# Describes the machine of a measurement: its device, its software and its memory.


_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def environment_of(devices: Devices, revision: str) -> Environment:
    """A description of the measured device, and of the versions of the software."""
    driver = DRIVERS.get(devices.kind)
    return Environment(
        device=driver.name(devices.first) if driver else _cpu(),
        num_devices=devices.count,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=driver.version if driver else "",
        driver=answers_of(["driver_version"], "0")[0] if driver else "",
        revision=revision,
    )


def host_memory_bytes() -> int:
    """The memory of the machine in bytes, or the part of it that this container may use."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(path).read_text().strip() for path in _LIMITS if Path(path).exists()]
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def device_memory_bytes(devices: Devices) -> int:
    """The memory of a GPU in bytes; devices on a CPU share half of the machine's memory."""
    driver = DRIVERS.get(devices.kind)
    if driver is None:
        return host_memory_bytes() // 2 // devices.count
    _, whole = driver.free_and_total_bytes(devices.first)
    return whole


def outside_bytes(device: torch.device) -> int:
    """The bytes in use outside torch's allocator: on a GPU by all processes, on a CPU by this
    process.
    """
    if driver_of(device) is not None:
        return outside.outside_bytes(device)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.machine()} with {os.cpu_count()} cores"
