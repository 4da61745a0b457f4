"""How sure a predicted time is, from the runs that its engine was compared on.

Bounds widen with the distance to the nearest of these, counted in doublings of width, GPUs and
sequence length. Over the first doubling they go from those of runs that were left out of the fit
while their neighbours were in it to those of whole widths that were left out; these hold as far as
such widths lay from the others. Each doubling beyond adds half as much again.
"""

from dataclasses import dataclass, field

from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.machine.whole_runs import EngineCalibration, MeasuredAt
from mistlab.values.workload import Workload

# Where no run of the engine on the hardware was measured.
UNMEASURED_HALF_WIDTH = 0.3
# A quantity may lie this far from what was measured before a prediction says so.
SLACK = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBounds:
    """The bounds of one workload's plans under one engine."""

    engine: str
    calibration: EngineCalibration | None
    hidden: int
    sequence_length: int

    _known: dict[int, "_Sure"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def half_width(self, gpus: int) -> float:
        """The share of a prediction that 90 % of measurements are within, on this many GPUs."""
        return self._on(gpus).half_width

    def notes(self, gpus: int) -> tuple[str, ...]:
        """What the prediction rests on that was not measured."""
        return self._on(gpus).notes

    def _on(self, gpus: int) -> "_Sure":
        if gpus not in self._known:
            self._known[gpus] = self._worked_out(gpus)
        return self._known[gpus]

    def _worked_out(self, gpus: int) -> "_Sure":
        if self.calibration is None:
            note = f"no run of engine {self.engine} on this hardware was measured"
            return _Sure(half_width=UNMEASURED_HALF_WIDTH, notes=(note,))
        place = MeasuredAt(hidden=self.hidden, gpus=gpus, sequence_length=self.sequence_length)
        nearest = min(self.calibration.at, key=place.doublings)
        return _Sure(
            half_width=half_width_at(self.calibration, nearest.doublings(place)),
            notes=tuple(
                f"{name} differs by a factor of {ratio:.1f} from the nearest runs measured"
                for name, ratio in nearest.ratios(place).items()
                if ratio > SLACK
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Sure:
    """How sure predictions for one number of GPUs are, and what they rest on."""

    half_width: float
    notes: tuple[str, ...]


def half_width_at(calibration: EngineCalibration, doublings: float) -> float:
    """The half-width at a distance from the nearest runs."""
    near, far = calibration.half_width, calibration.far_half_width
    share = min(1.0, doublings / min(1.0, calibration.reach))
    beyond = max(0.0, doublings - max(1.0, calibration.reach))
    return (near + (far - near) * share) * (1 + beyond / 2)


def bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    """The bounds of a workload's plans on a cluster."""
    calibrations = {c.engine: c for c in cluster.hardware.engines or ()}
    return PredictionBounds(
        engine=engine,
        calibration=calibrations.get(ENGINES[engine].measured_as or engine),
        hidden=workload.model.hidden,
        sequence_length=workload.sequence_length,
    )
