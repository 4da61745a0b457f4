"""Compares one measured training step with its prediction, and corrects the predictions of other
plans by the difference.

The difference is stated as a share of the time about which a prediction can be wrong: the time in
which GPUs do not compute the model (``mistlab/cost/confidence.py``). So the correction is smaller
for a plan near the GPUs' peak rate than for a plan that waits much. Bounds keep their width, since
a single run does not show how runs scatter.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from mistlab.core.units import GIB_BYTES
from mistlab.core.values import Checked, bounded
from mistlab.cost.confidence import MOST_UTILISED
from mistlab.cost.memory import room_of_plan
from mistlab.job.job import Job
from mistlab.job.prediction import Prediction, StagePrediction


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep(Checked):
    """A measured training step: its seconds, and the GiB that torch's allocator reserved on the
    fullest GPU; either may be unknown.
    """

    measured_step: float | None = field(default=None, metadata=bounded(above=0))
    measured_gib: float | None = field(default=None, metadata=bounded(above=0))

    def words(self, prediction: Prediction) -> Iterator[str]:
        """The measured step beside the prediction of its plan, as text."""
        if self.measured_step is not None:
            low, high = prediction.iteration_s_low, prediction.iteration_s_high
            where = "within" if low <= self.measured_step <= high else "OUTSIDE"
            off = self.measured_step / prediction.iteration_s - 1
            yield (
                f"measured {self.measured_step:.3f} s a step, {off:+.1%} against the prediction, "
                f"{where} its bounds; MFU {_mfu(prediction, self.measured_step):.0%}"
            )
        if self.measured_gib is not None:
            peak_gib = prediction.peak_reserved_bytes / GIB_BYTES
            yield (
                f"measured {self.measured_gib:.2f} GiB on the fullest GPU, "
                f"{self.measured_gib - peak_gib:+.2f} against the prediction"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCorrection:
    """How far a measured step is from its prediction, in a form that applies to other plans. Times
    are corrected by a ``share`` of the distance (as a logarithm) between the predicted time and the
    time of all arithmetic at peak rate; memory is corrected by bytes per GPU.
    """

    share: float
    reserved_bytes: int

    @classmethod
    def of(cls, measured: MeasuredStep, prediction: Prediction) -> "StepCorrection":
        """The correction that follows from a measured step of the plan with this prediction."""
        share, size = 0.0, 0
        if measured.measured_step is not None:
            share = math.log(measured.measured_step / prediction.iteration_s) / _way(prediction)
        if measured.measured_gib is not None:
            size = round(measured.measured_gib * GIB_BYTES) - prediction.peak_reserved_bytes
        return cls(share=share, reserved_bytes=size)

    def corrected(self, job: Job, prediction: Prediction) -> Prediction:
        """The prediction of another plan on the same machine and software, after the correction.

        The correction of its time is proportional to the distance between its own predicted time
        and the time of its arithmetic at peak rate. Every stage's memory peak changes by the same
        number of bytes.
        """
        times = math.exp(self.share * _way(prediction))
        stages = tuple(self._moved(stage) for stage in prediction.stages)
        peaks = [stage.peak_reserved_bytes for stage in stages]
        rooms = room_of_plan(job.cluster, job.plan).tolist()
        has_room = all(peak <= room for peak, room in zip(peaks, rooms, strict=True))
        was_short_of_host = not prediction.fits and all(
            stage.peak_reserved_bytes <= room
            for stage, room in zip(prediction.stages, rooms, strict=True)
        )
        return prediction.lasting(
            times,
            fits=has_room and not was_short_of_host,
            notes=(*prediction.notes, "corrected by one measured step; bounds keep their width"),
            stages=stages,
        )

    def _moved(self, stage: StagePrediction) -> StagePrediction:
        peak = max(stage.peak_allocated_bytes, stage.peak_reserved_bytes + self.reserved_bytes)
        return replace(stage, peak_reserved_bytes=peak)


def _way(prediction: Prediction) -> float:
    """The logarithm of the predicted time over the time that the model's arithmetic takes at peak
    rate; corrections are proportional to it.
    """
    return -math.log(min(prediction.mfu, MOST_UTILISED))


def _mfu(prediction: Prediction, step_s: float) -> float:
    return prediction.mfu * prediction.iteration_s / step_s
