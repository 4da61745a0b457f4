"""The time of transfers, by a fitted latency and bandwidth. Axes: C transfers."""

import numpy as np
from numpy.typing import NDArray

from mistlab.machine.transfers import Line


def transfer_s(size_bytes: NDArray[np.float64], line: Line) -> NDArray[np.float64]:
    """Seconds (C) of transfers of ``size_bytes`` (C); a transfer of no bytes takes no time."""
    seconds = line.latency_s + size_bytes / line.bytes_per_s
    return np.asarray(np.where(size_bytes > 0, seconds, 0.0))
