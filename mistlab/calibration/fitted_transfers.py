"""Fits a latency and a bandwidth to measured transfers, by least squares of relative errors.

Array axis: C is the number of transfers.
"""

from dataclasses import dataclass

import numpy as np
from scipy.optimize import nnls

from mistlab.core.arrays import Floats
from mistlab.core.units import GBYTES, MIB_BYTES, MICROSECONDS
from mistlab.core.values import reject
from mistlab.cost.links import transfer_s
from mistlab.machine.hardware import Line


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class TransferRows:
    """Measured transfers between GPUs or to the host: arrays of their bytes and of their
    seconds.
    """

    size_bytes: Floats
    seconds: Floats

    def __len__(self) -> int:
        return len(self.seconds)

    def every_second(self, start: int) -> "TransferRows":
        """Every second transfer in order of size, from the smallest (``start`` 0) or the second
        smallest (``start`` 1).
        """
        order = np.argsort(self.size_bytes, kind="stable")[start::2]
        return TransferRows(size_bytes=self.size_bytes[order], seconds=self.seconds[order])


def fit(rows: TransferRows) -> Line:
    """Fit a latency and a bandwidth to measured transfers; refuses transfers whose times do not
    grow with their sizes.
    """
    # In microseconds and in seconds per GB, the fitted latency and bandwidth are numbers near one,
    # which a fit handles best.
    terms = np.stack([np.full(len(rows), MICROSECONDS), rows.size_bytes / GBYTES], axis=1)
    (latency_us, seconds_a_gbyte), _ = nnls(terms / rows.seconds[:, None], np.ones(len(rows)))
    if seconds_a_gbyte == 0:
        reject(
            f"transfers of {rows.size_bytes.max() / MIB_BYTES:g} MiB took no longer than those of "
            f"{rows.size_bytes.min() / MIB_BYTES:g} MiB, so no bandwidth can be fitted: measure "
            "larger transfers, with nothing else running"
        )
    return Line(
        latency_us=round(float(latency_us), 2),
        gbytes_per_s=round(float(1 / seconds_a_gbyte), 4),
        smallest_mib=float(rows.size_bytes.min() / MIB_BYTES),
        largest_mib=float(rows.size_bytes.max() / MIB_BYTES),
    )


def mean_error(rows: TransferRows, line: Line) -> float:
    """The mean absolute relative error of a fitted latency and bandwidth on measured transfers."""
    return float(np.abs(transfer_s(rows.size_bytes, line) / rows.seconds - 1).mean())
