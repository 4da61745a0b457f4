"""Where something was measured: the device, the software."""

import os
import platform
import subprocess
from pathlib import Path

import torch

from mistlab.values.measurement import Environment
from runtime.devices import outside
from runtime.devices.table import DRIVERS, driver_of
from runtime.profiling.device import Devices

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")


def environment_of(devices: Devices, revision: str) -> Environment:
    """The machine and the software on it."""
    driver = DRIVERS.get(devices.kind)
    return Environment(
        device=driver.name(devices.first) if driver else _cpu(),
        num_devices=devices.count,
        python=platform.python_version(),
        torch=str(torch.__version__),
        cuda=driver.version if driver else "",
        driver=_smi("driver_version") if driver else "",
        revision=revision,
    )


def host_memory_bytes() -> int:
    """Memory of the machine, or as much of it as this container may use."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limits = [Path(path).read_text().strip() for path in _LIMITS if Path(path).exists()]
    return min([machine, *(int(limit) for limit in limits if limit.isdigit())])


def device_memory_bytes(devices: Devices) -> int:
    """All memory of a GPU, that outside of torch too, or a CPU device's part of a half."""
    driver = DRIVERS.get(devices.kind)
    if driver is None:
        return host_memory_bytes() // 2 // devices.count
    _, whole = driver.free_and_total_bytes(devices.first)
    return whole


def outside_bytes(device: torch.device) -> int:
    """Memory that is taken outside of torch's allocator: of a GPU, or a CPU's own process."""
    if driver_of(device) is not None:
        return outside.outside_bytes(device)
    resident_pages = int(Path("/proc/self/statm").read_text().split()[1])
    return resident_pages * os.sysconf("SC_PAGE_SIZE")


def _cpu() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"CPU {names[0] if names else platform.machine()} with {os.cpu_count()} cores"


def _smi(name: str) -> str:
    """What nvidia-smi says of the first GPU; empty where it says nothing."""
    command = ["nvidia-smi", f"--query-gpu={name}", "--format=csv,noheader", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
