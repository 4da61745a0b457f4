"""Fits how many bytes torch's allocator reserves beyond the peak bytes of tensors, to training runs
whose reserved peaks were measured.

The fitted bytes are the sum of two terms: for the optimizer step, a number of bytes for each
parameter of a rank's part of the largest layer; and for the head, a constant on the stage that has
it.
"""

from collections.abc import Sequence

import numpy as np
from scipy.optimize import nnls

from mistlab.core.arrays import Floats
from mistlab.core.units import MIB_BYTES
from mistlab.machine.hardware import Allocator
from mistlab.stages.stage_batch import StageBatch, StageFigures

# A measured run as three arrays with a row for each pipeline stage. The first has what a fit
# predicts from: a rank's parameters of the largest layer, and whether the stage has the head. The
# others have the bytes that torch reserved beyond its tensors, and all bytes that it reserved.
Beyond = tuple[Floats, Floats, Floats]

DEFAULT_OUTSIDE_MIB = 300.0


def beyond_tensors(figures: StageFigures, stages: StageBatch, reserved: Floats) -> Beyond:
    """For each stage of a measured run, the bytes that torch's allocator reserved beyond the
    predicted bytes of tensors, with the two figures of the stage from which a fit predicts them.
    """
    shard = np.where(stages.zero >= 1, stages.data_parallel, 1)
    terms = np.stack([figures.largest_parameters / shard, stages.has_head * MIB_BYTES], axis=1)
    return terms, reserved - figures.peak_bytes, reserved


def errors_of(run: Beyond, others: Sequence[Beyond]) -> Floats:
    """The relative errors of a run's predicted reserved bytes, where the prediction is fitted to
    the runs ``others`` only.
    """
    terms, beyond, reserved = run
    return np.asarray((terms @ _solved(others) - beyond) / reserved)


def fitted_allocator(rows: Sequence[Beyond], heads: Floats) -> Allocator:
    """The constants of torch's memory allocator, fitted to measured runs; ``heads`` are the numbers
    of parameters of these runs' heads.
    """
    step, head = _solved(rows)
    smallest = heads[heads > 0].min()
    return Allocator(
        step_bytes_a_parameter=round(float(step), 2),
        head_bytes_a_parameter=round(float(head) * MIB_BYTES / float(smallest), 2),
        head_mib=round(float(head), 1),
        outside_mib=DEFAULT_OUTSIDE_MIB,
    )


def _solved(rows: Sequence[Beyond]) -> Floats:
    terms, beyond, reserved = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    scales, _ = nnls(terms / reserved[:, None], beyond / reserved)
    return np.asarray(scales)
