"""Which devices there are besides the CPU: a row each, by the name that torch gives the kind."""

import torch

from runtime.devices.cuda import CudaDriver
from runtime.devices.driver import Driver

# A stand-in adds its row while it stands in.
DRIVERS: dict[str, Driver] = {"cuda": CudaDriver()}


def driver_of(device: torch.device) -> Driver | None:
    """Who drives a device; nobody drives a CPU, but where a stand-in does."""
    return DRIVERS.get(device.type)


def generator_of(device: torch.device) -> torch.Generator:
    """A new source of random values for tensors on a device, or on the CPU."""
    driver = driver_of(device)
    return torch.Generator() if driver is None else driver.generator(device)
