"""Fits the host's time to launch a kernel, from measured layers so small that only launches take
time.
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
    """Measured launches: numbers of kernels (C), and the host's seconds to launch them (C)."""

    origin: Origin
    kernels: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)


def read_launch_table(path: Path, *, hardware: str | None) -> LaunchRows:
    """The rows of a measurement table of kernel launches."""
    origin, rows = read_rows(path, NEEDED, hardware=hardware)
    values = [[positive(where, row, name) for name in NEEDED[1:]] for where, row in rows]
    kernels, microseconds = np.array(values).T
    return LaunchRows(origin=origin, kernels=kernels, seconds=microseconds * MICROSECONDS)


def launch_s(rows: LaunchRows) -> float:
    """The host's seconds for one launch: the median over the rows."""
    return float(np.median(rows.seconds / rows.kernels))


def mean_error(rows: LaunchRows) -> float:
    """The mean absolute relative error when the launches of each row are predicted from the other
    rows.
    """
    each = rows.seconds / rows.kernels
    if len(each) == 1:
        return 0.0
    others = [np.median(np.delete(each, row)) for row in range(len(each))]
    return float(np.abs(np.array(others) / each - 1).mean())
