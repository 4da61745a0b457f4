"""How much memory the logits of all tokens take at a plan's peak, as text."""

from dataclasses import replace

from experiments.bench.problem import predicted
from mistlab.core.units import GIB_BYTES
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction

# A text mentions logits if a loss in chunks lowers the peak by at least this many bytes.
WORTH_TELLING = GIB_BYTES


def logits_called(job: Job, prediction: Prediction) -> str:
    """What of a plan's memory peak the logits of all tokens take, with copies in 32 bits and
    gradients, as a sentence without its full stop; empty if that is little.

    It is what the peak is higher by than with a loss in chunks.
    """
    if job.workload.loss == "chunked":
        return ""
    chunked = predicted(replace(job, workload=replace(job.workload, loss="chunked")))
    if not isinstance(chunked, Prediction):
        return ""
    peaks = [
        max(stage.peak_allocated_bytes for stage in one.stages) for one in (prediction, chunked)
    ]
    saved = peaks[0] - peaks[1]
    if saved < WORTH_TELLING:
        return ""
    return (
        f"{saved / GIB_BYTES:.1f} GiB of logits and temporaries are the logits of all tokens with "
        "their copies in 32 bits, log-probabilities and gradients: a loss in chunks has them of "
        "some tokens (--loss chunked)"
    )
