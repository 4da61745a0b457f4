"""What is taken of a device outside torch's allocator, and the cap that leaves room for it.

That is the process's context, libraries, the communicators of its groups, and other processes.
"""

import torch

from mistlab.machine.cluster import Cluster
from mistlab.values.errors import InputError
from mistlab.values.units import GIB_BYTES
from runtime.devices.table import driver_of


def outside_bytes(device: torch.device) -> int:
    """What somebody has of a device, and torch's allocator does not; 0 on a CPU."""
    driver = driver_of(device)
    if driver is None:
        return 0
    free, whole = driver.free_and_total_bytes(device)
    return whole - free - driver.reserved_bytes(device)


class Cap:
    """Lets torch hold no more of a device than a cluster says that there is, less what is outside.

    Without a size in the plan torch may hold all there is. On a CPU nothing is capped.
    """

    def __init__(self, cluster: Cluster, device: torch.device) -> None:
        self.outside_bytes = 0
        self._cluster, self._device = cluster, device
        self._driver = driver_of(device)
        if self._driver is not None:
            # This process may have run other plans, and has connected.
            self._driver.count_anew(device)
            self.measure()

    def measure(self) -> None:
        """Find out what is outside now, and cap by it."""
        driver, device, cluster = self._driver, self._device, self._cluster
        if driver is None:
            return
        self.outside_bytes = outside_bytes(device)
        share = 1.0
        if cluster.memory_gib is not None:
            _, whole = driver.free_and_total_bytes(device)
            share = min(1.0, (cluster.memory_bytes - self.outside_bytes) / whole)
        if share <= 0.0:
            message = (
                f"cluster.memory_gib: {cluster.memory_gib:g} is no more than the "
                f"{self.outside_bytes / GIB_BYTES:.2f} GiB of {device} that are taken outside "
                "torch's allocator: give more, or end other processes on the GPU"
            )
            raise InputError(message)
        driver.cap(device, share)
