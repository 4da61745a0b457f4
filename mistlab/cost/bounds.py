"""How sure a predicted time is, from the runs that its engine was compared on."""

import math
from dataclasses import dataclass

from mistlab.cluster import Cluster
from mistlab.engines import EngineCalibration
from mistlab.plan import Engine
from mistlab.workload import Workload

# Where no run of the engine on the hardware was measured.
UNMEASURED_HALF_WIDTH = 0.3
# A quantity may lie this far outside of what was measured before the bounds widen.
SLACK = 1.25


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The bounds of one workload's plans under one engine."""

    engine: Engine
    calibration: EngineCalibration | None
    hidden: int
    sequence_length: int

    def half_width(self, gpus: int) -> float:
        """The share of a prediction that 90 % of measurements are within, on this many GPUs.

        Each doubling beyond what was measured adds half as much again.
        """
        if self.calibration is None:
            return UNMEASURED_HALF_WIDTH
        doublings = sum(math.log2(excess) for _, excess in self._excesses(gpus))
        return self.calibration.half_width * (1 + doublings / 2)

    def notes(self, gpus: int) -> tuple[str, ...]:
        """What the prediction rests on that was not measured."""
        if self.calibration is None:
            return (f"no run of engine {self.engine} on this hardware was measured",)
        return tuple(
            f"{name} is {excess:.1f} times outside of what was measured"
            for name, excess in self._excesses(gpus)
        )

    def _excesses(self, gpus: int) -> list[tuple[str, float]]:
        assert self.calibration is not None
        ranges = {
            "hidden": (self.calibration.hidden, self.hidden),
            "GPUs": (self.calibration.gpus, gpus),
            "sequence length": (self.calibration.sequence_length, self.sequence_length),
        }
        excesses = [(name, of.excess(value)) for name, (of, value) in ranges.items()]
        return [(name, excess) for name, excess in excesses if excess > SLACK]


def bounds_of(workload: Workload, cluster: Cluster, engine: Engine) -> Bounds:
    """The bounds of a workload's plans on a cluster."""
    calibrations = {c.engine: c for c in cluster.hardware.engines or ()}
    return Bounds(
        engine=engine,
        calibration=calibrations.get(engine),
        hidden=workload.model.hidden,
        sequence_length=workload.sequence_length,
    )
