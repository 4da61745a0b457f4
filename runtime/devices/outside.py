"""Measures the device memory used outside torch's allocator, and limits the allocator to the rest.

Memory outside the allocator is used by the process's CUDA context, its libraries, the communicators
of its groups, and other processes.
"""

import torch

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import reject
from mistlab.machine.cluster import Cluster
from runtime.devices.cuda import driver_of


def outside_bytes(device: torch.device) -> int:
    """The bytes in use on a device that torch's allocator does not hold; 0 on a CPU."""
    driver = driver_of(device)
    if driver is None:
        return 0
    free, whole = driver.free_and_total_bytes(device)
    return whole - free - driver.reserved_bytes(device)


class Cap:
    """Limits torch's allocator to the cluster's memory size, minus the bytes used outside the
    allocator.

    If the plan states no memory size, torch may use the whole device. On a CPU there is no limit.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        self.outside_bytes = 0
        self._cluster, self._device = cluster, device
        self._driver = driver_of(device)
        if self._driver is not None:
            # Free what earlier plans in this process cached. The groups of ranks are connected by
            # now, so the memory of their communicators counts as used outside the allocator.
            self._driver.count_anew(device)
            self.measure()

    def measure(self) -> None:
        """Measure the bytes that are used outside the allocator now, and set the allocator's
        limit.
        """
        driver, device, cluster = self._driver, self._device, self._cluster
        if driver is None:
            return
        self.outside_bytes = outside_bytes(device)
        driver.cap(device, self.share(cluster, device, self.outside_bytes))

    @staticmethod
    def share(cluster: Cluster, device: torch.device, outside: int) -> float:
        """The share of a device's memory that torch may use beside ``outside`` bytes; raises an
        error if the cluster's memory size leaves none.
        """
        driver, share = driver_of(device), 1.0
        if driver is not None and cluster.memory_gib is not None:
            _, whole = driver.free_and_total_bytes(device)
            share = min(1.0, (cluster.whole_memory_bytes - outside) / whole)
        if share <= 0.0:
            reject(
                f"cluster.memory_gib: {cluster.memory_gib:g} is no more than the "
                f"{outside / GIB_BYTES:.2f} GiB of {device} that are taken outside "
                "torch's allocator: give more, or end other processes on the GPU"
            )
        return share
