"""How sure a predicted time is, from the runs that its engine was compared on.

Bounds widen with the distance to the nearest of these, counted in doublings of width, GPUs and
sequence length. Over the first doubling they go from those of runs that were left out of the fit
while their neighbours were in it to those of whole widths that were left out; these hold as far as
such widths lay from the others. Each doubling beyond adds half as much again.
"""

from dataclasses import dataclass

from mistlab.cluster import Cluster
from mistlab.engines import EngineCalibration, MeasuredAt
from mistlab.plan import Engine
from mistlab.workload import Workload

# Where no run of the engine on the hardware was measured.
UNMEASURED_HALF_WIDTH = 0.3
# A quantity may lie this far from what was measured before a prediction says so.
SLACK = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one workload's plans under one engine."""

    engine: Engine
    calibration: EngineCalibration | None
    hidden: int
    sequence_length: int

    def half_width(self, gpus: int) -> float:
        """The share of a prediction that 90 % of measurements are within, on this many GPUs."""
        if self.calibration is None:
            return UNMEASURED_HALF_WIDTH
        return half_width_at(self.calibration, self._nearest(gpus).doublings(self._place(gpus)))

    def notes(self, gpus: int) -> tuple[str, ...]:
        """What the prediction rests on that was not measured."""
        if self.calibration is None:
            return (f"no run of engine {self.engine} on this hardware was measured",)
        ratios = self._nearest(gpus).ratios(self._place(gpus))
        return tuple(
            f"{name} differs by a factor of {ratio:.1f} from the nearest runs measured"
            for name, ratio in ratios.items()
            if ratio > SLACK
        )

    def _place(self, gpus: int) -> MeasuredAt:
        return MeasuredAt(hidden=self.hidden, gpus=gpus, sequence_length=self.sequence_length)

    def _nearest(self, gpus: int) -> MeasuredAt:
        assert self.calibration is not None
        return min(self.calibration.at, key=self._place(gpus).doublings)


def half_width_at(calibration: EngineCalibration, doublings: float) -> float:
    """The half-width at a distance from the nearest runs."""
    near, far = calibration.half_width, calibration.far_half_width
    share = min(1.0, doublings / min(1.0, calibration.reach))
    beyond = max(0.0, doublings - max(1.0, calibration.reach))
    return (near + (far - near) * share) * (1 + beyond / 2)


def bounds_of(workload: Workload, cluster: Cluster, engine: Engine) -> Bounds:
    """The bounds of a workload's plans on a cluster."""
    calibrations = {c.engine: c for c in cluster.hardware.engines or ()}
    return Bounds(
        engine=engine,
        calibration=calibrations.get(engine),
        hidden=workload.model.hidden,
        sequence_length=workload.sequence_length,
    )
