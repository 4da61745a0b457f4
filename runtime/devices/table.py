"""The table of device kinds besides the CPU: a driver for each, by torch's name of the kind."""

import torch

from runtime.devices.cuda import CudaDriver
from runtime.devices.driver import Driver

# A stand-in for a GPU adds its row while it is in use.
DRIVERS: dict[str, Driver] = {"cuda": CudaDriver()}


def driver_of(device: torch.device) -> Driver | None:
    """The driver of a device; None for a CPU, unless a stand-in drives the CPU."""
    return DRIVERS.get(device.type)


def generator_of(device: torch.device) -> torch.Generator:
    """A new source of random values for tensors on a device, or on the CPU."""
    driver = driver_of(device)
    return torch.Generator() if driver is None else driver.generator(device)
