"""Chooses the streams for a device."""

import torch

from runtime.devices.table import driver_of
from runtime.engine.streams.cuda import CudaStreams
from runtime.engine.streams.lanes import Streams
from runtime.engine.streams.simulated import SimulatedStreams


def streams_of(device: torch.device, *, serialises: bool = False) -> Streams:
    """A GPU's streams, or simulated streams on a CPU; with ``serialises`` no two tasks overlap."""
    driver = driver_of(device)
    if driver is None:
        return SimulatedStreams(spoils=False)
    return CudaStreams(device, driver, serialises=serialises)
