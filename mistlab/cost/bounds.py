"""The bounds of a predicted time, from the measured runs of its engine.

Bounds widen with the distance to the nearest measured run, counted in doublings of width, GPUs and
sequence length. At distance zero they are as wide as the errors of runs that were left out of the
fit while runs near them were in it. From one doubling on they are as wide as the errors of whole
model widths that were left out, as far as such widths lay from the others. Each doubling beyond
adds half as much again.

Where a hardware file has no calibration of an engine, bounds are those of measured runs of the same
kind: of the engine, or of any engine, on any hardware (``mistlab.cost.sureness``). A note says of
which.

What is slow on some clusters is in none of this. On a cluster without a profile, a run may take as
long as on the slowest cluster on which its engine was measured, so its upper bound is the one of
there. Its lower bound stays.
"""

from dataclasses import dataclass, field, replace

from mistlab import catalog
from mistlab.cost.sureness import BITS, Blocks, RunKind, Shares, known_sureness
from mistlab.engines.engine import Engine
from mistlab.engines.table import ENGINES
from mistlab.machine.cluster import Cluster
from mistlab.machine.whole_runs import EngineCalibration, MeasuredAt
from mistlab.values.workload import Workload

# A prediction gets a note if a quantity differs from measured runs by more than this factor.
SLACK = 1.25
# The note of every prediction on unlike nodes.
UNLIKE = "no run on unlike nodes was measured: bounds are those of the least sure group of nodes"


@dataclass(frozen=True, slots=True, kw_only=True)
class PredictionBounds:
    """The bounds of one workload's plans under one engine."""

    engine: str
    hardware: str
    calibration: EngineCalibration | None
    kind: RunKind
    hidden: int
    sequence_length: int
    # The same plans on the other groups of unlike nodes.
    others: "tuple[PredictionBounds, ...]" = ()

    _known: dict[int, "_Sure"] = field(default_factory=dict, init=False, repr=False, compare=False)

    def around(self, gpus: int, mfu: float) -> tuple[float, float]:
        """The multiples of a prediction on ``gpus`` GPUs between which 90 % of measurements lie,
        from the MFU that is predicted."""
        found = [one._on(gpus).around(one.kind.way(mfu)) for one in (self, *self.others)]
        return min(below for below, _ in found), max(above for _, above in found)

    def notes(self, gpus: int) -> tuple[str, ...]:
        """Assumptions of a prediction on ``gpus`` GPUs that were not measured."""
        if not self.others:
            return self._on(gpus).notes
        own = (note for one in (self, *self.others) for note in one._on(gpus).notes)
        return (*dict.fromkeys(own), UNLIKE)

    def _on(self, gpus: int) -> "_Sure":
        if gpus not in self._known:
            self._known[gpus] = self._worked_out(gpus)
        return self._known[gpus]

    def _worked_out(self, gpus: int) -> "_Sure":
        if self.calibration is None:
            known = known_sureness()
            note = f"engine {self.engine} is not calibrated on {self.hardware}: "
            note += known.words(self.kind)
            return _Sure(shares=known.shares(self.kind, gpus), notes=(note,))
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
    """How sure predictions for one number of GPUs are, and their notes: a half-width of measured
    runs near them, or a share of the way of runs of their kind."""

    half_width: float = 0.0
    shares: Shares | None = None
    notes: tuple[str, ...]

    def around(self, way: float) -> tuple[float, float]:
        if self.shares is not None:
            return self.shares.around(way)
        return max(0.0, 1 - self.half_width), 1 + self.half_width


def half_width_at(calibration: EngineCalibration, doublings: float) -> float:
    """The half-width at a distance, in doublings, from the nearest runs."""
    near, far = calibration.half_width, calibration.far_half_width
    share = min(1.0, doublings / min(1.0, calibration.reach))
    beyond = max(0.0, doublings - max(1.0, calibration.reach))
    return (near + (far - near) * share) * (1 + beyond / 2)


def bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    """The bounds of a workload's plans on a cluster, under an engine; of unlike nodes, those of the
    group whose bounds are widest."""
    first, *others = (_bounds_of(workload, group, engine) for group in cluster.of_groups)
    return replace(first, others=tuple(others)) if others else first


def _bounds_of(workload: Workload, cluster: Cluster, engine: str) -> PredictionBounds:
    calibrations = {c.engine: c for c in cluster.hardware.engines or ()}
    return PredictionBounds(
        engine=engine,
        hardware=cluster.hardware.name,
        calibration=calibrations.get(ENGINES[engine].family),
        kind=_kind_of(workload, cluster, engine),
        hidden=workload.model.hidden,
        sequence_length=workload.sequence_length,
    )


def _kind_of(workload: Workload, cluster: Cluster, engine: str) -> RunKind:
    """The kind of a workload's plans, which no software ran yet."""
    model = workload.model
    blocks: Blocks = "hybrid" if model.is_hybrid else "experts" if model.experts else "dense"
    return RunKind(
        software="",
        engine=ENGINES[engine].family,
        hardware=cluster.hardware.name,
        blocks="adapters" if ENGINES[engine].trains == "adapters" else blocks,
        bits=BITS[workload.precision],
        is_benchmark=True,
    )


def slowest_cluster(cluster: Cluster, engine: Engine) -> Cluster | None:
    """The same cluster as slow as the slowest on which an engine was measured; None where that says
    nothing: inside a node, with a profile of its own, or if no such cluster is known."""
    if cluster.profile is not None or cluster.nodes == 1 or not engine.slowest:
        return None
    return replace(cluster, profile=catalog.profile(engine.slowest))
