"""Describes the machine of a measurement: its device, its software and its memory."""

import os
import platform
from pathlib import Path

import torch

from mistlab.values.measurement import Environment
from runtime.devices import outside
from runtime.devices.table import DRIVERS, driver_of
from runtime.profiling.device import Devices
from runtime.profiling.nvidia_smi import answers_of

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def environment_of(devices: Devices, revision: str) -> Environment:
    """The device, and the versions of its software."""
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
    """Memory of the machine, or the part of it that this container may use."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(path).read_text().strip() for path in _LIMITS if Path(path).exists()]
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def device_memory_bytes(devices: Devices) -> int:
    """All memory of a GPU. On a CPU, the devices share half of the machine's memory."""
    driver = DRIVERS.get(devices.kind)
    if driver is None:
        return host_memory_bytes() // 2 // devices.count
    _, whole = driver.free_and_total_bytes(devices.first)
    return whole


def outside_bytes(device: torch.device) -> int:
    """Memory taken outside torch's allocator on a GPU; on a CPU, the memory of this process."""
    if driver_of(device) is not None:
        return outside.outside_bytes(device)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.machine()} with {os.cpu_count()} cores"
