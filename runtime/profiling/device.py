"""The devices that a profile measures: GPUs, or shares of a CPU in place of GPUs."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from mistlab.values.errors import InputError
from mistlab.values.workload import Precision
from runtime.devices.table import DRIVERS
from runtime.threads import allowed_cores, cores_of_device, on_cores

# ``cpu``, or a device kind that has a driver.
DeviceKind = str

# Communication needs at least two processes on a CPU.
CPU_DEVICES = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Devices:
    """Devices of one node, with one process each; a process has ``threads`` threads.

    On a CPU each thread has one of ``node_cores`` for itself.
    """

    kind: DeviceKind
    count: int
    threads: int
    node_cores: tuple[int, ...] = field(default_factory=lambda: tuple(sorted(allowed_cores())))

    @property
    def precision(self) -> Precision:
        """The precision in which operators are measured: the fastest for training."""
        if self.kind == "cpu":
            return "fp32"
        return "bf16" if DRIVERS[self.kind].has_bf16() else "fp16"

    @property
    def first(self) -> torch.device:
        """The device of the first process."""
        return torch.device(self.kind, 0)

    @contextmanager
    def driven(self, rank: int) -> Iterator[torch.device]:
        """The device of a process; in the ``with`` block it is the process's current device."""
        if self.kind == "cpu":
            with on_cores(cores_of_device(rank, self.threads, self.node_cores)):
                yield torch.device("cpu")
            return
        device = torch.device(self.kind, rank)
        DRIVERS[self.kind].choose(device)
        yield device


def devices_of(kind: DeviceKind | None, count: int | None) -> Devices:
    """The devices to measure: by default GPUs if there are any, and all of them."""
    present = DRIVERS[kind if kind in DRIVERS else "cuda"].count()
    if kind is None:
        kind = "cuda" if present else "cpu"
    if count is not None and count < 1:
        message = f"--gpus-per-node: {count} is below 1: give at least 1"
        raise InputError(message)
    if kind == "cpu":
        cores, count = len(allowed_cores()), count or CPU_DEVICES
        if count > max(cores, CPU_DEVICES):
            message = f"--gpus-per-node: {count} is above the {cores} cores: give fewer"
            raise InputError(message)
        return Devices(kind=kind, count=count, threads=max(1, cores // count))
    if not present:
        message = (
            f"--device cuda: torch {torch.__version__} finds no GPU: install a CUDA build of torch "
            "and NVIDIA's driver (nvidia-smi shows it), or give --device cpu"
        )
        raise InputError(message)
    if (count or present) > present:
        message = f"--gpus-per-node: {count} is above the {present} that are there: give fewer"
        raise InputError(message)
    return Devices(kind=kind, count=count or present, threads=1)
