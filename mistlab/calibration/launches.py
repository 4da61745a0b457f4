"""Fits the host's seconds to launch a kernel, from measured layers that are so small that launching
takes all of their time.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from mistlab.calibration.table_rows import HARDWARE, Origin, positive, read_rows
from mistlab.core.arrays import Floats
from mistlab.core.units import MICROSECONDS

NEEDED = (HARDWARE, "kernels", "time_us")


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LaunchRows:
    """Measured layers that take as long as launching their kernels: arrays of their numbers of
    kernels and of the host's seconds.
    """

    origin: Origin
    kernels: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)


def read_launch_table(path: Path, *, hardware: str | None) -> LaunchRows:
    """Read a measurement table of kernel launches."""
    origin, rows = read_rows(path, NEEDED, hardware=hardware)
    values = [[positive(where, row, name) for name in NEEDED[1:]] for where, row in rows]
    kernels, microseconds = np.array(values).T
    return LaunchRows(origin=origin, kernels=kernels, seconds=microseconds * MICROSECONDS)


def launch_s(rows: LaunchRows) -> float:
    """The host's seconds to launch one kernel: the median over the measured layers."""
    return float(np.median(rows.seconds / rows.kernels))


def mean_error(rows: LaunchRows) -> float:
    """The mean absolute relative error of predicted launch seconds, where each layer is predicted
    from the other measured layers.
    """
    each = rows.seconds / rows.kernels
    if len(each) == 1:
        return 0.0
    others = [np.median(np.delete(each, row)) for row in range(len(each))]
    return float(np.abs(np.array(others) / each - 1).mean())
